"""The command ``pyblockpool``: a module a verb, whose ``add_to`` adds its parser."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pyblockpool.cli import doctor, replay
from pyblockpool.errors import BlockQueueError

VERBS = (doctor, replay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 with a sentence on stderr, or 2 for bad usage."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of a pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BlockQueueError, OSError, ImportError) as error:
        print(f"pyblockpool {options.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyblockpool", description="A native KV-cache free-block queue for vLLM: its tools."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    return parser
