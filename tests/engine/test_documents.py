"""What the documents tell users to try first, as it stands, on real engines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, Block, all_blocks
from tiny_llama import engine_environment

pytestmark = pytest.mark.engine

# Rounds of requests with a reset of the prefix cache after each.
MY_LOOP = """
from report_scenes import main

if __name__ == "__main__":
    main({model!r}, "tokens.json", "cache")
"""
RECORDING = [block for block in all_blocks("bash") if "my_loop.py" in block.text]


def test_the_documents_agree_on_what_to_try() -> None:
    assert len(RECORDING) > 1
    assert len({block.text for block in RECORDING}) == 1


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the block was run, but for its `pip install`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_loop.py").write_text(MY_LOOP.format(model=str(model)), encoding="utf-8")
    environment = engine_environment(folder / "record.jsonl", None)
    search_path = [str(Path(__file__).parent), environment["PYTHONPATH"]]
    commands = Path(sys.executable).parent
    environment |= {
        "PYTHONPATH": os.pathsep.join(search_path),
        "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
        "COLUMNS": "200",
    }
    lines = [line for line in RECORDING[0].text.splitlines() if not line.startswith("pip ")]
    assert len(lines) == 3
    ran = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    (folder / "stdout").write_text(ran.stdout, encoding="utf-8")
    return folder


def test_two_traces_and_a_picture(folder: Path) -> None:
    assert (folder / "rounds.png").read_bytes().startswith(b"\x89PNG")
    for name in ("stock.jsonl", "native.jsonl"):
        header, *_ = (folder / name).read_text(encoding="utf-8").splitlines()
        assert json.loads(header)["implementation"] == ("vllm" if "stock" in name else "native")


def shown(block: Block) -> list[list[str]]:
    """The rows of an example of a report: engine, round and figures."""
    rows = []
    engine = ""
    for line in block.text.splitlines()[1:]:
        cells = line.split()
        if not cells[0].isdigit():
            engine, *cells = cells
        rows.append([engine, *cells])
    return rows


SHOWN = [block for block in all_blocks("") if block.text.startswith("engine  round")]


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_the_example_of_a_report(block: Block, folder: Path) -> None:
    """Its figures are those of the prompts of this very loop."""
    files = [folder / name for name in ("stock.jsonl", "native.jsonl")]
    ran = subprocess.run(
        [sys.executable, "-m", "pyblockpool", "report", *map(str, files), "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    engines = {engine["label"]: engine for engine in json.loads(ran.stdout)["engines"]}
    expected = shown(block)
    assert len(expected) == 4
    found = []
    for label, number, *_ in expected:
        figures = engines[label]["rounds"][int(number) - 1]
        prompts = figures["groups"][0]["prompts"]
        found.append(
            [
                label,
                number,
                str(figures["finished"]),
                f"{prompts['blocks_per_run']:.1f}",
                f"{prompts['tile_amplification']:.2f}",
                f"{prompts['mergeable_share']:.1%}",
            ]
        )
    assert found == expected


def test_the_examples_are_those_that_are_run() -> None:
    """In test_examples.py, on a tiny model."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"examples/(\w+\.py)", text))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}
