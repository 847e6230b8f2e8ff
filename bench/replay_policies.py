"""The placement policies on request traces: prefix hits and contiguity beside vLLM's queue.

    python bench/replay_policies.py TRACES

Runs `pyblockpool replay` for each row, saves all figures in bench/results/ and sets the tables into
the documents. TRACES is a folder with the traces that are named below; they are not part of this
repository.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table
from provenance import provenance
from rfc_rounds import write_rfc_rounds

QUEUES = [
    "python",
    "native:sorted",
    "native:extent,size=4",
    "native:extent,size=8",
    "native:extent,size=8,pack_tails",
    "native:extent,size=16",
    "native:extent,size=32",
]

# kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl (Apache-2.0).
MOONCAKE = "mooncake_conversation.jsonl"
# Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv (CC BY 4.0, Microsoft).
AZURE = "azure2023_conv.csv"
# callanjfox/kv-cache-tester, traces/ (Apache-2.0): every other session, block ids as runs.
AGENTS = "weka_agentic_odd.jsonl"
# Synthetic: 8 steps of 128 prompts with 8 samples each.
GRPO = "synthetic_grpo.jsonl"
RFC_ROUNDS = "rfc_rounds.jsonl"


@dataclass(frozen=True)
class Row:
    name: str
    trace: str
    arguments: str


ROWS = [
    Row("chat, Mooncake", MOONCAKE, "--limit 1000 --blocks 65536 --residents 32"),
    Row(
        "chat, Mooncake, chunks of 2,048",
        MOONCAKE,
        "--limit 1000 --blocks 65536 --residents 32 --chunk 2048",
    ),
    Row(
        "chat, Mooncake, cache off",
        MOONCAKE,
        "--limit 1000 --blocks 65536 --residents 32 --no-caching",
    ),
    # A block of the trace is a block of the cache: as if prompts were shorter by a factor of 32.
    Row(
        "short chat, Mooncake / 32",
        MOONCAKE,
        "--limit 6000 --block-size 512 --tile 8 --blocks 16384 --residents 64",
    ),
    Row("chat, Azure", AZURE, "--limit 3000 --blocks 8192 --residents 64"),
    Row("chat, Azure, cache off", AZURE, "--limit 3000 --blocks 8192 --residents 64 --no-caching"),
    *(
        Row(
            "agents by the clock",
            AGENTS,
            f"--limit 900 --max-context 131072 --blocks {num_blocks} --residents 8",
        )
        for num_blocks in (16_384, 32_768, 65_536)
    ),
    Row(
        "agents in rotation",
        AGENTS,
        "--limit 500 --max-context 131072 --arrangement rotation --blocks 32768 --residents 8",
    ),
    Row("RFC rounds, cache reset between them", RFC_ROUNDS, "--blocks 12000 --residents 8"),
    Row("GRPO, pool filled to the brim", GRPO, "--blocks 16384 --residents 128"),
]


def replayed(trace: Path, row: Row, workers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyblockpool", "replay", str(trace), *row.arguments.split()]
    command += ["--json", "--workers", str(workers)]
    command += [part for queue in QUEUES for part in ("--policy", queue)]
    # Not here, where the package lies without its compiled module.
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=trace.parent)
    found: dict[str, Any] = json.loads(ran.stdout)
    vllm, lowest_first = (found["queues"][queue] for queue in ("python", "native:sorted"))
    for figure in ("hit_tokens", "evictions", "preemptions"):
        if vllm[figure] != lowest_first[figure]:
            raise RuntimeError(f"{row.name}: policy sorted does not evict what vLLM evicts")
    for figures in found["queues"].values():
        del figures["rounds"], figures["all"]  # what the tables do not need
    return {"name": row.name, "trace": row.trace, "arguments": row.arguments, **found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Replay public request traces with every placement policy."
    )
    parser.add_argument("traces", type=Path, metavar="TRACES", help="the folder of the traces")
    parser.add_argument("--workers", type=int, default=2, help="processes; default: %(default)s")
    options = parser.parse_args()
    needed = {row.trace for row in ROWS} - {RFC_ROUNDS}
    if missing := sorted(name for name in needed if not (options.traces / name).is_file()):
        print(f"{options.traces} lacks {', '.join(missing)}", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_rfc_rounds(Path(folder) / RFC_ROUNDS)
        for row in ROWS:
            print(f"{row.name}: {row.arguments}", file=sys.stderr)
            at = Path(folder) if row.trace == RFC_ROUNDS else options.traces.resolve()
            rows.append(replayed(at / row.trace, row, options.workers))
    saved = {**provenance(), "rows": rows}
    (table.RESULTS / "replay.json").write_text(json.dumps(saved, indent=1) + "\n")
    table.fill_in()
    return 0


if __name__ == "__main__":
    sys.exit(main())
