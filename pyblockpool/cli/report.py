"""``pyblockpool report``: what block traces show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pyblockpool.block_trace import Header, Section, read_sections
from pyblockpool.cli import tables
from pyblockpool.cli.arguments import Verbs, add_plot, add_verb, at_least
from pyblockpool.cli.terminal import counted, show, show_json, tell_plot
from pyblockpool.errors import TraceError
from pyblockpool.report import (
    MANY_REQUESTS,
    STRETCHES,
    TILE_TOKENS,
    Choices,
    EngineFigures,
    engine_figures,
    labels,
)
from pyblockpool.settings import QUEUE_VARIABLE

# In bytes: what takes longer shows a bar.
_LONG_TRACE = 1 << 24


def add_to(verbs: Verbs) -> None:
    """Add the verb ``report``."""
    report = add_verb(
        verbs,
        "report",
        summary="how contiguous the block tables of engines were, round by round",
        description="Read block traces, which engines write under VLLM_BLOCK_TRACE=FILE, and show "
        "how contiguous their block tables were, beside prefix hits and the latency of prefill: "
        "per round and in all, engine beside engine. A round lies between two resets of the prefix "
        "cache or of the order. Exit status: 0 if there was something to report, and to draw where "
        "--plot asks for it, 1 if there was not, 2 for bad usage; what a file lacks is told on "
        "stderr.",
        example="pyblockpool report stock.jsonl native.jsonl --plot rounds.png",
    )
    report.set_defaults(run=_report)
    report.add_argument(
        "traces", type=Path, nargs="+", metavar="FILE", help="a block trace, of one or more engines"
    )
    report.add_argument(
        "--rounds",
        type=at_least(1),
        metavar="N",
        help="split each trace into N stretches with the same number of requests; default: at its "
        f"resets, and if there was none, {STRETCHES} stretches from {MANY_REQUESTS} requests on",
    )
    report.add_argument(
        "--tile",
        type=at_least(1),
        default=TILE_TOKENS,
        metavar="TOKENS",
        help="tokens in a tile, the aligned part of the cache that a kernel reads at once: as many "
        "whole blocks as fit into them, at least one; default: %(default)s",
    )
    report.add_argument(
        "--regions",
        type=at_least(1),
        default=1,
        metavar="N",
        help="stretches of memory of which each holds a part of every block, such as K and V of "
        "each layer: the descriptors of a table are its runs in each of them; "
        "default: %(default)s",
    )
    add_plot(report, "the rounds and maps of the pools")
    report.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _report(options: argparse.Namespace) -> int:
    if options.plot:
        from pyblockpool import plots  # before the work: matplotlib may be missing
    choices = Choices(options.tile, options.rounds, options.regions)
    sections, complaints = _read(options.traces)
    for complaint in complaints:
        print(f"pyblockpool report: {complaint}", file=sys.stderr)
    if not sections:
        return 1
    engines = _figures(sections, choices)
    plotted = [engine for engine in engines if engine.rounds]
    if options.plot and plotted:
        plots.save(plots.picture(plotted), options.plot)
        tell_plot("report", options.plot)
    if options.json:
        show_json(
            {
                "tile_tokens": choices.tile_tokens,
                "regions": choices.regions,
                "engines": [
                    _of_section(section) | engine.as_json(choices.regions)
                    for section, engine in zip(sections, engines, strict=True)
                ],
            }
        )
    else:
        show(_what_ran(sections, engines), "", *tables.of_engines(engines, choices))
    if options.plot and not plotted:
        print(
            f"pyblockpool report: {options.plot} is not written: no request has ended, so that "
            "there is nothing to draw",
            file=sys.stderr,
        )
        return 1
    return 0


def _read(paths: Sequence[Path]) -> tuple[list[Section], list[str]]:
    """The sections of all files, and what is wrong with them, in sentences."""
    sections: list[Section] = []
    complaints = []
    with _progress("reading", paths) as advance:
        for path in paths:
            try:
                found = read_sections(path, advance)
            except TraceError as error:
                complaints.append(str(error))
                continue
            except OSError as error:
                complaints.append(f"{path}: {error.strerror or error}")
                continue
            sections += found
            complaints += [_left_out(section) for section in found if section.cut]
    return sections, complaints


def _left_out(section: Section) -> str:
    first, *others = section.cut
    also = f", and so are {len(others)} more, up to line {others[-1]}" if others else ""
    writing = "" if section.end else ", or the engine is just writing it"
    return (
        f"{section.path}:{first}: the line is cut off, by a crash or a full disk{writing}{also}; "
        f"{counted(section.requests, 'request')} could be read"
    )


def _figures(sections: Sequence[Section], choices: Choices) -> list[EngineFigures]:
    with _progress("adding up", {section.path for section in sections}) as advance:
        return [
            engine_figures(section, label, choices, advance)
            for section, label in zip(sections, labels(sections), strict=True)
        ]


@contextmanager
def _progress(what: str, paths: Iterable[Path]) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, for what takes more than a moment; it is given bytes that were read."""
    total = sum(path.stat().st_size for path in paths if path.is_file())
    console = Console(stderr=True)
    if total < _LONG_TRACE or not console.is_terminal:
        yield lambda read: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=total)
        unshown = 0

        def advance(read: int) -> None:
            nonlocal unshown
            unshown += read
            if unshown > _LONG_TRACE // 64:  # a bar costs more than a line
                bars.advance(task, unshown)
                unshown = 0

        yield advance


def _of_section(section: Section) -> dict[str, Any]:
    return {
        "file": str(section.path),
        "line": section.line,
        "cut_lines": section.cut,
        "end": None if section.end is None else asdict(section.end),
    }


def _what_ran(sections: Sequence[Section], engines: Sequence[EngineFigures]) -> Table:
    ran = Table.grid(padding=(0, 2, 0, 0))
    ran.add_column(overflow="fold")
    ran.add_column()
    for section, engine in zip(sections, engines, strict=True):
        ran.add_row(engine.label, f"{describe(engine.header)}\n{_how_it_went(section, engine)}")
    return ran


def describe(header: Header) -> str:
    """What ran, in one line."""
    groups = "; ".join(
        f"{group.kind}, {counted(group.layers, 'layer')}, blocks of {group.block_size} tokens"
        for group in header.groups
    )
    queue = "not set" if header.queue is None else header.queue
    parts = [
        header.model or "model not known",
        f"vLLM {header.vllm}",
        f"{QUEUE_VARIABLE} {queue} ({header.implementation} queue, policy {header.policy})",
        f"{header.num_blocks:,} blocks ({groups})",
        f"prefix cache {'on' if header.caching else 'off'}",
    ]
    if header.attention is not None:
        parts.append(f"attention {header.attention}")
    if header.dp_rank is not None:
        parts.append(f"data-parallel rank {header.dp_rank}")
    return ", ".join(parts)


def _how_it_went(section: Section, engine: EngineFigures) -> str:
    split = engine.split
    if len(engine.rounds) > 1 and section.rounds < 2:
        split += ", as no reset lies between them"
    parts = [
        f"started {section.header.started}, {counted(section.requests, 'request')}",
        split,
    ]
    if section.end is None:
        parts.append(
            "no end line: it is still running, or ended before the line was written (killed, by "
            "vLLM at shutdown, too, or a crash), or the line could not be written; the last "
            "records may be missing"
        )
    elif section.end.end != "closed":
        parts.append(f"recording stopped: {section.end.end}")
    if section.end is not None and section.end.lost:
        parts.append(f"{counted(section.end.lost, 'record')} lost")
    if section.cut:
        parts.append(f"{counted(len(section.cut), 'line')} cut off")
    return "; ".join(parts)
