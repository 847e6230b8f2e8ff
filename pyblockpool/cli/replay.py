"""``pyblockpool replay``: a request trace through vLLM's pool, policy beside policy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pyblockpool.cli import tables
from pyblockpool.cli.arguments import Verbs, add_plot, add_verb, at_least
from pyblockpool.cli.terminal import FirstThatFits, counted, number, show, show_json, tell_plot
from pyblockpool.errors import SettingsError
from pyblockpool.replay import Figures, Setup, replay_each
from pyblockpool.report import TILE_TOKENS, Choices
from pyblockpool.request_trace import ARRANGEMENTS, read_requests
from pyblockpool.settings import QUEUE_VARIABLE, QUEUES, Settings

REPLAYED = ("python", "native:sorted", "native:extent")

# In columns: longer names of figures are wrapped before those of queues.
_LONGEST_NAME = 26


def add_to(verbs: Verbs) -> None:
    """Add the verb ``replay``."""
    replay = add_verb(
        verbs,
        "replay",
        summary="a request trace through vLLM's block pool, policy beside policy",
        description="Replay a request trace (Mooncake, agentic or GRPO JSONL, or Azure CSV) "
        "through the KVCacheManager and BlockPool of the installed vLLM, without a model, and "
        "compare the queues: prefix hits, and how contiguous the block tables are.",
        example="pyblockpool replay conversation_trace.jsonl --blocks 65536 --limit 1000",
    )
    replay.set_defaults(run=_replay)
    replay.add_argument(
        "trace", type=Path, metavar="TRACE", help="the file; its first line tells the format"
    )
    replay.add_argument(
        "--blocks",
        type=at_least(2),
        required=True,
        metavar="N",
        help="KV-cache blocks in the pool (vLLM logs the size of its KV cache in tokens: divide it "
        "by the block size)",
    )
    replay.add_argument(
        "--residents",
        type=at_least(1),
        default=32,
        metavar="R",
        help="requests that may run at the same time, like vLLM's --max-num-seqs; of a trace with "
        "sessions, also as many sessions at a time; default: %(default)s",
    )
    replay.add_argument(
        "--policy",
        action="append",
        type=_queue,
        metavar="QUEUE",
        help=f"a value of {QUEUE_VARIABLE} ({', '.join(QUEUES)}), may be repeated; python is "
        f"vLLM's own queue; default: {', '.join(REPLAYED)}",
    )
    replay.add_argument(
        "--block-size",
        type=at_least(1),
        default=16,
        metavar="TOKENS",
        help="tokens in a block; default: %(default)s",
    )
    replay.add_argument(
        "--no-caching", dest="caching", action="store_false", help="switch the prefix cache off"
    )
    replay.add_argument(
        "--chunk",
        type=at_least(1),
        metavar="TOKENS",
        help="tokens of a prompt that are computed in one turn; default: the whole prompt",
    )
    replay.add_argument(
        "--limit", type=at_least(1), metavar="N", help="only the first N requests of the trace"
    )
    replay.add_argument(
        "--arrangement",
        choices=ARRANGEMENTS,
        default=ARRANGEMENTS[0],
        help="order of the requests of a trace with sessions: time, by their timestamps; rotation, "
        "one request of each session in turn; default: %(default)s",
    )
    replay.add_argument(
        "--max-context",
        type=at_least(1),
        metavar="TOKENS",
        help="leave out requests with a longer prompt and answer, and sessions with such a request",
    )
    replay.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the random order in which resident requests take turns; default: %(default)s",
    )
    replay.add_argument(
        "--workers",
        type=at_least(1),
        default=1,
        metavar="N",
        help="queues that are replayed at the same time; default: %(default)s",
    )
    replay.add_argument(
        "--tile",
        type=at_least(1),
        default=0,
        metavar="BLOCKS",
        help="blocks in a tile, for the row 'tile amplification'; default: as many as fit into "
        f"{TILE_TOKENS} tokens, at least one",
    )
    replay.add_argument(
        "--rounds",
        type=at_least(1),
        metavar="N",
        help="tell the figures also for N stretches with the same number of requests; default: for "
        "the rounds of the trace, if it has any",
    )
    add_plot(replay, "the queues beside each other, and maps of their pools")
    replay.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _queue(text: str) -> str:
    """A type of argparse: a value of VLLM_BLOCK_QUEUE."""
    try:
        Settings.from_environ({QUEUE_VARIABLE: text})
    except SettingsError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(QUEUES)}") from error
    return text


def _replay(options: argparse.Namespace) -> int:
    if options.plot:
        from pyblockpool import plots  # before the work: matplotlib may be missing
    queues = list(dict.fromkeys(options.policy or REPLAYED))
    requests = read_requests(
        options.trace,
        limit=options.limit,
        arrangement=options.arrangement,
        residents=options.residents,
        max_context=options.max_context,
    )
    setup = Setup(
        num_blocks=options.blocks,
        residents=options.residents,
        block_size=options.block_size,
        caching=options.caching,
        chunk=options.chunk,
        seed=options.seed,
        tile=options.tile,
        rounds=options.rounds,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {queue: bars.add_task(queue, total=len(requests)) for queue in queues}
        figures = replay_each(
            requests,
            setup,
            queues,
            workers=options.workers,
            progress=lambda queue, admitted: bars.update(tasks[queue], completed=admitted),
        )
    engines = [each.engine for each in figures.values()]
    if options.plot:
        plots.save(plots.picture(engines, "whole tables"), options.plot)
        tell_plot("replay", options.plot)
    if options.json:
        found = {queue: each.as_json() for queue, each in figures.items()}
        show_json({"setup": asdict(setup), "requests": len(requests), "queues": found})
    else:
        show(
            _table(figures, setup),
            f"{options.trace.name}: {len(requests):,} requests, {setup.residents} resident, "
            f"{setup.num_blocks:,} blocks of {setup.block_size} tokens",
        )
        if any(len(engine.rounds) > 1 for engine in engines):
            show("", *tables.of_engines(engines, Choices(setup.tile * setup.block_size)))
    return 0


def _table(figures: dict[str, Figures], setup: Setup) -> FirstThatFits:
    """A column a queue: the names of the figures are long, and queues are few.

    Where there is no room for that, first those are wrapped, then the names of queues.
    """
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("prefix hits", lambda each: number(each.hit_rate, ".2%")),
        (
            "blocks a run, in prompts (2nd half of the requests)",
            lambda each: number(each.prefill.blocks_per_run, ",.1f"),
        ),
        ("blocks a run, in whole tables", lambda each: number(each.release.blocks_per_run, ",.1f")),
        ("longest run, in whole tables", lambda each: f"{each.release.longest_run:,}"),
        ("mergeable, in whole tables", lambda each: number(each.release.mergeable_share, ".1%")),
        (
            f"tile amplification ({counted(setup.tile, 'block')}), in whole tables",
            lambda each: number(each.release.tile_amplification, ".2f"),
        ),
        ("evictions of cached blocks", lambda each: f"{each.evictions:,}"),
        ("early evictions", lambda each: _of_queue(each, "early_evictions")),
        ("shortages", lambda each: _of_queue(each, "shortages")),
        ("preemptions", lambda each: f"{each.preemptions:,}"),
    ]

    def way(longest_name: int | None, wrapped: bool) -> RenderableType:
        table = Table()
        table.add_column(max_width=longest_name)
        for queue in figures:
            heading = re.sub("(?<=[:,])", "\n", queue) if wrapped else queue
            table.add_column(heading, justify="right", overflow="fold")
        for name, text in rows:
            table.add_row(name, *map(text, figures.values()))
        return table

    def ways() -> Iterator[RenderableType]:
        yield way(None, wrapped=False)
        yield way(_LONGEST_NAME, wrapped=False)
        yield way(_LONGEST_NAME, wrapped=True)

    return FirstThatFits(ways)


def _of_queue(figures: Figures, name: str) -> str:
    return f"{figures.queue[name]:,}" if name in figures.queue else "-"
