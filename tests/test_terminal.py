"""What the verbs of the command print alike."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console, RenderableType
from rich.table import Table

from pyblockpool.cli.terminal import FirstThatFits, show, show_json


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


def on_terminal(width: int, *parts: RenderableType) -> list[str]:
    """The lines that a terminal of that width shows."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as shown:
        for part in parts:
            console.print(part)
    return [re.sub("\x1b[^m]*m", "", line) for line in shown.get().splitlines()]


@pytest.mark.parametrize(("width", "shown"), [(80, "a" * 80), (79, "b" * 50), (9, "c" * 9)])
def test_the_first_way_that_fits(width: int, shown: str) -> None:
    """And the last where none does."""
    ways = FirstThatFits(lambda: iter(["a" * 80, "b" * 50, "c" * 10]))
    assert on_terminal(width, ways)[0] == shown
