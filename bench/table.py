"""Saved results in bench/results/ -> the tables between markers in README.md; the only writer."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def micro_table(results: dict[str, Any]) -> str:
    lines = [
        "| operation | vLLM's class, ns a block | native, ns a block | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for operation, ns in results["ns_per_block"].items():
        ratio = ns["vllm"] / ns["native"]
        lines.append(
            f"| {operation} | {ns['vllm']:.1f} | {ns['native']:.{1 if ns['native'] > 1 else 2}f} "
            f"| {ratio:.{0 if ratio > 20 else 1}f}x |"
        )
    lines += [
        "",
        f"{results['num_blocks']:,} blocks where no number is given; {results['cpu']}; "
        f"Python {results['python']}, vLLM {results['vllm']}, pyblockpool "
        f"{results['pyblockpool']} ({results['commit']}); {results['date']}.",
    ]
    return "\n".join(lines)


def filled_in(readme: str) -> str:
    """The README with each table made anew."""
    table = micro_table(json.loads((ROOT / "bench/results/micro.json").read_text()))
    begin, end = "<!-- begin micro -->", "<!-- end micro -->"
    filled, count = re.subn(
        f"{begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", readme, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"README.md has {count} places for the table micro, not 1")
    return filled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether README.md agrees")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    filled = filled_in(text)
    if not arguments.check:
        readme.write_text(filled)
    elif text != filled:
        print("README.md does not agree with bench/results/: run `python bench/table.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
