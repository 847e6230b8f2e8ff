"""Ring 3: golden id sequences. The numbers were read off vLLM 0.32's own class and are fixed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from implementations import MakeBlocks, ids


@pytest.mark.needs("prepend_n")
def test_a_short_life(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(12)
    queue = queue_class(made)
    assert queue.popleft() is made[0]
    assert ids(queue.popleft_n(5)) == [1, 2, 3, 4, 5]
    queue.append_n([made[3], made[2], made[1]])
    queue.prepend_n([made[5]])
    assert ids(queue.get_all_free_blocks()) == [5, 6, 7, 8, 9, 10, 11, 3, 2, 1]
    queue.remove(made[8])
    queue.remove(made[2])
    assert ids(queue.popleft_n(7)) == [5, 6, 7, 9, 10, 11, 3]
    queue.append_n([made[i] for i in (8, 2, 11, 10, 9)])
    queue.prepend_n([made[7], made[6]])
    queue.append(made[4])
    assert ids(queue.get_all_free_blocks()) == [7, 6, 1, 8, 2, 11, 10, 9, 4]


@pytest.mark.needs("prepend_n")
def test_a_long_life(queue_class: Any, blocks: MakeBlocks) -> None:
    """Requests come and go 2,000 times; the order that is left, folded into one number."""
    made = blocks(512)
    queue = queue_class(made)
    chance = random.Random(40244)
    resident: list[list[Any]] = []
    folded = 0
    for _ in range(2_000):
        n = chance.randint(1, 40)
        if resident and (n > queue.num_free_blocks or chance.random() < 0.4):
            request = resident.pop(chance.randrange(len(resident)))
            cached = chance.randint(0, len(request))
            queue.prepend_n(request[cached:])
            queue.append_n(request[:cached][::-1])
        if n <= queue.num_free_blocks:
            resident.append(queue.popleft_n(n))
            for block in resident[-1]:
                folded = (folded * 1_000_003 + block.block_id) % (2**61 - 1)
        if queue.num_free_blocks and chance.random() < 0.3:
            hit = chance.choice(queue.get_all_free_blocks())
            queue.remove(hit)
            resident.append([hit])
    for block in queue.get_all_free_blocks():
        folded = (folded * 1_000_003 + block.block_id) % (2**61 - 1)
    assert (queue.num_free_blocks, folded) == (9, 1005725621169171153)
