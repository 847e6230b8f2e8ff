from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pyblockpool.plugin import entry
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def vllm_is_not_searched_for_garbage() -> None:
    """Taking patches back collects garbage; the million objects of vLLM need no look each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def switched_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends with an untouched vLLM."""
    monkeypatch.delenv(QUEUE_VARIABLE, raising=False)
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    yield
    entry.restore()
