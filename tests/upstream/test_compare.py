"""The judgement of the comparison itself, on made-up runs: no vLLM, no processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from upstream_compare import FILES, SLOWEST, as_json, compare, compare_all, report, select
from upstream_expected import BY_DESIGN
from upstream_fetch import FetchError
from upstream_hub import CONFIGS, write_hub
from upstream_run import Run
from upstream_verdict import (
    CRASHED,
    ERROR,
    FAILED,
    MISSING,
    PASSED,
    SKIPPED,
    Divergence,
    Outcome,
    complaints,
    diverging,
    file_of,
    only_ours,
    read_junit,
    repeated,
    table,
)

FILE = "tests/core/test_pool.py"
TEST = f"{FILE}::test_evict"

MODULE = "tests.core.test_pool"
DIED = "failed on setup with &quot;worker 'gw1' crashed while running 'tests/x'&quot;"
# class name, name, what the element holds
CASES = [
    (MODULE, "test_passes[a.b::c]", "<system-out>text</system-out>"),
    (f"{MODULE}.TestQueue", "test_fails", '<failure message="1 != 2"/>'),
    (MODULE, "test_skips", '<skipped message="needs a GPU"/>'),
    (MODULE, "test_setup", '<error message="no fixture"/>'),
    (MODULE, "test_twice", ""),
    (MODULE, "test_twice", '<error message="teardown"/>'),
    (MODULE, "test_subtests", '<failure message="one of them"/>'),
    (MODULE, "test_subtests", ""),
    (MODULE, "test_dies", f'<error message="{DIED}"/>'),
    ("", "tests.core.test_gone", '<error message="collection failure"/>'),
    ("pytest", "internal", '<error message="internal error"/>'),
]


def outcomes(**statuses: str) -> dict[str, Outcome]:
    return {f"{FILE}::{name}": Outcome(status, "why") for name, status in statuses.items()}


def run_of(found: dict[str, Outcome], pools_built: int = 3, complaint: str = "") -> Run:
    return Run(found, [complaint] if complaint else [], pools_built, seconds=1.0)


class Runs:
    """Stands in for the processes: hands out the runs in order and keeps what was asked for."""

    def __init__(self, *runs: Run) -> None:
        self.runs = list(runs)
        self.asked: list[tuple[str, Sequence[str]]] = []

    def __call__(self, queue: str, tests: Sequence[str], name: str) -> Run:
        self.asked.append((queue, tests))
        return self.runs.pop(0)


def test_junit_outcomes_by_node_id(tmp_path: Path) -> None:
    cases = [f'<testcase classname="{c}" name="{n}">{x}</testcase>' for c, n, x in CASES]
    junit = tmp_path / "run.xml"
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = read_junit(junit)
    assert {test: outcome.status for test, outcome in found.items()} == {
        f"{FILE}::test_passes[a.b::c]": PASSED,
        f"{FILE}::TestQueue::test_fails": FAILED,
        f"{FILE}::test_skips": SKIPPED,
        f"{FILE}::test_setup": ERROR,
        f"{FILE}::test_twice": ERROR,
        f"{FILE}::test_subtests": FAILED,
        f"{FILE}::test_dies": CRASHED,
        "tests/core/test_gone.py": ERROR,
    }
    assert found[f"{FILE}::TestQueue::test_fails"].message == "1 != 2"


def test_a_run_without_a_report_has_no_outcomes(tmp_path: Path) -> None:
    assert read_junit(tmp_path / "absent.xml") == {}


@pytest.mark.parametrize("status", [FAILED, ERROR, SKIPPED, CRASHED])
def test_what_passes_only_with_stock_diverges(status: str) -> None:
    found = diverging(outcomes(test_evict=PASSED), outcomes(test_evict=status))
    assert found == [Divergence(TEST, PASSED, status, "why")]


def test_a_vanished_test_diverges() -> None:
    found = diverging(outcomes(test_evict=PASSED), {})
    assert found == [Divergence(TEST, PASSED, MISSING.status, MISSING.message)]


@pytest.mark.parametrize("status", [FAILED, ERROR, SKIPPED, CRASHED])
def test_what_does_not_pass_with_stock_says_nothing(status: str) -> None:
    assert diverging(outcomes(test_evict=status), outcomes(test_evict=FAILED)) == []
    assert only_ours(outcomes(test_evict=status), outcomes(test_evict=PASSED)) == [TEST]


@pytest.mark.parametrize("status", [PASSED, FAILED, CRASHED])
def test_a_crash_with_ours_diverges_whatever_stock_does(status: str) -> None:
    found = diverging(outcomes(test_evict=status), outcomes(test_evict=CRASHED))
    assert [(d.stock, d.ours) for d in found] == [(status, CRASHED)]


def test_a_file_that_only_ours_cannot_collect_diverges() -> None:
    found = diverging({}, {FILE: Outcome(ERROR, "ImportError")})
    assert found == [Divergence(FILE, MISSING.status, ERROR, "ImportError")]
    assert diverging({FILE: Outcome(ERROR)}, {FILE: Outcome(ERROR)}) == []


@pytest.mark.parametrize(
    ("first", "stock_again", "ours_again", "excused"),
    [
        (FAILED, PASSED, PASSED, True),
        (FAILED, FAILED, FAILED, True),
        (FAILED, PASSED, FAILED, False),
        (FAILED, PASSED, SKIPPED, False),
        (FAILED, SKIPPED, FAILED, False),
        (FAILED, MISSING.status, MISSING.status, False),
        (FAILED, FAILED, CRASHED, False),
        (CRASHED, PASSED, PASSED, False),
        (CRASHED, FAILED, FAILED, False),
    ],
)
def test_which_divergences_further_runs_excuse(
    first: str, stock_again: str, ours_again: str, excused: bool
) -> None:
    divergence = Divergence(TEST, PASSED, first, "why")
    stock, ours = outcomes(test_evict=stock_again), outcomes(test_evict=ours_again)
    verdict = ([], [divergence]) if excused else ([divergence], [])
    assert repeated([divergence], stock, [ours, ours]) == verdict


def test_one_more_failure_in_further_runs_is_not_excused() -> None:
    divergence = Divergence(TEST, PASSED, FAILED, "why")
    good, bad = outcomes(test_evict=PASSED), outcomes(test_evict=FAILED)
    assert repeated([divergence], good, [good, bad, good]) == ([divergence], [])


def worker(crash: str = "", strangers: Sequence[str] = ()) -> dict[str, Any]:
    return {"crash": crash, "pools_built": 1, "strangers": list(strangers)}


def test_a_run_has_to_prove_its_queue() -> None:
    proof = {"queue": "native", "workers": [worker(), worker()]}
    assert complaints(proof, "native", {}) == []
    assert "left no proof" in complaints({}, "native", {})[0]
    assert "left no proof" in complaints({"queue": "native", "workers": []}, "native", {})[0]
    assert "left no proof" in complaints(proof, "vllm", {})[0]


def test_a_pool_on_another_queue_spoils_the_run() -> None:
    proof = {"queue": "native", "workers": [worker(), worker(strangers=["a pool has vLLM's"])]}
    (sentence,) = complaints(proof, "native", {})
    assert "a pool has vLLM's" in sentence


def test_a_crash_outside_of_a_test_is_told() -> None:
    proof = {"queue": "native", "workers": [worker(crash="Not properly terminated"), worker()]}
    assert complaints(proof, "native", outcomes(test_evict=CRASHED)) == []
    (sentence,) = complaints(proof, "native", outcomes(test_evict=PASSED))
    assert "died outside of a test" in sentence


def test_equal_runs_are_fine_and_not_run_again() -> None:
    same = run_of(outcomes(test_evict=PASSED, test_gpu=SKIPPED))
    runs = Runs(same, same)
    comparison = compare_all(runs, ["native"], [FILE], floor=1)["native"]
    assert comparison.ok
    assert runs.asked == [("vllm", [FILE]), ("native", [FILE])]
    assert "Nothing that passes" in report("native", comparison)


def test_only_the_diverging_tests_are_run_again() -> None:
    good = run_of(outcomes(test_evict=PASSED, test_flaky=PASSED, test_touch=PASSED))
    bad = run_of(outcomes(test_evict=FAILED, test_flaky=FAILED, test_touch=PASSED))
    again = run_of(outcomes(test_evict=FAILED, test_flaky=PASSED), pools_built=0)
    runs = Runs(bad, good, again, again, again)
    comparison = compare(runs, good, "native", [FILE], floor=1)
    assert runs.asked[1:] == [(q, [TEST, f"{FILE}::test_flaky"]) for q in ("vllm", *["native"] * 3)]
    assert (comparison.ok, comparison.problems) == (False, [])
    text = report("native", comparison)
    assert f"DIVERGES {TEST}: passed with vLLM's queue, failed with ours\n    why" in text
    assert f"Excused, did not diverge when run again by itself: {FILE}::test_flaky" in text


@pytest.mark.parametrize(
    ("stock", "ours", "problem"),
    [
        (run_of(outcomes(test_evict=FAILED)), run_of({}), "Fewer than 1 tests pass"),
        (run_of(outcomes(a=PASSED)), run_of(outcomes(a=PASSED), pools_built=0), "built no pool"),
        (run_of(outcomes(a=PASSED), pools_built=0), run_of(outcomes(a=PASSED)), "built no pool"),
        (run_of(outcomes(a=PASSED), complaint="spoilt"), run_of(outcomes(a=PASSED)), "spoilt"),
        (run_of(outcomes(a=PASSED)), run_of(outcomes(a=PASSED), complaint="spoilt"), "spoilt"),
    ],
)
def test_a_run_that_proves_nothing_fails(stock: Run, ours: Run, problem: str) -> None:
    comparison = compare(Runs(ours), stock, "native", [FILE], floor=1)
    assert not comparison.ok
    assert comparison.divergences == []
    assert problem in comparison.problems[0]
    assert f"PROBLEM {comparison.problems[0]}" in report("native", comparison)


def test_stock_is_run_once_for_all_queues() -> None:
    """And the slowest file with the first of ours only."""
    slow = {f"{SLOWEST}::test_blast": Outcome(PASSED)}
    both = run_of(outcomes(test_evict=PASSED) | slow)
    runs = Runs(both, both, run_of(outcomes(test_evict=PASSED)))
    found = compare_all(runs, ["native", "native:extent"], [SLOWEST, FILE], floor=2)
    assert runs.asked == [
        ("vllm", [SLOWEST, FILE]),
        ("native", [SLOWEST, FILE]),
        ("native:extent", [FILE]),
    ]
    assert [comparison.ok for comparison in found.values()] == [True, True]
    assert SLOWEST in report("native", found["native"])
    assert SLOWEST not in report("native:extent", found["native:extent"])


def test_the_slowest_file_is_run_with_every_queue_if_nothing_else_was_asked_for() -> None:
    same = run_of({f"{SLOWEST}::test_blast": Outcome(PASSED)})
    runs = Runs(same, same, same)
    compare_all(runs, ["native", "native:extent"], [SLOWEST], floor=1)
    assert [tests for _, tests in runs.asked] == [[SLOWEST]] * 3


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_DESIGN, "native:odd", {TEST: "asserts an even order"})


ASSERTS = [
    "assert [1] == [2]",
    "AssertionError",
    "AssertionError: assert 1 == 2",
]


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("message", ASSERTS)
def test_a_listed_test_may_fail(message: str) -> None:
    stock = run_of(outcomes(test_evict=PASSED, test_touch=PASSED))
    ours = run_of(outcomes(test_touch=PASSED) | {TEST: Outcome(FAILED, message)})
    runs = Runs(ours)
    comparison = compare(runs, stock, "native:odd", [FILE], floor=1)
    assert comparison.ok
    assert len(runs.asked) == 1
    assert as_json(comparison)["by_design"][0]["test"] == TEST
    text = report("native:odd", comparison)
    assert f"Fails by design: {TEST}: asserts an even order" in text
    assert "Nothing but what is listed" in text


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (FAILED, "RuntimeError: append(): block 3 is already queued"),
        (FAILED, "AssertionErrors: of another kind"),
        *((status, ASSERTS[0]) for status in (ERROR, SKIPPED, CRASHED)),
        (MISSING.status, MISSING.message),
    ],
)
def test_what_a_listed_test_may_not_do(status: str, message: str) -> None:
    stock = run_of(outcomes(test_evict=PASSED))
    ours = run_of({} if status == MISSING.status else {TEST: Outcome(status, message)})
    comparison = compare(Runs(ours, stock, *[ours] * 3), stock, "native:odd", [FILE], floor=1)
    assert comparison.divergences == [Divergence(TEST, PASSED, status, message)]
    assert not comparison.ok


@pytest.mark.usefixtures("listed")
def test_a_listed_test_may_not_pass() -> None:
    same = run_of(outcomes(test_evict=PASSED))
    comparison = compare(Runs(same), same, "native:odd", [FILE], floor=1)
    assert not comparison.ok
    (problem,) = comparison.problems
    assert problem.startswith(f"{TEST} passes with the queue 'native:odd'")


@pytest.mark.usefixtures("listed")
def test_a_listed_test_that_a_release_lacks_or_that_was_not_asked_for_says_nothing() -> None:
    same = run_of(outcomes(test_touch=PASSED))
    assert compare(Runs(same), same, "native:odd", [FILE], floor=1).ok


@pytest.mark.usefixtures("listed")
def test_the_list_of_one_queue_says_nothing_of_another() -> None:
    stock, ours = run_of(outcomes(test_evict=PASSED)), run_of({TEST: Outcome(FAILED, ASSERTS[0])})
    comparison = compare(Runs(ours, stock, *[ours] * 3), stock, "native", [FILE], floor=1)
    assert [divergence.test for divergence in comparison.divergences] == [TEST]
    assert comparison.by_design == []


@pytest.mark.parametrize("queue", BY_DESIGN)
def test_what_is_listed_is_run(queue: str) -> None:
    assert {file_of(test) for test in BY_DESIGN[queue]} <= {*FILES} - {SLOWEST}


def test_the_result_is_json() -> None:
    stock = run_of(outcomes(test_evict=PASSED))
    ours = run_of(outcomes(test_evict=CRASHED, test_new=PASSED))
    runs = Runs(ours, stock, *[ours] * 3)
    result = as_json(compare(runs, stock, "native", [FILE], floor=1))
    assert json.loads(json.dumps(result)) == result
    assert not result["ok"]
    assert result["passed"] == {"stock": 1, "ours": 1}
    assert result["only_ours"] == [f"{FILE}::test_new"]
    assert result["divergences"][0]["ours"] == CRASHED


def test_the_table_counts_by_file() -> None:
    stock = outcomes(test_evict=PASSED, test_touch=PASSED) | {"tests/b.py::test_b": Outcome(PASSED)}
    ours = outcomes(test_touch=PASSED) | {"tests/b.py::test_b": Outcome(PASSED)}
    text = table([FILE, "tests/b.py"], stock, ours, diverging(stock, ours))
    assert [line.split() for line in text.splitlines()] == [
        ["file", "vLLM", "ours", "diverge"],
        [FILE, "2", "1", "1"],
        ["tests/b.py", "1", "1", "0"],
        ["all", "3", "2", "1"],
    ]


def test_files_that_a_release_lacks_are_said_to_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_a.py").touch()
    (tmp_path / "test_b.py").touch()
    assert select(tmp_path, ["test_*.py", "gone.py"], "9.9") == ["test_a.py", "test_b.py"]
    assert capsys.readouterr().out == "vLLM 9.9 has no gone.py: skipped.\n"
    with pytest.raises(FetchError, match="none of the tests"):
        select(tmp_path, ["gone.py"], "9.9")


def test_the_hub_has_the_layout_of_the_client(tmp_path: Path) -> None:
    write_hub(tmp_path)
    for name in CONFIGS:
        model = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text()
        assert json.loads((snapshot / "config.json").read_text()) == CONFIGS[name]
