"""Ring 2: native, reference and vLLM's class stay equal after each step of any program."""

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
)
from implementations import BLOCKS, QUEUES, assert_order, ids

NUM_IDS = 24


class QueuesInStep(RuleBasedStateMachine):
    """Each rule runs on all implementations, each over blocks of its own with the same ids."""

    block_class: Any

    walks = Bundle("walks")

    @initialize(order=st.permutations(range(NUM_IDS)), known=st.integers(0, NUM_IDS))
    def construct(self, order: list[int], known: int) -> None:
        """`known` blocks at construction; ids beyond them are appended later, unseen."""
        self.blocks = {name: {i: self.block_class(i) for i in range(NUM_IDS)} for name in QUEUES}
        self.queues = {
            name: queue_class([self.blocks[name][i] for i in order[:known]])
            for name, queue_class in QUEUES.items()
        }
        self.expected = list(order[:known])

    def everywhere(self, call: Any) -> Any:
        """Do `call(queue, blocks)` on all; all must return the same, or raise the same type."""
        results = {}
        for name, queue in self.queues.items():
            try:
                results[name] = call(queue, self.blocks[name])
            except (ValueError, AssertionError, RuntimeError) as error:
                results[name] = type(error)
        assert len({repr(result) for result in results.values()}) == 1, results
        return results["native"]

    def in_use(self) -> list[int]:
        return [i for i in range(NUM_IDS) if i not in self.expected]

    def some_in_use(self) -> st.SearchStrategy[list[int]]:
        in_use = self.in_use()
        return st.lists(st.sampled_from(in_use), unique=True) if in_use else st.just([])

    @rule()
    def popleft(self) -> None:
        taken = self.everywhere(lambda queue, _: queue.popleft().block_id)
        assert taken == (self.expected.pop(0) if self.expected else ValueError)

    @rule(n=st.integers(0, NUM_IDS + 2))
    def popleft_n(self, n: int) -> None:
        taken = self.everywhere(lambda queue, _: ids(queue.popleft_n(n)))
        if n <= len(self.expected):
            assert taken == self.expected[:n]
            del self.expected[:n]
        else:
            assert taken is AssertionError

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.expected))
        self.everywhere(lambda queue, blocks: queue.remove(blocks[chosen]))
        self.expected.remove(chosen)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def remove_what_is_in_use(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.in_use()))
        refused = self.everywhere(lambda queue, blocks: queue.remove(blocks[chosen]))
        assert refused is RuntimeError

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.in_use()))
        self.everywhere(lambda queue, blocks: queue.append(blocks[chosen]))
        self.expected.append(chosen)

    @rule(data=st.data(), verb=st.sampled_from(["append_n", "prepend_n"]))
    def insert_n(self, data: st.DataObject, verb: str) -> None:
        if not all(hasattr(queue, verb) for queue in self.queues.values()):
            verb = "append_n"
        chosen = data.draw(self.some_in_use())
        self.everywhere(lambda queue, blocks: getattr(queue, verb)([blocks[i] for i in chosen]))
        if verb == "append_n":
            self.expected.extend(chosen)
        else:
            self.expected[:0] = chosen

    @rule(
        data=st.data(),
        verb=st.sampled_from(["append_n", "prepend_n"]),
        kind=st.sampled_from(["queued", "twice", "foreign", "end"]),
    )
    def insert_n_with_a_mistake(self, data: st.DataObject, verb: str, kind: str) -> None:
        """Only ours: vLLM's class would be corrupted. The rest of the batch is fine."""
        good = data.draw(self.some_in_use())
        place = data.draw(st.integers(0, len(good)))
        known = [i for i in range(NUM_IDS) if i in self.expected]
        for name in ("native", "reference"):
            queue, blocks = self.queues[name], self.blocks[name]
            batch = [blocks[i] for i in good]
            if kind == "queued" and known:
                batch.insert(place, blocks[known[0]])
            elif kind == "twice" and batch:
                batch.insert(place, batch[0])
            elif kind == "foreign" and known:
                batch.insert(place, self.block_class(known[-1]))
            else:
                batch.insert(place, queue.fake_free_list_head)
            with pytest.raises(RuntimeError):
                getattr(queue, verb)(batch)

    @rule(count=st.integers(0, 3), n=st.integers(1, NUM_IDS))
    def assign_num_free_blocks_and_back(self, count: int, n: int) -> None:
        """As vLLM's own tests do, to make a pool look full."""
        if n <= count:
            return
        for queue in self.queues.values():
            before = queue.num_free_blocks
            queue.num_free_blocks = min(count, before)
            if n > queue.num_free_blocks:
                with pytest.raises(AssertionError):
                    queue.popleft_n(n)
            queue.num_free_blocks = before

    @rule()
    def reorder(self) -> None:
        """vLLM's class has no such call: take all out and put them back in id order."""
        for name, queue in self.queues.items():
            if hasattr(queue, "reorder"):
                queue.reorder()
            else:
                queue.append_n(sorted(queue.popleft_n(len(self.expected)), key=_block_id))
                assert name == "vllm"
        self.expected.sort()

    @rule(target=walks, data=st.data())
    def begin_a_walk(self, data: st.DataObject) -> Any:
        cursor = data.draw(st.none() | st.integers(0, NUM_IDS - 1))
        return {
            name: queue.iter_blocks_after(None if cursor is None else self.blocks[name][cursor])
            for name, queue in self.queues.items()
            if hasattr(queue, "iter_blocks_after")
        }

    @rule(walk=walks, steps=st.integers(1, 3))
    def step_a_walk(self, walk: Any, steps: int) -> None:
        """Walks begun at any time, continued after any changes, see the same blocks."""
        for _ in range(steps):
            seen = {
                name: getattr(next(iterator, None), "block_id", None)
                for name, iterator in walk.items()
            }
            assert len(set(seen.values())) == 1, seen

    @invariant()
    def all_say_the_same(self) -> None:
        for queue in self.queues.values():
            assert_order(queue, self.expected)
        native, reference = (self.queues[name].stats() for name in ("native", "reference"))
        assert native | {"implementation": ""} == reference | {"implementation": ""}
        for name, blocks in self.blocks.items():
            for i in self.in_use():
                assert blocks[i].prev_free_block is None, (name, i)
                assert blocks[i].next_free_block is None, (name, i)


def _block_id(block: Any) -> int:
    return int(block.block_id)


QueuesInStep.TestCase.settings = settings(deadline=None)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_the_state_machine(kind: str) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (QueuesInStep,), {"block_class": BLOCKS[kind]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
