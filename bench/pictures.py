"""The pictures of saved results, as SVG beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

RESULTS = Path(__file__).parent / "results"

# Of Okabe and Ito (Color Universal Design, 2008), which colour-blind people can tell apart.
_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_PURPLE, _BLACK = "#CC79A7", "#000000"

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.hashsalt": "pyblockpool",
}

# Variants of a prefill: colour, marker.
_VARIANTS = {
    "vLLM": (_VERMILLION, "o"),
    "reorder only": (_ORANGE, "s"),
    "native + reset": (_BLUE, "D"),
    "sorted": (_PURPLE, "^"),
    "extent": (_GREEN, "v"),
}
_SCENES = {
    "idle": "pool idle between prompts",
    "busy": "requests always in flight",
}


def _prefill(results: dict[str, Any], figure: Figure) -> None:
    """Round by round, KV tile 128; medians over repetitions."""
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (scene, title) in zip(axes, _SCENES.items(), strict=True):
        for name, (colour, marker) in _VARIANTS.items():
            repetitions = [
                [each["prefill"] for each in run["rounds"]]
                for run in results["runs"]
                if run["variant"] == name
                and (run["shape"]["scene"], run["shape"]["tile"]) == (scene, 128)
                and (run["shape"]["num_blocks"], run["shape"]["prompt"]) == (2_400, 4_000)
            ]
            by_round = list(zip(*repetitions, strict=True))
            numbers = range(1, len(by_round) + 1)
            middle = [median(each) for each in by_round]
            ax.plot(numbers, middle, color=colour, marker=marker, markersize=5, label=name)
        ax.set_title(title)
        ax.set_xlabel("round")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(bottom=0)
    prompt = results["runs"][0]["shape"]["prompt"]
    axes[0].set_ylabel(f"prefill of {prompt:,} tokens, s")
    axes[1].legend(loc="center right")
    figure.suptitle(
        "vLLM with FlexAttention, KV tile of 128 tokens, blocks of 16, on 2 CPU cores", fontsize=11
    )


# Queues of a replay: colour, marker, name.
_QUEUES = {
    "python": (_VERMILLION, "o", "vLLM"),
    "native:sorted": (_PURPLE, "^", "sorted"),
    "native:extent,size=8": (_GREEN, "v", "extent, 8 blocks"),
    "native:extent,size=8,pack_tails": (_BLUE, "D", "extent, 8 blocks, tails packed"),
    "native:extent,size=16": (_BLACK, "P", "extent, 16 blocks"),
}


def _hits(results: dict[str, Any], figure: Figure) -> None:
    """What each policy gives and what it costs, a line for each trace with a prefix cache."""
    rows = [row for row in results["rows"] if row["queues"]["python"]["hit_rate"]][::-1]
    runs, hits = figure.subplots(1, 2, sharey=True)
    for y, row in enumerate(rows):
        found = [row["queues"][name] for name in _QUEUES]
        for (colour, marker, name), queue in zip(_QUEUES.values(), found, strict=True):
            style = {"color": colour, "marker": marker, "s": 36, "label": "" if y else name}
            runs.scatter(queue["release"]["blocks_per_run"], y, **style)
            hits.scatter(100 * (queue["hit_rate"] - found[0]["hit_rate"]), y, **style)
    names = [f"{row['name']}\n{row['setup']['num_blocks']:,} blocks" for row in rows]
    runs.set_yticks(range(len(rows)), names, fontsize=8)
    runs.set_xscale("log")
    runs.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    runs.set_xlabel("blocks a run, in tables at their end")
    hits.set_xlabel("prefix hits against vLLM's queue, percentage points")
    figure.legend(*runs.get_legend_handles_labels(), loc="outside upper center", ncols=5)


# File beside the results -> the results it is made of, what draws it, its size in inches.
PICTURES: dict[str, tuple[str, Callable[[dict[str, Any], Figure], None], tuple[float, float]]] = {
    "prefill.svg": ("prefill_cpu.json", _prefill, (9.0, 4.0)),
    "hits.svg": ("replay.json", _hits, (10.0, 4.5)),
}


def is_current(name: str) -> bool:
    """Whether the picture was made of the results that are there."""
    path = RESULTS / name
    return path.exists() and _digest(name) in path.read_text(encoding="utf-8")


def draw(name: str) -> None:
    file, paint, size = PICTURES[name]
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(results, figure)
        figure.savefig(RESULTS / name, metadata={"Date": None, "Description": _digest(name)})


def _digest(name: str) -> str:
    results = (RESULTS / PICTURES[name][0]).read_bytes()
    return f"of {PICTURES[name][0]}, sha256 {hashlib.sha256(results).hexdigest()}"
