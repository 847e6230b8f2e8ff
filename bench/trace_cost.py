"""What a block trace costs: two schedulers of vLLM in lockstep, one of them recorded, in turn.

    python bench/trace_cost.py

Both get the same requests and take turns, step by step, so that drift of the machine hits both; no
model runs. After each window of steps they change places, as two schedulers of one process differ
by a per cent or so for no other reason than where their objects lie; a sample is the geometric mean
of two windows. Only the time in `schedule()` and `update_from_output()` counts, as processor time
of their thread: it has the hooks in it. The thread that writes works beside the model in a real
engine; its processor time is a column of its own. The scheduler that is not recorded calls vLLM's
own methods, not our wrappers.

Before a time counts, the traces have to tell the table of each request that has ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table
from scheduler_alone import make_request, make_scheduler, schedule
from tiny_llama import write_tiny_llama

from pyblockpool.plugin import entry, recorder, surface
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE
from pyblockpool.trace_writer import TraceWriter

RESULTS = Path(__file__).parent / "results" / "trace.json"
# Steps that are compared, in sums: single steps are too different.
WINDOW = 25


@dataclass(frozen=True)
class Load:
    """So many running requests, always; tokens of prompt and output vary by a half around these."""

    running: int
    prompt: int
    output: int
    num_blocks: int
    steps: int


# Means of public traces: recorded chats (Azure 2023), synthetic GRPO rollouts; the half of a median
# of Mooncake's chats, for the time it takes; and classification, far from any of them.
LOADS = [
    Load(running=64, prompt=1155, output=211, num_blocks=16_000, steps=1500),
    Load(running=256, prompt=1155, output=211, num_blocks=48_000, steps=600),
    Load(running=64, prompt=108, output=1470, num_blocks=16_000, steps=3000),
    Load(running=64, prompt=3455, output=175, num_blocks=48_000, steps=1500),
    Load(running=64, prompt=100, output=20, num_blocks=4_000, steps=1500),
]


@dataclass
class Measured:
    """Sums and samples over repeats; times are seconds of processor time.

    Attributes:
        ratios: of each pair of windows, recorded over not recorded.
        plain: time of the scheduler that is not recorded.
        writer: time of the threads that write.
        requests: that have ended and were recorded.
        steps: of the scheduler that is not recorded.
    """

    ratios: list[float] = field(default_factory=list)
    plain: float = 0.0
    writer: float = 0.0
    requests: int = 0
    steps: int = 0

    def as_json(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        # Not the median: what comes once in a while, as the garbage collector does, counts too.
        mean = statistics.geometric_mean(self.ratios)
        return {
            "step_us": round(self.plain / self.steps * 1e6, 1),
            "request_us": round(self.plain / self.requests * 1e6, 1),
            "requests_per_step": round(self.requests / self.steps, 3),
            "hooks_percent": round((mean - 1) * 100, 2),
            "hooks_percent_quartiles": [round((low - 1) * 100, 2), round((high - 1) * 100, 2)],
            "writer_percent": round(self.writer / self.plain * 100, 2),
            "writer_us_per_request": round(self.writer / self.requests * 1e6, 1),
        }


class Engine:
    """A scheduler with requests that never run out, which is recorded or not.

    Attributes:
        section: its recording.
        ended: requests that have.
        told: those of them that ended while they were recorded.
    """

    def __init__(self, load: Load, model: Path, seed: int) -> None:
        self.scheduler = make_scheduler(model, num_blocks=load.num_blocks)
        self._load = load
        self._dice = random.Random(seed)
        self.ended = 0
        self.told: list[str] = []

    def begin(self, trace: Path) -> None:
        """Once the hooks are in."""
        manager = self.scheduler.kv_cache_manager
        self.section = recorder.Section(manager, TraceWriter(str(trace), {}, print), True)
        setattr(manager, recorder._SECTION, self.section)
        owners = {"Scheduler": self.scheduler, "KVCacheManager": manager}
        self._hooked = [
            (owners[cls], name, getattr(type(owners[cls]), name))
            for _, cls, name, _ in surface.RECORDED
            if cls in owners and hasattr(owners[cls], name)
        ]

    def record(self, on: bool) -> None:
        """Call the hooks, or vLLM's own methods."""
        self._is_recorded = on
        # What the section would know of these requests if it had been recorded all the time.
        self.section.waiting.clear()
        self.section.prefilled.clear()
        if on:
            for request in self.scheduler.running:
                if request.num_output_tokens:
                    self.section.prefilled[request] = 0, 0.0
                else:
                    self.section.waiting[request] = time.monotonic(), 0, 0
        for owner, name, hook in self._hooked:
            setattr(owner, name, MethodType(hook if on else hook.__wrapped__, owner))

    def refill(self) -> None:
        while len(self.scheduler.requests) < self._load.running:
            prompt, output = (
                self._dice.randint(tokens // 2, tokens * 3 // 2)
                for tokens in (self._load.prompt, self._load.output)
            )
            number = self.ended + len(self.scheduler.requests)
            tokens = [self._dice.randrange(30_000) for _ in range(prompt)]
            self.scheduler.add_request(make_request(f"cmpl-{number}", tokens, output))

    def step(self) -> float:
        """Seconds of processor time."""
        before = list(self.scheduler.requests)
        start = time.thread_time()
        plan = schedule(self.scheduler)
        self.scheduler.update_from_output(*plan)
        took = time.thread_time() - start
        ended = [each for each in before if each not in self.scheduler.requests]
        self.ended += len(ended)
        if self._is_recorded:
            self.told += ended
        return took

    def writing(self) -> float:
        """Seconds of processor time of the thread that writes."""
        clock = time.pthread_getcpuclockid(self.section.writer._thread.ident or 0)
        return time.clock_gettime(clock)


def measure(load: Load, model: Path, seed: int, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder, name) for name in "ab"]
        engines = [Engine(load, model, seed) for _ in traces]
        os.environ[TRACE_VARIABLE] = str(Path(folder, "of other engines"))
        entry.register()
        for engine, trace in zip(engines, traces, strict=True):
            engine.begin(trace)
            engine.record(True)
        gc.collect()
        gc.freeze()  # as vLLM does
        for number in range(2 * load.output):
            take_turns(engines, number)
        ended = [len(engine.told) for engine in engines]
        writing = [engine.writing() for engine in engines]
        for _ in range(load.steps // (2 * WINDOW)):
            ratios = []
            for recorded in (0, 1):
                for engine in engines:
                    engine.record(engine is engines[recorded])
                times = [0.0, 0.0]
                for number in range(WINDOW):
                    times = [
                        sum(pair) for pair in zip(times, take_turns(engines, number), strict=True)
                    ]
                ratios.append(times[recorded] / times[1 - recorded])
                measured.plain += times[1 - recorded]
                measured.steps += WINDOW
            measured.ratios.append(statistics.geometric_mean(ratios))
        time.sleep(2.0)  # until all is written
        for index, engine in enumerate(engines):
            measured.writer += engine.writing() - writing[index]
            measured.requests += len(engine.told) - ended[index]
            check(engine, traces[index])
            engine.section.close()
        entry.restore()
        gc.unfreeze()
        del os.environ[TRACE_VARIABLE]


def take_turns(engines: Sequence[Engine], number: int) -> list[float]:
    """A step of each; seconds."""
    times = [0.0, 0.0]
    for index in (0, 1) if number % 2 else (1, 0):
        engines[index].refill()
        times[index] = engines[index].step()
    return times


def check(engine: Engine, trace: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    told = [line for line in lines if line.get("outcome") == "length"]
    assert [line["request"] for line in told] == engine.told
    for line in told:
        assert line["blocks"] == sum(count for _, count in line["runs"]) == -(-line["tokens"] // 16)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: bench/results/")
    options = parser.parse_args(arguments)
    os.environ.pop(QUEUE_VARIABLE, None)
    os.environ.pop(TRACE_VARIABLE, None)
    table = Table(title="block trace, processor time in percent of that of the scheduler")
    for column in ("running", "prompt", "output", "us a step", "hooks", "quartiles", "writer"):
        table.add_column(column, justify="right")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder))
        for load in LOADS:
            measured = Measured()
            for seed in range(options.repeats):
                measure(load, model, seed, measured)
            found = measured.as_json()
            rows.append(
                {"running": load.running, "prompt": load.prompt, "output": load.output, **found}
            )
            low, high = found["hooks_percent_quartiles"]
            table.add_row(
                *map(str, (load.running, load.prompt, load.output, found["step_us"])),
                f"{found['hooks_percent']:.2f} %",
                f"{low:.2f} to {high:.2f} %",
                f"{found['writer_percent']:.2f} %, {found['writer_us_per_request']} us a request",
            )
    Console(width=120).print(table)
    options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
