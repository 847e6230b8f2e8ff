"""vLLM's own tests, with vLLM's queue and with ours: what passes with theirs has to pass with ours.

    python tests/upstream/upstream_compare.py --queue native native:sorted native:extent

Fetches the tests of the installed vLLM into .cache/upstream/, runs them with vLLM's queue and with
each of ours and compares test by test. What fails under a placement policy by design is listed in
upstream_expected.py. Exit status: 0 when nothing diverges, 1 when something does, the list is not
true or a run proves nothing, 2 when the tests cannot be had.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from upstream_expected import BY_DESIGN
from upstream_fetch import FetchError, fetch_tests, installed_version
from upstream_hub import write_hub
from upstream_run import HERE, STOCK, Run, run_tests
from upstream_verdict import (
    Divergence,
    by_design,
    diverging,
    file_of,
    only_ours,
    passes,
    repeated,
    table,
)

CACHE = HERE.parents[1] / ".cache" / "upstream"

# With fewer passes the environment is broken and success means nothing. The first figure is for
# releases that have all of these files; on vLLM 0.32 they have 580 passes.
CORE = (
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_swa_inflight_window_free.py",
)
CORE_FLOOR, OLD_FLOOR = 500, 100
AGAIN = 3
SHOWN = 50
MESSAGE_LINES = 6

# The files of vLLM 0.32 whose tests build a pool or a queue and need neither a GPU nor weights. The
# slowest comes first, so that both workers are busy to the end. It takes longer than all the others
# together and counts blocks, whichever they are: it is run with the first queue only.
SLOWEST = "tests/v1/core/test_priority_scheduler_random.py"
FILES = (
    SLOWEST,
    *CORE,
    "tests/v1/core/test_contiguous_kv_packing.py",
    "tests/v1/core/test_kv_cache_metrics.py",
    "tests/v1/core/test_mamba_align_chunk_split.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/core/test_worker_slot_overflow.py",
    "tests/v1/core/prefix_cache/test_*.py",
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
    "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "tests/v1/kv_connector/unit/test_decode_bench_connector.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_hisparse_connector.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_scheduler.py",
    "tests/v1/kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_scheduler_kv_connector_override.py",
    "tests/v1/kv_connector/unit/test_simple_cpu_offload_connector.py",
    "tests/v1/kv_connector/unit/test_simple_cpu_offload_metrics.py",
    "tests/v1/simple_kv_offload/test_kv_events.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
)


@dataclass(frozen=True)
class Comparison:
    files: Sequence[str]
    stock: Run
    ours: Run
    divergences: list[Divergence]
    by_design: list[Divergence]
    excused: list[Divergence]
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.divergences and not self.problems


# Runs these tests with this queue; the name is for the reader and the log.
Runner = Callable[[str, Sequence[str], str], Run]


def compare_all(
    run: Runner, queues: Sequence[str], files: Sequence[str], floor: int
) -> dict[str, Comparison]:
    """One run with vLLM's queue, and with each of ours its comparison with that."""
    stock = run(STOCK, files, "stock")
    rest = [name for name in files if name != SLOWEST] or files
    return {
        queue: compare(run, stock, queue, files if queue == queues[0] else rest, floor)
        for queue in queues
    }


def compare(run: Runner, stock: Run, queue: str, files: Sequence[str], floor: int) -> Comparison:
    """A run with this queue; where it counts, what diverges is run again, as it may be flaky."""
    ours = run(queue, files, queue)
    problems = stock.complaints + ours.complaints
    for used, done in ((STOCK, stock), (queue, ours)):
        if not done.pools_built:
            problems.append(
                f"The run with the queue {used!r} built no pool, so it tested no queue."
            )
    if len(passes(stock.outcomes)) < floor:
        problems.append(
            f"Fewer than {floor} tests pass with vLLM's own queue: this environment cannot tell."
        )
    expected = {t: outcome for t, outcome in stock.outcomes.items() if file_of(t) in files}
    listed = BY_DESIGN.get(queue, {})
    found = diverging(expected, ours.outcomes)
    divergences, accepted = by_design(found, listed)
    excused: list[Divergence] = []
    if divergences and not problems:
        tests = [divergence.test for divergence in divergences]
        stock_again = run(STOCK, tests, f"{queue}-stock-again")
        ours_again = [run(queue, tests, f"{queue}-again-{number}") for number in range(AGAIN)]
        problems += [text for again in (stock_again, *ours_again) for text in again.complaints]
        divergences, excused = repeated(
            divergences, stock_again.outcomes, [again.outcomes for again in ours_again]
        )
    problems += [
        f"{test} passes with the queue {queue!r}, but upstream_expected.py says that it cannot."
        for test in sorted(passes(ours.outcomes) & listed.keys())
    ]
    stock = replace(stock, outcomes=expected)
    return Comparison(files, stock, ours, divergences, accepted, excused, problems)


def report(queue: str, comparison: Comparison) -> str:
    stock, ours = comparison.stock.outcomes, comparison.ours.outcomes
    rows = table(comparison.files, stock, ours, comparison.divergences)
    lines = ["", f"The queue {queue!r}:", "", rows, ""]
    lines += [
        f"Fails by design: {d.test}: {BY_DESIGN[queue][d.test]}" for d in comparison.by_design
    ]
    lines += [f"Passes only with our queue: {test}" for test in only_ours(stock, ours)]
    lines += [
        f"Excused, did not diverge when run again by itself: {d.test}: {d.ours}"
        for d in comparison.excused
    ]
    for divergence in comparison.divergences[:SHOWN]:
        statuses = f"{divergence.stock} with vLLM's queue, {divergence.ours} with ours"
        lines.append(f"DIVERGES {divergence.test}: {statuses}")
        lines += [f"    {line}" for line in divergence.message.splitlines()[:MESSAGE_LINES]]
    if len(comparison.divergences) > SHOWN:
        lines.append(f"... and {len(comparison.divergences) - SHOWN} more, see result.json")
    lines += [f"PROBLEM {problem}" for problem in comparison.problems]
    besides = " but what is listed" if comparison.by_design else ""
    lines.append(
        f"Nothing{besides} that passes with vLLM's queue fails with ours."
        if comparison.ok
        else "FAILED"
    )
    return "\n".join(lines)


def as_json(comparison: Comparison) -> dict[str, Any]:
    stock, ours = comparison.stock, comparison.ours
    return {
        "ok": comparison.ok,
        "passed": {"stock": len(passes(stock.outcomes)), "ours": len(passes(ours.outcomes))},
        "pools_built": {"stock": stock.pools_built, "ours": ours.pools_built},
        "seconds": {"stock": round(stock.seconds), "ours": round(ours.seconds)},
        "divergences": [asdict(divergence) for divergence in comparison.divergences],
        "by_design": [asdict(divergence) for divergence in comparison.by_design],
        "excused": [asdict(divergence) for divergence in comparison.excused],
        "only_ours": only_ours(stock.outcomes, ours.outcomes),
        "problems": comparison.problems,
    }


def select(tree: Path, patterns: Sequence[str], version: str) -> list[str]:
    """The files that this release has; says which it has not."""
    files: list[str] = []
    for pattern in patterns:
        found = sorted(path.relative_to(tree).as_posix() for path in tree.glob(pattern))
        if not found:
            print(f"vLLM {version} has no {pattern}: skipped.")
        files += found
    if not files:
        raise FetchError(f"vLLM {version} has none of the tests that were asked for.")
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare vLLM's own tests on vLLM's queue and on ours."
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="default: .cache/upstream in the repository"
    )
    parser.add_argument(
        "--queue",
        nargs="+",
        default=["native"],
        metavar="QUEUE",
        help="values of VLLM_BLOCK_QUEUE; default: native; the second and further ones without "
        f"{SLOWEST}",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that run tests; default: 2"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FILE", help="some of vLLM's test files: tests/v1/..."
    )
    options = parser.parse_args(arguments)
    # Leave by an exception, so that a comparison that is told to stop stops its workers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cache = options.cache.resolve()
    result_file = cache / "result.json"
    result_file.unlink(missing_ok=True)
    try:
        version = installed_version()
        tree = fetch_tests(version, cache)
        files = select(tree, options.only or FILES, version)
    except FetchError as error:
        print(f"upstream_compare: {error}", file=sys.stderr)
        return 2
    write_hub(cache / "hub")

    def run(queue: str, tests: Sequence[str], name: str) -> Run:
        name = name.replace(":", "-")
        print(
            f"{name}: {len(tests)} files or tests with the queue {queue!r} ...", end=" ", flush=True
        )
        done = run_tests(tree, cache, queue, tests, options.workers, name)
        print(
            f"{len(passes(done.outcomes))} passed, {done.pools_built} pools, {done.seconds:.0f} s",
            flush=True,
        )
        return done

    floor = CORE_FLOOR if set(CORE) <= set(files) else 1 if options.only else OLD_FLOOR
    comparisons = compare_all(run, options.queue, files, floor)
    for queue, comparison in comparisons.items():
        print(report(queue, comparison))
    ok = all(comparison.ok for comparison in comparisons.values())
    queues = {queue: as_json(comparison) for queue, comparison in comparisons.items()}
    result_file.write_text(
        json.dumps({"vllm": version, "ok": ok, "queues": queues}, indent=2) + "\n"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
