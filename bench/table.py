"""Saved results in bench/results/ -> tables and pictures; the only writer of both.

Tables stand between markers in README.md, bench/RESULTS.md and docs/, pictures are files beside the
results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pictures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"

# As they are called in the saved replays -> in the README.
REPLAYED = {
    "python": "vLLM",
    "native:sorted": "`sorted`",
    "native:extent,size=8": "E = 8",
    "native:extent,size=16": "E = 16",
    "native:extent,size=8,pack_tails": "E = 8, packed",
}

# As they are called in the saved prefills -> in tables.
VARIANTS = {
    "vLLM": "vLLM",
    "reorder only": "reorder only",
    "native + reset": "`native` + reset",
    "sorted": "`sorted`",
    "extent": "`extent`",
}

RESET = "order reset "
POLICIES = "policies: "
FLAT = "flat: "
CONTIGUITY = "contiguity: "
# Each operation alone, and some pairs: too many for the README.
QUEUE = "queue: "
POOL = "pool: "


def micro_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| operation | vLLM's class, ns a block | native, ns a block | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        if not operation.startswith((RESET, POLICIES, FLAT, CONTIGUITY, QUEUE, POOL)):
            ratio = times(ns["vllm"] / ns["native"])
            lines.append(f"| {operation} | {ns['vllm']:.1f} | {ns['native']:.1f} | {ratio} |")
    return [*lines, "", f"{results['num_blocks']:,} blocks; {provenance(results)}"]


def reset_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| blocks | rebuilt in Python, ms | `python`, ms | `native`, ms | rebuilt / native |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        if operation.startswith(RESET):
            blocks = operation.removeprefix(RESET)
            ms = {name: each * int(blocks.replace(",", "")) / 1e6 for name, each in ns.items()}
            lines.append(
                f"| {blocks} | {ms['rebuild']:.1f} | {ms['python']:.1f} | {ms['native']:.3f} "
                f"| {times(ms['rebuild'] / ms['native'])} |"
            )
    return [*lines, "", provenance(results)]


def policies_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| operation, ns a block | `lru` | `sorted` | `extent` |",
        "| --- | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        if operation.startswith(POLICIES):
            cells = [f"{ns['lru']:.1f}"]
            cells += [
                f"{ns[name]:.1f} ({ns[name] / ns['lru']:.2f}x)" for name in ("sorted", "extent")
            ]
            lines.append(f"| {operation.removeprefix(POLICIES)} | {' | '.join(cells)} |")
    return [*lines, "", f"{results['num_blocks']:,} blocks, all cached; {provenance(results)}"]


def flat_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| blocks | 512 a call, cached | 512 a call, fragmented | growth by one, fragmented |",
        "| ---: | ---: | ---: | ---: |",
    ]
    rows: dict[str, dict[str, str]] = {}
    for operation, ns in results["ns_per_block"].items():
        if operation.startswith(FLAT):
            name, blocks = operation.removeprefix(FLAT).split(", ")
            cell = " / ".join(f"{ns[policy]:.1f}" for policy in ("lru", "sorted", "extent"))
            rows.setdefault(blocks, {})[name] = cell
    for blocks, cells in rows.items():
        lines.append(
            f"| {blocks} | {cells['cached']} | {cells['fragmented']} | {cells['growth']} |"
        )
    return [*lines, "", f"ns a block, `lru` / `sorted` / `extent`; {provenance(results)}"]


def pool_table(results: dict[str, Any]) -> list[str]:
    ours = ("native", "sorted", "extent")
    lines = [
        "| operation of `BlockPool`, ns a block | vLLM's class | native | `sorted` | `extent` |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        if operation.startswith(POOL):
            cells = [f"{ns[name]:.0f} ({ns['vllm'] / ns[name]:.2f}x)" for name in ours]
            name = operation.removeprefix(POOL)
            lines.append(f"| {name} | {ns['vllm']:.0f} | {' | '.join(cells)} |")
    return [*lines, "", f"{results['num_blocks']:,} blocks; {provenance(results)}"]


def every_micro_table(results: dict[str, Any]) -> list[str]:
    """Each operation that was measured, with quartiles; one table for each set of rivals."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for operation, ns in results["ns_per_block"].items():
        groups.setdefault(tuple(ns), []).append(operation)
    lines = []
    for names, operations in groups.items():
        lines += [
            f"| operation, ns a block (quartiles) | {' | '.join(names)} |",
            f"| --- |{' ---: |' * len(names)}",
        ]
        for operation in operations:
            ns = results["ns_per_block"][operation]
            cells = []
            for name in names:
                low, high = results["quartiles"][operation][name]
                ratio = "" if name == names[0] else f", {ns[names[0]] / ns[name]:.2f}x"
                cells.append(f"{ns[name]:.1f} ({low:.1f} to {high:.1f}){ratio}")
            lines.append(f"| {operation} | {' | '.join(cells)} |")
        lines.append("")
    repeats, rounds = results["repeats"], results["rounds"]
    measured = f"{rounds} rounds in each of {repeats} repeats"
    return [*lines, f"{results['num_blocks']:,} blocks; {measured}; {provenance(results)}"]


def replay_table(results: dict[str, Any]) -> list[str]:
    columns = [f"tiles: {REPLAYED['python']}", *list(REPLAYED.values())[1:]]
    columns += ["hits: vLLM, `sorted`", *list(REPLAYED.values())[2:]]
    lines = replay_header(columns)
    for row in results["rows"]:
        found = {name: row["queues"][name] for name in REPLAYED}
        cells = [f"{each['release']['tile_amplification']:.2f}" for each in found.values()]
        del found["native:sorted"]  # asserted to be those of vLLM
        caching = row["setup"]["caching"]
        cells += [f"{each['hit_rate']:.2%}" if caching else "off" for each in found.values()]
        lines.append(replay_line(row, cells))
    return [*lines, "", provenance(results)]


def runs_table(results: dict[str, Any]) -> list[str]:
    lines = replay_header(list(REPLAYED.values()))
    for row in results["rows"]:
        found = [row["queues"][name] for name in REPLAYED]
        cells = [
            " / ".join(short(each[when]["blocks_per_run"]) for when in ("prefill", "release"))
            for each in found
        ]
        lines.append(replay_line(row, cells))
    return lines


def trace_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| running requests, tokens of prompt + answer | a step, ms | in the step | quartiles "
        "| writing thread |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        low, high = row["hooks_percent_quartiles"]
        step = row["step_us"] / 1000
        lines.append(
            f"| {row['running']}, {row['prompt']:,} + {row['output']:,} | {step:.1f} "
            f"| {row['hooks_percent']:.1f}% | {low:.1f}% to {high:.1f}% "
            f"| {row['writer_percent']:.1f}% |"
        )
    return [*lines, "", provenance(results)]


def prefill_table(results: dict[str, Any]) -> list[str]:
    """The tiles and scenes of the headline."""
    told = [("idle", 128), ("busy", 128), ("idle", 16), ("busy", 16)]
    rows = {(s["scene"], s["tile"]): runs for s, runs in prefill_shapes(results) if is_default(s)}
    return [
        *prefill_header("requests between prompts, KV tile"),
        *(prefill_line(f"{scene}, {tile} tokens", rows[scene, tile]) for scene, tile in told),
        "",
        provenance(results),
    ]


def prefill_shapes_table(results: dict[str, Any]) -> list[str]:
    lines = prefill_header("scene, backend, KV tile: blocks; prompts x samples of tokens")
    for shape, runs in prefill_shapes(results):
        name = (
            f"{shape['scene']}, {shape['backend']}, {shape['tile']}: {shape['num_blocks']:,}; "
            f"{shape['prompts']} x {shape['samples']} of {shape['prompt']:,}"
        )
        lines.append(prefill_line(name, runs))
    return [*lines, "", provenance(results)]


def decode_table(results: dict[str, Any]) -> list[str]:
    return [
        *prefill_header("tokens of prompt + answer"),
        *(
            prefill_line(f"{shape['prompt']:,} + {shape['output']:,}", runs, "decode")
            for shape, runs in prefill_shapes(results)
            if shape["output"] > 1
        ),
        "",
        provenance(results),
    ]


def rounds_table(scene: str) -> Callable[[dict[str, Any]], list[str]]:
    """Round by round, with a KV tile of 128 tokens."""

    def table(results: dict[str, Any]) -> list[str]:
        (runs,) = (
            runs
            for shape, runs in prefill_shapes(results)
            if is_default(shape) and (shape["scene"], shape["tile"]) == (scene, 128)
        )
        lines = [
            f"| round | {' | '.join(VARIANTS.values())} |",
            f"| ---: |{' ---: |' * len(VARIANTS)}",
        ]
        for number in range(len(runs["vLLM"][0])):
            cells = []
            for variant in VARIANTS:
                rounds = [rounds[number] for rounds in runs[variant]]
                ms = sorted(1000 * each["prefill"] for each in rounds)
                cells.append(
                    f"{median(ms):,.0f} ({ms[0]:,.0f} to {ms[-1]:,.0f}), "
                    f"{rounds[0]['tile_amplification']:.1f}"
                )
            lines.append(f"| {number + 1} | {' | '.join(cells)} |")
        return [
            *lines,
            "",
            f"Milliseconds of prefill, median (least to most) of {len(runs['vLLM'])} repetitions, "
            f"and tile amplification; {provenance(results)}",
        ]

    return table


Rounds = list[dict[str, Any]]


def prefill_shapes(
    results: dict[str, Any],
) -> Iterator[tuple[dict[str, Any], dict[str, list[Rounds]]]]:
    """Shapes -> variants -> the rounds of each repetition."""
    found: dict[str, dict[str, list[Rounds]]] = {}
    for run in results["runs"]:
        of_shape = found.setdefault(json.dumps(run["shape"]), {})
        of_shape.setdefault(run["variant"], []).append(run["rounds"])
    for shape, runs in found.items():
        yield json.loads(shape), runs


def is_default(shape: dict[str, Any]) -> bool:
    """Whether only its scene and its tile are its own."""
    return (shape["num_blocks"], shape["prompt"]) == (2_400, 4_000) and shape["samples"] == 1


def prefill_header(first: str) -> list[str]:
    return [
        f"| {first} | repetitions | {' | '.join(VARIANTS.values())} |",
        f"| --- | ---: |{' ---: |' * len(VARIANTS)}",
    ]


def prefill_line(name: str, runs: dict[str, list[Rounds]], what: str = "prefill") -> str:
    cells = []
    for variant in VARIANTS:
        # A single round of a single repetition can be disturbed.
        first, last = (
            median(each[what] for rounds in runs[variant] for each in rounds[at])
            for at in (slice(1), slice(-3, None))
        )
        tiles = runs[variant][0][-1]["tile_amplification"]
        ms = f"{1000 * first:,.0f} → {1000 * last:,.0f} ms"
        cells.append(f"{ms}, {times(last / first)} ({tiles:.1f})")
    return f"| {name} | {len(runs['vLLM'])} | {' | '.join(cells)} |"


def scheduler_table(results: dict[str, Any]) -> list[str]:
    columns = ["vLLM, again", "native", "sorted", "extent"]
    lines = [
        "| 256 running, prompt + answer | blocks | a step, ms | in the queue | "
        f"{' | '.join(columns)} |",
        f"| --- | ---: | ---: | ---: |{' ---: |' * len(columns)}",
    ]
    for row in results["rows"]:
        load = f"{row['prompt']:,} + {row['output']}"
        load += ", shared prefixes" if row["prefixes"] else ""
        cells = []
        for name in columns:
            low, middle, high = (f"{100 * (each - 1):+.1f}" for each in row["ratios"][name])
            cells.append(f"{middle}% ({low} to {high})")
        lines.append(
            f"| {load} | {row['num_blocks']:,} | {row['step_us'] / 1000:.2f} "
            f"| {row['queue_percent'][1]:.1f}% | {' | '.join(cells)} |"
        )
    return [*lines, "", provenance(results)]


def kernel_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| prompt, KV tile | id order, ms | reversed | shuffled | aged |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results["prefill"]:
        name = f"{row['prompt']:,}, {row['tile']}"
        rows.setdefault(name, {})[row["table"]] = row
    for name, tables in rows.items():
        cells = [f"{1000 * tables['id order']['seconds']['median']:.1f}"]
        cells += [
            f"{tables[table]['ratio']:.2f}x ({tables[table]['tile_amplification']:.1f})"
            for table in ("reversed", "shuffled", "aged")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", provenance(results)]


def gather_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| prompt | id order, GB/s | reversed | shuffled | aged |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    for row in results["gather"]:
        rows.setdefault(row["prompt"], {})[row["table"]] = row
    for prompt, tables in rows.items():
        cells = [f"{tables['id order']['gb_per_second']:.1f}"]
        cells += [f"{tables[name]['ratio']:.2f}x" for name in ("reversed", "shuffled", "aged")]
        lines.append(f"| {prompt:,} | {' | '.join(cells)} |")
    return [*lines, "", provenance(results)]


def transfer_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| bytes a block and region, way | queue | blocks a run | descriptors a table | "
        "a copy a block, GB/s | a copy a run, GB/s | against vLLM's tables |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        low, middle, high = row["run"]["ratio"]
        lines.append(
            f"| {row['layout']['block_bytes']:,}, {row['way']} | {row['queue']} "
            f"| {row['blocks'] / row['runs']:.1f} | {row['descriptors'] / row['tables']:,.0f} "
            f"| {row['block']['gb_per_s'][1]:.1f} | {row['run']['gb_per_s'][1]:.1f} "
            f"| {middle:.2f}x ({low:.2f} to {high:.2f}) |"
        )
    return [*lines, "", f"{results['tables_from']}; {provenance(results)}"]


def compat_table(results: dict[str, Any]) -> list[str]:
    """A column without any result is left out."""
    names = [
        *("vLLM", "`native`, order reset", "`sorted`, `extent`", "block trace", "lazy CPU offload"),
        *("tests of ours", "vLLM's own tests, its queue / ours", "engines on the CPU"),
    ]
    rows = [
        [
            version,
            *scene_cells(found.get("scene")),
            tests_cell(found.get("ours")),
            upstream_cell(found.get("upstream")),
            tests_cell(found.get("engine")),
        ]
        for version, found in results["releases"].items()
    ]
    columns = [
        [name, "---", *cells]
        for name, *cells in zip(names, *rows, strict=True)
        if not {*cells} <= {"not run", "-"}
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]
    return [*lines, "", *compat_provenances(results)]


def compat_provenances(results: dict[str, Any]) -> list[str]:
    """Where the parts are from: one line for all that differ in their commit only."""
    top = {name: results[name] for name in results if name != "releases"}
    commits: dict[str, set[str]] = {}
    for found in results["releases"].values():
        for part in found.values():
            # Older parts tell their commit alone.
            origin = part.get("provenance", top) | {"vllm": None, "commit": None}
            known = commits.setdefault(json.dumps(origin, sort_keys=True), set())
            known.add(part["commit"] or "no commit")
    return [
        provenance(json.loads(origin) | {"commit": ", ".join(sorted(known))})
        for origin, known in commits.items()
    ]


def scene_cells(scene: dict[str, Any] | None) -> list[str]:
    """What the plugin says and does; "no result" for what the scene did not come to."""
    if scene is None:
        return ["not run"] * 4
    verdicts, lives = scene.get("verdicts", {}), scene.get("lives", {})

    def cell(*values: str) -> str:
        if not verdicts:
            return "no result"
        if any(verdicts[value] for value in values):
            return "refused"
        told = [lives.get(value) for value in values]
        if any(told):
            return "differs"
        return "no result" if None in told else "yes"

    if not verdicts:
        trace = "no result"
    elif verdicts["python"]:
        trace = "not run"
    else:
        trace = "refused" if verdicts["trace"] else "yes"
    walk = "no result"
    if "walk" in scene:
        walk = {None: "-", "": "yes"}.get(scene["walk"], "differs")
    return [cell("python", "native"), cell("native:sorted", "native:extent"), trace, walk]


def tests_cell(ran: dict[str, Any] | None) -> str:
    if ran is None:
        return "not run"
    if ran.get("problems"):
        return "no result"
    counts = [
        (ran["passed"], "passed"),
        (ran["skipped"], "skipped"),
        (len(ran["failed"]), "failed"),
    ]
    return ", ".join(f"{count} {what}" for count, what in counts if count or what == "passed")


def upstream_cell(ran: dict[str, Any] | None) -> str:
    if ran is None:
        return "not run"
    if ran["problems"]:
        return "no result"
    diverge = f", {len(ran['divergences'])} differ" if ran["divergences"] else ""
    return f"{ran['passed']['stock']} / {ran['passed']['ours']} passed{diverge}"


def replay_header(columns: list[str]) -> list[str]:
    return [
        f"| trace | blocks / resident | {' | '.join(columns)} |",
        f"| --- | ---: |{' ---: |' * len(columns)}",
    ]


def replay_line(row: dict[str, Any], cells: list[str]) -> str:
    setup = row["setup"]
    engine = f"{setup['num_blocks']:,} / {setup['residents']}"
    return f"| {row['name']} | {engine} | {' | '.join(cells)} |"


def short(number: float) -> str:
    return f"{number:,.{1 if number < 10 else 0}f}"


def times(ratio: float) -> str:
    return f"{ratio:.{0 if ratio > 20 else 1}f}x"


def provenance(results: dict[str, Any]) -> str:
    machine = (
        results["cpu"] if results.get("gpu") is None else f"{results['gpu']}; {results['cpu']}"
    )
    versions = [f"Python {results['python']}"]
    for package, name in (("torch", "PyTorch"), ("vllm", "vLLM")):
        if results.get(package):  # older results do not tell PyTorch
            versions.append(f"{name} {results[package]}")
    ours = f"pyblockpool {results['pyblockpool']} ({results['commit']})"
    return f"{machine}; {', '.join([*versions, ours])}; {results['date']}."


# The results that a table is made of -> its name in the documents, what makes it.
TABLES: dict[str, dict[str, Callable[[dict[str, Any]], list[str]]]] = {
    "micro": {
        "micro": micro_table,
        "pool": pool_table,
        "reset": reset_table,
        "policies": policies_table,
        "flat": flat_table,
        "every-micro": every_micro_table,
    },
    "prefill_cpu": {
        "prefill": prefill_table,
        "prefill-shapes": prefill_shapes_table,
        "prefill-idle": rounds_table("idle"),
        "prefill-busy": rounds_table("busy"),
        "decode": decode_table,
    },
    "kernel_cpu": {"kernel": kernel_table, "gather": gather_table},
    "transfer_cpu": {"transfer": transfer_table},
    "scheduler": {"scheduler": scheduler_table},
    "replay": {"replay": replay_table, "runs": runs_table},
    "trace": {"trace": trace_table},
    "compat": {"compat": compat_table},
}


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "bench" / "RESULTS.md", *sorted(ROOT.glob("docs/*.md"))]


def filled_in(texts: list[str]) -> list[str]:
    """The documents with each table made anew.

    Raises:
        ValueError: a table stands nowhere, or twice.
    """
    found: Counter[str] = Counter()
    for file, tables in TABLES.items():
        results = json.loads((RESULTS / f"{file}.json").read_text())
        for name, table in tables.items():
            begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
            text = "\n".join([begin, *table(results), end])
            pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
            for at, before in enumerate(texts):
                texts[at], count = pattern.subn(lambda _, text=text: text, before)  # type: ignore[misc]
                found[name] += count
            if found[name] != 1:
                raise ValueError(f"there are {found[name]} places for the table {name}, not 1")
    return texts


def fill_in() -> None:
    """Write the tables into the documents, and draw the pictures."""
    paths = documents()
    texts = filled_in([path.read_text(encoding="utf-8") for path in paths])
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    for name in pictures.PICTURES:
        pictures.draw(name)


def stale() -> list[Path]:
    """The documents and pictures that do not agree with the results."""
    paths = documents()
    before = [path.read_text(encoding="utf-8") for path in paths]
    found = [path for path, a, b in zip(paths, before, filled_in([*before]), strict=True) if a != b]
    return found + [RESULTS / name for name in pictures.PICTURES if not pictures.is_current(name)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether they agree")
    if not parser.parse_args().check:
        fill_in()
        return 0
    for path in (found := stale()):
        print(f"{path.relative_to(ROOT)} does not agree with bench/results/*.json")
    if found:
        print("run `python bench/table.py`")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
