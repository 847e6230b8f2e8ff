"""bench/gpu.sh: its options, and what it makes of parts that fail. Nothing is measured here.

The script runs in a copy of bench/, with a Python that does nothing but what a test asks for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_summary  # bench/
import pytest
from rich.console import Console

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu.sh"

# As PYTHON, and as that of the environment, which it makes: a copy of itself.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *'is_available()'*) exit "${NO_GPU:-0}" ;;
  *'import pip, sys, torch;'*) echo "$0" && exit "${NO_TORCH:-0}" ;;
  '-m venv '*)
    mkdir -p "${@: -1}"/bin "${@: -1}"/lib/python3.99/site-packages
    cp "$0" "${@: -1}/bin/python"
    ;;
  *attention_backends.py*)
    [[ $BACKENDS ]] || { echo 'ImportError: no vLLM' && exit 1; }
    printf '%b' "$BACKENDS" >"${@: -1}"
    ;;
  *'pip '*' wheel '*) exit "${NO_BUILD:-0}" ;;
  *'pip '*pytest-benchmark*) echo 'no such wheel' && exit "${NO_PYTEST:-0}" ;;
  *gpu_summary.py*) exec "$REAL_PYTHON" "$@" ;;
  *gpu/*.json* | *--results=*)
    for word in "$@"; do [[ $word != *.json ]] || out=${word#--results=}; done
    if [[ $out == */$FAILING.json ]]; then
      printf 'ValueError: the first\\nRuntimeError: the second\\nand more\\n' && exit 1
    fi
    name=$(basename "$out" .json)
    cp "$SAVED/${name%%_*}.json" "$out"
    ;;
esac
"""

SAVED: dict[str, Any] = {
    "kernel": {
        "prefill": [
            {"prompt": prompt, "tile": tile, "table": table, "ratio": ratio}
            for prompt in (64, 128)
            for tile in (16, 128)
            for table, ratio in (("id order", 1.0), ("aged", tile / 16 + prompt / 128))
        ],
        "gather": [{"prompt": 128, "table": "aged", "ratio": 1.25}],
    },
    "transfer": {
        "rows": [
            {"layout": layout, "way": way, "queue": queue, "run": {"gb_per_s": [0, speed, 9]}}
            for layout in ("a", "b")
            for way in ("to pool", "to buffer")
            for queue, speed in (("vLLM", 1.0), ("native", 1.1), ("extent", 4.0))
        ]
    },
    "micro": {
        "ns_per_block": {
            "a": {"vllm": 12.0, "native": 4.0},
            "b": {"vllm": 8.0, "native": 1.0},
            "c": {"lru": 3.0, "extent": 4.0},
        }
    },
    "prefill": {
        "runs": [
            {
                "variant": variant,
                "shape": {"rounds": 2, "prompt": 4_000},
                "rounds": [
                    {"prefill": 0.5, "tile_amplification": 1.0},
                    {"prefill": seconds, "tile_amplification": tiles},
                ],
            }
            for variant, seconds, tiles in (("vLLM", 2.5, 5.5), ("extent", 0.5, 1.0))
        ]
    },
}
ALL_BACKENDS = "vLLM\\t\\n" + "".join(
    f"{name}\\t\\n" for name in ("FLEX_ATTENTION", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script needs of a checkout, PYTHON, and results."""
    (tmp_path / "bench").mkdir()
    for path in (ROOT / "bench").glob("*"):
        if path.is_file():
            shutil.copy(path, tmp_path / "bench")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    packages = tmp_path / "packages"  # the real ones take seconds to import
    packages.mkdir()
    (packages / "vllm.py").write_text("__version__ = '0.1'")
    (packages / "torch.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2.0'\n"
        "cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: 'a GPU')"
    )
    (tmp_path / "saved").mkdir()
    for name, saved in SAVED.items():
        (tmp_path / "saved" / f"{name}.json").write_text(json.dumps(saved))
    return tmp_path


def run(
    checkout: Path, *options: str, backends: str = ALL_BACKENDS, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, str]]]:
    """And the rows of the summary, by the names of the parts."""
    ran = subprocess.run(
        [checkout / "bench" / "gpu.sh", "--python", checkout / "python", *options],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={
            **os.environ,
            "REAL_PYTHON": sys.executable,
            "PYTHONPATH": f"{checkout / 'packages'}:{os.environ.get('PYTHONPATH', '')}",
            "SAVED": str(checkout / "saved"),
            "BACKENDS": backends,
            "FAILING": "nothing",
            **environment,
        },
    )
    summary = checkout / "bench" / "results" / "gpu" / "summary.json"
    parts = json.loads(summary.read_text())["parts"] if summary.exists() else []
    return ran, {part["name"]: part for part in parts}


PARTS = [
    "kernel",
    "transfer",
    "micro",
    "prefill_FLEX_ATTENTION",
    "prefill_FLEX_ATTENTION_busy",
    "prefill_FLASH_ATTN",
    "prefill_TRITON_ATTN",
    "prefill_FLASHINFER",
]


def test_all_parts(checkout: Path) -> None:
    ran, parts = run(checkout)
    assert ran.returncode == 0, ran.stderr
    assert "a GPU, PyTorch 2.0" in ran.stdout
    assert list(parts) == PARTS
    assert {part["state"] for part in parts.values()} == {"done"}
    assert parts["kernel"]["result"] == "to id order, KV tile 128: aged 9.00x; gather: aged 1.25x"
    pool, buffer = parts["transfer"]["result"].split("; ")
    assert pool == "to pool, GB/s: vLLM 1.0, extent 4.0"
    assert buffer == "to buffer, GB/s: vLLM 1.0, extent 4.0"
    assert parts["micro"]["result"] == "vLLM's class to native, 2 operations: 5.5x (3.0 to 8.0)"
    assert parts["prefill_FLASHINFER"]["result"] == (
        "round 2, 4,000 tokens (tiles): vLLM 2,500 ms (5.5), extent 500 ms (1.0)"
    )
    results = {path.stem for path in (checkout / "bench" / "results" / "gpu").iterdir()}
    assert results == {*PARTS, "summary"}


def test_a_part_that_fails_stops_no_other(checkout: Path) -> None:
    ran, parts = run(checkout, FAILING="kernel")
    assert ran.returncode == 1
    assert [name for name, part in parts.items() if part["state"] != "done"] == ["kernel"]
    assert parts["kernel"]["reason"] == "ValueError: the first"
    assert "and more" in ran.stderr
    assert "failed: ValueError: the first" in ran.stdout


def test_a_part_that_runs_out_of_time(checkout: Path) -> None:
    """With a `timeout` for which time flies."""
    (checkout / "bin").mkdir()
    timeout = checkout / "bin" / "timeout"
    timeout.write_text('#!/usr/bin/env bash\n[[ $* == *transfer* ]] && exit 124\nexec "${@:3}"\n')
    timeout.chmod(0o755)
    stale = checkout / "bench" / "results" / "gpu" / "transfer.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    ran, parts = run(checkout, PATH=f"{timeout.parent}:{os.environ['PATH']}")
    assert ran.returncode == 1
    assert parts["transfer"]["state"] == "out of time"
    assert parts["transfer"]["reason"] == "stopped after 60 s"
    assert parts["micro"]["state"] == "done"
    assert not stale.exists()


def test_what_cannot_run_is_named_and_is_no_failure(checkout: Path) -> None:
    reason = "ValueError: [not on [this] device]"
    backends = ALL_BACKENDS.replace("FLASH_ATTN\\t", f"FLASH_ATTN\\t{reason}")
    ran, parts = run(checkout, backends=backends + "in PyTorch\\tsilu_and_mul\\n")
    assert ran.returncode == 0, ran.stderr
    assert parts["prefill_FLASH_ATTN"]["state"] == "not run"
    assert f"not run: {reason}" in ran.stdout
    assert parts["prefill_TRITON_ATTN"]["state"] == "done"
    assert "This vLLM lacks, and PyTorch did: silu_and_mul\n" in ran.stdout


@pytest.mark.parametrize(
    ("backends", "reason"),
    [
        ("vLLM\\tvLLM is not installed\\n", "vLLM is not installed"),
        ("", "vLLM cannot be asked: ImportError: no vLLM"),
    ],
)
def test_without_vllm(checkout: Path, backends: str, reason: str) -> None:
    ran, parts = run(checkout, backends=backends)
    assert ran.returncode == 0, ran.stderr
    assert [name for name, part in parts.items() if part["state"] == "done"] == PARTS[:2]
    assert {part["reason"] for part in parts.values()} == {"", reason}
    assert list(parts) == PARTS


def test_without_pytest_benchmark(checkout: Path) -> None:
    ran, parts = run(checkout, NO_PYTEST="1")
    assert ran.returncode == 0, ran.stderr
    assert parts["micro"]["reason"] == "no pytest-benchmark: no such wheel"
    assert parts["prefill_TRITON_ATTN"]["state"] == "done"


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        (["--devices"], {}, "unknown option --devices"),
        (["--device"], {}, "--device needs a value"),
        (["--device", "tpu"], {}, "--device tpu: cuda or cpu"),
        (["--wheels", "nowhere"], {}, "--wheels nowhere: no such folder"),
        ([], {"NO_TORCH": "1"}, "has no PyTorch, or no pip"),
        ([], {"NO_GPU": "1"}, "finds no GPU; --device cpu needs none"),
        ([], {"NO_BUILD": "1"}, "build failed: see"),
    ],
)
def test_what_it_cannot_begin_with(
    checkout: Path, options: list[str], environment: dict[str, str], sentence: str
) -> None:
    ran, parts = run(checkout, *options, **environment)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert not parts


def test_help() -> None:
    ran = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stdout.startswith("usage: bench/gpu.sh [--device cuda|cpu]")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
def test_shellcheck() -> None:
    ran = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_a_part_without_its_results_is_an_error(tmp_path: Path) -> None:
    """It never goes by as done."""
    (tmp_path / "parts").write_text("kernel\tdone\t1\t\n")
    (tmp_path / "backends").write_text("vLLM\tvLLM is not installed\n")
    with pytest.raises(OSError, match=r"kernel\.json"):
        gpu_summary.summary(tmp_path / "parts", tmp_path / "backends", tmp_path)


def test_brackets_are_no_markup() -> None:
    console = Console(width=120, record=True)
    part = {"name": "micro", "state": "not run", "seconds": "0", "reason": "[bold]: no such"}
    found = {"gpu": None, "cpu": "a CPU", "torch": "2", "parts": [part]}
    gpu_summary.show(console, {**found, "in_pytorch": ""})
    assert "not run: [bold]: no such" in console.export_text()
