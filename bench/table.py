"""Saved results in bench/results/ -> the tables between markers in README.md; the only writer."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

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

RESET = "order reset "
POLICIES = "policies: "
FLAT = "flat: "
CONTIGUITY = "contiguity: "


def micro_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| operation | vLLM's class, ns a block | native, ns a block | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        if not operation.startswith((RESET, POLICIES, FLAT, CONTIGUITY)):
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
            f"| {row['running']}, {row['prompt']:,} + {row['output']} | {step:.1f} "
            f"| {row['hooks_percent']:.1f}% | {low:.1f}% to {high:.1f}% "
            f"| {row['writer_percent']:.1f}% |"
        )
    return [*lines, "", provenance(results)]


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
    return (
        f"{results['cpu']}; Python {results['python']}, vLLM {results['vllm']}, pyblockpool "
        f"{results['pyblockpool']} ({results['commit']}); {results['date']}."
    )


# The results that a table is made of -> its name in the README, what makes it.
TABLES = {
    "micro": {
        "micro": micro_table,
        "reset": reset_table,
        "policies": policies_table,
        "flat": flat_table,
    },
    "replay": {"replay": replay_table, "runs": runs_table},
    "trace": {"trace": trace_table},
}


def filled_in(readme: str) -> str:
    """The README with each table made anew."""
    for file, tables in TABLES.items():
        results = json.loads((RESULTS / f"{file}.json").read_text())
        for name, table in tables.items():
            begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
            text = "\n".join([begin, *table(results), end])
            pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
            readme, count = pattern.subn(lambda _, text=text: text, readme)  # type: ignore[misc]
            if count != 1:
                raise ValueError(f"README.md has {count} places for the table {name}, not 1")
    return readme


def fill_in() -> None:
    """Set the tables into the README."""
    path = ROOT / "README.md"
    path.write_text(filled_in(path.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether README.md agrees")
    if not parser.parse_args().check:
        fill_in()
        return 0
    text = (ROOT / "README.md").read_text()
    if text != filled_in(text):
        print("README.md does not agree with bench/results/: run `python bench/table.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
