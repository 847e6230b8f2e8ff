"""The command ``pyblockpool``: a module a verb, whose ``add_to`` adds its parser."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import pyblockpool
from pyblockpool.errors import BlockQueueError

VERBS = ("doctor", "report", "replay")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 with a sentence on stderr, or 2 for bad usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = "pyblockpool"
    # Names of files and models are not for every encoding, and some file names for none.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser(given).parse_args(given)
        command += f" {options.verb}"
        return int(options.run(options))
    except BrokenPipeError:  # the reader of a pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BlockQueueError, OSError, ImportError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Version(argparse.Action):
    """Like argparse's, but the version, which may be missing, is read only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        print("pyblockpool", pyblockpool.__version__)
        parser.exit()


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Of the verb that is asked for alone, so that each can do without what others need."""
    parser = argparse.ArgumentParser(
        prog="pyblockpool", description="A native KV-cache free-block queue for vLLM: its tools."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    verbs = parser.add_subparsers(dest="verb", required=True)
    asked_for = arguments[:1] if arguments and arguments[0] in VERBS else VERBS
    for verb in () if arguments[:1] == ["--version"] else asked_for:
        import_module(f"{__name__}.{verb}").add_to(verbs)
    return parser
