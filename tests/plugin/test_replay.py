"""Request traces through the installed vLLM's pool: the figures, and what holds for each policy."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_traces
import pytest
from implementations import HAS_VLLM
from pools import splits_by_hash

from pyblockpool.block_trace import Request, read_sections
from pyblockpool.cli import main
from pyblockpool.errors import ReplayError, SettingsError, UnsupportedVLLMError
from pyblockpool.plugin import entry
from pyblockpool.replay import Figures, Setup, replay, replay_each
from pyblockpool.report import Choices, EngineFigures, engine_figures
from pyblockpool.request_trace import TraceRequest, read_requests
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE

pytestmark = pytest.mark.skipif(
    not HAS_VLLM or not splits_by_hash(), reason="placement needs vLLM 0.24.0 or later"
)

QUEUES = ["python", "native", "native:sorted", "native:extent", "native:extent,size=2"]
Replay = Callable[..., Figures]


@pytest.fixture
def replay_with(monkeypatch: pytest.MonkeyPatch) -> Replay:
    """``replay_with(queue, requests, setup)``, in this process."""

    def replay_with(queue: str, requests: list[TraceRequest], setup: Setup) -> Figures:
        monkeypatch.setenv(QUEUE_VARIABLE, queue)
        entry.register()
        try:
            return replay(requests, setup)
        except ReplayError as error:
            refusal = str(error)  # without its traceback, which keeps the pool alive
        finally:
            entry.restore()
        raise ReplayError(refusal)

    return replay_with


def chats(num_sessions: int, turns: int, seed: int = 0) -> list[TraceRequest]:
    """Sessions with a system prompt in common, whose prompts grow from turn to turn."""
    chance = random.Random(seed)
    system = range(100)
    lengths = [chance.randint(20, 300) for _ in range(num_sessions)]
    requests = []
    for turn in range(turns):
        for session in range(num_sessions):
            first = 10_000 * (session + 1)
            own = range(first, first + lengths[session] * (turn + 1))
            requests.append(
                TraceRequest(
                    len(system) + len(own) + 5, chance.randint(1, 90), (system, own), 0, session
                )
            )
    return requests


def known_hits(requests: list[TraceRequest], block_size: int) -> int:
    """Tokens that are hit in a pool that never forgets, by a set of all prefixes ever seen."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    number = 0
    for request in requests:
        if request.round != number:
            seen.clear()
            number = request.round
        tokens = [token for piece in request.prefix for token in piece]
        longest = (request.input_length - 1) // block_size
        whole = [tuple(tokens[: (i + 1) * block_size]) for i in range(len(tokens) // block_size)]
        hits += block_size * next(
            (i for i, prefix in enumerate(whole[:longest]) if prefix not in seen),
            min(len(whole), longest),
        )
        seen.update(whole)
    return hits


@pytest.mark.parametrize("queue", QUEUES)
def test_hits_in_a_pool_that_never_forgets(replay_with: Replay, queue: str) -> None:
    requests = chats(6, 4)
    found = replay_with(queue, requests, Setup(6000, 3))
    assert found.prompt_tokens == sum(request.input_length for request in requests)
    assert found.hit_tokens == known_hits(requests, 16) > 0
    assert (found.evictions, found.preemptions) == (0, 0)
    assert (found.prefill.tables, found.release.tables) == (12, 24)
    # All of a prompt and an answer has a slot, but for the last token, which nobody reads.
    assert found.release.blocks == sum(
        -(-(request.input_length + request.output_length - 1) // 16) for request in requests
    )
    assert found.prefill.blocks == sum(
        -(-request.input_length // 16) for request in requests[len(requests) // 2 :]
    )


@pytest.mark.parametrize("chunk", [None, 64])
def test_lru_and_sorted_evict_what_vllm_evicts(replay_with: Replay, chunk: int | None) -> None:
    """A pool that is far too small: everything comes and goes."""
    requests = chats(12, 6)
    setup = Setup(220, 5, chunk=chunk)
    vllm, lru, lowest = (
        replay_with(queue, requests, setup) for queue in ("python", "native", "native:sorted")
    )
    assert vllm.evictions > 1000
    assert vllm.preemptions > 0
    assert vllm.queue == {}
    assert lru.queue["policy"] == "lru"
    lru.queue = {}
    assert lru == vllm, "block for block"
    for figure in ("hit_tokens", "evictions", "preemptions"):
        assert getattr(lowest, figure) == getattr(vllm, figure)
    assert lowest.release.runs < vllm.release.runs


@pytest.mark.parametrize("queue", ["python", "native:extent"])
def test_preempted_requests_come_to_their_end(replay_with: Replay, queue: str) -> None:
    """With all the blocks that they need and no more, whenever they lose them."""
    preemptions = 0
    for seed in range(25):
        chance = random.Random(seed)
        requests = [TraceRequest(chance.randint(1, 60), chance.randint(1, 90)) for _ in range(20)]
        setup = Setup(chance.randint(12, 30), 6, chunk=chance.choice([None, 7, 32]), seed=seed)
        found = replay_with(queue, requests, setup)
        assert found.release.tables == 20
        assert found.release.blocks == sum(
            -(-(request.input_length + request.output_length - 1) // 16) for request in requests
        )
        preemptions += found.preemptions
    assert preemptions > 100


@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_answers_of_one_token(replay_with: Replay, num_requests: int) -> None:
    """They end as they are admitted, and nobody else may be left then."""
    found = replay_with("native", [TraceRequest(40, 1)] * num_requests, Setup(20, 2))
    assert (found.release.tables, found.release.blocks) == (num_requests, 3 * num_requests)


def test_a_tile_is_128_tokens() -> None:
    tiles = {size: Setup(100, 1, block_size=size).tile for size in (16, 32, 128, 1056)}
    assert tiles == {16: 8, 32: 4, 128: 1, 1056: 1}
    assert Setup(100, 1, block_size=32, tile=16).tile == 16


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [None, 64])
def test_tile_amplification_of_extents(
    replay_with: Replay, chunk: int | None, caching: bool
) -> None:
    """1.0 in a pool that never runs short, but for the tiles in which shared prefixes branch."""
    requests = chats(40, 5)
    found = replay_with("native:extent", requests, Setup(1000, 6, caching=caching, chunk=chunk))
    assert found.queue["shortages"] == 0
    assert found.evictions > 0 or not caching
    branches = found.release.tables * 2 if caching else 0  # the system prompt, the last turn
    assert found.release.packed_tiles <= found.release.tiles
    assert found.release.tiles <= found.release.packed_tiles + branches
    vllm = replay_with("python", requests, Setup(1000, 6, caching=caching, chunk=chunk))
    assert vllm.release.tile_amplification > 2 * found.release.tile_amplification


@pytest.mark.parametrize("chunk", [None, 64])
def test_while_clean_extents_last_nothing_is_shared_but_prefixes(
    replay_with: Replay, chunk: int | None
) -> None:
    """One tile too many where a common prefix ends, and none without one."""
    chance = random.Random(4)
    for prefix in (range(0), range(100)):
        requests = [
            TraceRequest(len(prefix) + chance.randint(1, 700), chance.randint(1, 300), (prefix,))
            for _ in range(60)
        ]
        found = replay_with("native:extent", requests, Setup(8000, 6, chunk=chunk))
        assert found.evictions == found.queue["shortages"] == 0
        assert found.queue["clean"] > 0
        extra = found.release.tiles - found.release.packed_tiles
        assert 0 <= extra <= (len(requests) if prefix else 0)
        assert extra > 0 or not prefix


@pytest.mark.parametrize("queue", QUEUES)
def test_the_same_again(replay_with: Replay, queue: str) -> None:
    requests = chats(12, 3)
    setup = Setup(500, 5, chunk=100)
    assert replay_with(queue, requests, setup) == replay_with(queue, requests, setup)


@pytest.mark.parametrize("queue", ["native:sorted", "native:extent"])
def test_rounds_start_from_canonical_order(replay_with: Replay, queue: str) -> None:
    """The prefix cache is reset between rounds: their tables are alike, whatever came before."""
    one_round = [
        TraceRequest(2000, 40, (range(prompt * 2000, (prompt + 1) * 2000),))
        for prompt in range(2)
        for _ in range(3)
    ]
    requests = [
        TraceRequest(r.input_length, r.output_length, r.prefix, number)
        for number in range(4)
        for r in one_round
    ]
    found = replay_with(queue, requests, Setup(1000, 6))
    assert found.hit_tokens == known_hits(requests, 16) == 4 * 4 * 1984
    assert found.prefill.blocks_per_run > 30
    vllm = replay_with("python", requests, Setup(1000, 6))
    assert vllm.hit_tokens == found.hit_tokens
    assert vllm.prefill.blocks_per_run < found.prefill.blocks_per_run / 3


def test_figures_by_round(replay_with: Replay) -> None:
    """Those of the trace, or stretches; together they are what the replay says in all."""
    requests = [dataclasses.replace(each, round=i // 10) for i, each in enumerate(chats(10, 4))]
    for setup, sizes in ((Setup(900, 6), [10] * 4), (Setup(900, 6, rounds=3), [14, 13, 13])):
        found = replay_with("native:extent", requests, setup)
        engine = found.engine
        assert [each.requests for each in engine.rounds] == sizes
        assert (engine.label, engine.header.queue) == ("native:extent", "native:extent")
        assert (engine.header.policy, engine.header.extent) == ("extent", 8)
        assert engine.all.hit_tokens == sum(each.hit_tokens for each in engine.rounds)
        assert (engine.all.prompt_tokens, engine.all.hit_tokens, engine.all.preempted) == (
            found.prompt_tokens,
            found.hit_tokens,
            found.preemptions,
        )
        assert engine.all.groups[0].tables.contiguity == found.release


def test_preempted_tables_are_figures_of_the_engine(replay_with: Replay) -> None:
    found = replay_with("python", chats(12, 6), Setup(220, 5))
    assert found.preemptions > 0
    assert found.engine.all.preempted == found.preemptions
    assert found.engine.all.finished == found.release.tables == 72
    assert found.engine.all.groups[0].tables.contiguity.tables == 72 + found.preemptions
    assert (found.engine.header.implementation, found.engine.header.policy) == ("vllm", "lru")


def test_a_report_of_a_trace_shows_the_same(
    replay_with: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a replay, written as an engine writes them, and read back."""
    lines: list[dict[str, Any]] = []

    class Recorder(EngineFigures):
        def add(self, record: Request) -> None:
            super().add(record)
            lines.append(
                block_traces.request(
                    record.table.tolist(),
                    record.prompt,
                    hit=record.hit,
                    outcome=record.outcome,
                    request=record.request,
                    prefill=None,
                )
            )

        def end_round(self) -> None:
            super().end_round()
            lines.append(block_traces.reset())

    monkeypatch.setattr("pyblockpool.replay.EngineFigures", Recorder)
    requests = [dataclasses.replace(each, round=i // 12) for i, each in enumerate(chats(12, 4))]
    for queue in ("python", "native:extent"):
        lines.clear()
        played = replay_with(queue, requests, Setup(400, 6)).engine
        trace = tmp_path / queue
        block_traces.write(trace, block_traces.header(num_blocks=400), *lines)
        (section,) = read_sections(trace)
        read = engine_figures(section, queue, Choices())
        assert len(read.rounds) == 4
        assert read.as_json(1)["rounds"] == played.as_json(1)["rounds"]
        assert read.as_json(1)["all"] == played.as_json(1)["all"]
        assert read.first_holders.tolist() == played.first_holders.tolist()
        assert read.last_holders.tolist() == played.last_holders.tolist()


def test_the_shuffle_grows_under_lru_and_not_under_the_policies(replay_with: Replay) -> None:
    """Rounds of the same prompts with a reset between them, as in vllm-project/vllm#40244."""
    chance = random.Random(0)
    requests = [
        TraceRequest(
            1600, chance.randint(100, 400), (range(1600 * prompt, 1600 * (prompt + 1)),), n
        )
        for n in range(6)
        for prompt in range(4)
        for _ in range(4)
    ]
    tiles: dict[str, list[float]] = {}
    for queue in ("python", "native:sorted", "native:extent"):
        rounds = replay_with(queue, requests, Setup(1200, 16)).engine.rounds
        tiles[queue] = [each.groups[0].prompts.contiguity.tile_amplification for each in rounds]
    assert tiles["python"][0] < 1.1
    assert tiles["python"][-1] > tiles["python"][0] + 0.5
    for queue in ("native:sorted", "native:extent"):
        assert max(tiles[queue]) < 1.1, queue


@pytest.mark.parametrize("queue", QUEUES)
def test_a_request_that_does_not_fit(replay_with: Replay, queue: str) -> None:
    fits = TraceRequest(100, 10)
    setup = Setup(12, 4)  # 11 blocks, 176 tokens
    assert replay_with(queue, [TraceRequest(100, 77)], setup).release.blocks == 11
    for request in (TraceRequest(177, 1), TraceRequest(100, 78), TraceRequest(1000, 1)):
        with pytest.raises(ReplayError, match=r"request 2 of the trace, .*12 blocks of 16"):
            replay_with(queue, [fits, fits, request], setup)


def test_each_queue_in_a_process_of_its_own() -> None:
    queues = ["python", "native", "native:extent,size=2"]
    seen: dict[str, list[int]] = {queue: [] for queue in queues}
    found = replay_each(
        chats(5, 2),
        Setup(400, 3),
        queues,
        workers=2,
        progress=lambda queue, admitted: seen[queue].append(admitted),
    )
    assert list(found) == queues
    assert all(numbers == list(range(1, 11)) for numbers in seen.values())
    assert [figures.queue.get("policy") for figures in found.values()] == [None, "lru", "extent"]
    assert found["native:extent,size=2"].queue["size"] == 2
    assert found["native"].release == found["python"].release


def test_a_replay_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "trace.jsonl"))
    replay_each(chats(1, 1), Setup(100, 1), ["python"])
    assert not list(tmp_path.iterdir())


def test_troubles_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="'nativ' is not allowed"):
        replay_each(chats(1, 1), Setup(100, 1), ["python", "nativ"])
    with pytest.raises(ReplayError, match="does not fit"):
        replay_each(chats(1, 1), Setup(3, 1), ["native"])
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ReplayError, match="VLLM_PLUGINS, where it is set, has to name pyblockpool"):
        replay_each(chats(1, 1), Setup(100, 1), ["native"])


def test_an_older_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_manager

    class UpTo22:
        def __init__(self, kv_cache_config: Any, max_model_len: int, hash_block_size: int) -> None:
            pytest.fail("it cannot be used as it is")

    monkeypatch.setattr(kv_cache_manager, "KVCacheManager", UpTo22)
    with pytest.raises(UnsupportedVLLMError, match=r"install vLLM 0\.23\.0 or later"):
        replay(chats(1, 1), Setup(100, 4))


@pytest.mark.parametrize("name", ["num_blocks", "residents", "block_size", "chunk", "rounds"])
def test_impossible_setups_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        dataclasses.replace(Setup(100, 2), **{name: 0})  # type: ignore[arg-type]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyblockpool", "replay", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows: list[dict[str, Any]] = [
        {"input_length": 900 + i, "output_length": 30, "hash_ids": [0, i]} for i in range(1, 20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_prints_a_table(trace: str) -> None:
    policies = ["--policy", "python", "--policy", "native:extent"]
    ran = command(trace, "--blocks", "400", "--residents", "3", "--workers", "2", *policies)
    assert ran.returncode == 0, ran.stderr
    header, *rows = [
        [cell.strip() for cell in line.split(line[0])[1:-1]]
        for line in ran.stdout.splitlines()
        if line[0] in "┃│"
    ]
    assert header == ["", "python", "native:extent"]
    figures = {name: cells for name, *cells in rows}
    assert figures["prefix hits"][0] == figures["prefix hits"][1] != "0.00%"
    assert 1.0 <= float(figures["tile amplification (8 blocks), in whole tables"][1]) < 1.05
    assert figures["shortages"] == ["-", "0"]
    assert "blocks a run, in prompts (2nd half of the requests)" in figures
    for name in ("blocks a run", "longest run", "mergeable"):
        assert f"{name}, in whole tables" in figures


def test_the_command_prints_json(trace: str) -> None:
    arguments = ["--blocks", "400", "--block-size", "48", "--policy", "native:extent"]
    ran = command(trace, *arguments, "--limit", "5", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["requests"], found["setup"]["num_blocks"]) == (5, 400)
    figures = found["queues"]["native:extent"]
    assert figures["queue"]["policy"] == "extent"
    assert figures["hit_rate"] == figures["hit_tokens"] / figures["prompt_tokens"] > 0
    assert figures["release"]["tile_amplification"] == 1.0
    assert found["setup"]["tile"] == figures["release"]["tile"] == 2
    assert figures["all"]["groups"][0]["tile_tokens"] == 96


def test_the_command_tells_rounds_and_draws(trace: str, tmp_path: Path) -> None:
    picture = tmp_path / "queues.svg"
    arguments = [trace, "--blocks", "400", "--policy", "python", "--policy", "native:extent"]
    ran = command(*arguments, "--rounds", "2", "--plot", str(picture))
    assert ran.returncode == 0, ran.stderr
    shown = [line.split()[:3] for line in ran.stdout.splitlines()]
    assert ["python", "1", "10"] in shown
    assert ["2", "9"] in [words[:2] for words in shown]
    assert ["native:extent", "all", "19"] in shown
    assert ran.stderr.endswith(f"pyblockpool replay: the picture is in {picture}\n")
    drawn = picture.read_text()
    for text in ("blocks a run, in whole tables", "prefix hits", "native:extent, round 2"):
        assert text in drawn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (120, [["python", "native:extent", "native:extent,pack_tails"]]),
        (90, [["python", "native:extent", "native:extent,pack_tails"]]),
        (60, [["", "", "native:"], ["", "native:", "extent,"], ["python", "extent", "pack_tails"]]),
    ],
)
def test_names_of_queues_on_a_narrow_terminal(
    trace: str, monkeypatch: pytest.MonkeyPatch, width: int, headings: list[list[str]]
) -> None:
    """First the names of figures are wrapped, then those of queues, between their parts."""
    printed = Terminal()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    queues = ("python", "native:extent", "native:extent,pack_tails")
    arguments = [f"--policy={queue}" for queue in queues]
    assert main(["replay", trace, "--blocks", "400", "--residents", "3", *arguments]) == 0
    shown = re.sub("\x1b[^m]*m", "", printed.getvalue())
    cells = [
        [cell.strip() for cell in line.split(line[0])[2:-1]]
        for line in shown.splitlines()
        if line[0] == "┃"
    ]
    assert sorted(cells) == sorted(headings)
    assert max(map(len, shown.splitlines())) <= width


def test_figures_that_there_are_none_of(tmp_path: Path) -> None:
    """Tables of one block have no neighbours: null in JSON, which knows no NaN."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"input_length": 5, "output_length": 3, "hash_ids": []}\n')
    ran = command(str(path), "--blocks", "9", "--policy", "native", "--policy", "native", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout, parse_constant=pytest.fail)
    assert found["queues"]["native"]["release"]["mergeable_share"] is None


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["nowhere.jsonl", "--blocks", "100"], 1, "No such file"),
        (["{trace}", "--blocks", "9"], 1, "does not fit into 9 blocks"),
        (["{trace}", "--blocks", "100", "--policy", "lru"], 2, "'lru' is none of python, native,"),
        (["{trace}", "--blocks", "1"], 2, "--blocks: must be at least 2, not 1"),
        (["{trace}", "--blocks", "100", "--chunk", "0"], 2, "--chunk: must be at least 1, not 0"),
        (["{trace}"], 2, "required: --blocks"),
    ],
)
def test_the_command_says_what_is_wrong(
    trace: str, arguments: list[str], status: int, complaint: str
) -> None:
    ran = command(*(argument.format(trace=trace) for argument in arguments))
    assert (ran.returncode, ran.stdout) == (status, "")
    assert complaint in ran.stderr
    assert "Traceback" not in ran.stderr


# A short table has a whole tile more for each prefix that it shares.
PUBLIC: list[tuple[str, dict[str, Any], Setup, float]] = [
    ("mooncake_conversation.jsonl", {"limit": 60}, Setup(16_384, 16), 1.01),
    ("azure2023_conv.csv", {"limit": 400}, Setup(4_096, 32), 1.01),
    ("weka_agentic_odd.jsonl", {"limit": 40, "max_context": 65_536}, Setup(24_576, 4), 1.01),
    ("synthetic_grpo.jsonl", {"limit": 300}, Setup(16_384, 64), 1.2),
]


@pytest.mark.parametrize(
    ("file", "read", "setup", "amplification"), PUBLIC, ids=[file for file, *_ in PUBLIC]
)
def test_public_traces(
    replay_with: Replay, file: str, read: dict[str, Any], setup: Setup, amplification: float
) -> None:
    """The files are not part of the repository: PYBLOCKPOOL_TRACES is the folder they are in."""
    path = Path(os.environ.get("PYBLOCKPOOL_TRACES", "")) / file
    if not path.is_file():
        pytest.skip(f"set PYBLOCKPOOL_TRACES to a folder with {file}")
    requests = read_requests(path, residents=setup.residents, **read)
    vllm, extents = (replay_with(queue, requests, setup) for queue in ("python", "native:extent"))
    assert vllm.prompt_tokens == extents.prompt_tokens
    assert abs(vllm.hit_rate - extents.hit_rate) < 0.005
    assert extents.queue["shortages"] == 0
    assert 1.0 <= extents.release.tile_amplification <= amplification
    assert vllm.release.tile_amplification > max(1.05, extents.release.tile_amplification)
