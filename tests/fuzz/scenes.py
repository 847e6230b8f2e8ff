"""What the scenes of the fuzzer have in common.

A *scene* is a few queues, or pools, under one setting, each of them there once for each *side*: the
native implementation and its rivals. An *operation* is a list that JSON can hold,
`[verb, which queue, arguments...]`; blocks are named by their ids. A scene plays it on all sides
and raises `Divergence` where they do not do the same. It knows which operations are legal in the
state that it is in, and can be told any: it leaves out those that have no meaning in that state,
so that a sequence from which operations were taken away can still be played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, ClassVar, Protocol, TypeAlias

Ids: TypeAlias = list[int]
Operation: TypeAlias = list[Any]
Do: TypeAlias = Callable[[Operation], Any]

# The sizes of extents that are played; others are powers of two as well.
SIZES = (1, 2, 2, 4, 4, 8, 8, 16, 64)


class Divergence(AssertionError):
    """Two sides differ, or one is broken."""


class Scene(Protocol):
    def do(self, operation: Operation) -> Any:
        """Play one operation on all sides; returns the ids that were handed out, if any were."""

    def glance(self) -> None:
        """What can be compared after each operation: the counts, and each `check()`."""

    def look(self) -> None:
        """Compare all that can be seen."""


class Setting(Protocol):
    """What a scene is made of; a frozen dataclass of numbers, strings, and lists of them."""

    kind: ClassVar[str]

    @property
    def policy(self) -> str: ...

    @property
    def num_ids(self) -> int:
        """Block ids are below this."""

    def scene(self) -> Scene: ...

    def simpler(self) -> Iterator[Setting]:
        """Settings in which a failure would be easier to understand, the simplest first."""


class Player(Protocol):
    def play(self) -> None:
        """Choose one thing to do and do it: an operation or a few."""


class SceneKind(Protocol):
    """The module of a kind of scene."""

    def random_setting(self, chance: Random, policy: str) -> Setting: ...

    def player(self, chance: Random, scene: Any, do: Do) -> Player: ...


def pick(chance: Random, items: Any) -> Any:
    """`chance.choice(items)`, in a fraction of the time."""
    return items[int(chance.random() * len(items))]


def below(chance: Random, limit: int) -> int:
    return int(chance.random() * limit)


def some(chance: Random, most: int, size: int) -> int:
    """How many blocks to ask for, 1 to `most`: often one, often whole extents, sometimes all."""
    kind = chance.random()
    if kind < 0.35 or most <= 1:
        return 1
    if kind < 0.6:
        n = 1 + below(chance, 6)
    elif kind < 0.75:
        n = size * (1 + below(chance, 3))
    elif kind < 0.97:
        n = 1 + below(chance, most)
    else:
        n = most
    return min(n, most)
