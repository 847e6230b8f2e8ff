"""Figures of engines as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan

from rich import box
from rich.console import RenderableType
from rich.table import Table

from pyblockpool.cli.terminal import number, size
from pyblockpool.contiguity import Contiguity
from pyblockpool.report import Choices, EngineFigures, Figures, GroupFigures, TableFigures


@dataclass(frozen=True)
class Column:
    """A figure: its heading, and what stands below it for a round, or all, and a group of it."""

    heading: str
    cell: Callable[[Figures, GroupFigures], str]


def of_engines(engines: Sequence[EngineFigures], choices: Choices) -> Iterator[RenderableType]:
    """For each KV-cache group a table of prompts and one of whole block tables, and what they mean.

    Rows are rounds, engine after engine, and then the engines in all.
    """
    num_groups = max(len(engine.header.groups) for engine in engines)
    for index in range(num_groups):
        having = [engine for engine in engines if index < len(engine.header.groups)]
        group = f"KV-cache group {index}, " if num_groups > 1 else ""
        title = f"{group}prompts: the blocks that prefill computes and reads"
        yield _table(title, _prompts(having), having, index)
        yield ""
        title = f"{group}whole tables: with the blocks of the answers, as requests leave them"
        yield _table(title, _whole(choices.regions), having, index)
        yield ""
    yield _meanings(choices)


def _meanings(choices: Choices) -> Table:
    meanings = Table.grid(padding=(0, 2, 0, 0))
    regions = "" if choices.regions == 1 else f" in each of {choices.regions:,} regions of memory"
    for row in (
        ("blocks a run", "in a stretch of consecutive ids; median: of the means of the tables"),
        ("mergeable", "neighbours that one copy takes together; either: descending ids, too"),
        ("tiles", f"of {choices.tile_tokens} tokens that tables touch, 1.00 if they were packed"),
        ("longest", "run"),
        ("descr. a table", f"descriptors of copies that move a table, one a run{regions}"),
        ("high water", "the highest block that was used, over the number of blocks used"),
    ):
        meanings.add_row(*row)
    return meanings


def _prompts(engines: Sequence[EngineFigures]) -> list[Column]:
    columns = [Column("\nrequests", lambda each, group: f"{each.requests:,}")]
    if any(engine.all.aborted for engine in engines):
        columns.append(Column("abor-\nted", lambda each, group: f"{each.aborted:,}"))
    if any(engine.all.preempted for engine in engines):
        columns.append(Column("preemp-\ntions", lambda each, group: f"{each.preempted:,}"))
    columns += [
        Column("prompt\ntokens", lambda each, group: f"{each.prompt_tokens:,}"),
        Column("prefix\nhits", lambda each, group: number(each.hit_rate, ".1%")),
        *_runs(lambda group: group.prompts),
    ]
    if any(engine.all.prefill for engine in engines):
        columns += [
            Column("prefill,\nms", lambda each, group: size(each.prefill_ms)),
            Column("\nmedian", lambda each, group: size(each.median_prefill_ms)),
        ]
    return columns


def _whole(regions: int) -> list[Column]:
    def of(figure: Callable[[Contiguity], str]) -> Callable[[Figures, GroupFigures], str]:
        return lambda each, group: figure(group.tables.contiguity)

    return [
        Column("\ntables", of(lambda seen: f"{seen.tables:,}")),
        Column("\nblocks", of(lambda seen: f"{seen.blocks:,}")),
        *_runs(lambda group: group.tables),
        Column("\neither", of(lambda seen: number(seen.mergeable_share_either, ".1%"))),
        Column("long-\nest", of(lambda seen: f"{seen.longest_run:,}")),
        Column(
            "descr.\na table",
            of(lambda seen: size(seen.descriptors(regions) / seen.tables if seen.tables else nan)),
        ),
        Column("high\nwater", lambda each, group: number(each.high_water_ratio, ",.2f")),
    ]


def _runs(part: Callable[[GroupFigures], TableFigures]) -> list[Column]:
    def of(figure: Callable[[TableFigures], str]) -> Callable[[Figures, GroupFigures], str]:
        return lambda each, group: figure(part(group))

    return [
        Column("blocks\na run", of(lambda seen: size(seen.contiguity.blocks_per_run))),
        Column("\nmedian", of(lambda seen: size(seen.median_blocks_per_run))),
        Column("\ntiles", of(lambda seen: number(seen.contiguity.tile_amplification, ".2f"))),
        Column("merge-\nable", of(lambda seen: number(seen.contiguity.mergeable_share, ".1%"))),
    ]


def _table(
    title: str, columns: Sequence[Column], engines: Sequence[EngineFigures], index: int
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("\nengine", overflow="fold")
    table.add_column("\nround", justify="right")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)

    def add(label: str, name: str, figures: Figures) -> None:
        cells = (column.cell(figures, figures.groups[index]) for column in columns)
        table.add_row(label, name, *cells)

    if any(len(engine.rounds) > 1 for engine in engines):
        for engine in engines:
            for place, figures in enumerate(engine.rounds):
                add("" if place else engine.label, str(place + 1), figures)
            table.add_section()
    for engine in engines:
        add(engine.label, "all", engine.all)
    return table
