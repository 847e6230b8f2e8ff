"""What a block trace costs: two schedulers of vLLM in lockstep, one of them recorded.

    python bench/trace_cost.py

Both get the same requests and take turns, step by step, so that drift of the machine hits both; no
model runs. Only the time in `schedule()` and `update_from_output()` counts, as processor time of
their thread: it has the hooks in it. The thread that writes works beside the model in a real
engine; its processor time is a column of its own. The scheduler that is not recorded calls vLLM's
own methods, not our wrappers.

Before a time counts, the trace has to tell the table of each request that has ended.
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

RESULTS = Path(__file__).parent / "results" / "trace.json"
# Steps that are compared, in sums: single steps are too different.
WINDOW = 50


@dataclass(frozen=True)
class Load:
    """So many running requests, always; tokens of prompt and output vary by a half around these."""

    running: int
    prompt: int
    output: int
    num_blocks: int
    steps: int


LOADS = [
    Load(running=64, prompt=1000, output=150, num_blocks=16_000, steps=1500),
    Load(running=256, prompt=1000, output=150, num_blocks=48_000, steps=500),
    Load(running=64, prompt=4000, output=200, num_blocks=48_000, steps=1500),
    Load(running=64, prompt=100, output=20, num_blocks=4_000, steps=1000),
]


@dataclass
class Measured:
    """Sums and samples over repeats; times are seconds of processor time.

    Attributes:
        ratios: of each window, recorded over not recorded.
        plain: time of the scheduler that is not recorded.
        writer: time of the thread that writes.
        requests: that have ended.
        steps: in all.
    """

    ratios: list[float] = field(default_factory=list)
    plain: float = 0.0
    writer: float = 0.0
    requests: int = 0
    steps: int = 0

    def as_json(self) -> dict[str, Any]:
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return {
            "step_us": round(self.plain / self.steps * 1e6, 1),
            "request_us": round(self.plain / self.requests * 1e6, 1),
            "requests_per_step": round(self.requests / self.steps, 3),
            "hooks_percent": round((middle - 1) * 100, 2),
            "hooks_percent_quartiles": [round((low - 1) * 100, 2), round((high - 1) * 100, 2)],
            "writer_percent": round(self.writer / self.plain * 100, 2),
            "writer_us_per_request": round(self.writer / self.requests * 1e6, 1),
        }


class Engine:
    """A scheduler with requests that never run out."""

    def __init__(self, load: Load, model: Path, seed: int) -> None:
        self.scheduler = make_scheduler(model, num_blocks=load.num_blocks)
        self._load = load
        self._dice = random.Random(seed)
        self.started = 0

    @property
    def ended(self) -> int:
        return self.started - len(self.scheduler.requests)

    def refill(self) -> None:
        while len(self.scheduler.requests) < self._load.running:
            prompt, output = (
                self._dice.randint(tokens // 2, tokens * 3 // 2)
                for tokens in (self._load.prompt, self._load.output)
            )
            self.started += 1
            tokens = [self._dice.randrange(30_000) for _ in range(prompt)]
            self.scheduler.add_request(make_request(f"cmpl-{self.started}", tokens, output))

    def step(self) -> float:
        start = time.thread_time()
        plan = schedule(self.scheduler)
        self.scheduler.update_from_output(*plan)
        return time.thread_time() - start


def without_hooks(scheduler: Any) -> None:
    """Give a scheduler, and its KVCacheManager, the methods that vLLM has."""
    manager = scheduler.kv_cache_manager
    owners = {"Scheduler": scheduler, "KVCacheManager": manager}
    for _, cls, name, _ in surface.RECORDED:
        if cls in owners and hasattr(owners[cls], name):
            method = getattr(type(owners[cls]), name).__wrapped__
            setattr(owners[cls], name, MethodType(method, owners[cls]))


def measure(load: Load, model: Path, seed: int, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        plain = Engine(load, model, seed)
        os.environ[TRACE_VARIABLE] = str(trace)
        entry.register()
        traced = Engine(load, model, seed)
        without_hooks(plain.scheduler)
        section = recorder.section_of(traced.scheduler.kv_cache_manager)
        assert section is not None
        clock = time.pthread_getcpuclockid(section.writer._thread.ident or 0)
        gc.collect()
        gc.freeze()  # as vLLM does
        times: dict[Engine, list[float]] = {plain: [], traced: []}
        warm_up = 2 * load.output
        for number in range(warm_up + load.steps):
            if number == warm_up:
                ended, writing = traced.ended, time.clock_gettime(clock)
                for each in times.values():
                    each.clear()
            for engine in (plain, traced) if number % 2 else (traced, plain):
                engine.refill()
                times[engine].append(engine.step())
        time.sleep(2.0)  # until all is written
        measured.writer += time.clock_gettime(clock) - writing
        check(plain, traced, trace)
        measured.requests += traced.ended - ended
        measured.plain += sum(times[plain])
        measured.steps += load.steps
        measured.ratios += [
            sum(times[traced][at : at + WINDOW]) / sum(times[plain][at : at + WINDOW])
            for at in range(0, load.steps, WINDOW)
        ]
        section.close()
        entry.restore()
        gc.unfreeze()
        del os.environ[TRACE_VARIABLE]


def check(plain: Engine, traced: Engine, trace: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    told = [line for line in lines if line.get("outcome") == "length"]
    assert plain.ended == traced.ended == len({line["request"] for line in told}) == len(told)
    for line in told:
        assert line["blocks"] == sum(count for _, count in line["runs"]) == -(-line["tokens"] // 16)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
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
    RESULTS.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
