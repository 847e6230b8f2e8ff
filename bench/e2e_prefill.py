"""Prefill of a real vLLM engine, round by round, as its pool of KV-cache blocks ages.

    python bench/e2e_prefill.py            # scenes idle and busy, KV tile of 128 tokens
    python bench/e2e_prefill.py --full     # all that the README reports; about an hour

An engine serves one long prompt a round. Between two rounds its pool is aged: requests without a
model (vLLM's own `Request`s, through the engine's own KVCacheManager) are admitted, grow and are
freed.

    idle    all of them have ended before the prompt comes, and the prefix cache is reset: the
            rounds of a training loop. Who has an order reset calls it here.
    busy    some are always in flight, nothing is ever reset, and the pool fills with cached blocks:
            a server. An order reset is asked for and cannot be done.
    rfc     idle, with the shape of the RFC's reproducer: 2 prompts, 4 samples of each.
    decode  idle, with a short prompt and a long answer, whose time is taken as well.

The attention backend is vLLM's FlexAttention, with KV tiles of so many tokens, or any other that
runs on the device. Each variant runs in a process of its own; repetitions take turns. The tokens of
each round have to be the same under all variants, or the exit status is 1.

What it does not show: mixed batches, and models with real weights. On a CPU, PyTorch's code
generator fails on FlexAttention for many shapes: there prompts are multiples of 16 tokens and one
token is generated, but for the backend CPU_ATTN.
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

from provenance import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tiny_llama import engine_environment, write_tiny_llama

from pyblockpool.contiguity import Contiguity

RESULTS = Path(__file__).parent / "results"


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
SCENES = ("idle", "busy", "rfc", "decode")


@dataclass(frozen=True)
class Shape:
    """What is played; the same for all variants.

    Attributes:
        scene: see above.
        tile: tokens in a KV tile of FlexAttention, a multiple of the block size. For the other
            backends only what tiles are counted by.
        backend: of attention, by vLLM's name.
        block_size: tokens in a block.
        num_blocks: in the pool. Times the block size it has to be a multiple of the tile: PyTorch's
            code generator for CPUs fails on others.
        prompts: in a round.
        prompt: tokens of each.
        samples: of each.
        output: tokens of each sample.
        rounds: how many.
        requests: without a model, between two rounds.
        resident: of them, at the same time.
        in_flight: of them, while the prompt of scene busy is computed.
    """

    scene: str
    tile: int
    backend: str = "FLEX_ATTENTION"
    block_size: int = 16
    num_blocks: int = 2_400
    prompts: int = 1
    prompt: int = 4_000
    samples: int = 1
    output: int = 1
    rounds: int = 12
    requests: int = 60
    resident: int = 40
    in_flight: int = 28

    @property
    def title(self) -> str:
        text = f"{self.scene}, {self.backend}, KV tile {self.tile}: {self.num_blocks:,} blocks, "
        text += f"{self.prompts} x {self.samples} of {self.prompt:,} tokens"
        return text if self.output == 1 else f"{text} + {self.output:,}"


@dataclass(frozen=True)
class Device:
    """What a kind of machine can hold: the model, its numbers, and the shapes of a round.

    Attributes:
        model: arguments of `write_tiny_llama()`.
        dtype: of weights and cache.
        cache_bytes: of the KV cache.
        tolerance: of the logarithm of a probability. Where blocks lie decides in which order an
            attention kernel adds.
        step_tokens: in a step of the engine, None for a whole round.
        shapes: what differs from the defaults of `Shape`, in each scene.
    """

    model: dict[str, int]
    dtype: str
    cache_bytes: int
    tolerance: float
    step_tokens: int | None
    shapes: dict[str, dict[str, Any]]


DEVICES = {
    "cpu": Device(
        {"layers": 2},
        "float32",
        1 << 28,
        1e-3,
        None,
        {
            "rfc": {"prompts": 2, "samples": 4},
            "decode": {
                "backend": "CPU_ATTN",
                "block_size": 32,  # as its kernels want it
                "prompt": 1_024,
                "output": 128,
            },
        },
    ),
    "cuda": Device(
        {"layers": 4, "hidden": 2_048, "heads": 16, "kv_heads": 8, "max_positions": 131_072},
        "bfloat16",
        16 << 30,
        0.1,
        8_192,
        {
            "idle": {"prompt": 70_000, "num_blocks": 24_000, "requests": 600},
            "busy": {"prompt": 70_000, "num_blocks": 24_000, "requests": 600},
            "rfc": {
                "prompts": 2,
                "samples": 4,
                "prompt": 70_000,
                "num_blocks": 24_000,
                "requests": 600,
            },
            "decode": {"prompt": 1_024, "output": 2_048},
        },
    ),
}


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


def play(variant: Variant, shape: Shape, device: str) -> list[dict[str, Any]]:
    """All rounds of one variant, in this process."""
    about = DEVICES[device]
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        record = Path(folder, "record.jsonl")
        os.environ |= engine_environment(record, variant.block_queue)
        # The engine in this process, so that the pool is within reach.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # only now: it reads some of these variables at import
        import vllm_fallbacks

        vllm_fallbacks.enable()
        model = write_tiny_llama(Path(folder, "model"), **about.model)
        attention: dict[str, Any] = {"backend": shape.backend}
        if shape.backend == "FLEX_ATTENTION":
            attention["flex_attn_kv_block_size"] = shape.tile
        in_round = shape.prompts * (shape.prompt + shape.samples * shape.block_size)
        llm = vllm.LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype=about.dtype,
            enforce_eager=True,
            disable_log_stats=False,  # for the time stamps of the requests
            scheduler_cls="recording_scheduler.RecordingScheduler",
            block_size=shape.block_size,
            kv_cache_memory_bytes=about.cache_bytes,
            num_gpu_blocks_override=shape.num_blocks,
            max_model_len=shape.prompt + shape.output + shape.block_size,
            max_num_batched_tokens=about.step_tokens or in_round,
            attention_config=attention,
        )
        try:
            return list(_rounds(llm, vllm, variant, shape, record))
        finally:
            llm.llm_engine.engine_core.shutdown()


def _rounds(llm: Any, vllm: Any, variant: Variant, shape: Shape, record: Path) -> Any:
    crowd = Crowd(llm.llm_engine.engine_core.engine_core, shape)
    busy = shape.scene == "busy"
    sampling = vllm.SamplingParams(
        max_tokens=shape.output,
        n=shape.samples,
        temperature=float(shape.samples > 1),
        seed=17,
        logprobs=1,
        ignore_eos=True,
        detokenize=False,
    )

    def prefill(number: int) -> dict[str, Any]:
        chance = random.Random(number)
        prompts = [
            {"prompt_token_ids": chance.choices(range(2, 512), k=shape.prompt)}
            for _ in range(shape.prompts)
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        ended = [line["table"] for line in lines if line["kind"] == "request"]
        samples = [sample for output in outputs for sample in output.outputs]
        times = [output.metrics for output in outputs]
        return {
            "prefill": statistics.mean(each.first_token_ts - each.scheduled_ts for each in times),
            "decode": statistics.mean(each.last_token_ts - each.first_token_ts for each in times),
            "tokens": [list(sample.token_ids) for sample in samples],
            "logprobs": [sample.logprobs[0][sample.token_ids[0]].logprob for sample in samples],
            "tables": [table for (table,) in ended[-len(samples) :]],
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


def run(name: str, shape: Shape, device: str) -> list[dict[str, Any]]:
    """Play one variant in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--play", name, "--out", str(out)]
        command += ["--shape", json.dumps(asdict(shape)), "--device", device]
        with log.open("wb") as file:
            ran = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        if ran.returncode:
            print(*log.read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
            raise RuntimeError(f"{name}: exit status {ran.returncode}")
        played: list[dict[str, Any]] = json.loads(out.read_text())
        return played


def different_answers(runs: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Where variants disagree, in sentences."""
    wrong = []
    for other in runs[1:]:
        for number, (a, b) in enumerate(zip(runs[0]["rounds"], other["rounds"], strict=True), 1):
            far = max(abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"], strict=True))
            if a["tokens"] != b["tokens"] or far > tolerance:
                wrong.append(
                    f"{Shape(**other['shape']).title}, {other['variant']}, round {number}: other "
                    f"tokens than {runs[0]['variant']}, or of another probability"
                )
    return wrong


def report(console: Console, shape: Shape, runs: list[dict[str, Any]]) -> None:
    """Medians over the repetitions, round by round."""
    decodes = shape.output > 1
    what = "prefill, decode" if decodes else "prefill"
    shown = Table(title=f"{shape.title}\n{what}, ms (tile amplification)")
    shown.add_column("round", justify="right")
    by_variant = {name: [each for each in runs if each["variant"] == name] for name in VARIANTS}
    by_variant = {name: each for name, each in by_variant.items() if each}
    for name in by_variant:
        shown.add_column(name, justify="right")
    for number in range(len(runs[0]["rounds"])):
        cells = []
        for repetitions in by_variant.values():
            rounds = [each["rounds"][number] for each in repetitions]
            times = [
                f"{1000 * statistics.median(each[name] for each in rounds):,.0f}"
                for name in ("prefill", "decode")[: 1 + decodes]
            ]
            cells.append(f"{', '.join(times)} ({rounds[0]['tile_amplification']:.1f})")
        shown.add_row(str(number + 1), *cells)
    console.print(shown)


def planned(options: argparse.Namespace) -> list[tuple[Shape, int]]:
    """What is to be played, and how often."""
    of_scene = DEVICES[options.device].shapes

    def shape(scene: str, tile: int, **changes: Any) -> Shape:
        return Shape(
            scene, tile, **{**of_scene.get(scene, {}), "rounds": options.rounds, **changes}
        )

    if not options.full:
        given = {"num_blocks": options.num_blocks, "prompt": options.prompt}
        changes = {name: value for name, value in given.items() if value}
        backends = [{"backend": name} for name in options.backends] or [{}]
        return [
            (shape(scene, tile, **changes, **backend), options.repetitions)
            for scene in options.scenes
            for tile in options.tiles
            for backend in backends
        ]
    if options.device == "cuda":
        return [
            (shape(scene, tile, backend=backend), options.repetitions)
            for scene in SCENES
            for backend in options.backends or ["FLEX_ATTENTION"]
            for tile in ((16, 128) if backend == "FLEX_ATTENTION" else (128,))
        ]
    return [
        *((shape(scene, 128), options.repetitions) for scene in ("idle", "busy")),
        *((shape(scene, 16), 1) for scene in ("idle", "busy")),
        (shape("idle", 64), 1),
        (shape("idle", 128, num_blocks=4_800), 1),
        (shape("idle", 128, prompt=2_000), 1),
        (shape("rfc", 128), 1),
        (shape("decode", 128), 1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--full", action="store_true", help="all shapes; else those given here:")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=["idle", "busy"])
    parser.add_argument("--tiles", nargs="+", type=int, default=[128], metavar="TOKENS")
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="of attention")
    parser.add_argument("--num-blocks", type=int, help="in the pool")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: bench/results/prefill_DEVICE.json")
    parser.add_argument("--play", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        shape = Shape(**json.loads(options.shape))
        options.out.write_text(json.dumps(play(VARIANTS[options.play], shape, options.device)))
        return 0

    plan = planned(options)
    of_what = provenance()
    runs: dict[Shape, list[dict[str, Any]]] = {shape: [] for shape, _ in plan}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        total = sum(repetitions for _, repetitions in plan) * len(options.variants)
        task = bar.add_task("", total=total)
        for repetition in range(max(repetitions for _, repetitions in plan)):
            for shape in (shape for shape, repetitions in plan if repetition < repetitions):
                for name in options.variants:
                    bar.update(task, description=f"{shape.scene}, tile {shape.tile}, {name}")
                    rounds = run(name, shape, options.device)
                    for each in rounds:
                        tiles = Contiguity(shape.tile // shape.block_size)
                        for table in each.pop("tables"):
                            tiles.add(table)
                        each["tile_amplification"] = tiles.tile_amplification
                    runs[shape].append(
                        {
                            "variant": name,
                            "repetition": repetition,
                            "shape": asdict(shape),
                            "rounds": rounds,
                        }
                    )
                    save(options, of_what, runs)  # it takes long, and may be stopped
                    bar.advance(task)
    console, wrong = Console(), []
    for shape, of_shape in runs.items():
        report(console, shape, of_shape)
        wrong += different_answers(of_shape, DEVICES[options.device].tolerance)
    console.print("\n".join(wrong) or "The tokens are the same under all variants.")
    return 1 if wrong else 0


def save(
    options: argparse.Namespace,
    of_what: dict[str, Any],
    runs: dict[Shape, list[dict[str, Any]]],
) -> None:
    tolerance = DEVICES[options.device].tolerance
    results = {
        **of_what,
        "device": options.device,
        "correct": not any(different_answers(each, tolerance) for each in runs.values()),
        "runs": [each for of_shape in runs.values() for each in of_shape],
    }
    out = options.out or RESULTS / f"prefill_{options.device}.json"
    out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    sys.exit(main())
