"""One run of vLLM's tests under pytest-xdist, in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream_verdict import Outcome, complaints, read_junit

HERE = Path(__file__).resolve().parent
STOCK = "vllm"

# A test that hangs fails after the first limit. Native code that never returns to Python ignores
# it, so the second limit ends the worker, and the third the run.
TEST_SECONDS = 300
WORKER_SECONDS = TEST_SECONDS + 60
RUN_SECONDS = 3600


@dataclass(frozen=True)
class Run:
    outcomes: dict[str, Outcome]
    complaints: list[str]
    pools_built: int
    seconds: float


def run_tests(
    tree: Path, cache: Path, queue: str, tests: Sequence[str], workers: int, name: str
) -> Run:
    """Run tests (files or node ids, relative to the tree); the reports go to cache/runs/name.*"""
    runs = cache / "runs"
    runs.mkdir(exist_ok=True)
    junit, proof_file, log = (runs / f"{name}.{suffix}" for suffix in ("xml", "json", "log"))
    for stale in (junit, proof_file):
        stale.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--quiet"),
        *("-p", "swap_queue", "-p", "no:cacheprovider"),
        # Leaves out tests/conftest.py, which imports half of the model zoo.
        "--confcutdir=tests/v1",
        "--continue-on-collection-errors",
        f"--junit-xml={junit}",
        # One test at a time: the slow ones stand together. Not by file: a file whose worker has
        # crashed is begun again with the same test, until no worker is left.
        *(f"--numprocesses={workers}", "--dist=load", "--maxschedchunk=1"),
        f"--timeout={TEST_SECONDS}",
        f"--override-ini=faulthandler_timeout={WORKER_SECONDS}",
        "--override-ini=faulthandler_exit_on_timeout=true",
        *tests,
    ]
    start = time.monotonic()
    with log.open("w") as output:
        status = _run(command, tree, _environment(tree, cache, queue, proof_file), output)
    seconds = time.monotonic() - start
    proof: dict[str, Any] = json.loads(proof_file.read_text()) if proof_file.is_file() else {}
    outcomes = read_junit(junit)
    problems = complaints(proof, queue, outcomes)
    if status not in (0, 1):
        last = (log.read_text().strip().splitlines() or [""])[-1]
        problems.append(
            f"pytest ended with status {status} with the queue {queue!r}: {last} (log: {log})"
        )
    pools = sum(worker["pools_built"] for worker in proof.get("workers", []))
    return Run(outcomes, problems, pools, seconds)


def _environment(tree: Path, cache: Path, queue: str, proof_file: Path) -> dict[str, str]:
    # Nothing of an outer pytest, and none of the settings that decide which queue vLLM gets.
    dropped = ("PYTEST_", "VLLM_BLOCK_", "VLLM_PLUGINS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = [str(tree), str(HERE), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "HF_HOME": str(cache / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "UPSTREAM_QUEUE": queue,
        "UPSTREAM_PROOF": str(proof_file),
    }
    if queue != STOCK:
        environment["VLLM_BLOCK_QUEUE"] = queue
    return environment


def _run(command: list[str], tree: Path, environment: dict[str, str], output: Any) -> int:
    # A session of its own, so that a run takes its workers with it, however it ends.
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
