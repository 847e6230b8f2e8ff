from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pyblockpool.plugin import entry
from pyblockpool.settings import QUEUE_VARIABLE


@pytest.fixture(autouse=True)
def switched_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends with an untouched vLLM."""
    monkeypatch.delenv(QUEUE_VARIABLE, raising=False)
    yield
    gc.collect()
    entry.restore()
