"""Ring 2 for the placement policies: native and reference stay equal after each step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from implementations import BLOCKS, QUEUES, assert_order, ids

NUM_IDS = 36
STRICT = ("native", "reference")


class PoliciesInStep(RuleBasedStateMachine):
    """Each rule runs on both, each over blocks of its own with the same ids.

    `requests` are block tables as an engine holds them: they grow at their end, with the hint, and
    are freed tail first, the head with hashes. `cached` is what was freed with a hash and has been
    neither handed out nor hit since.
    """

    policy: str
    size: int
    pack_tails: bool

    walks = Bundle("walks")

    @initialize(order=st.permutations(range(NUM_IDS)), known=st.integers(0, NUM_IDS))
    def construct(self, order: list[int], known: int) -> None:
        """`known` blocks at construction; the other ids are freed later, unseen."""
        block_class = BLOCKS["slots"]
        self.blocks = {name: {i: block_class(i) for i in range(NUM_IDS)} for name in STRICT}
        self.queues = {
            name: QUEUES[name](
                [self.blocks[name][i] for i in order[:known]],
                policy=self.policy,
                size=self.size,
                pack_tails=self.pack_tails,
            )
            for name in STRICT
        }
        self.free = set(order[:known])
        self.seen = set(self.free)
        self.requests: list[list[int]] = [[i] for i in order[known:]]
        self.cached: set[int] = set()

    def both(self, call: Any) -> Any:
        results = [call(self.queues[name], self.blocks[name]) for name in STRICT]
        assert results[0] == results[1]
        return results[0]

    def took(self, taken: list[int]) -> list[int]:
        assert len(set(taken)) == len(taken)
        assert set(taken) <= self.free
        self.free -= set(taken)
        self.cached -= set(taken)
        return taken

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """A new request: no hint; ids ascending in a pool that has whole extents left, where tails
        are packed those of the tail by themselves.
        """
        n = data.draw(st.integers(1, len(self.free)))
        self.both(lambda queue, _: queue.grow_after(None))
        whole = self.queues["reference"].stats()
        taken = self.took(self.both(lambda queue, _: ids(queue.popleft_n(n))))
        if (whole["clean"] + whole["aged"]) * whole["size"] >= n and n > 1:
            over = n % self.size if self.pack_tails else 0
            assert taken[: n - over] == sorted(taken[: n - over])
            assert taken[n - over :] == sorted(taken[n - over :])
        self.requests.append(taken)

    @precondition(lambda self: self.free)
    @rule()
    def popleft(self) -> None:
        self.requests.append(self.took([self.both(lambda queue, _: queue.popleft().block_id)]))

    @precondition(lambda self: self.free and self.requests)
    @rule(data=st.data(), bulk=st.booleans())
    def grow(self, data: st.DataObject, bulk: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        n = data.draw(st.integers(1, len(self.free))) if bulk else 1
        spendable = set(self.queues["reference"]._order._spendable)
        shortages = self.queues["reference"].stats()["shortages"]
        whole = {
            k for k in range(NUM_IDS) if set(range(k * self.size, (k + 1) * self.size)) <= self.free
        }
        if request and request[-1] in self.seen:
            last = request[-1]
            self.both(lambda queue, blocks: queue.grow_after(blocks[last]))
        taken = self.took(self.both(lambda queue, _: ids(queue.popleft_n(n))))
        self.both(lambda queue, _: queue.grow_after(None))
        if self.queues["reference"].stats()["shortages"] == shortages:
            # What lies in the extents that were there is grown into only if nobody may want it.
            in_place = [i for i in taken if i // self.size not in whole]
            assert set(in_place) <= spendable
        request += taken

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Free a request: its first blocks have hashes, the rest has none."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        hashed = data.draw(st.integers(0, len(request)))
        kept, lost = request[:hashed][::-1], request[hashed:][::-1]
        self.both(lambda queue, blocks: queue.prepend_n([blocks[i] for i in lost]))
        self.both(lambda queue, blocks: queue.append_n([blocks[i] for i in kept]))
        self.free |= set(request)
        self.seen |= set(request)
        self.cached |= set(kept)

    @precondition(lambda self: any(self.requests))
    @rule(data=st.data(), cached=st.booleans())
    def slide(self, data: st.DataObject, cached: bool) -> None:
        """A sliding window frees the first blocks of a request that goes on."""
        request = data.draw(st.sampled_from([r for r in self.requests if r]))
        n = data.draw(st.integers(1, len(request)))
        gone = request[:n]
        del request[:n]
        if cached:
            for block_id in gone:
                self.both(lambda queue, blocks, i=block_id: queue.append(blocks[i]))
        else:
            self.both(lambda queue, blocks: queue.prepend_n([blocks[i] for i in gone]))
        self.free |= set(gone)
        self.seen |= set(gone)
        self.cached |= set(gone) if cached else set()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Cached blocks are touched, in the middle of an extent too."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        for block_id in chosen:
            self.both(lambda queue, blocks, i=block_id: queue.remove(blocks[i]))
        self.free -= set(chosen)
        self.cached -= set(chosen)
        self.requests.append(chosen)

    @precondition(lambda self: self.free)
    @rule(n=st.integers(1, 6))
    def take_with_the_hint_that_stands(self, n: int) -> None:
        """Whatever has become of its block."""
        n = min(n, len(self.free))
        self.requests.append(self.took(self.both(lambda queue, _: ids(queue.popleft_n(n)))))

    @precondition(lambda self: any(self.requests))
    @rule(data=st.data())
    def leave_a_hint(self, data: st.DataObject) -> None:
        in_use = [i for request in self.requests for i in request if i in self.seen]
        if in_use:
            block_id = data.draw(st.sampled_from(in_use))
            self.both(lambda queue, blocks: queue.grow_after(blocks[block_id]))

    @rule()
    def reset_the_cache(self) -> None:
        self.both(lambda queue, _: queue.forget_hashes())
        self.cached.clear()

    @rule()
    def reorder(self) -> None:
        self.both(lambda queue, _: queue.reorder())
        self.cached.clear()

    @rule(target=walks, data=st.data())
    def begin_a_walk(self, data: st.DataObject) -> Any:
        cursor = data.draw(st.none() | st.integers(0, NUM_IDS - 1))
        return [
            self.queues[name].iter_blocks_after(
                None if cursor is None else self.blocks[name][cursor]
            )
            for name in STRICT
        ]

    @rule(walk=walks, steps=st.integers(1, 3))
    def step_a_walk(self, walk: Any, steps: int) -> None:
        for _ in range(steps):
            seen = [getattr(next(iterator, None), "block_id", None) for iterator in walk]
            assert seen[0] == seen[1]

    @invariant()
    def both_say_the_same(self) -> None:
        native, reference = (self.queues[name] for name in STRICT)
        order = ids(reference.get_all_free_blocks())
        assert set(order) == self.free
        for queue in (native, reference):
            assert_order(queue, order)
        stats = [queue.stats() | {"implementation": ""} for queue in (native, reference)]
        assert stats[0] == stats[1]
        if self.policy == "sorted":
            assert stats[0]["early_evictions"] == 0


def machine_of(policy: str, size: int, pack_tails: bool) -> type[PoliciesInStep]:
    members = {"policy": policy, "size": size, "pack_tails": pack_tails}
    return type("Machine", (PoliciesInStep,), members)


@pytest.mark.parametrize(
    ("policy", "size", "pack_tails"),
    [
        ("sorted", 8, False),
        *[("extent", size, False) for size in (1, 2, 4, 8, 64)],
        *[("extent", size, True) for size in (2, 4, 8)],
    ],
)
def test_the_state_machine(policy: str, size: int, pack_tails: bool) -> None:
    run_state_machine_as_test(
        machine_of(policy, 1 if policy == "sorted" else size, pack_tails),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
