"""What is read from the installed vLLM about its attention backends; what if it is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from implementations import HAS_VLLM

from pyblockpool.doctor import (
    Attention,
    Backend,
    Question,
    RefusedTileError,
    Remark,
    UnknownBackendError,
)
from pyblockpool.plugin import attention
from pyblockpool.plugin.attention import FLEX_ATTENTION, LOOKUPS, Lookup, examine_attention

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """vLLM writes into it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def flex() -> Any:
    return import_module("vllm.v1.attention.backends.flex_attention")


def ask(
    backend: str | None = None, block_size: int | None = None, kv_tile: int | None = None
) -> tuple[Attention, dict[str, Backend], list[Remark]]:
    found, remarks = examine_attention(Question(backend, block_size, kv_tile))
    return found, {each.name: each for each in found.backends}, remarks


def test_every_backend_of_vllm_is_there() -> None:
    registry = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    found, backends, _ = ask()
    assert list(backends) == [member.name for member in registry]
    assert {FLEX_ATTENTION, *LOOKUPS} <= set(backends)
    assert found.platform == import_module("vllm.platforms").current_platform.device_type


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_was_read_is_there(name: str) -> None:
    """When this fails: read the backend of this vLLM, and correct or drop its entry in LOOKUPS."""
    _, backends, _ = ask()
    assert backends[name] == Backend(name, "blocks", LOOKUPS[name].meaning)


def test_what_was_read_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = LOOKUPS["CPU_ATTN"].file
    monkeypatch.setitem(LOOKUPS, "CPU_ATTN", Lookup(there, "paged_attention", "block_table", "-"))
    monkeypatch.setitem(LOOKUPS, "FLASHINFER", Lookup(("gone.py",), "plan", "indices", "-"))
    found, backends, remarks = ask("CPU_ATTN")
    assert backends["CPU_ATTN"].reads == backends["FLASHINFER"].reads == "unknown"
    assert "has no paged_attention(… block_table …) in v1/attention" in backends["CPU_ATTN"].reason
    assert found.fragmentation_costs is None
    assert [each.level for each in remarks if "cost CPU_ATTN prefill time" in each.sentence] == [
        "unknown"
    ]


def test_calls_and_names(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("# load(table)\nx = tl.load(base + table[0])\nrun(keys=table, block=1)\n")
    assert attention._calls(source, "load", "table")
    assert attention._calls(source, "run", "keys")
    assert attention._calls(source, "run", "block")
    assert not attention._calls(source, "load", "keys")
    assert not attention._calls(source, "run", "table")


@pytest.mark.parametrize(
    ("block_size", "kv_tile", "small_blocks", "tile", "costs"),
    [
        (16, None, True, 16, False),
        (64, None, True, 64, False),
        (16, 128, True, 128, True),
        (32, 64, True, 64, True),
        (128, 128, True, 128, False),
        (128, 16, True, 16, False),
        # PyTorch before 2.9
        (16, None, False, 128, True),
        (16, 16, False, 16, False),
        (128, None, False, 128, False),
        (256, None, False, 128, False),
    ],
)
def test_the_tile_of_flex_attention(
    flex: Any,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    kv_tile: int | None,
    small_blocks: bool,
    tile: int,
    costs: bool,
) -> None:
    monkeypatch.setattr(flex, "is_torch_equal_or_newer", lambda version: small_blocks)
    found, backends, remarks = ask(FLEX_ATTENTION, block_size, kv_tile)
    assert (found.flex_attention_tile, found.fragmentation_costs) == (tile, costs)
    assert (found.backend, found.block_size) == (FLEX_ATTENTION, block_size)
    assert backends[FLEX_ATTENTION].reads == ("tiles" if costs else "blocks")
    (verdict,) = [each for each in remarks if each.sentence.startswith("with FLEX_ATTENTION")]
    assert verdict.level == ("note" if costs else "good")
    assert f"its KV tile {'is' if costs else 'of'} {tile} tokens" in verdict.sentence


def test_blocks_that_flex_attention_refuses() -> None:
    reason = "it does not take blocks of 24 tokens"
    found, backends, remarks = ask(FLEX_ATTENTION, 24)
    assert (found.flex_attention_tile, found.fragmentation_costs) == (None, None)
    assert backends[FLEX_ATTENTION].reads == "unknown"
    assert reason in backends[FLEX_ATTENTION].reason
    assert any(
        each.level == "unknown" and reason in each.sentence and each.sentence.startswith("cannot")
        for each in remarks
    )


@pytest.mark.parametrize("backend", [FLEX_ATTENTION, "FLASH_ATTN", None])
def test_a_tile_that_vllm_refuses(backend: str | None) -> None:
    """A wrong question, not something unknown; in vLLM's words, in one line."""
    refusal = "refuses flex_attn_kv_block_size 24: ValueError: flex_attn_kv_block_size must be a"
    with pytest.raises(RefusedTileError, match=refusal) as refused:
        ask(backend, 16, 24)
    assert "\n" not in str(refused.value)


def test_a_fault_of_something_else_is_no_refusal(
    flex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(flex.FlexAttentionMetadataBuilder, "__init__", fail)
    _, backends, _ = ask(FLEX_ATTENTION, 16, 128)
    assert backends[FLEX_ATTENTION] == Backend(
        FLEX_ATTENTION, "unknown", "ValueError: no such layer"
    )


def test_a_flex_attention_of_another_make(flex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(flex.FlexAttentionMetadata, "build_block_mask", lambda self: None)
        assert "not made of tiles of the cache" in ask(FLEX_ATTENTION, 16)[1][FLEX_ATTENTION].reason
    with monkeypatch.context() as patch:
        patch.setattr(flex.FlexAttentionMetadataBuilder, "__init__", lambda self, spec: None)
        assert ask(FLEX_ATTENTION, 16)[1][FLEX_ATTENTION].reason.startswith("TypeError")
    with monkeypatch.context() as patch:
        config = import_module("vllm.config")
        patch.setattr(config, "AttentionConfig", lambda backend=None: None)
        assert ask(FLEX_ATTENTION, 16, 128)[1][FLEX_ATTENTION].reads == "unknown"


def test_flex_attention_is_mentioned_if_another_is_used() -> None:
    found, _, remarks = ask("FLASH_ATTN", 16, 128)
    assert (found.flex_attention_tile, found.fragmentation_costs) == (128, False)
    (aside,) = [each for each in remarks if each.sentence.startswith(FLEX_ATTENTION)]
    loses = "would lose prefill time to scattered blocks: its KV tile is 128 tokens and a block is"
    assert loses in aside.sentence
    _, _, remarks = ask("FLASH_ATTN", 128, 128)
    (verdict,) = [each for each in remarks if each.sentence.startswith("with FLASH_ATTN")]
    assert "scattered blocks cost prefill nothing: its kernel gets the" in verdict.sentence
    gains_nothing = (
        "its KV tile of 128 tokens is a block (--flex-attn-kv-block-size asks about another)"
    )
    assert remarks[-1].sentence == f"{FLEX_ATTENTION} would gain nothing either: {gains_nothing}"
    _, _, remarks = ask("FLASHMLA", 128, 128)
    assert remarks[-1].sentence == f"{FLEX_ATTENTION} would gain nothing: {gains_nothing}"
    _, _, remarks = ask("FLASH_ATTN", 24)
    assert any("what FLEX_ATTENTION would read at once" in each.sentence for each in remarks)


def test_what_vllm_takes_here() -> None:
    """On the CPU it takes its own kernel and blocks of 128 tokens, whatever it is asked for."""
    found, _, remarks = ask()
    if found.platform != "cpu":
        pytest.skip("a vLLM for another platform")
    assert (found.chosen, found.backend, found.block_size) == ("CPU_ATTN", "CPU_ATTN", 128)
    assert found.fragmentation_costs is False
    assert any("vLLM's default on cpu" in each.sentence for each in remarks)
    found, _, remarks = ask("FLASH_ATTN")
    assert (found.chosen, found.backend) == ("CPU_ATTN", "FLASH_ATTN")
    assert [each.level for each in remarks if "even if it is asked" in each.sentence] == ["note"]


def test_an_unknown_backend() -> None:
    with pytest.raises(
        UnknownBackendError, match="no attention backend 'FLUSH'; it has FLASH_ATTN"
    ):
        ask("FLUSH")


def test_a_backend_that_somebody_has_replaced() -> None:
    registry = import_module("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum.CPU_ATTN
    registry.register_backend(member, "rival.attention.Backend")
    try:
        _, backends, _ = ask("CPU_ATTN")
    finally:
        member.clear_override()
    assert backends["CPU_ATTN"].reads == "unknown"
    assert "rival.attention.Backend" in backends["CPU_ATTN"].reason


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a vLLM for GPUs finds none: a question that names everything is answered."""
    config = import_module("vllm.config")

    def fail(**arguments: Any) -> None:
        raise RuntimeError("Failed to infer device type")

    monkeypatch.setattr(config, "VllmConfig", fail)
    found, backends, remarks = ask()
    assert (found.chosen, found.backend, found.block_size) == (None, None, None)
    assert found.fragmentation_costs is None
    sentence = "cannot tell the block size and attention backend that vLLM takes here"
    assert any(each.sentence.startswith(sentence) for each in remarks)
    assert backends[FLEX_ATTENTION].reads == "unknown"
    found, _, remarks = ask(FLEX_ATTENTION, 16, 128)
    assert (found.chosen, found.fragmentation_costs) == (None, True)
    assert any("Failed to infer device type" in each.sentence for each in remarks)


def test_a_backend_that_is_not_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_chosen", lambda asked: "ELSEWHERE")
    found, _, remarks = ask(block_size=16)
    assert (found.backend, found.fragmentation_costs) == ("ELSEWHERE", None)
    assert any("it is not in vLLM's list" in each.sentence for each in remarks)
