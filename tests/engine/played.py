"""What is left of a script of this folder that ran engines: the fixture `play_scenes` makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Played:
    """
    Attributes:
        result: what the script wrote.
        record: lines of `RecordingScheduler`; none where the engines had another scheduler.
        log: stdout and stderr of the script.
    """

    result: dict[str, Any]
    record: list[dict[str, Any]]
    log: str


PlayScenes: TypeAlias = Callable[..., Played]
