from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from implementations import BLOCKS, QUEUES, MakeBlocks

from pyblockpool.plugin.surface import LATER_QUEUE_METHODS

# How long an example takes says more of the machine, and of the sanitizers, than of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(params=sorted(BLOCKS))
def block_class(request: pytest.FixtureRequest) -> Any:
    return BLOCKS[request.param]


@pytest.fixture(params=sorted(QUEUES))
def queue_class(request: pytest.FixtureRequest) -> Any:
    """Each implementation; a method that the installed vLLM does not have yet skips the test."""
    queue_class = QUEUES[request.param]
    needed = request.node.get_closest_marker("needs")
    for name in needed.args if needed else ():
        if not hasattr(queue_class, name):
            pytest.skip(f"vLLM's queue has {name} since {LATER_QUEUE_METHODS[name]}")
    return queue_class


@pytest.fixture(params=["native", "reference"])
def strict_class(request: pytest.FixtureRequest) -> Any:
    """The implementations that refuse where vLLM's class silently corrupts itself."""
    return QUEUES[request.param]


@pytest.fixture
def blocks(block_class: Any) -> MakeBlocks:
    """``blocks(n)``: n fresh blocks with the ids 0 ... n-1."""
    return lambda n: [block_class(block_id) for block_id in range(n)]
