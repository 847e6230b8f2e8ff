"""What two runs of the same tests say about the queue: pure functions over their outcomes."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSED, SKIPPED, FAILED, ERROR, CRASHED = "passed", "skipped", "failed", "error", "crashed"
# A test can have several entries (setup and teardown, subtests): the worst one is its outcome.
SEVERITY = (PASSED, SKIPPED, FAILED, ERROR, CRASHED)
TAG_STATUS = {"skipped": SKIPPED, "failure": FAILED, "error": ERROR}
# The words in which pytest-xdist reports the test during which a worker died.
CRASH = re.compile(r"worker '\w+' crashed while running")
# How the message of a failed assertion begins; any other exception is a failure, too.
ASSERTION = re.compile(r"assert |AssertionError\b")


@dataclass(frozen=True)
class Outcome:
    status: str
    message: str = ""


@dataclass(frozen=True)
class Divergence:
    test: str
    stock: str
    ours: str
    message: str


Outcomes = Mapping[str, Outcome]
MISSING = Outcome("missing", "the test was not run")


def read_junit(path: Path) -> dict[str, Outcome]:
    """The outcome of each test by its pytest node id; nothing when pytest left no report."""
    outcomes: dict[str, Outcome] = {}
    if not path.is_file():
        return outcomes
    for case in ElementTree.parse(path).iter("testcase"):
        node_id = _node_id(case.get("classname", ""), case.get("name", ""))
        if not node_id:
            continue  # an internal error of pytest, of which the exit status tells
        for outcome in [Outcome(PASSED), *map(_outcome, case)]:
            before = outcomes.get(node_id, outcome)
            if SEVERITY.index(outcome.status) >= SEVERITY.index(before.status):
                outcomes[node_id] = outcome
    return outcomes


def _outcome(child: ElementTree.Element) -> Outcome:
    status = TAG_STATUS.get(child.tag, PASSED)  # a test's output is no failure
    message = child.get("message", "")
    return Outcome(CRASHED if CRASH.search(message) else status, message)


def _node_id(classname: str, name: str) -> str:
    """`a.test_b.TestC`, `test_d[x]` -> `a/test_b.py::TestC::test_d[x]`, which pytest can run again.

    A file that could not be collected has no class name, and the dotted path as its name.
    """
    parts = [*classname.split("."), name] if classname else name.split(".")
    for index, part in enumerate(parts):
        if part.startswith("test_"):
            return "::".join(["/".join(parts[: index + 1]) + ".py", *parts[index + 1 :]])
    return ""


def file_of(test: str) -> str:
    return test.partition("::")[0]


def passes(outcomes: Outcomes) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome.status == PASSED}


def diverging(stock: Outcomes, ours: Outcomes) -> list[Divergence]:
    """Tests that pass with vLLM's queue only; each crash and each uncollected file with ours."""
    suspects = passes(stock) - passes(ours)
    suspects |= {test for test, outcome in ours.items() if outcome.status == CRASHED}
    suspects |= {
        test for test, outcome in ours.items() if outcome.status == ERROR and test not in stock
    }
    found = []
    for test in sorted(suspects):
        outcome = ours.get(test, MISSING)
        found.append(
            Divergence(test, stock.get(test, MISSING).status, outcome.status, outcome.message)
        )
    return found


def by_design(
    divergences: Collection[Divergence], listed: Collection[str]
) -> tuple[list[Divergence], list[Divergence]]:
    """Those that are not listed, and those that are and fail by an assertion and nothing worse."""
    found: list[Divergence] = []
    accepted: list[Divergence] = []
    for divergence in divergences:
        asserts = divergence.ours == FAILED and ASSERTION.match(divergence.message)
        (accepted if asserts and divergence.test in listed else found).append(divergence)
    return found, accepted


def repeated(
    divergences: Collection[Divergence], stock: Outcomes, ours: Collection[Outcomes]
) -> tuple[list[Divergence], list[Divergence]]:
    """The divergences that hold, and those that further runs of just these tests excuse.

    Excused are tests that pass with ours in each of them, or now fail with vLLM's queue as well;
    never a crash.
    """
    kept: list[Divergence] = []
    excused: list[Divergence] = []
    for divergence in divergences:
        again = {run.get(divergence.test, MISSING).status for run in ours}
        stock_fails = stock.get(divergence.test, MISSING).status in (FAILED, ERROR, CRASHED)
        crashed = CRASHED in {divergence.ours, *again}
        flaky = not crashed and (again == {PASSED} or stock_fails)
        (excused if flaky else kept).append(divergence)
    return kept, excused


def complaints(proof: Mapping[str, Any], queue: str, outcomes: Outcomes) -> list[str]:
    """Why a run does not count: not the queue asked for, or a crash that no test shows."""
    workers = proof.get("workers", [])
    if proof.get("queue") != queue or not workers:
        return [f"The run with the queue {queue!r} left no proof of the queue it used."]
    strangers = sorted({what for worker in workers for what in worker["strangers"]})
    found = [f"In the run with the queue {queue!r}, {what}." for what in strangers]
    crashes = [worker["crash"] for worker in workers if worker["crash"]]
    if len(crashes) > sum(outcome.status == CRASHED for outcome in outcomes.values()):
        found.append(f"A worker with the queue {queue!r} died outside of a test: {crashes[-1]}")
    return found


def only_ours(stock: Outcomes, ours: Outcomes) -> list[str]:
    return sorted(passes(ours) - passes(stock))


def table(
    files: Collection[str], stock: Outcomes, ours: Outcomes, divergences: Collection[Divergence]
) -> str:
    """One row a file and the sum: passes with vLLM's queue, passes with ours, divergences."""
    columns = [passes(stock), passes(ours), {divergence.test for divergence in divergences}]
    width = max(map(len, files))
    lines = [f"{'file':{width}}  {'vLLM':>6}  {'ours':>6}  {'diverge':>7}"]
    for name in [*files, "all"]:
        vllm_n, ours_n, diverge_n = (
            len([test for test in column if name in (file_of(test), "all")]) for column in columns
        )
        lines.append(f"{name:{width}}  {vllm_n:6}  {ours_n:6}  {diverge_n:7}")
    return "\n".join(lines)
