"""Prefill of a real vLLM engine, round by round, as its pool of KV-cache blocks ages.

    python bench/e2e_prefill.py --repetitions 3  # scenes idle and busy, KV tiles of 16 and 128

An engine serves one long prompt a round, with vLLM's FlexAttention backend. Between two rounds its
pool is aged: requests without a model (vLLM's own `Request`s, through the engine's own
KVCacheManager) are admitted, grow and are freed.

    idle   all of them have ended before the prompt comes, and the prefix cache is reset: the rounds
           of a training loop. Who has an order reset calls it here.
    busy   some are always in flight, nothing is ever reset, and the pool fills with cached blocks:
           a server. An order reset is asked for and cannot be done.

Each variant runs in a process of its own; repetitions take turns. The first token of each round has
to be the same under all variants, or the exit status is 1.

What it does not show: decoding, several prompts at a time, and kernels that read one block at a
time, to which all variants look alike (KV tile = block is such a case).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import table
from provenance import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_llama import engine_environment, write_tiny_llama

from pyblockpool.contiguity import Contiguity


@dataclass(frozen=True)
class Variant:
    """A value of VLLM_BLOCK_QUEUE (None: unset), and whether the order is reset between rounds."""

    block_queue: str | None
    resets_order: bool = False


VARIANTS = {
    "vLLM": Variant(None),
    "reorder only": Variant("python", resets_order=True),
    "native + reset": Variant("native", resets_order=True),
    "sorted": Variant("native:sorted"),
    "extent": Variant("native:extent"),
}
SCENES = ("idle", "busy")


@dataclass(frozen=True)
class Shape:
    """What is played; the same for all variants.

    Attributes:
        scene: see above.
        tile: tokens in a KV tile of FlexAttention, a multiple of the block size.
        block_size: tokens in a block.
        num_blocks: in the pool. Times the block size it has to be a multiple of the tile: PyTorch's
            code generator for CPUs fails on others.
        prompt: tokens of the prompt of a round; a multiple of 16, for the same reason.
        rounds: how many.
        requests: without a model, between two rounds.
        resident: of them, at the same time.
        in_flight: of them, while the prompt of scene busy is computed.
    """

    scene: str
    tile: int
    block_size: int = 16
    num_blocks: int = 2_400
    prompt: int = 4_000
    rounds: int = 12
    requests: int = 60
    resident: int = 40
    in_flight: int = 28


class Crowd:
    """Requests without a model, in the pool of an engine."""

    def __init__(self, core: Any, shape: Shape) -> None:
        self._manager = core.scheduler.kv_cache_manager
        self._hasher = core.request_block_hasher
        self._shape = shape
        self._chance = random.Random(17)
        self._running: list[tuple[Any, int]] = []  # and how many blocks it has yet to grow by
        self._admitted = 0

    def age(self, in_flight: int) -> None:
        """Admit as many requests as a round has, let them grow, and end all but some of them."""
        goal = self._admitted + self._shape.requests
        while self._admitted < goal or len(self._running) > in_flight:
            if self._admitted < goal and len(self._running) < self._shape.resident:
                self._admit()
            else:
                self._advance()

    def _admit(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        blocks = self._chance.randint(4, 43)
        prompt = self._chance.choices(range(2, 512), k=blocks * self._shape.block_size)
        request = Request(
            f"aging-{self._admitted}",
            prompt,
            SamplingParams(max_tokens=10_000),
            None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )
        self._admitted += 1
        self._compute(request, len(prompt))
        self._running.append((request, self._chance.randint(0, 29)))

    def _advance(self) -> None:
        at = self._chance.randrange(len(self._running))
        request, growth = self._running[at]
        if growth:
            tokens = self._chance.choices(range(2, 512), k=self._shape.block_size)
            request.append_output_token_ids(tokens)
            self._compute(request, len(tokens))
            self._running[at] = request, growth - 1
        else:
            self._manager.free(request)
            del self._running[at]

    def _compute(self, request: Any, tokens: int) -> None:
        if self._manager.allocate_slots(request, tokens) is None:
            raise RuntimeError("the pool is too small for the requests that age it")
        request.num_computed_tokens += tokens


def play(variant: Variant, shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds of one variant, in this process."""
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        record = Path(folder, "record.jsonl")
        os.environ.pop("VLLM_BLOCK_QUEUE", None)
        os.environ |= engine_environment(record, variant.block_queue)
        # In this process, so that the pool is within reach.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # only now: it reads some of these variables at import

        if options.device == "cpu":
            import flex_on_cpu

            flex_on_cpu.enable()
        model = write_tiny_llama(Path(folder, "model"), layers=2)
        llm = vllm.LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=False,  # for the time stamps of the requests
            scheduler_cls="recording_scheduler.RecordingScheduler",
            block_size=shape.block_size,
            kv_cache_memory_bytes=1 << 28,
            num_gpu_blocks_override=shape.num_blocks,
            max_model_len=shape.prompt + shape.block_size,
            max_num_batched_tokens=shape.prompt,
            attention_config={
                "backend": "FLEX_ATTENTION",
                "flex_attn_kv_block_size": shape.tile,
            },
        )
        try:
            return list(_rounds(llm, vllm, variant, shape, record))
        finally:
            llm.llm_engine.engine_core.shutdown()


def _rounds(llm: Any, vllm: Any, variant: Variant, shape: Shape, record: Path) -> Any:
    crowd = Crowd(llm.llm_engine.engine_core.engine_core, shape)
    busy = shape.scene == "busy"
    sampling = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False
    )

    def prefill(number: int) -> dict[str, Any]:
        prompt = random.Random(number).choices(range(2, 512), k=shape.prompt)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        (token,) = output.outputs[0].token_ids
        (group,) = json.loads(record.read_text().splitlines()[-1])["table"]
        times = output.metrics
        return {
            "prefill": times.first_token_ts - times.scheduled_ts,
            "token": token,
            "logprob": output.outputs[0].logprobs[0][token].logprob,
            "table": group,
        }

    prefill(-1)  # compiles the kernels
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be reset after the first prompt")
    if busy:
        crowd.age(shape.in_flight)
    for number in range(shape.rounds):
        played = prefill(number)
        crowd.age(shape.in_flight if busy else 0)
        if busy:
            if variant.resets_order and llm.reset_free_block_queue_order():
                raise RuntimeError(f"the order was reset in flight, after round {number + 1}")
        elif not llm.reset_prefix_cache(
            **({"reorder_free_queue": True} if variant.resets_order else {})
        ):
            raise RuntimeError(f"nothing was reset after round {number + 1}")
        yield played


def run(name: str, shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Play one variant in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--variant", name, "--out", str(out)]
        command += ["--shape", json.dumps(asdict(shape)), "--device", options.device]
        with log.open("wb") as file:
            ran = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        if ran.returncode:
            print(*log.read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
            raise RuntimeError(f"{name}: exit status {ran.returncode}")
        played: list[dict[str, Any]] = json.loads(out.read_text())
        return played


def different_answers(runs: list[dict[str, Any]]) -> list[str]:
    """Where variants disagree, in sentences."""
    wrong = []
    for other in runs[1:]:
        for number, (a, b) in enumerate(zip(runs[0]["rounds"], other["rounds"], strict=True), 1):
            if a["token"] != b["token"] or abs(a["logprob"] - b["logprob"]) > 1e-3:
                wrong.append(
                    f"{other['variant']}, tile {other['shape']['tile']}, round {number}: another "
                    f"first token than {runs[0]['variant']}"
                )
    return wrong


def report(console: Console, scene: str, tile: int, runs: list[dict[str, Any]]) -> None:
    """Medians over the repetitions, round by round."""
    shown = Table(title=f"{scene}, KV tile {tile}: prefill, ms (tile amplification)")
    shown.add_column("round", justify="right")
    by_variant = {name: [each for each in runs if each["variant"] == name] for name in VARIANTS}
    by_variant = {name: each for name, each in by_variant.items() if each}
    for name in by_variant:
        shown.add_column(name, justify="right")
    for number in range(len(runs[0]["rounds"])):
        cells = []
        for repetitions in by_variant.values():
            rounds = [each["rounds"][number] for each in repetitions]
            prefill = statistics.median(each["prefill"] for each in rounds)
            cells.append(f"{1000 * prefill:,.0f} ({rounds[0]['tile_amplification']:.1f})")
        shown.add_row(str(number + 1), *cells)
    console.print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--tiles", nargs="+", type=int, default=[16, 128], metavar="TOKENS")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        played = play(VARIANTS[options.variant], Shape(**json.loads(options.shape)), options)
        options.out.write_text(json.dumps(played))
        return 0

    shapes = [
        Shape(scene, tile, rounds=options.rounds)
        for scene in options.scenes
        for tile in options.tiles
    ]
    of_what, runs = provenance(), []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(shapes) * options.repetitions * len(options.variants))
        for repetition in range(options.repetitions):
            for shape in shapes:
                for name in options.variants:
                    bar.update(task, description=f"{shape.scene}, tile {shape.tile}, {name}")
                    rounds = run(name, shape, options)
                    for each in rounds:
                        tiles = Contiguity(shape.tile // shape.block_size)
                        tiles.add(each.pop("table"))
                        each["tile_amplification"] = tiles.tile_amplification
                    runs.append(
                        {
                            "variant": name,
                            "repetition": repetition,
                            "shape": asdict(shape),
                            "rounds": rounds,
                        }
                    )
                    bar.advance(task)
    console, wrong = Console(), []
    for shape in shapes:
        of_shape = [each for each in runs if each["shape"] == asdict(shape)]
        report(console, shape.scene, shape.tile, of_shape)
        wrong += different_answers(of_shape)
    console.print("\n".join(wrong) or "The first tokens are the same under all variants.")
    results = {**of_what, "device": options.device, "correct": not wrong, "runs": runs}
    (table.RESULTS / f"prefill_{options.device}.json").write_text(json.dumps(results) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
