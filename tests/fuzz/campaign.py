"""Random operations on queues and pools, for as long as you like: native against its rivals.

    make fuzz SECONDS=3600
    make fuzz SEED=17            # one batch again

The rivals are vLLM's class (policy `lru`: the same ids, always) and the specification,
`pyblockpool.reference` (all policies), both alone (queue_scene.py) and in vLLM's real BlockPool
(pool_scene.py). All that is handed out and refused is compared at once, the counts and `check()`
mostly after each operation (in large pools less often, so as not to drown the operations), order,
links, figures and the state of all blocks at random distances and at the end of each sequence.

A batch is a number of sequences of one policy in one kind of scene, all made from its seed. What
fails, crashes or hangs is shrunk, written as JSON to `cases/`, where a unit test replays it, and
ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import pool_scene
import queue_scene
from cases import (
    DEATHS,
    FOLDER,
    SECONDS,
    Case,
    in_a_child,
    limit_memory,
    limit_time,
    outcome,
    outcome_here,
    shrink,
)
from implementations import HAS_VLLM
from rich.console import Console
from rich.table import Table
from scenes import Divergence, Operation, SceneKind, Setting, below, pick

KINDS: dict[str, SceneKind] = {"queue": queue_scene, "pool": pool_scene}
# Operations in a batch: seconds, no more, so that a run of a minute sees all of them.
BATCHES = {
    ("queue", "lru"): 200_000,
    ("queue", "sorted"): 60_000,
    ("queue", "extent"): 40_000,
    ("pool", "lru"): 60_000,
    ("pool", "sorted"): 30_000,
    ("pool", "extent"): 20_000,
}
TURNS = [*BATCHES, ("queue", "extent"), ("pool", "extent")]
SHRINK_SECONDS = 60
# A batch that takes more processor time hangs. That may be played once more, with each operation
# written down.
BATCH_SECONDS = 120
CRASH_SECONDS = 2 * BATCH_SECONDS

Log: TypeAlias = list[Operation]


@dataclass(frozen=True)
class Failure:
    """A sequence that failed."""

    seed: int
    case: Case


@dataclass
class Tally:
    """What was done in one kind of scene under one policy."""

    batches: int = 0
    operations: int = 0
    seconds: float = 0.0


class Sequence:
    """One scene and what is played in it.

    Args:
        chance: where everything comes from.
        kind: of scene, a key of `KINDS`.
        policy: of its queues.
        log: gets each operation before it is played.
    """

    def __init__(self, chance: Random, kind: str, policy: str, log: Log) -> None:
        self.setting: Setting = KINDS[kind].random_setting(chance, policy)
        self.log = log
        self._scene = self.setting.scene()
        # A glance costs as much as many operations where there are many blocks, and a look at the
        # specification the square of it.
        blocks = self.setting.num_ids
        self._glance_every = max(1, blocks // 32)
        self._look_every = pick(chance, (1, 8, 64, 64)) * min(max(1, blocks**2 // 1000), 500)
        self._length = pick(chance, (50, 500, 500, 3000))
        self._player = KINDS[kind].player(chance, self._scene, self._do)

    def play(self) -> int:
        """Returns the number of operations. Raises `Divergence`."""
        while len(self.log) < self._length:
            before = len(self.log)
            self._player.play()
            if len(self.log) == before:
                self._length -= 1  # nothing can be done here, maybe never: the pool has no blocks
        self._scene.look()
        return len(self.log)

    def _do(self, operation: Operation) -> Any:
        self.log.append(operation)
        result = self._scene.do(operation)
        done = len(self.log)
        if done % self._look_every == 0:
            self._scene.look()
        elif done % self._glance_every == 0:
            self._scene.glance()
        return result


def batch_of(seed: int) -> tuple[str, str]:
    """Kind of scene and policy of a batch."""
    return TURNS[below(Random(f"batch {seed}"), len(TURNS))]


def sequences(seed: int, log: Callable[[], Log] = list) -> Iterator[Sequence]:
    """Those of a batch, without end; each with a log of its own."""
    kind, policy = batch_of(seed)
    for number in count():
        yield Sequence(Random(f"batch {seed}, sequence {number}"), kind, policy, log())


def play_batch(seed: int, operations: int | None = None) -> int | Failure:
    """A batch, or as much of it as makes so many operations: their number, or what failed."""
    played = 0
    for sequence in sequences(seed):
        try:
            played += sequence.play()
        except Divergence as error:
            return Failure(seed, Case(sequence.setting, sequence.log, str(error)))
        if played >= (BATCHES[batch_of(seed)] if operations is None else operations):
            break
    return played


class FileLog(list[Operation]):
    """Operations that outlive the process: the last one may crash it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w")

    def append(self, operation: Operation) -> None:
        super().append(operation)
        print(json.dumps(operation), file=self._file, flush=True)


def play_crashed(seed: int) -> Failure | None:
    """Play a batch that ended its worker again, in a child, and note what led to it."""
    kind, policy = batch_of(seed)
    with tempfile.TemporaryDirectory() as folder:
        log, begun = Path(folder) / "log", Path(folder) / "begun"

        def play() -> None:
            played = 0
            for number, sequence in enumerate(sequences(seed, lambda: FileLog(log))):
                begun.write_text(str(number))
                played += sequence.play()
                if played >= BATCHES[kind, policy]:
                    return

        found = in_a_child(play, seconds=CRASH_SECONDS)
        if not found:
            return None
        chance = Random(f"batch {seed}, sequence {begun.read_text()}")
        setting = KINDS[kind].random_setting(chance, policy)
        operations = [json.loads(line) for line in log.read_text().splitlines()]
        return Failure(seed, Case(setting, operations, found))


def work(seeds: Iterator[int], enough: Any, pipe: Connection) -> None:
    """In a process of its own: plays one batch after the other and tells how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory()
    for each in seeds:
        if enough.is_set():
            return
        pipe.send(("begin", each, 0.0))
        limit_time(BATCH_SECONDS)
        started = time.perf_counter()
        result = play_batch(each)
        pipe.send(("end", result, time.perf_counter() - started))


@dataclass
class Worker:
    """A process that plays batches, as its parent sees it."""

    process: Any
    seed: int


@dataclass
class Campaign:
    """A run of the fuzzer: its workers, what they have done, and what they have found.

    Attributes:
        first_seed: each batch has the seed of the one before plus 1.
        workers: how many processes.
        is_over: told the number of operations done, says whether that is enough.
        console: gets a line a batch.
        tallies: by kind of scene and policy.
        operations: how many were done in all.
    """

    first_seed: int
    workers: int
    is_over: Callable[[int], bool]
    console: Console
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    operations: int = 0

    def run(self, batches: int | None = None) -> Failure | None:
        """Until it is over, or each worker has played so many batches, or one has failed."""
        context = multiprocessing.get_context("fork")
        enough = context.Event()
        workers: dict[Any, Worker] = {}
        for seed in range(self.first_seed, self.first_seed + self.workers):
            reader, writer = context.Pipe(duplex=False)
            seeds = islice(count(seed, self.workers), batches)
            process = context.Process(target=work, args=(seeds, enough, writer), daemon=True)
            process.start()
            writer.close()
            workers[reader] = Worker(process, seed)
        try:
            while workers:
                if self.is_over(self.operations):
                    enough.set()  # the batches that are played are played to their end
                for ready in wait(list(workers), timeout=1):
                    failure = self._hear(ready, workers)
                    if failure is not None:
                        return failure
            return None
        finally:
            for worker in workers.values():
                worker.process.terminate()
                worker.process.join()

    def _hear(self, reader: Any, workers: dict[Any, Worker]) -> Failure | None:
        worker = workers[reader]
        try:
            what, told, seconds = reader.recv()
        except EOFError:
            del workers[reader]
            return self._ask_why(worker)
        if what == "begin":
            worker.seed = told
        elif isinstance(told, Failure):
            return told
        else:
            self._note(worker.seed, told, seconds)
        return None

    def _ask_why(self, worker: Worker) -> Failure | None:
        """A worker has ended."""
        worker.process.join()
        code = worker.process.exitcode
        if code == 0:
            return None
        self.console.print(f"seed {worker.seed}: the worker ended with {code}", highlight=False)
        failure = play_crashed(worker.seed)
        if failure is None:
            raise RuntimeError(
                f"seed {worker.seed} ended a worker with {code}, but passes when played again"
            )
        return failure

    def _note(self, seed: int, operations: int, seconds: float) -> None:
        kind, policy = batch_of(seed)
        tally = self.tallies.setdefault((kind, policy), Tally())
        tally.batches += 1
        tally.operations += operations
        tally.seconds += seconds
        self.operations += operations
        self.console.print(
            f"seed {seed}  {kind:5}  {policy:6}  {operations:,} operations  "
            f"{operations / seconds:,.0f}/s",
            highlight=False,
        )


def show(console: Console, campaign: Campaign, seconds: float) -> None:
    table = Table("policy", "scene")
    for name in ("batches", "operations", "operations/s of a worker"):
        table.add_column(name, justify="right")
    for (kind, policy), tally in sorted(campaign.tallies.items(), key=lambda item: item[0][::-1]):
        table.add_row(
            policy,
            kind,
            f"{tally.batches:,}",
            f"{tally.operations:,}",
            f"{tally.operations / tally.seconds:,.0f}",
        )
    console.print(table)
    console.print(
        f"{campaign.operations:,} operations in {seconds:,.0f} s, "
        f"{campaign.operations / seconds:,.0f}/s"
    )


def keep(failure: Failure, folder: Path, console: Console, seconds: float) -> Path:
    """Shrink what failed and write it down."""
    until = time.monotonic() + seconds
    case = failure.case
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.setting.kind}_{case.setting.policy}_{failure.seed}.json"
    case.write(path)
    found = outcome(case)
    # A process for each try only where it may die. Otherwise one for all of them: should it hang or
    # crash, what it had by then is written.
    one_by_one = found.startswith(DEATHS)

    def fails(candidate: Case) -> str:
        found = outcome(candidate) if one_by_one else outcome_here(candidate)
        if found:
            replace(candidate, found=found).write(path)
        return found

    def shrink_it() -> None:
        shrink(case, fails, lambda: time.monotonic() > until)

    if not found:
        console.print("it passes when everything is compared after each operation: kept as it is")
    elif one_by_one:
        shrink_it()
    else:
        in_a_child(shrink_it, seconds=int(seconds) + SECONDS)
    case = Case.read(path)
    console.print(
        f"seed {failure.seed} failed: {failure.case.found}\n"
        f"{len(failure.case.operations)} operations, shrunk to {len(case.operations)}: "
        f"{case.found}\nkept as {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--operations", type=int, help="end after so many instead")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="play one batch again")
    parser.add_argument("--first-seed", type=int, help="of the first batch (default: at random)")
    parser.add_argument(
        "--cases", type=Path, default=FOLDER, help="where failures go (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    if not HAS_VLLM:
        raise SystemExit("the fuzzer compares with vLLM, which is not installed: `make env`")
    first = options.first_seed
    if first is None:
        first = int.from_bytes(os.urandom(4), "big")
    started = time.monotonic()

    def is_over(operations: int) -> bool:
        if options.operations is not None:
            return bool(operations >= options.operations)
        return bool(time.monotonic() - started >= options.seconds)

    if options.seed is None:
        campaign = Campaign(first, options.workers, is_over, console)
        failure = campaign.run()
    else:
        campaign = Campaign(options.seed, 1, lambda _: False, console)
        failure = campaign.run(batches=1)
    show(console, campaign, time.monotonic() - started)
    if failure is None:
        return 0
    keep(failure, options.cases, console, SHRINK_SECONDS)
    console.print(f"the whole batch again: make fuzz SEED={failure.seed}", highlight=False)
    return 1


if __name__ == "__main__":
    logging.getLogger("vllm").setLevel(logging.ERROR)  # of this process alone: tests call main()
    sys.exit(main())
