"""What the verbs of the command print alike."""

from __future__ import annotations

import json

import pytest
from rich.table import Table

from pyblockpool.cli.terminal import show, show_json


def test_nothing_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    for letter in "abc":
        table.add_column(letter * 60)
    show(table, "d" * 200)
    printed = capsys.readouterr().out
    assert "a" * 60 in printed
    assert "c" * 60 in printed
    assert "d" * 200 in printed


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"a": [1, None], "b": "x" * 300})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"a": [1, None], "b": "x" * 300}
