"""Placement: what the policies `sorted` and `extent` promise, on both implementations."""

from __future__ import annotations

import enum
import random
from itertools import pairwise
from typing import Any

import pytest
from implementations import QUEUES, MakeBlocks, SlotBlock, assert_order, ids

from pyblockpool import FreeBlockQueue, _queue, reference, settings

POLICIES = [("sorted", 1), ("extent", 1), ("extent", 2), ("extent", 8), ("extent", 64)]


@pytest.fixture
def block_class() -> Any:
    """What kind of blocks they are makes no difference to where they go."""
    return SlotBlock


@pytest.fixture(params=POLICIES, ids=lambda param: f"{param[0]},size={param[1]}")
def placement(request: pytest.FixtureRequest) -> dict[str, Any]:
    policy, size = request.param
    return {"policy": policy, "size": size}


def runs_of(block_ids: list[int]) -> int:
    return 1 + sum(b != a + 1 for a, b in pairwise(block_ids))


def drained(queue: Any) -> list[int]:
    return [queue.popleft().block_id for _ in range(queue.num_free_blocks)]


def test_the_limits_are_the_same_everywhere() -> None:
    assert settings.MAX_EXTENT_SIZE == reference.MAX_EXTENT_SIZE == _queue.MAX_EXTENT_SIZE
    assert reference.DEFAULT_EXTENT_SIZE == _queue.DEFAULT_EXTENT_SIZE
    assert reference.POLICIES == _queue.POLICIES


@pytest.mark.parametrize("size", [1, 2, 512, 4096])
def test_sizes(strict_class: Any, blocks: MakeBlocks, size: int) -> None:
    queue = strict_class(blocks(3), policy="extent", size=size)
    assert queue.stats()["size"] == size
    assert queue.stats()["policy"] == "extent"
    assert_order(queue, [0, 1, 2])


@pytest.mark.parametrize("size", [0, -1, 3, 6, 4095, 8192, 2**40, True + 2])
def test_a_size_that_is_no_power_of_two_is_refused_by_name(strict_class: Any, size: int) -> None:
    with pytest.raises(ValueError, match=f"size {size} is not a power of two from 1 to 4096"):
        strict_class([], policy="extent", size=size)


@pytest.mark.parametrize("size", ["8", None, 8.0])
def test_a_size_that_is_no_number(strict_class: Any, size: Any) -> None:
    with pytest.raises(TypeError):
        strict_class([], policy="extent", size=size)


def test_block_zero_comes_first(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """kvcached#398"""
    queue = strict_class(blocks(20)[::-1], **placement)
    assert queue.popleft().block_id == 0


def test_the_walk_is_the_order_of_single_blocks(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    chance = random.Random(1)
    queue = strict_class(blocks(100), **placement)
    resident: list[list[Any]] = []
    for _ in range(60):
        if resident and chance.random() < 0.5:
            request = resident.pop(chance.randrange(len(resident)))
            kept = chance.randint(0, len(request))
            queue.prepend_n(request[kept:])
            queue.append_n(request[:kept][::-1])
        elif queue.num_free_blocks:
            resident.append(queue.popleft_n(chance.randint(1, min(9, queue.num_free_blocks))))
    walk = ids(queue.get_all_free_blocks())
    assert_order(queue, walk)
    assert len(walk) > 20
    assert drained(queue) == walk


def test_contiguity_is_never_a_reason_to_refuse(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """vllm#32290"""
    made = blocks(11)
    queue = strict_class(made, **placement)
    queue.popleft()
    for i in (2, 4, 6, 8, 10):
        queue.remove(made[i])
    assert ids(queue.popleft_n(5)) == [1, 3, 5, 7, 9]
    assert queue.check() == ""


def test_a_fresh_pool_gives_one_run(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """vllm#55434"""
    queue = strict_class(blocks(1500), **placement)
    queue.popleft()
    assert runs_of(ids(queue.popleft_n(642))) == 1


def test_a_churned_pool_gives_few_runs(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """vllm#35990, caching off: nothing has a hash. Scaled down, as the specification is slow."""
    chance = random.Random(35990)
    queue = strict_class(blocks(600), **placement)
    queue.popleft()
    resident: list[list[Any]] = []
    for _ in range(80):
        n = chance.randint(6, 60)
        while resident and (n > queue.num_free_blocks or len(resident) > 10):
            queue.prepend_n(resident.pop(chance.randrange(len(resident)))[::-1])
        resident.append(queue.popleft_n(n))
    for request in resident:
        queue.prepend_n(request[::-1])
    assert runs_of(ids(queue.popleft_n(193))) <= 3


def test_the_tail_of_a_chain_is_evicted_first(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """llm-d-inference-sim#704, vllm#42656"""
    queue = strict_class(blocks(11), **placement)
    queue.popleft()
    chain = queue.popleft_n(5)
    first = chain[0].block_id
    assert ids(chain) == list(range(first, first + 5))
    queue.prepend_n(chain[4:])
    queue.append_n(chain[:4][::-1])
    if placement["size"] in (1, 64):
        assert_order(queue, [5, 6, 7, 8, 9, 10, 4, 3, 2, 1])
    order = [i for i in ids(queue.get_all_free_blocks()) if i in ids(chain[:4])]
    extents = [block_id // placement["size"] for block_id in order]
    assert extents == sorted(extents, reverse=True)


def test_after_a_reset_of_the_cache_the_order_is_canonical(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    for verb in ("forget_hashes", "reorder"):
        queue = strict_class(blocks(40), **placement)
        null, taken = queue.popleft(), queue.popleft_n(39)
        assert null.block_id == 0
        random.Random(2).shuffle(taken)
        for block in taken:
            queue.append(block)
        getattr(queue, verb)()
        order = ids(queue.popleft_n(39))
        assert sorted(order) == list(range(1, 40))
        if placement["size"] == 1:
            assert order == sorted(order)
        queue.prepend_n(taken)
        assert runs_of(ids(queue.popleft_n(32 if placement["size"] < 64 else 39))) == 1


def test_growth_beside_the_last_block(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(64)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    one, other = queue.popleft_n(3), queue.popleft_n(2)
    assert (ids(one), ids(other)) == ([8, 9, 10], [16, 17])
    for _ in range(7):
        for request in (one, other):
            queue.grow_after(request[-1])
            request += queue.popleft_n(1)
    queue.grow_after(None)
    assert ids(one) == [8, 9, 10, 11, 12, 13, 14, 15, 24, 25]
    assert ids(other) == [16, 17, 18, 19, 20, 21, 22, 23, 32]
    queue.grow_after(other[-1])
    assert ids(queue.popleft_n(10)) == [33, 34, 35, 36, 37, 38, 39, 40, 41, 42]
    assert queue.popleft().block_id == 43, "the hint moves on with what is handed out"
    queue.grow_after(None)
    assert queue.popleft().block_id == 1, "single blocks share the extent of the first one"
    assert queue.check() == ""


def test_a_hint_has_to_be_a_block_in_use(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    made = blocks(4)
    queue = strict_class(made, **placement)
    block = queue.popleft()
    for wrong in (made[3], blocks(1)[0], queue.fake_free_list_head, "block"):
        with pytest.raises(RuntimeError, match="is not a block of this queue in use"):
            queue.grow_after(wrong)
    queue.grow_after(block)
    assert queue.popleft().block_id == 1


def test_a_hint_must_not_be_queued_elsewhere(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    queue = strict_class(blocks(4), **placement)
    other = strict_class([], **placement)
    block = queue.popleft()
    other.append(block)
    with pytest.raises(RuntimeError, match="is not a block of this queue in use"):
        queue.grow_after(block)


def test_a_hint_at_a_block_that_another_queue_has_given_back(
    strict_class: Any, blocks: MakeBlocks, placement: dict[str, Any]
) -> None:
    """It is in use here again: this queue knows it, and would take it back."""
    made = blocks(8)
    queue = strict_class(made, **placement)
    other = strict_class([], **placement)
    block = queue.popleft()
    other.append(block)
    other.remove(block)
    queue.grow_after(block)
    assert ids(queue.popleft_n(2)) == [1, 2]
    queue.grow_after(None)
    with pytest.raises(RuntimeError, match="is not a block of this queue in use"):
        other.grow_after(made[1])
    queue.append(block)
    assert queue.check() == other.check() == ""


def test_a_hint_at_a_block_that_was_freed(strict_class: Any, blocks: MakeBlocks) -> None:
    """It stands; growing breaks the extent, which has become whole meanwhile."""
    made = blocks(12)
    queue = strict_class(made, policy="extent", size=4)
    queue.popleft_n(12)
    queue.grow_after(made[4])
    queue.prepend_n([made[5], made[6], made[7]])
    queue.append(made[4])
    assert queue.stats()["aged"] == 1
    assert queue.popleft() is made[5]
    queue.grow_after(None)
    assert queue.stats()["aged"] == 0
    assert_order(queue, [6, 7, 4])


def test_policies_may_be_enums(strict_class: Any, blocks: MakeBlocks) -> None:
    class Policy(str, enum.Enum):
        EXTENT = "extent"

    stats = strict_class(blocks(8), policy=Policy.EXTENT, size=4).stats()
    assert (type(stats["policy"]), stats["policy"], stats["size"]) == (str, "extent", 4)


def test_a_queue_that_was_used_before_it_was_made(blocks: MakeBlocks) -> None:
    from pyblockpool import FreeBlockQueue

    made = blocks(4)
    queue = FreeBlockQueue.__new__(FreeBlockQueue)
    queue.append(made[0])
    with pytest.raises(RuntimeError, match="or late"):
        FreeBlockQueue.__init__(queue, made[1:], "extent", 2)
    assert_order(queue, [0])


def test_ids_may_come_one_by_one(blocks: MakeBlocks, placement: dict[str, Any]) -> None:
    from pyblockpool import FreeBlockQueue

    made = blocks(5000)
    queue = FreeBlockQueue([], **placement)
    for block in made:
        queue.prepend_n([block])
    assert queue.check() == ""
    assert ids(queue.popleft_n(5000 // 64 * 64)) == list(range(5000 // 64 * 64))


def test_many_short_runs_of_clean_extents(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(120)
    queue = strict_class(made, policy="extent", size=2)
    queue.popleft_n(120)
    lengths = {0: 1, 3: 2, 8: 4, 15: 4, 22: 3, 28: 1, 32: 2, 40: 3, 50: 2}  # by first extent
    for first, length in lengths.items():
        queue.prepend_n(made[2 * first : 2 * (first + length)])
    extents = [block.block_id // 2 for block in queue.popleft_n(2 * 13)]
    # The two of four, the lower of three, and of those that hold the last two, the shortest.
    assert extents[::2] == [3, 4, 8, 9, 10, 11, 15, 16, 17, 18, 22, 23, 24]
    assert queue.check() == ""


def test_cached_blocks_are_never_grown_into(strict_class: Any, blocks: MakeBlocks) -> None:
    """A cached block behind the last one may be the continuation of a sibling with a prefix."""
    made = blocks(32)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    table = queue.popleft_n(8)
    assert ids(table) == [8, 9, 10, 11, 12, 13, 14, 15]
    queue.append_n(table[4:][::-1])
    queue.grow_after(table[3])
    assert queue.popleft().block_id == 16


def test_the_blocks_of_a_victim_are_doomed(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(24)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    old, new = queue.popleft_n(8), queue.popleft_n(8)
    for chain in (old, new):
        queue.append_n(chain[::-1])
    assert queue.stats()["aged"] == 2
    assert queue.popleft_n(2) == old[:2]
    assert queue.stats()["unhashed"] == 6 + 7, "what is left of the victim, and extent 0"
    queue.remove(old[5])  # it can still be hit
    queue.grow_after(old[1])
    assert ids(queue.popleft_n(3)) == [10, 11, 12]
    assert queue.stats()["early_evictions"] == 0, "a chain goes as a whole, its tail first"
    assert queue.stats()["shortages"] == 0
    assert queue.check() == ""


def test_early_evictions_are_counted(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(24)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    one, other = queue.popleft_n(8), queue.popleft_n(8)
    queue.append_n([*one[:4], *other[:4], *one[4:], *other[4:]])
    assert queue.popleft_n(8) == one
    # Given up with the oldest four, 8 ... 11: 12 ... 15, which are younger than 16 ... 19.
    assert queue.stats()["early_evictions"] == 4
    assert ids(queue.popleft_n(8)) == ids(other)
    assert queue.stats()["early_evictions"] == 4


def test_what_stays_behind_makes_no_eviction_early(strict_class: Any, blocks: MakeBlocks) -> None:
    """A cached block in an extent that is in use outlives all; that is not the others' fault."""
    made = blocks(32)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    kept, one, other = (queue.popleft_n(8) for _ in range(3))
    queue.append(kept[3])
    for chain in (one, other):
        queue.append_n(chain[::-1])
    assert [queue.popleft_n(8), queue.popleft_n(8)] == [one, other]
    assert queue.stats()["early_evictions"] == 0


@pytest.mark.parametrize("size", [2, 8])
def test_at_most_the_rest_of_an_extent_leaves_early(
    strict_class: Any, blocks: MakeBlocks, size: int
) -> None:
    """Blocks that come back one by one, in any order."""
    chance = random.Random(size)
    made = blocks(64)
    queue = strict_class(made, policy="extent", size=size)
    queue.popleft()
    used = queue.popleft_n(63)
    some_were_early = False
    for _ in range(200):
        chance.shuffle(used)
        for _ in range(chance.randint(0, len(used))):
            queue.append(used.pop())
        wanted = chance.randint(0, queue.num_free_blocks)
        before = queue.stats()["early_evictions"]
        used += queue.popleft_n(wanted)
        early = queue.stats()["early_evictions"] - before
        assert 0 <= early <= (size - 1) * -(-wanted // size)
        some_were_early |= early > 0
    assert some_were_early
    assert queue.check() == ""


def test_shortage_and_recovery(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(40)
    queue = strict_class(made, policy="extent", size=8)
    queue.popleft()
    requests = [queue.popleft_n(5) for _ in range(4)]
    assert [request[0].block_id for request in requests] == [8, 16, 24, 32]
    # No whole extent is left: the fullest first, the lowest of several.
    assert ids(queue.popleft_n(9)) == [1, 2, 3, 4, 5, 6, 7, 13, 14]
    assert queue.stats()["shortages"] == 1
    queue.append_n(requests[1][::-1])
    assert ids(queue.popleft_n(5)) == [16, 17, 18, 19, 20]
    assert queue.stats()["shortages"] == 1
    assert queue.num_free_blocks == 10
    assert queue.check() == ""


def test_best_fit_over_runs_of_clean_extents(strict_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(2 * 16)
    queue = strict_class(made, policy="extent", size=2)
    queue.popleft_n(32)
    for extents in ([2, 3, 4], [6], [8, 9], [12, 13, 14, 15]):
        queue.prepend_n([made[2 * k + i] for k in extents for i in (1, 0)])
    assert ids(queue.popleft_n(4)) == [16, 17, 18, 19], "the smallest that holds it"
    assert ids(queue.popleft_n(2)) == [12, 13]
    assert ids(queue.popleft_n(10)) == [4, 5, 24, 25, 26, 27, 28, 29, 30, 31], "longest, again"


@pytest.mark.parametrize(("policy", "size"), [("sorted", 1), ("extent", 8), ("extent", 64)])
def test_unpinned_blocks_are_the_last_resort(
    strict_class: Any, blocks: MakeBlocks, policy: str, size: int
) -> None:
    """vllm#56109: appended without a hash, and still read."""
    made = blocks(8)
    queue = strict_class(made, policy=policy, size=size)
    queue.popleft()
    taken = queue.popleft_n(3)
    queue.append_n([taken[1]])
    queue.prepend_n([taken[2], taken[0]])
    assert drained(queue)[-1] == taken[1].block_id


@pytest.mark.skipif("vllm" not in QUEUES, reason="vLLM is not installed")
def test_sorted_evicts_what_vllm_would(blocks: MakeBlocks) -> None:
    """The same prefix-cache contents leave with each call, whatever blocks hold them."""
    chance = random.Random(4)
    names = ("vllm", "native", "reference")
    made = {name: blocks(120) for name in names}
    queues = {
        name: QUEUES[name](made[name], **({} if name == "vllm" else {"policy": "sorted"}))
        for name in names
    }
    contents: dict[str, dict[int, int]] = {name: {} for name in names}
    requests: list[dict[str, list[Any]]] = []
    number = 0
    evictions = 0
    for _ in range(1200):
        free = queues["vllm"].num_free_blocks
        if chance.random() < 0.5 and free:
            n = chance.randint(1, min(free, 14))
            taken = {name: queues[name].popleft_n(n) for name in names}
            evicted = [
                sorted(contents[name].pop(block.block_id, -1) for block in taken[name])
                for name in names
            ]
            assert evicted[0] == evicted[1] == evicted[2]
            evictions += sum(content >= 0 for content in evicted[0])
            assert ids(taken["native"]) == sorted(ids(taken["native"]))
            requests.append(taken)
        elif chance.random() < 0.2 and contents["vllm"]:
            content = chance.choice(sorted(contents["vllm"].values()))
            hit = {}
            for name in names:
                (at,) = [i for i, held in contents[name].items() if held == content]
                queues[name].remove(made[name][at])
                del contents[name][at]
                hit[name] = [made[name][at]]
            requests.append(hit)
        elif requests:
            request = requests.pop(chance.randrange(len(requests)))
            kept = chance.randint(0, len(request["vllm"]))
            for name in names:
                queues[name].prepend_n(request[name][kept:])
                queues[name].append_n(request[name][:kept][::-1])
                for at, block in enumerate(request[name][:kept]):
                    contents[name][block.block_id] = number + at
            number += kept
    assert evictions > 500
    assert queues["native"].check() == ""


def test_extents_are_opened_in_as_few_pieces_as_the_specification_says(blocks: MakeBlocks) -> None:
    """Many runs of clean extents, short and long ones: too many for the state machine."""
    chance = random.Random(8)
    made = blocks(1200)
    queue = _queue.FreeBlockQueue(made, policy="extent", size=2)
    order = reference.ExtentOrder(2)
    order.add_unhashed(list(range(1200)))
    requests: list[list[int]] = []
    for _ in range(600):
        n = chance.choice([2, 6, 30, 64, 150])
        if queue.num_free_blocks >= n and chance.random() < 0.55:
            taken = order.take(n, None)
            assert ids(queue.popleft_n(n)) == taken
            requests += [taken[i : i + 100] for i in range(0, n, 100)]
        elif requests:
            request = requests.pop(chance.randrange(len(requests)))
            queue.prepend_n([made[i] for i in request])
            order.add_unhashed(request)
    assert queue.check() == ""
    assert queue.stats()["clean"] == order.stats()["clean"] > 0


@pytest.mark.parametrize("size", [2, 8])
def test_outside_of_shortage_an_extent_has_one_tenant(strict_class: Any, size: int) -> None:
    """So the tiles of a request are its own, in prefill and decode, with a full prefix cache, in
    whatever pieces it grows.
    """
    chance = random.Random(size)
    made = [SlotBlock(i) for i in range(40 * size)]
    queue = strict_class(made, policy="extent", size=size)
    queue.popleft()
    requests: list[list[Any]] = []
    for _ in range(400):
        if len(requests) < 6:
            requests.append(queue.popleft_n(chance.randint(2, 3 * size)))
        request = chance.choice(requests)
        queue.grow_after(request[-1])
        request += queue.popleft_n(chance.choice([1, 1, 1, chance.randint(1, size)]))
        queue.grow_after(None)
        if chance.random() < 0.2 or len(request) > 4 * size:
            requests = [other for other in requests if other is not request]
            queue.append_n(request[::-1])
        tiles = [{block.block_id // size for block in request} for request in requests]
        assert sum(map(len, tiles)) == len(set().union(*tiles))
        for request, own in zip(requests, tiles, strict=True):
            assert len(own) == -(-len(request) // size), "tile amplification is 1.0"
    assert queue.stats()["shortages"] == 0
    assert queue.stats()["early_evictions"] == 0


def aged_extents(
    strict_class: Any, num_cached: list[int], pack_tails: bool = True
) -> tuple[Any, list[list[int]]]:
    """A queue with nothing but aged extents of 8, longest whole first; so many cached in each."""
    made = [SlotBlock(i) for i in range(8 * (len(num_cached) + 1))]
    queue = strict_class(made, policy="extent", size=8, pack_tails=pack_tails)
    queue.popleft()
    chains = [queue.popleft_n(8) for _ in num_cached]
    queue.popleft_n(queue.num_free_blocks)
    for chain, count in zip(chains, num_cached, strict=True):
        queue.prepend_n(chain[: count - 1 : -1])
        queue.append_n(chain[count - 1 :: -1])
    assert queue.stats()["aged"] == len(num_cached)
    return queue, [ids(chain) for chain in chains]


def test_a_packed_tail_goes_where_an_aged_extent_has_room(strict_class: Any) -> None:
    queue, chains = aged_extents(strict_class, [3, 3, 3, 3])
    shortages = queue.stats()["shortages"]
    # Less than an extent, behind nothing: into the last one that has room, behind what is cached.
    few = queue.popleft_n(4)
    assert ids(few) == chains[3][3:7]
    # An extent and more, behind a block: the rest into the last one that has enough.
    queue.grow_after(few[-1])
    more = queue.popleft_n(1 + 8 + 2)
    assert ids(more) == [chains[3][7], *chains[0], *chains[2][3:5]]
    # It grows there; where it cannot, it opens an extent of its own.
    grown = [queue.popleft() for _ in range(4)]
    queue.grow_after(None)
    assert ids(grown) == [*chains[2][5:], chains[1][0]]
    # The cached blocks of those who made room are still there, in their order.
    assert ids(queue.get_all_free_blocks()[-6:]) == [*chains[2][2::-1], *chains[3][2::-1]]
    assert queue.stats()["shortages"] == shortages
    assert queue.stats()["early_evictions"] == 0
    assert queue.check() == ""


def test_the_tail_of_a_prompt_is_packed(strict_class: Any) -> None:
    queue, chains = aged_extents(strict_class, [3, 3, 3])
    assert ids(queue.popleft_n(11)) == [*chains[0], *chains[2][3:6]]


def test_a_tail_is_not_packed_if_nobody_has_asked_for_it(strict_class: Any) -> None:
    queue, chains = aged_extents(strict_class, [3, 3, 3, 3], pack_tails=False)
    few = queue.popleft_n(4)
    assert ids(few) == chains[0][:4]
    queue.grow_after(few[-1])
    assert ids(queue.popleft_n(4 + 8 + 2)) == [*chains[0][4:], *chains[1], *chains[2][:2]]
    assert queue.stats()["pack_tails"] is False


def test_room_that_is_too_small_or_was_made_too_long_ago(strict_class: Any) -> None:
    """Then the extent that is whole for the longest is opened, as ever."""
    queue, chains = aged_extents(strict_class, [3, 3, 3])
    assert ids(queue.popleft_n(6)) == chains[0][:6]
    looks = reference.ROOM_LOOKS
    queue, chains = aged_extents(strict_class, [3, *[7] * (looks - 1)])
    assert ids(queue.popleft_n(4)) == chains[0][3:7]
    queue, chains = aged_extents(strict_class, [3, *[7] * looks])
    assert ids(queue.popleft_n(4)) == chains[0][:4]


def num_cached(
    strict_class: Any, num_blocks: int, length: int, in_flight: int, pack_tails: bool
) -> int:
    """Cached blocks in a queue through which requests of ``length`` have gone three times."""
    made = [SlotBlock(i) for i in range(num_blocks + 1)]
    queue = strict_class(made, policy="extent", size=8, pack_tails=pack_tails)
    queue.popleft()
    requests: list[list[Any]] = []
    for _ in range(3 * num_blocks // length):
        requests.append(queue.popleft_n(length))
        if len(requests) > in_flight:
            queue.append_n(requests.pop(0)[::-1])
    assert queue.check() == ""
    stats = queue.stats()
    return int(stats["free"] - stats["unhashed"])


@pytest.mark.parametrize("length", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("in_flight", [0, 8])
def test_packed_tables_do_not_cost_the_cache(
    strict_class: Any, length: int, in_flight: int
) -> None:
    """Nothing is evicted as long as there are blocks without a hash, but for a few extents."""
    in_use = in_flight * -(-length // 8)
    assert num_cached(strict_class, 256, length, in_flight, True) > 256 - 8 * (in_use + 2)


@pytest.mark.parametrize(
    ("length", "cached"), [(2, 254), (9, 575), (20, 848), (50, 908), (200, 1016)]
)
def test_what_fresh_tables_cost_the_cache(length: int, cached: int) -> None:
    """They share no extent, so the last one of each is filled in part: docs/policies.md tells."""
    assert num_cached(FreeBlockQueue, 1024, length, 0, False) == cached
    assert num_cached(FreeBlockQueue, 1024, length, 0, True) >= 1012
