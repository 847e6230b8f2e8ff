"""Figures of engines as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table

from pyblockpool.cli.terminal import FirstThatFits, number, size
from pyblockpool.contiguity import Contiguity
from pyblockpool.report import Choices, EngineFigures, Figures, GroupFigures, TableFigures

# In columns: a longer name of an engine is folded before figures are left out.
_LONGEST_NAME = 24


@dataclass(frozen=True)
class Column:
    """A figure.

    Attributes:
        heading: what stands above it.
        cell: what stands below that for a round, or all, and a group of it.
        lesser: where there is no room for all, the figures with the highest number are left out
            first; those with 0 always stay.
    """

    heading: str
    cell: Callable[[Figures, GroupFigures], str]
    lesser: int = 0

    @property
    def name(self) -> str:
        """The heading in one line."""
        return self.heading.replace("-\n", "").replace("\n", " ").strip()


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
    yield _meanings(engines, choices)


def _meanings(engines: Sequence[EngineFigures], choices: Choices) -> Table:
    meanings = Table.grid(padding=(0, 2, 0, 0))
    regions = "" if choices.regions == 1 else f" in each of {choices.regions:,} regions of memory"
    for row in (
        ("blocks a run", "in a stretch of consecutive ids; median: of the means of the tables"),
        ("mergeable", "neighbours that one copy takes together; either: descending ids, too"),
        ("tiles", _tiles(engines, choices.tile_tokens)),
        ("longest", "longest run, in blocks"),
        ("descr. a table", f"descriptors of copies that move a table, one a run{regions}"),
        ("prefill", "from being scheduled to the first token"),
        ("high water", "the highest block that was used, over the number of blocks used"),
    ):
        meanings.add_row(*row)
    return meanings


def _tiles(engines: Sequence[EngineFigures], asked: int) -> str:
    """What a tile is: whole blocks, so that it may differ from what was asked for."""
    used = {group.tile_tokens for engine in engines for group in engine.all.groups}
    tokens = " and ".join(f"{each:,}" for each in sorted(used))
    meaning = f"of {tokens} tokens that tables touch, 1.00 if they were packed"
    if used == {asked}:
        return meaning
    not_asked = "not always" if asked in used else "not"
    return f"{meaning}; {not_asked} of {asked:,}, as a tile is whole blocks"


def _prompts(engines: Sequence[EngineFigures]) -> list[Column]:
    columns = [Column("\nrequests", lambda each, group: f"{each.requests:,}")]
    if any(engine.all.aborted for engine in engines):
        columns.append(Column("abor-\nted", lambda each, group: f"{each.aborted:,}", 2))
    if any(engine.all.preempted for engine in engines):
        columns.append(Column("preemp-\ntions", lambda each, group: f"{each.preempted:,}", 2))
    columns += [
        Column("prompt\ntokens", lambda each, group: f"{each.prompt_tokens:,}", 1),
        Column("prefix\nhits", lambda each, group: number(each.hit_rate, ".1%")),
        *_runs(lambda group: group.prompts),
    ]
    if any(engine.all.prefill for engine in engines):
        columns += [
            Column("prefill,\nms", lambda each, group: size(each.prefill_ms)),
            Column("median\nprefill", lambda each, group: size(each.median_prefill_ms), 4),
        ]
    return columns


def _whole(regions: int) -> list[Column]:
    def of(figure: Callable[[Contiguity], str]) -> Callable[[Figures, GroupFigures], str]:
        return lambda each, group: figure(group.tables.contiguity)

    return [
        Column("\ntables", of(lambda seen: f"{seen.tables:,}")),
        Column("\nblocks", of(lambda seen: f"{seen.blocks:,}"), 1),
        *_runs(lambda group: group.tables),
        Column("\neither", of(lambda seen: number(seen.mergeable_share_either, ".1%")), 8),
        Column("long-\nest", of(lambda seen: f"{seen.longest_run:,}"), 7),
        Column(
            "descr.\na table",
            of(lambda seen: size(seen.descriptors(regions) / seen.tables if seen.tables else nan)),
            2,
        ),
        Column("high\nwater", lambda each, group: number(each.high_water_ratio, ",.2f"), 6),
    ]


def _runs(part: Callable[[GroupFigures], TableFigures]) -> list[Column]:
    def of(figure: Callable[[TableFigures], str]) -> Callable[[Figures, GroupFigures], str]:
        return lambda each, group: figure(part(group))

    return [
        Column("blocks\na run", of(lambda seen: size(seen.contiguity.blocks_per_run))),
        Column("\nmedian", of(lambda seen: size(seen.median_blocks_per_run)), 9),
        Column("\ntiles", of(lambda seen: number(seen.contiguity.tile_amplification, ".2f"))),
        Column("merge-\nable", of(lambda seen: number(seen.contiguity.mergeable_share, ".1%")), 5),
    ]


def _table(
    title: str, columns: Sequence[Column], engines: Sequence[EngineFigures], index: int
) -> FirstThatFits:
    """With as many of the columns as there is room for."""
    parts = [
        [
            ("" if place else engine.label, str(place + 1), figures)
            for place, figures in enumerate(engine.rounds)
        ]
        for engine in engines
    ]
    if all(len(engine.rounds) < 2 for engine in engines):
        parts = []
    parts.append([(engine.label, "all", engine.all) for engine in engines])
    cells = [
        [
            (label, name, [column.cell(figures, figures.groups[index]) for column in columns])
            for label, name, figures in part
        ]
        for part in parts
    ]
    name_width = min(_LONGEST_NAME, max(cell_len(engine.label) for engine in engines))

    def way(least: int, longest_name: int | None) -> RenderableType:
        table = Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        table.add_column("\nengine", overflow="fold", min_width=name_width, max_width=longest_name)
        table.add_column("\nround", justify="right", no_wrap=True)
        kept = [place for place, column in enumerate(columns) if column.lesser <= least]
        for place in kept:
            table.add_column(columns[place].heading, justify="right", no_wrap=True)
        for part in cells:
            for label, name, row in part:
                table.add_row(label, name, *(row[place] for place in kept))
            table.add_section()
        if len(kept) < len(columns):
            names = ", ".join(column.name for column in columns if column.lesser > least)
            table.caption = f"no room for {names}: a wider terminal, or a pipe, has it"
            table.caption_justify = "left"
        return table

    def ways() -> Iterator[RenderableType]:
        ranks = sorted({0, *(column.lesser for column in columns)}, reverse=True)
        yield way(ranks[0], None)
        for rank in ranks:
            yield way(rank, _LONGEST_NAME)

    return FirstThatFits(ways)
