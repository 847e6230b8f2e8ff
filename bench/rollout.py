"""The main job: GRPO-style rollouts on a real vLLM engine, once with vLLM's queue, once with ours.

Each round sends two long prompts with a few samples each to a multi-process CPU engine that serves
a tiny random Llama, then resets the prefix cache. Both runs must give the same tokens, the same
block tables and the same order of free blocks, as told by the engine core (recording_scheduler.py).
Exit status: 0 all is identical, 1 something differs, 2 a run failed.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_llama import BLOCK_SIZE, ENGINE_OPTIONS, engine_environment, write_tiny_llama

Result = dict[str, Any]

QUEUES = {"vllm": "vllm.", "native": "pyblockpool."}  # variant -> where its queue class lives
PROMPTS, VOCABULARY, MIN_OUTPUT, MAX_OUTPUT = 2, 512, 8, 48
# A sample ends when it hits one of these: one token in 16 gives lengths between the two limits, so
# that requests finish out of order and shuffle the queue as they do in life.
STOP_TOKENS = list(range(2, 2 + VOCABULARY // 16))
REQUEST_ID = re.compile(r"(?:(?P<sample>\d+)_)?(?P<request>\d+)(?:-.*)?")


def play(options: argparse.Namespace, done: Callable[[str], None]) -> Result:
    """Runs all rounds under one queue and returns what came out of each."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        record = Path(folder, "record.jsonl")
        os.environ.pop("VLLM_BLOCK_QUEUE", None)
        os.environ |= engine_environment(record, "native" if options.variant == "native" else None)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        import vllm  # only now: it reads some of these variables at import

        model = write_tiny_llama(Path(folder, "model"), layers=4, hidden=256, vocabulary=VOCABULARY)
        tails = options.samples * (MAX_OUTPUT // BLOCK_SIZE + 2)
        blocks = PROMPTS * (options.prompt_tokens // BLOCK_SIZE + tails)
        engine = vllm.LLM(
            str(model),
            max_model_len=options.prompt_tokens + MAX_OUTPUT,
            # All prompts fit into one step: vLLM's CPU worker cannot split the prefill of a request
            # with a seed of its own ("CPU Generator does not use offset").
            max_num_batched_tokens=PROMPTS * (options.prompt_tokens + options.samples * BLOCK_SIZE),
            # A quarter more than a round needs: from the second round on, blocks are used again.
            num_gpu_blocks_override=blocks * 5 // 4,
            **ENGINE_OPTIONS,
        )
        done("engine started")
        rounds: list[Result] = []
        for number in range(options.rounds):
            played = play_round(engine, vllm.SamplingParams, number, options)
            lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
            rounds.append(played | read_round(lines, number, options.samples))
            done(f"round {number + 1} of {options.rounds}")
    result: Result = {"variant": options.variant, "pid": os.getpid(), "engine": lines[0]}
    versions = {"vLLM": vllm.__version__, "Python": platform.python_version()}
    return result | {"versions": versions, "rounds": rounds}


def play_round(engine: Any, sampling: Any, number: int, options: argparse.Namespace) -> Result:
    prompts, parameters = [], []
    for index in range(PROMPTS):
        seed = 1000 * (PROMPTS * number + index)  # vLLM adds the number of the sample
        dice = random.Random(seed)
        tokens = [dice.randrange(VOCABULARY) for _ in range(options.prompt_tokens)]
        prompts.append({"prompt_token_ids": tokens})
        end = {"min_tokens": MIN_OUTPUT, "max_tokens": MAX_OUTPUT, "stop_token_ids": STOP_TOKENS}
        chance = {"n": options.samples, "temperature": 1.0, "seed": seed}
        parameters.append(sampling(**chance, **end, ignore_eos=True, detokenize=False))
    # The engine core starts to schedule when the first request arrives. Only if it waits until it
    # has them all do two runs schedule the same steps, whatever the timing of the processes.
    engine.sleep(level=0)
    engine.enqueue(prompts, parameters, use_tqdm=False)
    engine.wake_up(tags=["scheduling"])
    outputs = engine.wait_for_completion(use_tqdm=False)
    engine.reset_prefix_cache()
    times = [output.metrics for output in outputs]
    return {
        "tokens": [[list(sample.token_ids) for sample in output.outputs] for output in outputs],
        "prefill_ms": [1000 * (time.first_token_ts - time.scheduled_ts) for time in times],
    }


def read_round(lines: list[Result], number: int, samples: int) -> Result:
    """One round of the engine core's record: ``tables[prompt][sample]``, and the reset after it."""
    resets = [at for at, line in enumerate(lines) if line["kind"] == "reset"]
    start = resets[number - 1] + 1 if number else 1
    tables = {}
    for line in lines[start : resets[number]]:
        match = REQUEST_ID.fullmatch(line["request_id"])
        if match is None:
            raise ValueError(f"a request id of an unknown form: {line['request_id']!r}")
        # vLLM numbers the requests of an engine; the samples of one prompt share a number.
        prompt = int(match["request"]) - PROMPTS * number
        tables[prompt, int(match["sample"] or 0)] = line["table"]
    by_prompt = [[tables[prompt, i] for i in range(samples)] for prompt in range(PROMPTS)]
    return {"tables": by_prompt, "reset": lines[resets[number]]}


def run(
    variant: str, options: argparse.Namespace, log: Path, done: Callable[[str], None]
) -> Result:
    """Plays one variant in a process of its own."""
    out = log.with_suffix(".json")
    command = [sys.executable, __file__, "--variant", variant, "--out", str(out)]
    for name in ("rounds", "prompt_tokens", "samples"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with (
        log.open("wb") as log_file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_file, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            done(json.loads(line)["done"])
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    result: Result = json.loads(out.read_text(encoding="utf-8"))
    return result


def compare(stock: Result, native: Result) -> tuple[list[dict[str, bool]], list[str]]:
    """What is identical in each round, and all that is wrong, in sentences."""
    verdicts, wrong = [], []
    for result in (stock, native):
        name, engine = result["variant"], result["engine"]
        if not engine["queue"].startswith(QUEUES[name]):
            wrong.append(f"{name}: the engine core runs {engine['queue']}.")
        if engine["pid"] == result["pid"]:
            wrong.append(f"{name}: the engine core is not a process of its own.")
        for number, played in enumerate(result["rounds"], 1):
            if not played["reset"]["success"]:
                wrong.append(f"{name}, round {number}: the prefix cache could not be reset.")
            if played["reset"]["check"]:
                wrong.append(f"{name}, round {number}: broken queue: {played['reset']['check']}")
    if len(stock["rounds"]) != len(native["rounds"]):
        wrong.append("The runs have different numbers of rounds.")
    for number, (a, b) in enumerate(zip(stock["rounds"], native["rounds"], strict=False), 1):
        verdict = {
            "tokens": a["tokens"] == b["tokens"],
            "block tables": a["tables"] == b["tables"],
            "queue order": a["reset"]["order_digest"] == b["reset"]["order_digest"],
        }
        verdicts.append(verdict)
        wrong += [
            f"Round {number}: different {what}." for what, same in verdict.items() if not same
        ]
    return verdicts, wrong


def blocks_a_run(tables: list[list[list[list[int]]]]) -> float:
    """Mean over all block tables of a round; a run goes on while the next id is one higher."""
    groups = [group for prompt in tables for sample in prompt for group in sample if group]
    breaks = sum(b != a + 1 for ids in groups for a, b in pairwise(ids))
    return sum(map(len, groups)) / (len(groups) + breaks)


def report(console: Console, stock: Result, native: Result) -> list[str]:
    """Prints the table and what to read from it; returns what is wrong."""
    verdicts, wrong = compare(stock, native)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("\nround", "prefill ms\nvllm", "\nnative", "blocks/run\nvllm", "\nnative"):
        table.add_column(heading, justify="right")
    for heading in ("tokens\nidentical", "block tables\nidentical", "queue order\nidentical"):
        table.add_column(heading)
    for number, verdict in enumerate(verdicts):
        pair = stock["rounds"][number], native["rounds"][number]
        table.add_row(
            str(number + 1),
            *(f"{statistics.median(played['prefill_ms']):.0f}" for played in pair),
            *(f"{blocks_a_run(played['tables']):.1f}" for played in pair),
            *("yes" if same else "[bold red]NO" for same in verdict.values()),
        )
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in native["versions"].items())
    console.print(f"{datetime.now():%Y-%m-%d %H:%M}, {os.cpu_count()} CPUs, {versions}")
    for result in (stock, native):
        engine = result["engine"]
        console.print(f"{result['variant']:6} engine core, pid {engine['pid']}: {engine['queue']}")
    for sentence in wrong:
        console.print(sentence, style="bold red")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all that was measured")
    parser.add_argument("--variant", choices=QUEUES, help="play only this one, in this process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the result of --variant")
    options = parser.parse_args(arguments)
    if (options.variant is None) != (options.out is None):
        parser.error("--variant and --out go together")
    if options.variant:
        # vLLM and its processes print to stdout: send that to stderr and keep stdout for progress.
        progress = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        result = play(options, lambda what: print(json.dumps({"done": what}), file=progress))
        options.out.write_text(json.dumps(result), encoding="utf-8")
        return 0

    errors = Console(stderr=True, highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="rollout-"))
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    results = []
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        for variant in QUEUES:
            task = bar.add_task(f"{variant}: engine starts", total=1 + options.rounds)

            def done(what: str, variant: str = variant, task: TaskID = task) -> None:
                bar.update(task, advance=1, description=f"{variant}: {what}")
                if bar.disable:
                    errors.print(f"{variant}: {what}")

            log = folder / f"{variant}.log"
            try:
                results.append(run(variant, options, log, done))
            except subprocess.CalledProcessError as failure:
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
                print(*tail, sep="\n", file=sys.stderr)
                errors.print(f"{variant}: exit status {failure.returncode}; the whole log: {log}")
                return 2
    wrong = report(Console(highlight=False), *results)
    if options.json:
        named = dict(zip(QUEUES, results, strict=True))
        options.json.write_text(json.dumps(named | {"wrong": wrong}, indent=1), encoding="utf-8")
    shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
