"""The tables of README.md, bench/RESULTS.md and docs/ are those of the saved results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
import pictures  # it needs matplotlib
import table

SAVED = sorted(table.RESULTS.glob("*.json"))


def test_tables_and_pictures_are_of_the_saved_results() -> None:
    assert table.stale() == []


def test_a_result_that_changes_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in SAVED:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in pictures.PICTURES:
        (tmp_path / name).write_bytes((table.RESULTS / name).read_bytes())
    for module in (table, pictures):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    changed = json.loads((tmp_path / "prefill_cpu.json").read_text())
    for run in changed["runs"]:
        for played in run["rounds"]:
            played["prefill"] *= 2
    (tmp_path / "prefill_cpu.json").write_text(json.dumps(changed))
    assert {path.name for path in table.stale()} == {"README.md", "RESULTS.md", "prefill.svg"}


def commits(saved: Any) -> Iterator[str | None]:
    """All that a result tells, at whatever depth."""
    if isinstance(saved, dict):
        if "commit" in saved:
            yield saved["commit"]
        saved = [*saved.values()]
    if isinstance(saved, list):
        for each in saved:
            yield from commits(each)


def test_the_commits_of_a_result_are_found_at_any_depth() -> None:
    part = {"commit": "b+changes", "provenance": {"commit": "c"}}
    assert [
        *commits({"commit": None, "releases": {"1": {"ours": part}}, "rows": [{"commit": "d"}]})
    ] == [None, "b+changes", "c", "d"]


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_results_tell_where_they_are_from(path: Path) -> None:
    saved = json.loads(path.read_text())
    assert {"date", "commit", "cpu", "python", "vllm", "pyblockpool"} <= set(saved)
    assert saved.get("correct", True) is True
    for commit in commits(saved):
        assert commit, "measured on a state without a name"
        assert not commit.endswith("+changes"), "measured on a state that nobody can go back to"


@pytest.mark.parametrize("places", [0, 2])
def test_each_table_stands_once(places: int) -> None:
    texts = [path.read_text(encoding="utf-8") for path in table.documents()]
    markers = "<!-- begin micro -->", "<!-- end micro -->"
    texts = [*texts, "\n".join(markers)] if places else [t.replace(markers[0], "") for t in texts]
    with pytest.raises(ValueError, match=f"{places} places for the table micro"):
        table.filled_in(texts)
