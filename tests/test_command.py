"""The command ``pyblockpool`` as a whole; what its verbs do is tested with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pyblockpool.cli import VERBS, main


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    if arguments == ["--help"]:
        assert all(f"\n    {verb} " in printed for verb in VERBS)
    else:
        example = printed.split("\nexample:\n")[1].splitlines()
        assert len(example) == 1, "a line that can be copied"
        assert example[0].startswith(f"  pyblockpool {arguments[0]} ")


@pytest.mark.parametrize(
    ("arguments", "complaint"), [([], "required: verb"), (["repot"], "invalid choice: 'repot'")]
)
def test_bad_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_verb_loads_what_it_needs_itself() -> None:
    """A compiled module that does not load is a sentence, and stops only who needs it."""
    code = """
import sys
sys.modules["pyblockpool._contiguity"] = None
from pyblockpool.cli import main
assert not any(name.startswith("pyblockpool.cli.re") for name in sys.modules)
sys.exit(main(["report", "x"]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("pyblockpool: the compiled module pyblockpool._contiguity does ")
    assert len(ran.stderr.splitlines()) == 1
