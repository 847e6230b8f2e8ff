"""What the queue is worth to vLLM's scheduler: real schedulers without a model, step by step.

    python bench/scheduler.py          # --short for a look in two minutes

256 requests are running, always; who ends makes room for the next. Prefix caching is on, and the
pool is full of cached blocks before the first step that counts, so that each new block is one that
is evicted.

    prefill-heavy   long prompts, few tokens of output: hundreds of blocks are taken and given back
                    in each step; also with prefixes in common that are out of use, and so taken out
                    of the middle of the queue, when they are hit; also in a pool that is just large
                    enough
    decode-heavy    short prompts, long outputs: some twenty blocks a step, most one by one

Each variant runs in a process of its own, as a native queue changes the class of vLLM's blocks. The
processes take turns, a few steps at a time, all with the same requests, so that drift of the
machine hits all. Only `schedule()` and `update_from_output()` count, as processor time of their
thread: what an engine core does in a step beside the model. *vLLM, again* is a second process with
vLLM's queue: a difference that it shows, too, is none. *Queue* is the share of the methods of
vLLM's queue in a step, in a process of its own in which a clock is read before and after each: more
than that no queue can save, but for what it does to the memory of the others.

Before a time counts, all variants have to end the same requests in the same steps with the same
prefix hits, vLLM's queue and policy lru with the same block tables, and have all blocks free at the
end.

What it does not show: the forward pass, which takes longer than a step of the scheduler and mostly
runs beside it, and what placement does to it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scheduler_alone import BLOCK_SIZE, make_request, make_scheduler, schedule
from tiny_llama import write_tiny_llama

from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings

RESULTS = Path(__file__).parent / "results" / "scheduler.json"

# Values of VLLM_BLOCK_QUEUE, None for unset.
VARIANTS = {
    "vLLM": None,
    "vLLM, again": None,
    "native": "native",
    "sorted": "native:sorted",
    "extent": "native:extent",
}
CLOCKED = "vLLM, clocked"

RUNNING = 256
TOKENS_A_STEP = 16_384
# Steps in one turn of a process, which are compared as a sum: single steps are too different.
TURN = 25
# Steps: all of the first prompts have been computed by then.
WARM_UP = 60
QUEUE_METHODS = ("popleft", "popleft_n", "remove", "append", "append_n", "prepend_n")


@dataclass(frozen=True)
class Load:
    """The same requests for all variants.

    Attributes:
        name: for the reader.
        prompt, output: tokens; those of a request vary by a half around these.
        num_blocks: in the pool.
        prefixes: of as many tokens as half of a prompt, one of which each prompt begins with, in
            turn; 0 for none.
    """

    name: str
    prompt: int
    output: int
    num_blocks: int
    prefixes: int = 0


# The smaller pools are hardly larger than what is in use. 300 prefixes come back when the requests
# that had them have ended, and long before they are evicted.
LOADS = [
    Load("prefill-heavy", 2000, 50, 64_000),
    Load("prefill-heavy", 2000, 50, 40_000),
    Load("prefill-heavy, shared prefixes", 2000, 50, 64_000, prefixes=300),
    Load("decode-heavy", 100, 300, 64_000),
    Load("decode-heavy", 100, 300, 6_000),
]


@dataclass
class Turn:
    """Some steps.

    Attributes:
        spent: seconds in `schedule()` and `update_from_output()`.
        queue: seconds of that in the methods of the queue; 0 where it has no clock.
        calls: of them.
    """

    spent: float
    queue: float
    calls: int


@dataclass
class Answer:
    """What has to be the same under all variants, but for the tables and the cached share.

    Attributes:
        ended: (request, number of the step).
        hit_tokens: found in the prefix cache.
        tables: digest of the block tables of all requests when they end.
        cached_share: of the free blocks at the start.
    """

    ended: list[tuple[str, int]]
    hit_tokens: int
    tables: str
    cached_share: float


class QueueClock:
    """Reads the clock before and after each call of the methods of vLLM's queue."""

    def __init__(self) -> None:
        self.spent = 0
        self.calls = 0

    def install(self) -> None:
        """In the class that vLLM's pools make their queues of, in this process."""
        from vllm.v1.core.block_pool import FreeKVCacheBlockQueue

        for name in QUEUE_METHODS:
            setattr(FreeKVCacheBlockQueue, name, self._clocked(vars(FreeKVCacheBlockQueue)[name]))

    def _clocked(self, method: Any) -> Any:
        def clocked(queue: Any, argument: Any = None) -> Any:
            start = time.perf_counter_ns()
            result = method(queue) if argument is None else method(queue, argument)
            self.spent += time.perf_counter_ns() - start
            self.calls += 1
            return result

        return clocked


class Engine:
    """A scheduler with requests that never run out."""

    def __init__(self, load: Load, model: Path, seed: int) -> None:
        self.scheduler = make_scheduler(
            model,
            num_blocks=load.num_blocks,
            scheduler_class=_timed_scheduler(),
            max_num_seqs=RUNNING,
            max_num_batched_tokens=TOKENS_A_STEP,
        )
        self._load = load
        self._dice = random.Random(seed)
        self._prefixes = [self._tokens(load.prompt // 2) for _ in range(load.prefixes)]
        self._started = 0
        self._steps = 0
        self._ended: list[tuple[str, int]] = []
        self._hit_tokens = 0
        self._tables = hashlib.blake2b()
        self._cached_share = 0.0

    def fill(self) -> None:
        """Other requests, one lot after the other, that have more blocks than the pool."""
        left = self._load.num_blocks * 5 // 4
        while left > 0:
            for _ in range(RUNNING):
                blocks = min(self._dice.randint(1, 64), max(left, 1))
                left -= blocks
                self._add(self._tokens(blocks * BLOCK_SIZE), 1)
            while self.scheduler.requests:
                self.step()
        free = [block for block in self._pool.blocks if block.ref_cnt == 0]
        self._cached_share = sum(block.block_hash is not None for block in free) / len(free)

    def start(self) -> None:
        """The first requests are somewhere in the midst of their outputs."""
        for _ in range(RUNNING):
            self._add(self._prompt(), self._dice.randint(1, self._load.output))
        self.steps(WARM_UP)

    def steps(self, count: int) -> float:
        """Do so many steps; seconds that count."""
        before = self.scheduler.spent
        for _ in range(count):
            while len(self.scheduler.requests) < RUNNING:
                self._add(self._prompt(), self._around(self._load.output))
            self.step()
        spent: float = self.scheduler.spent - before
        return spent

    def step(self) -> None:
        scheduled, returned = schedule(self.scheduler)
        self._steps += 1
        self._hit_tokens += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        for request_id, tokens in zip(returned.req_ids, returned.sampled_token_ids, strict=True):
            request = self.scheduler.requests[request_id]
            if tokens and request.num_output_tokens + 1 == request.max_tokens:
                self._ended.append((request_id, self._steps))
                (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
                self._tables.update(np.array([len(table), *table], np.int32).tobytes())
        self.scheduler.update_from_output(scheduled, returned)

    def finish(self, variant: str) -> Answer:
        """Let all requests end, and see whether the pool is whole."""
        while self.scheduler.requests:
            self.step()
        assert len(self._ended) == self._started
        assert all(block.ref_cnt == 0 for block in self._pool.blocks if not block.is_null)
        queue = self._pool.free_block_queue
        ids = [block.block_id for block in queue.get_all_free_blocks()]
        assert sorted(ids) == list(range(1, self._load.num_blocks))
        assert queue.num_free_blocks == len(ids)
        value = VARIANTS.get(variant)
        policy = None if value is None else Settings.from_environ({QUEUE_VARIABLE: value}).policy
        assert (queue.stats()["policy"] if hasattr(queue, "stats") else None) == policy
        assert policy is None or queue.check() == ""
        return Answer(self._ended, self._hit_tokens, self._tables.hexdigest(), self._cached_share)

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _add(self, prompt: list[int], output: int) -> None:
        self._started += 1
        self.scheduler.add_request(make_request(f"cmpl-{self._started}", prompt, output))

    def _prompt(self) -> list[int]:
        tokens = self._around(self._load.prompt)
        if not self._prefixes:
            return self._tokens(tokens)
        prefix = self._prefixes[self._started % len(self._prefixes)]
        return prefix + self._tokens(tokens - len(prefix) + 1)

    def _around(self, tokens: int) -> int:
        return self._dice.randint(tokens // 2, tokens * 3 // 2)

    def _tokens(self, count: int) -> list[int]:
        """No two blocks of them are alike."""
        return list(self._dice.randbytes(count))


def _timed_scheduler() -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    class TimedScheduler(Scheduler):  # type: ignore[misc]
        """Adds up the processor time of its thread in the two calls of a step."""

        spent = 0.0

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            scheduled = super().schedule(*args, **kwargs)
            self.spent += time.thread_time() - start
            return scheduled

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            outputs = super().update_from_output(*args, **kwargs)
            self.spent += time.thread_time() - start
            return outputs

    return TimedScheduler


def serve(connection: Connection, variant: str, model: Path) -> None:
    """In a process of its own: a load at a time; each message that comes is a turn."""
    os.environ.pop(TRACE_VARIABLE, None)
    os.environ.pop(QUEUE_VARIABLE, None)
    os.environ["PYTHONHASHSEED"] = "0"  # otherwise some releases of vLLM never hit a prefix here
    if value := VARIANTS.get(variant):
        os.environ[QUEUE_VARIABLE] = value
    from pyblockpool.plugin import entry

    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what does not matter here
    entry.register()
    clock = QueueClock()
    if variant == CLOCKED:
        clock.install()
    for load, seed, turns in iter(connection.recv, None):
        engine = Engine(load, model, seed)
        engine.fill()
        engine.start()
        gc.collect()
        gc.freeze()  # as vLLM does
        connection.send("ready")
        for _ in range(turns):
            connection.recv()
            queue, calls = clock.spent, clock.calls
            spent = engine.steps(TURN)
            connection.send(Turn(spent, (clock.spent - queue) / 1e9, clock.calls - calls))
        connection.send(engine.finish(variant))
        gc.unfreeze()


class Player:
    """A variant, from the outside."""

    def __init__(self, variant: str, model: Path) -> None:
        self.variant = variant
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, variant, model), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is seen at our end

    def say(self, message: Any) -> None:
        self._connection.send(message)

    def hear(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"{self.variant}: exit status {self._process.exitcode}; what it printed says why"
            ) from None

    def close(self) -> None:
        self.say(None)
        self._process.join()


def play(players: Sequence[Player], load: Load, seed: int, turns: int) -> dict[str, list[Turn]]:
    """One repetition of one load under all variants."""
    for player in players:  # one after the other: they may share a processor
        player.say((load, seed, turns))
        player.hear()
    taken: dict[str, list[Turn]] = {player.variant: [] for player in players}
    for number in range(turns):
        at = number % len(players)
        for player in [*players[at:], *players[:at]]:
            player.say("turn")
            taken[player.variant].append(player.hear())
    compare({player.variant: player.hear() for player in players}, load)
    return taken


def compare(answers: dict[str, Answer], load: Load) -> None:
    vllm = answers["vLLM"]
    for variant, answer in answers.items():
        for what in ("ended", "hit_tokens"):
            if getattr(answer, what) != getattr(vllm, what):
                raise RuntimeError(f"{load}: {variant} differs from vLLM in {what}")
        if VARIANTS.get(variant) in (None, "native") and answer.tables != vllm.tables:
            raise RuntimeError(f"{load}: {variant} has other block tables than vLLM")
        if answer.cached_share < 0.9:
            raise RuntimeError(f"{load}: the pool of {variant} was not full of cached blocks")
    if (vllm.hit_tokens > 0) != (load.prefixes > 0):
        raise RuntimeError(f"{load}: {vllm.hit_tokens} tokens were found in the prefix cache")


def quartiles(samples: Sequence[float]) -> list[float]:
    return statistics.quantiles(samples, n=4)


def summary(load: Load, taken: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians, with the quartiles about them; each turn is compared with that of vLLM's queue."""
    vllm, clocked = taken["vLLM"], taken[CLOCKED]
    shares = quartiles([100 * turn.queue / turn.spent for turn in clocked])
    ratios = {
        variant: quartiles([a.spent / b.spent for a, b in zip(turns, vllm, strict=True)])
        for variant, turns in taken.items()
        if variant != "vLLM"
    }
    return {
        **asdict(load),
        "running": RUNNING,
        "turns": len(vllm),
        "step_us": round(statistics.median(turn.spent for turn in vllm) / TURN * 1e6, 1),
        "queue_calls": round(statistics.fmean(turn.calls for turn in clocked) / TURN, 1),
        "queue_percent": [round(share, 2) for share in shares],
        "ratios": {name: [round(ratio, 4) for ratio in found] for name, found in ratios.items()},
    }


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    shown = Table(title="processor time of a step, change against vLLM's queue (quartiles)")
    shown.add_column("256 running, tokens of prompt + output")
    for column in ("blocks", "a step, ms", "queue", *list(VARIANTS)[1:]):
        shown.add_column(column, justify="right")
    for row in rows:
        cells = []
        for variant in list(VARIANTS)[1:]:
            low, middle, high = (100 * (ratio - 1) for ratio in row["ratios"][variant])
            cells.append(f"{middle:+.1f} %\n({low:+.1f} to {high:+.1f})")
        shown.add_row(
            f"{row['name']}, {row['prompt']:,} + {row['output']}",
            f"{row['num_blocks']:,}",
            f"{row['step_us'] / 1000:.2f}",
            f"{row['queue_percent'][1]:.1f} %\n{row['queue_calls']:.0f} calls",
            *cells,
        )
    console.print(shown)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes for each")
    parser.add_argument("--turns", type=int, default=16, help="of 25 steps, in each repeat")
    parser.add_argument("--short", action="store_true", help="one repeat of 4 turns")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: bench/results/")
    options = parser.parse_args(arguments)
    repeats, turns = (1, 4) if options.short else (options.repeats, options.turns)
    taken: dict[Load, dict[str, list[Turn]]] = {load: {} for load in LOADS}
    names = [*VARIANTS, CLOCKED]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar,
    ):
        model = write_tiny_llama(Path(folder))
        task = bar.add_task("", total=repeats * len(LOADS))
        for seed in range(repeats):
            players = [Player(name, model) for name in names]
            for load in LOADS:
                bar.update(task, description=f"{load.name}, {load.num_blocks:,} blocks")
                for name, found in play(players, load, seed, turns).items():
                    taken[load].setdefault(name, []).extend(found)
                bar.advance(task)
            for player in players:
                player.close()
    rows = [summary(load, found) for load, found in taken.items()]
    show(Console(width=140), rows)
    options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
