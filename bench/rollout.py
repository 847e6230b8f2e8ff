"""The main job: GRPO-style rollouts on a real vLLM engine, once with vLLM's queue, once with ours.

A round is two long prompts, four samples each, on a multi-process CPU engine that serves a tiny
random Llama, and a reset of the prefix cache. Both runs must give the same tokens, block tables and
order of free blocks, as told by the engine core (recording_scheduler.py).
Exit status: 0 all is identical, 1 something differs, 2 a run failed.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpuinfo import get_cpu_info  # type: ignore[import-untyped, unused-ignore]
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_llama import BLOCK_SIZE, engine_environment, tiny_engine, write_tiny_llama

Result = dict[str, Any]

IDENTICAL = """\
Read from it: the native queue gave out and took back every block just as vLLM's
did, so the runs of consecutive block ids get shorter alike. This job proves
equality, not speed: the two engines run one after the other, and their prefill
times differ by what else the machine did meanwhile."""

QUEUES = {"vllm": "vllm.", "native": "pyblockpool."}  # variant -> where its queue class lives
PROMPTS, VOCABULARY, MIN_OUTPUT, MAX_OUTPUT = 2, 512, 8, 48
# A sample ends when it hits one of these: one token in 16 gives lengths between the two limits, so
# that requests finish out of order and shuffle the queue as they do in life.
STOP_TOKENS = list(range(2, 2 + VOCABULARY // 16))


def play(options: argparse.Namespace, done: Callable[[str], None]) -> Result:
    """Runs all rounds under one queue and returns what came out of each."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        record = Path(folder, "record.jsonl")
        os.environ.pop("VLLM_BLOCK_QUEUE", None)
        os.environ |= engine_environment(record, "native" if options.variant == "native" else None)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        import vllm  # only now: it reads some of these variables at import

        model = write_tiny_llama(Path(folder, "model"), layers=4, hidden=512, vocabulary=VOCABULARY)
        sample = MAX_OUTPUT + 2 * BLOCK_SIZE  # with a block begun at either end
        tokens = PROMPTS * (options.prompt_tokens + options.samples * sample)
        with tiny_engine(
            model,
            max_model_len=options.prompt_tokens + MAX_OUTPUT,
            # All prompts fit into one step: vLLM's CPU worker cannot split the prefill of a request
            # with a seed of its own ("CPU Generator does not use offset").
            max_num_batched_tokens=tokens,
            # A quarter more than a round needs: from the second round on, blocks are used again.
            num_gpu_blocks_override=tokens // BLOCK_SIZE * 5 // 4,
        ) as engine:
            done("engine started")
            rounds: list[Result] = []
            for number in range(options.rounds):
                played = play_round(engine, vllm.SamplingParams, number, options)
                lines = [json.loads(line) for line in record.read_text().splitlines()]
                rounds.append(played | read_round(lines, number, options.samples))
                done(f"round {number + 1} of {options.rounds}")
    where = f"{datetime.now():%Y-%m-%d %H:%M}, {get_cpu_info()['brand_raw']}, {os.cpu_count()} CPUs"
    where += f", vLLM {vllm.__version__}, pyblockpool {metadata.version('pyblockpool')}"
    result = {"variant": options.variant, "where": where, "pid": os.getpid()}
    return result | {"engine": lines[0], "rounds": rounds}


def play_round(engine: Any, sampling: Any, number: int, options: argparse.Namespace) -> Result:
    prompts, parameters = [], []
    for index in range(PROMPTS):
        seed = 1000 * (PROMPTS * number + index)  # vLLM adds the number of the sample
        dice = random.Random(seed)
        prompt = dice.choices(range(VOCABULARY), k=options.prompt_tokens)
        prompts.append({"prompt_token_ids": prompt})
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
    times = [(output.metrics.scheduled_ts, output.metrics.first_token_ts) for output in outputs]
    tokens = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
    return {"tokens": tokens, "prefill_ms": [1000 * (end - start) for start, end in times]}


def read_round(lines: list[Result], number: int, samples: int) -> Result:
    """One round of the engine core's record: ``tables[prompt][sample]``, and the reset after it."""
    resets = [at for at, line in enumerate(lines) if line["kind"] == "reset"]
    start = resets[number - 1] + 1 if number else 1
    tables = {}
    for line in lines[start : resets[number]]:
        # "SAMPLE_REQUEST-random", or "REQUEST-random" for a single sample. Requests of an engine
        # are numbered from 0, and the samples of one prompt share a number.
        sample, _, request = line["request_id"].partition("-")[0].rpartition("_")
        tables[int(request) - PROMPTS * number, int(sample or 0)] = line["table"]
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
        for line in child.stdout or ():
            done(json.loads(line)["done"])
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return dict(json.loads(out.read_text(encoding="utf-8")))


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
    table = Table("\n\nround", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("prefill\nms\n", "blocks\na run\n"):
        for variant in QUEUES:
            table.add_column(heading + variant, justify="right")
    for heading in ("tokens", "block tables", "queue order"):
        table.add_column(f"\n{heading}\nidentical")
    for number, verdict in enumerate(verdicts):
        pair = stock["rounds"][number], native["rounds"][number]
        table.add_row(
            str(number + 1),
            *(f"{statistics.median(played['prefill_ms']):.0f}" for played in pair),
            *(f"{blocks_a_run(played['tables']):.1f}" for played in pair),
            *("yes" if same else "[bold red]NO" for same in verdict.values()),
        )
    console.print(table, "")
    console.print(native["where"])
    for result in (stock, native):
        engine = result["engine"]
        console.print(f"{result['variant']:6} engine core, pid {engine['pid']}: {engine['queue']}")
    console.print("\n".join(wrong) or IDENTICAL, style="bold red" if wrong else None)
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
    if min(options.rounds, options.prompt_tokens, options.samples) < 1:
        parser.error("--rounds, --prompt-tokens and --samples take numbers from 1")
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
    results = {}
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        for variant in QUEUES:
            task = bar.add_task(f"{variant}: engine starts", total=1 + options.rounds)

            def done(what: str, variant: str = variant, task: TaskID = task) -> None:
                bar.update(task, advance=1, description=f"{variant}: {what}")
                if bar.disable:
                    errors.print(f"{variant}: {what}")

            log = folder / f"{variant}.log"
            try:
                results[variant] = run(variant, options, log, done)
            except subprocess.CalledProcessError as failure:
                print(*log.read_text().splitlines()[-30:], sep="\n", file=sys.stderr)
                errors.print(f"{variant}: exit status {failure.returncode}; the whole log: {log}")
                return 2
    wrong = report(Console(highlight=False), results["vllm"], results["native"])
    if options.json:
        options.json.write_text(json.dumps(results | {"wrong": wrong}), encoding="utf-8")
    if wrong:
        errors.print(f"The logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
