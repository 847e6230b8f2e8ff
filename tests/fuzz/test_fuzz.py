"""What the fuzzer has found is played again; and the fuzzer itself finds what it should."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import campaign
import cases
import pytest
from cases import FOLDER, Case, in_a_child, outcome, replay
from implementations import HAS_VLLM, QUEUES
from patient_reference import PatientReference
from rich.console import Console
from scenes import Divergence

from pyblockpool.reference import ExtentOrder

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
    # Newer Pythons warn of a fork beside threads: the child runs none of theirs.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_what_failed_once(path: Path) -> None:
    replay(Case.read(path))


def seed_of(kind: str, policy: str) -> int:
    """The first batch of such sequences."""
    return next(seed for seed in count() if campaign.batch_of(seed) == (kind, policy))


@pytest.mark.parametrize(("kind", "policy"), campaign.BATCHES)
def test_a_part_of_a_batch(kind: str, policy: str) -> None:
    played = campaign.play_batch(seed_of(kind, policy), operations=3000)
    assert isinstance(played, int), played
    assert played >= 3000


def logged(seed: int) -> list[Any]:
    sequence = next(campaign.sequences(seed))
    sequence.play()
    return [sequence.setting, sequence.log]


@pytest.mark.parametrize(("kind", "policy"), campaign.BATCHES)
def test_a_seed_says_everything(kind: str, policy: str) -> None:
    seed = seed_of(kind, policy)
    assert logged(seed) == logged(seed)


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


def one_worker(console: Console, kind: str, policy: str) -> campaign.Campaign:
    started = time.monotonic()
    return campaign.Campaign(
        seed_of(kind, policy), 1, lambda _: time.monotonic() - started > 60, console
    )


def append_backwards(queue: Any, blocks: list[Any]) -> None:
    for block in reversed(blocks):
        queue.append(block)


def forget_to_doom(order: Any, extent: int) -> None:
    """Cached blocks of an opened extent stay where they were."""


@pytest.mark.parametrize(
    ("kind", "policy", "broken", "name", "fault", "most"),
    [
        ("queue", "extent", ExtentOrder, "_doom", forget_to_doom, 8),
        ("queue", "lru", QUEUES.get("vllm"), "append_n", append_backwards, 4),
        ("pool", "lru", QUEUES.get("vllm"), "append_n", append_backwards, 8),
        ("pool", "extent", ExtentOrder, "_complete", lambda order, extent: None, 8),
        ("pool", "sorted", PatientReference, "prepend_n", PatientReference.append_n, 8),
    ],
)
def test_a_fault_is_found_shrunk_and_kept(
    kind: str,
    policy: str,
    broken: Any,
    name: str,
    fault: Any,
    most: int,
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(broken, name, fault)
        failure = campaign.play_batch(seed_of(kind, policy))
        assert isinstance(failure, campaign.Failure)
        path = campaign.keep(failure, tmp_path, console, seconds=60)
        case = Case.read(path)
        assert 0 < len(case.operations) <= most
        with pytest.raises(Divergence):
            replay(case)
        assert outcome(case) == case.found != ""
    replay(case)


def die(queue: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_is_found_and_shrunk(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a worker."""
    monkeypatch.setattr(PatientReference, "forget_hashes", die)
    failure = one_worker(console, "queue", "extent").run()
    assert failure is not None
    assert failure.case.found == "killed by SIGKILL"
    case = Case.read(campaign.keep(failure, tmp_path, console, seconds=60))
    assert [operation[0] for operation in case.operations] == ["forget_hashes"]


def never_end(*_: Any) -> None:
    while True:
        pass


def test_what_hangs_fails() -> None:
    assert in_a_child(never_end, seconds=1) == "does not end in 1 s"
    assert in_a_child(lambda: None) == ""


def test_a_batch_that_hangs_is_found(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientReference, "forget_hashes", never_end)
    monkeypatch.setattr(campaign, "BATCH_SECONDS", 10)
    monkeypatch.setattr(campaign, "CRASH_SECONDS", 20)
    failure = one_worker(console, "queue", "extent").run()
    assert failure is not None
    assert failure.case.found == "does not end in 20 s"
    assert failure.case.operations[-1][0] == "forget_hashes"


def test_waiting_for_the_processor_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_a_child(lambda: time.sleep(2), seconds=1) == ""
    monkeypatch.setattr(cases, "PATIENCE", 1)
    assert in_a_child(lambda: time.sleep(60), seconds=1) == "does not end in 1 s"


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts what it did; a failure ends it with 1 and is kept."""
    arguments = ["--workers", "1", "--operations", "1", "--cases", str(tmp_path)]
    seed = seed_of("pool", "extent")
    monkeypatch.setitem(campaign.BATCHES, ("pool", "extent"), 2000)
    assert campaign.main([*arguments, "--first-seed", str(seed)]) == 0
    assert f"seed {seed}  pool   extent  2," in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(ExtentOrder, "_doom", forget_to_doom)
    assert campaign.main([*arguments, "--seed", str(seed)]) == 1
    (path,) = tmp_path.iterdir()
    assert path.name == f"pool_extent_{seed}.json"
    assert json.loads(path.read_text())["operations"]
    assert f"make fuzz SEED={seed}" in capsys.readouterr().out
