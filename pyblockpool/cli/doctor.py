"""``pyblockpool doctor``: what is installed, and what the variable would do here."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import get_args

from rich.console import Console, ConsoleOptions
from rich.text import Text

from pyblockpool.cli.arguments import Verbs, add_verb, at_least
from pyblockpool.cli.terminal import show, show_json
from pyblockpool.doctor import (
    Attention,
    Diagnosis,
    Facts,
    Outcome,
    Question,
    RefusedTileError,
    Remark,
    Topic,
    UnknownBackendError,
    diagnose,
)
from pyblockpool.settings import QUEUE_VARIABLE, assignments

# Sentences in wider terminals are hard to read.
WIDEST = 100
MARKS = {
    "good": ("ok", "green"),
    "note": ("note", "yellow"),
    "bad": ("BAD", "bold red"),
    "unknown": ("?", "cyan"),
}
READS = {
    "tiles": "read tiles of the cache, whoever their blocks belong to",
    "blocks": "read the blocks of a request, wherever they lie",
}


def add_to(verbs: Verbs) -> None:
    """Add the verb ``doctor``."""
    doctor = add_verb(
        verbs,
        "doctor",
        summary=f"what is installed, and what {QUEUE_VARIABLE} would do here",
        description="Look at the installed vLLM and at the environment: whether what "
        f"{QUEUE_VARIABLE} asks for would work, what each of its values could do, and whether "
        "scattered blocks can cost prefill time with the attention backend that vLLM takes here, "
        "or with another. Nothing is changed, no GPU memory is taken, and a server may be "
        "running. It takes as long as importing vLLM does. The exit status is 0 if what the "
        "environment asks for would work, or if it asks for nothing; 1 if not; 2 for bad usage.",
        example="pyblockpool doctor --attention-backend FLEX_ATTENTION --block-size 16",
    )
    doctor.set_defaults(run=partial(_doctor, doctor))
    doctor.add_argument(
        "--attention-backend",
        type=str.upper,
        metavar="NAME",
        help="ask about this one, under its name in vLLM; default: the one that vLLM takes here",
    )
    doctor.add_argument(
        "--block-size",
        type=at_least(1),
        metavar="TOKENS",
        help="tokens in a KV-cache block; default: what vLLM takes here",
    )
    doctor.add_argument(
        "--flex-attn-kv-block-size",
        type=at_least(1),
        metavar="TOKENS",
        help="the KV tile of FlexAttention, as in vLLM's --attention-config; default: what vLLM "
        "takes here",
    )
    doctor.add_argument(
        "--load-plugins",
        action="store_true",
        help="run the other general plugins of vLLM first, as vLLM does when it starts: shows "
        "whether they replace what pyblockpool replaces",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    question = Question(
        attention_backend=options.attention_backend,
        block_size=options.block_size,
        flex_attn_kv_block_size=options.flex_attn_kv_block_size,
        load_plugins=options.load_plugins,
    )
    try:
        with Console(stderr=True).status("importing vLLM and trying it out"):
            diagnosis = diagnose(question)
    except (UnknownBackendError, RefusedTileError) as error:
        parser.error(str(error))
    if options.json:
        show_json(asdict(diagnosis))
    else:
        show(*_page(diagnosis))
    return 0 if diagnosis.works else 1


@dataclass(frozen=True)
class _Line:
    """A mark and a text, which is wrapped beside it on a terminal and stays one line in a pipe."""

    mark: str
    text: str
    style: str = ""
    indent: int = 6

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = min(options.max_width, WIDEST) - self.indent
        lines = [self.text]
        if options.is_terminal:
            lines = textwrap.wrap(self.text, max(width, 20), break_on_hyphens=False)
        for number, line in enumerate(lines):
            mark = "" if number else self.mark
            yield Text.assemble((f"{mark:{self.indent}}", self.style), line)


def _page(diagnosis: Diagnosis) -> Iterator[_Line | Text]:
    """Sections that have anything to say, and the verdict on both questions."""
    for title, lines in _sections(diagnosis):
        if lines:
            yield Text(title, "bold")
            yield from lines
            yield Text()
    yield _verdict(diagnosis)
    yield _verdict_on_attention(diagnosis)


def _sections(diagnosis: Diagnosis) -> Iterator[tuple[str, list[_Line]]]:
    remarks = {
        topic: [_remark(each) for each in diagnosis.remarks if each.topic == topic]
        for topic in get_args(Topic)
    }
    yield "Installed", [*_facts(diagnosis.facts), *remarks["installation"]]
    yield "Environment", remarks["environment"]
    yield f"What {diagnosis.probed} needs of vLLM", remarks["probe"]
    yield (
        f"What each value of {QUEUE_VARIABLE} could do here",
        list(_outcomes(diagnosis.outcomes)),
    )
    yield (
        "Attention: does it matter where blocks lie?",
        [*remarks["attention"], *_backends(diagnosis.attention)],
    )


def _remark(remark: Remark) -> _Line:
    mark, style = MARKS[remark.level]
    sentence = remark.sentence.removesuffix(".") + "."
    if sentence.split()[0].islower():  # no name
        sentence = sentence[0].upper() + sentence[1:]
    return _Line(mark, sentence, style)


def _outcomes(outcomes: Sequence[Outcome]) -> Iterator[_Line]:
    """A line each; a reason is told once."""
    told: dict[str, str] = {}
    width = max((len(each.value) for each in outcomes), default=0) + 2
    for each in outcomes:
        mark, style = MARKS["good" if each.works else "bad"]
        first = told.setdefault(each.sentence, each.value)
        sentence = each.sentence if first == each.value else f"as for {first}"
        yield _Line(f"{mark:6}{each.value:{width}}", sentence, style, 6 + width)


def _facts(facts: Facts | None) -> Iterator[_Line]:
    if facts is not None:
        for name, value in _named_facts(facts):
            yield _Line(f"      {name}", value, indent=20)


def _named_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    missing = "not imported"
    yield "pyblockpool", f"{facts.pyblockpool or 'not installed'}, {facts.package}"
    yield "vLLM", missing if facts.vllm is None else f"{facts.vllm}, {facts.vllm_package}"
    yield "PyTorch", facts.torch or missing
    yield "Python", f"{facts.python}, {facts.executable}"
    yield "CPU", f"{facts.cpu}, {facts.cores} cores for this process"
    if not facts.gpus and not facts.gpus_of_torch:
        yield "GPU", "none is seen"
    else:
        models = [f"{count} x {name}" for name, count in Counter(facts.gpus).items()]
        gpus = ", ".join(models) or "not listed by nvidia-smi"
        driver = f", driver {facts.driver}" if facts.driver else ""
        yield "GPU", f"{gpus}{driver}; PyTorch sees {facts.gpus_of_torch or 0}"


def _backends(attention: Attention | None) -> Iterator[_Line]:
    if attention is None:
        return
    yield _Line("", "The attention backends of this vLLM:")
    unknown = len(attention.backends)
    for reads, meaning in READS.items():
        names = [backend.name for backend in attention.backends if backend.reads == reads]
        if names:
            unknown -= len(names)
            yield _Line("      - ", f"{meaning}: {', '.join(names)}", indent=8)
    if unknown:
        others = "" if unknown == len(attention.backends) else " other" + "s" * (unknown > 1)
        yield _Line("      - ", f"{unknown}{others}: not known (--json names them)", indent=8)


def _verdict(diagnosis: Diagnosis) -> _Line:
    asked = assignments(diagnosis.asked)
    if not asked:
        verdict = "Nothing is asked for: vLLM would run untouched."
    elif diagnosis.works:
        verdict = f"{asked} would work here."
    else:
        verdict = f"{asked} would not work here: see what is marked BAD."
    return _Line("", verdict, indent=0)


def _verdict_on_attention(diagnosis: Diagnosis) -> _Line:
    """Of the backend in question, which need not be the one that vLLM takes here."""
    attention = diagnosis.attention
    if attention is None or attention.fragmentation_costs is None:
        verdict = (
            "Whether it matters to prefill where blocks lie cannot be told "
            f"({_why_untold(diagnosis)})."
        )
    elif attention.fragmentation_costs:  # only FlexAttention reads tiles
        tile = f"tile {attention.flex_attention_tile}, block {attention.block_size}"
        verdict = f"Where blocks lie matters to prefill with {attention.backend} ({tile})."
    else:
        verdict = f"Where blocks lie does not matter to prefill with {attention.backend}."
    return _Line("", verdict, indent=0)


def _why_untold(diagnosis: Diagnosis) -> str:
    attention = diagnosis.attention
    if attention is None:
        told = any(remark.topic == "attention" for remark in diagnosis.remarks)
        return "see what is marked ?" if told else "vLLM cannot be imported: see what is marked BAD"
    if attention.backend is None:
        return "the attention backend is not known: see what is marked ?"
    reasons = {backend.name: backend.reason for backend in attention.backends}
    return f"{attention.backend}: {reasons.get(attention.backend, 'see what is marked ?')}"
