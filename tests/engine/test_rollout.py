"""The main job: what it makes of differences, and a short run of it on multi-process engines."""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rollout


def result(variant: str, queue: str) -> dict[str, Any]:
    """Two rounds as a run would return them: two prompts, two samples."""
    engine = {"kind": "engine", "pid": 2, "queue": queue, "num_gpu_blocks": 9, "block_size": 32}
    rounds = [
        {
            "tokens": [[[1, 2], [3]], [[4], [5, 6]]],
            "prefill_ms": [100.0, 110.0],
            "tables": [[[[1, 2, 3]], [[1, 2, 5]]], [[[6, 4]], [[6, 8]]]],
            "reset": {"kind": "reset", "success": True, "order_digest": digest, "check": ""},
        }
        for digest in ("a", "b")
    ]
    return {
        "variant": variant,
        "pid": 1,
        "where": "some day, somewhere",
        "engine": engine,
        "rounds": rounds,
    }


STOCK = result("vllm", "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue")
NATIVE = result("native", "pyblockpool._queue.FreeBlockQueue")


def change(*path: Any, to: Any) -> dict[str, Any]:
    """The native result with one thing changed."""
    changed = copy.deepcopy(NATIVE)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != to
    place[path[-1]] = to
    return changed


@pytest.fixture(autouse=True)
def logs_are_left_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def play_back(monkeypatch: pytest.MonkeyPatch, native: dict[str, Any]) -> None:
    def run(variant: str, options: Any, log: Path, done: Callable[[str], None]) -> dict[str, Any]:
        done("engine started")
        return STOCK if variant == "vllm" else native

    monkeypatch.setattr(rollout, "run", run)


def test_equal_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    play_back(monkeypatch, NATIVE)
    assert rollout.main([]) == 0
    captured = capsys.readouterr()
    assert "yes" in captured.out
    assert "NO" not in captured.out
    assert NATIVE["engine"]["queue"] in captured.out
    printed = captured.out + captured.err
    assert all(char.isprintable() or char == "\n" for char in printed), "control characters"
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("native", "sentence"),
    [
        (change("rounds", 1, "tokens", 0, 1, to=[7]), "Round 2: different tokens."),
        (change("rounds", 0, "tables", 1, 0, 0, 1, to=7), "Round 1: different block tables."),
        (
            change("rounds", 1, "reset", "order_digest", to="c"),
            "Round 2: different queue order.",
        ),
        (
            change("rounds", 1, "reset", "success", to=False),
            "native, round 2: the prefix cache could not be reset.",
        ),
        (
            change("rounds", 0, "reset", "check", to="a cycle"),
            "native, round 1: broken queue: a cycle",
        ),
        (
            change("engine", "queue", to=STOCK["engine"]["queue"]),
            "native: the engine core runs vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.",
        ),
        (change("pid", to=2), "native: the engine core is not a process of its own."),
        (
            change("rounds", to=NATIVE["rounds"][:1]),
            "The runs have different numbers of rounds.",
        ),
    ],
)
def test_a_difference(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    native: dict[str, Any],
    sentence: str,
) -> None:
    play_back(monkeypatch, native)
    assert rollout.main(["--json", str(tmp_path / "all.json")]) == 1
    assert sentence in capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))["wrong"] == [sentence]


def test_a_failed_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(variant: str, options: Any, log: Path, done: Callable[[str], None]) -> None:
        log.write_text("first line\n" + "noise\n" * 50 + "the cause\n", encoding="utf-8")
        raise subprocess.CalledProcessError(3, "child")

    monkeypatch.setattr(rollout, "run", run)
    assert rollout.main([]) == 2
    captured = capsys.readouterr()
    assert "the cause" in captured.err
    assert "first line" not in captured.err
    assert "vllm.log" in captured.err


def test_blocks_a_run() -> None:
    assert rollout.blocks_a_run([[[[1, 2, 3, 7, 8]]], [[[4, 3]], [[]]]]) == 7 / 4


def test_requests_are_found_by_prompt_and_sample() -> None:
    def request(name: str, block: int) -> dict[str, Any]:
        return {"kind": "request", "request_id": name, "table": [[block]]}

    lines = [
        {"kind": "engine"},
        *(request(name, at) for at, name in enumerate(["1_0-aa", "0_1-bb", "0_0-aa", "1_1-bb"])),
        {"kind": "reset", "success": True},
        *(request(name, at) for at, name in enumerate(["1_3", "0_2-cc", "0_3", "1_2-cc"], 10)),
        {"kind": "reset", "success": False},
    ]
    first = rollout.read_round(lines, 0, samples=2)
    assert first == {"tables": [[[[2]], [[0]]], [[[1]], [[3]]]], "reset": lines[5]}
    second = rollout.read_round(lines, 1, samples=2)
    assert second == {"tables": [[[[11]], [[13]]], [[[12]], [[10]]]], "reset": lines[-1]}
    alone = [lines[0], request("0-aa", 5), request("1-bb", 6), lines[5]]
    assert rollout.read_round(alone, 0, samples=1)["tables"] == [[[[5]]], [[[6]]]]


@pytest.mark.engine
def test_the_job_itself(
    model: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "all.json"
    sizes = ["--rounds", "3", "--prompt-tokens", "600", "--samples", "4"]
    ended = run_python(rollout.__file__, *sizes, "--json", out)
    assert ended.returncode == 0, ended.stdout[-5000:]
    everything = json.loads(out.read_text(encoding="utf-8"))
    assert everything["wrong"] == []
    assert everything["native"]["engine"]["queue"] == "pyblockpool._queue.FreeBlockQueue"
    pids = {everything[variant]["engine"]["pid"] for variant in ("vllm", "native")}
    pids |= {everything[variant]["pid"] for variant in ("vllm", "native")}
    assert len(pids) == 4, "both engine cores are processes of their own"
    for played in everything["native"]["rounds"]:
        assert all(len(prompt) == 4 for prompt in played["tables"])
        left, right = played["tokens"]
        assert left != right
    # The queue got shuffled, or the comparison would be an easy one.
    first, *_, last = (rollout.blocks_a_run(p["tables"]) for p in everything["native"]["rounds"])
    assert last < first
