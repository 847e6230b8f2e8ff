"""The command ``pyblockpool`` as a whole; what its verbs do is tested with them."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version

import pytest

import pyblockpool
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


def test_version() -> None:
    """On stdout, as a module and as the command, and with nothing loaded that it does not need."""
    code = """
import sys
sys.modules["pyblockpool._contiguity"] = sys.modules["rich"] = None
from pyblockpool.cli import main
main(["--version"])
"""
    for arguments in (["-m", "pyblockpool", "--version"], ["-c", code]):
        ran = subprocess.run(
            [sys.executable, *arguments], cwd="/", capture_output=True, text=True, check=False
        )
        expected = f"pyblockpool {version('pyblockpool')}\n"
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected, "")


def test_a_version_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_metadata(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", no_metadata)
    monkeypatch.delitem(vars(pyblockpool), "__version__", raising=False)
    assert main(["--version"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pyblockpool: pyblockpool is not installed: ")


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
