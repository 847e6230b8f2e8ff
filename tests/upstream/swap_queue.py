"""A pytest plugin: vLLM's tests on a queue of our choice, and the proof that it was that queue.

Loaded with `-p swap_queue` under pytest-xdist. Each process makes the swap before it imports a test
or a conftest, and looks at the queue of every BlockPool that is built. The workers tell the
controller, which writes it all to UPSTREAM_PROOF. UPSTREAM_QUEUE is a value of VLLM_BLOCK_QUEUE, or
`vllm` for the queue that vLLM ships.
"""

import functools
import importlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUEUE = os.environ["UPSTREAM_QUEUE"]
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ

expected: type
pools_built = 0
strangers: set[str] = set()
reports: list[dict[str, Any]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    try:
        _swap()
    except Exception as error:
        raise pytest.UsageError(f"the queue {QUEUE!r} cannot be had: {error}") from error


def _swap() -> None:
    global expected
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    kv_cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    expected = kv_cache_utils.FreeKVCacheBlockQueue
    if QUEUE != "vllm":
        importlib.import_module("pyblockpool.plugin.entry").register()
    if QUEUE.startswith("native"):
        expected = importlib.import_module("pyblockpool").FreeBlockQueue
        # The plugin patches the module that builds queues; vLLM's tests import the defining one.
        vars(kv_cache_utils)["FreeKVCacheBlockQueue"] = expected
    _watch(block_pool.BlockPool)


def _watch(pool_class: Any) -> None:
    build = pool_class.__init__

    @functools.wraps(build)
    def build_and_look(pool: Any, *args: Any, **kwargs: Any) -> None:
        global pools_built
        build(pool, *args, **kwargs)
        pools_built += 1
        _look(f"a {type(pool).__name__} was built on", type(pool.free_block_queue))

    pool_class.__init__ = build_and_look


def _look(where: str, queue_class: type) -> None:
    if queue_class is not expected:
        strangers.add(f"{where} {queue_class.__module__}.{queue_class.__qualname__}")


def pytest_sessionstart() -> None:
    """Build a pool to see that the swap has worked: in the controller before any worker starts."""
    global pools_built
    pool_class = importlib.import_module("vllm.v1.core.block_pool").BlockPool
    pool_class(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    if strangers:
        raise pytest.UsageError(f"the queue {QUEUE!r} was asked for, but {', '.join(strangers)}")
    pools_built = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that make queues of their own must have imported the right class."""
    for module in {item.getparent(pytest.Module) for item in items}:
        if module is not None and hasattr(module.obj, "FreeKVCacheBlockQueue"):
            _look(f"{module.name} imported", module.obj.FreeKVCacheBlockQueue)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that hears vLLM's loggers, which do not propagate.

    vLLM's fixture of this name is in its root conftest, which is left out (see upstream_run).
    """
    logger = logging.getLogger("vllm")
    logger.propagate, before = True, logger.propagate
    yield caplog
    logger.propagate = before


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if IN_WORKER:
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output["pools_built"] = pools_built
        output["strangers"] = sorted(strangers)
    else:
        Path(os.environ["UPSTREAM_PROOF"]).write_text(
            json.dumps({"queue": QUEUE, "workers": reports}, indent=2)
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Called in the controller when a worker has ended; one that crashed has no output."""
    output = getattr(node, "workeroutput", {})
    reports.append(
        {
            "worker": node.gateway.id,
            "crash": str(error) if error else "",
            "pools_built": output.get("pools_built", 0),
            "strangers": output.get("strangers", []),
        }
    )
