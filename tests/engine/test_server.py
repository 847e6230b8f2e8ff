"""The OpenAI-compatible server: the same requests under both queues, told by the engine core."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import BLOCK_SIZE, engine_environment

pytestmark = pytest.mark.engine

OPTIONS = """
    --host 127.0.0.1 --skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 1024
    --num-gpu-blocks-override 48 --kv-cache-memory-bytes 268435456
    --scheduler-cls recording_scheduler.RecordingScheduler
"""


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def refusal(url: str, method: str) -> tuple[int, str]:
    request = urllib.request.Request(url, b"" if method == "POST" else None, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:  # refused, reset, timed out, or an HTTP error: not yet
        return False


@contextmanager
def server(model: Path, record: Path, block_queue: str | None) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that is up; it is stopped as an operator would do it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [*OPTIONS.split(), "--block-size", str(BLOCK_SIZE), "--port", port]
    log = record.with_suffix(".log")
    environment = engine_environment(record, block_queue)
    # Endpoint plugins have to be named.
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "pyblockpool"}
    with (
        log.open("w") as log_file,
        subprocess.Popen(
            command,
            cwd=record.parent,  # `python -m` would import pyblockpool from the source folder here
            env=environment,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not is_up(f"{address}/health"):
                up_to_now = log.read_text(errors="replace")
                assert process.poll() is None, f"the server ended:\n{up_to_now[-5000:]}"
                assert time.monotonic() < deadline, f"no server:\n{up_to_now[-5000:]}"
                time.sleep(0.5)
            yield address, process.pid
            process.terminate()
            process.wait(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def converse(address: str) -> list[list[int]]:
    """Completions one after the other, so that each run schedules alike; returns their tokens."""
    dice = random.Random(0)
    shared = [dice.randrange(512) for _ in range(8 * BLOCK_SIZE)]
    answers = []
    for length in (300, 40, 120, 500, 64, 200):
        prompt = shared[: dice.randrange(9) * BLOCK_SIZE] + dice.choices(range(512), k=length)
        completion = post(
            f"{address}/v1/completions",
            {
                "prompt": prompt,
                "max_tokens": dice.randrange(4, 60),
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
                "return_token_ids": True,
            },
        )
        answers.append(completion["choices"][0]["token_ids"])
    return answers


def reset_order(address: str) -> dict[str, Any]:
    """While a completion runs, and when it is done."""
    reset, stats = f"{address}/reset_free_block_queue_order", f"{address}/free_block_queue_stats"
    shuffled = get(stats)
    # Four long samples, more than the pool holds at once: the machine may be slow to answer us.
    body = {"prompt": [7] * 100, "max_tokens": 800, "ignore_eos": True, "detokenize": False, "n": 4}
    answers = []
    with ThreadPoolExecutor() as threads:
        completion = threads.submit(post, f"{address}/v1/completions", body)
        while not completion.done():
            answers.append(post(reset))
        completion.result()
    return {
        "shuffled": shuffled,
        "meanwhile": answers,
        "idle": post(reset),
        "in order": get(stats),
    }


@pytest.fixture(scope="module")
def plays(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = {}
    for variant, block_queue in {"vllm": None, "native": "native"}.items():
        record = tmp_path_factory.mktemp(variant) / "record.jsonl"
        with server(model, record, block_queue) as (address, pid):
            tokens = converse(address)
            reset = post(f"{address}/reset_prefix_cache")
            tokens += converse(address)
            post(f"{address}/reset_prefix_cache")
            if block_queue:
                order: dict[str, Any] = reset_order(address)
            else:
                order = {
                    path: refusal(f"{address}/{path}", method)
                    for method, path in (
                        ("POST", "reset_free_block_queue_order"),
                        ("GET", "free_block_queue_stats"),
                    )
                }
        lines = record.read_text(encoding="utf-8").splitlines()
        header, *rest = map(json.loads, lines)
        for line in rest:
            line.pop("request_id", None)  # random
        results[variant] = {
            "pid": pid,
            "tokens": tokens,
            "reset": reset,
            "order": order,
            "engine": header,
            "record": rest,
            "log": record.with_suffix(".log").read_text(errors="replace").splitlines(),
        }
    return results


def test_who_serves(plays: dict[str, dict[str, Any]]) -> None:
    assert plays["vllm"]["engine"]["queue"].startswith("vllm.")
    assert plays["native"]["engine"]["queue"] == "pyblockpool._queue.FreeBlockQueue"
    for play in plays.values():
        assert play["engine"]["pid"] != play["pid"]


def test_the_engine_core_logs_one_line(plays: dict[str, dict[str, Any]]) -> None:
    assert not [line for line in plays["vllm"]["log"] if "free-block queue" in line]
    core = f"pid {plays['native']['engine']['pid']}"
    lines = [line for line in plays["native"]["log"] if "free-block queue" in line]
    (line,) = [line for line in lines if line.endswith(core)]
    assert "INFO" in line
    assert "native free-block queue, policy lru" in line


def test_the_same_answers(plays: dict[str, dict[str, Any]]) -> None:
    assert plays["native"]["tokens"] == plays["vllm"]["tokens"]
    answers = plays["native"]["tokens"]
    assert answers[:6] == answers[6:], "the reset changes no answer"
    assert len({str(answer) for answer in answers[:6]}) == 6


def test_the_same_blocks(plays: dict[str, dict[str, Any]]) -> None:
    stock = plays["vllm"]["record"]
    native, of_reset_order = (
        plays["native"]["record"][: len(stock)],
        plays["native"]["record"][len(stock) :],
    )
    assert [line["kind"] for line in of_reset_order] == ["request"] * 4
    assert [line["kind"] for line in native] == (["request"] * 6 + ["reset"]) * 2
    for line, expected in zip(native, stock, strict=True):
        assert line == expected


def test_the_reset(plays: dict[str, dict[str, Any]]) -> None:
    for play in plays.values():
        assert play["reset"] == {"success": True}
        resets = [line for line in play["record"] if line["kind"] == "reset"]
        for line in resets:
            assert line["success"]
            assert line["num_free_blocks"] == 47
            assert line["check"] == ""


def test_the_order_reset_over_http(plays: dict[str, dict[str, Any]]) -> None:
    order = plays["native"]["order"]
    assert order["shuffled"]["pid"] == plays["native"]["engine"]["pid"]
    assert order["shuffled"]["implementation"] == "native"
    assert order["shuffled"]["runs"] > 1
    assert {"success": False} in order["meanwhile"]
    assert order["idle"] == {"success": True}
    assert (order["in order"]["runs"], order["in order"]["free"]) == (1, 47)


def test_the_routes_of_a_server_without_the_variable(plays: dict[str, dict[str, Any]]) -> None:
    for code, body in plays["vllm"]["order"].values():
        assert code == 501
        assert "start it with VLLM_BLOCK_QUEUE=native" in body
