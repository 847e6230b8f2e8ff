"""The kernel benchmark: its tables, its block masks, and checks that can fail. Nothing is compiled.

A block mask is right if attention over the tiles that it lists is, so a dense kernel in float64
stands in for the compiled one: it computes exactly the listed tiles of the physical cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_traces import FULL, header, request, reset, write

from pyblockpool.contiguity import Contiguity
from pyblockpool.errors import TraceError

torch = pytest.importorskip("torch")
import kernel_prefill  # noqa: E402  # it needs torch
from kernel_prefill import (  # noqa: E402
    ID_ORDER,
    QUERY_TILE,
    Prompt,
    Shape,
    aged_table,
    block_mask,
    in_turn,
    longest_table,
    made_tables,
    parse_options,
    reference,
    visits,
)
from torch.nn.attention.flex_attention import create_block_mask, create_mask  # noqa: E402

SHAPE = Shape(heads=4, kv_heads=2, head_dim=8, block_size=16, num_blocks=40)
TOKENS = 240  # 15 blocks; neither a tile nor the pool ends with the prompt
TABLES = made_tables(15, SHAPE.num_blocks, seed=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small work on busy processors: several threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def amplification(table: list[int]) -> float:
    contiguity = Contiguity(8)
    contiguity.add(table)
    return contiguity.tile_amplification


# Tables


def test_made_tables() -> None:
    tables = made_tables(250, 2_400, seed=1)
    assert list(tables) == [ID_ORDER, "reversed", "shuffled", "aged"]
    assert tables[ID_ORDER] == list(range(1, 251))
    assert tables["reversed"] == list(range(250, 0, -1))
    for table in tables.values():
        assert len(table) == len(set(table)) == 250
        assert min(table) > 0
        assert max(table) < 2_400
    assert amplification(tables["reversed"]) == amplification(tables[ID_ORDER]) < 1.05
    # 250 of 300 tiles at most, where 32 would do.
    assert 3 < amplification(tables["aged"]) < 7
    assert 3 < amplification(tables["shuffled"]) < 7


def test_a_table_can_have_all_blocks_but_the_null_block() -> None:
    for table in made_tables(39, 40, seed=1).values():
        assert sorted(table) == list(range(1, 40))


def test_tables_follow_the_seed() -> None:
    assert made_tables(9, 40, seed=1) == made_tables(9, 40, seed=1)
    other = made_tables(9, 40, seed=2)
    assert made_tables(9, 40, seed=1)["shuffled"] != other["shuffled"]
    assert made_tables(9, 40, seed=1)["aged"] != other["aged"]


@pytest.mark.parametrize("num_blocks", [2, 3, 17, 400])
def test_an_aged_pool_loses_no_block(num_blocks: int) -> None:
    table = aged_table(num_blocks - 1, num_blocks, random.Random(0))
    assert sorted(table) == list(range(1, num_blocks))


class Greedy(random.Random):
    """Requests that are all as large as can be, more than fit."""

    def randint(self, a: int, b: int) -> int:
        return b


def test_a_pool_that_runs_out_of_blocks_ages_too() -> None:
    assert sorted(aged_table(399, 400, Greedy(0))) == list(range(1, 400))


def test_the_longest_table_that_fits(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace.jsonl",
        header(num_blocks=100, groups=[FULL, FULL | {"block_size": 32}]),
        request([3, 4, 9, 8], 64, request="short"),
        request([50, 51, 52, 60, 61], 80, request="long", t=2.0),
        reset(),
        request([0, 1, 2, 5, 6, 7], 96, request="window"),
        request([70, 71, 72, 73, 74, 75, 76], 224, request="another block size", group=1),
    )
    longest = longest_table(trace, 16, None)
    assert (longest.blocks, longest.num_blocks) == ([50, 51, 52, 60, 61], 100)
    assert longest.description == "trace.jsonl, request long, group 0, after 2.000 s: 5 blocks"
    assert longest_table(trace, 16, 61).blocks == [3, 4, 9, 8]
    assert longest_table(trace, 32, None).blocks == [70, 71, 72, 73, 74, 75, 76]
    with pytest.raises(TraceError, match=r"ids below 9: give --block-size and --blocks"):
        longest_table(trace, 16, 9)


# Block masks


def defined_mask(table: list[int], shape: Shape) -> Any:
    """Which query may see which slot of the physical cache, query by query."""
    allowed = torch.zeros(TOKENS, shape.num_blocks * shape.block_size, dtype=torch.bool)
    for position in range(TOKENS):
        block = table[position // shape.block_size]
        allowed[position:, block * shape.block_size + position % shape.block_size] = True
    return allowed


def mask_of(table: list[int], tile: int, shape: Shape = SHAPE) -> Any:
    return block_mask(
        torch.tensor(table),
        TOKENS,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        tile=tile,
    )


def listed(counts: Any, indices: Any) -> list[list[int]]:
    """The tiles of each tile of queries."""
    if counts is None:
        return [[]] * (TOKENS // QUERY_TILE)
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [row[:count] for count, row in rows]


def listed_tiles(mask: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Those that are computed with the mask, and without."""
    return (
        listed(mask.kv_num_blocks, mask.kv_indices),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
    )


def check_mask(table: list[int], tile: int, shape: Shape) -> None:
    """A tile is visited if a block of the request lies in it that a query may see."""
    mask = mask_of(table, tile, shape)
    allowed = defined_mask(table, shape)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, *allowed.shape, "cpu")[0, 0], allowed)
    by_tile = allowed.view(TOKENS // QUERY_TILE, QUERY_TILE, -1, tile).permute(0, 2, 1, 3)
    some, every = by_tile.flatten(2).any(-1), by_tile.flatten(2).all(-1)
    masked, whole = listed_tiles(mask)
    for row, (with_mask, without) in enumerate(zip(masked, whole, strict=True)):
        assert sorted(with_mask + without) == some[row].nonzero().flatten().tolist()
        assert tile == shape.block_size or without == every[row].nonzero().flatten().tolist()
    assert visits(mask) == int(some.sum())
    assert list(mask.BLOCK_SIZE) == [QUERY_TILE, tile]
    assert mask.shape[-2:] == allowed.shape


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("name", TABLES)
def test_which_tiles_are_visited(name: str, tile: int) -> None:
    check_mask(TABLES[name], tile, SHAPE)


@pytest.mark.parametrize(
    ("block_size", "tile"),
    [(8, 16), (8, 64), (32, 32), (32, 64), (128, 128)],  # the last block of 32 is half full
)
def test_blocks_smaller_and_larger_than_a_tile_of_queries(block_size: int, tile: int) -> None:
    shape = Shape(4, 2, 8, block_size, num_blocks=1_024 // block_size)
    for table in made_tables(-(-TOKENS // block_size), shape.num_blocks, seed=3).values():
        check_mask(table, tile, shape)


@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("name", TABLES)
def test_larger_tiles_are_listed_as_pytorch_lists_them(name: str, tile: int) -> None:
    mask = mask_of(TABLES[name], tile)
    slots = SHAPE.num_blocks * SHAPE.block_size
    pytorch = create_block_mask(
        mask.mask_mod, None, None, TOKENS, slots, device="cpu", BLOCK_SIZE=(QUERY_TILE, tile)
    )
    assert listed_tiles(mask) == listed_tiles(pytorch)


@pytest.mark.parametrize("name", TABLES)
def test_tiles_of_one_block_are_listed_as_in_the_table(name: str) -> None:
    masked, whole = listed_tiles(mask_of(TABLES[name], 16))
    assert masked == [TABLES[name][: row + 1] for row in range(15)]
    assert whole == [[]] * 15


# Answers


def dense_kernel(query: Any, key: Any, value: Any, *, block_mask: Any, **_: Any) -> Any:
    """What the compiled kernel computes: the listed tiles, some of them without the mask."""
    _, tile = block_mask.BLOCK_SIZE
    tiles = torch.zeros(2, TOKENS // QUERY_TILE, key.shape[2] // tile, dtype=torch.bool)
    for kind, rows in enumerate(listed_tiles(block_mask)):
        for row, columns in enumerate(rows):
            tiles[kind, row, columns] = True
    masked, whole = tiles.repeat_interleave(QUERY_TILE, 1).repeat_interleave(tile, 2)
    allowed = create_mask(block_mask.mask_mod, 1, 1, TOKENS, key.shape[2], "cpu")[0, 0]
    key, value = (
        each.double().repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
    )
    scores = query.double() @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~(masked & allowed | whole), -torch.inf).softmax(-1) @ value


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(TOKENS, TABLES, SHAPE, "float32", "cpu")


def masks(prompt: Prompt, tile: int) -> dict[str, Any]:
    return {name: cache.mask(TOKENS, tile) for name, cache in prompt.caches.items()}


def test_the_reference_is_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_prefill, "REFERENCE_QUERIES", 24)
    query, key, value = torch.randn(4, 70, 8), torch.randn(2, 70, 8), torch.randn(2, 70, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None].double(), key[None].double(), value[None].double(), None, 0.0, True,
        enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(reference(query, key, value), expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_attention_over_the_listed_tiles_is_right(prompt: Prompt, tile: int) -> None:
    for name, mask in masks(prompt, tile).items():
        assert prompt.error(prompt.attention(dense_kernel, name, mask)) < 1e-12
    prompt.check_attention(dense_kernel, tile, masks(prompt, tile))


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("at", [0, 7, 13])
def test_one_wrong_block_is_seen_anywhere(prompt: Prompt, at: int, tile: int) -> None:
    for name, cache in prompt.caches.items():
        exchanged = cache.table.clone()
        exchanged[at : at + 2] = exchanged[at : at + 2].flip(0)
        wrong = cache.mask(TOKENS, tile, exchanged)
        assert not prompt.agrees(prompt.attention(dense_kernel, name, wrong))


def test_an_output_that_is_no_number_is_wrong(prompt: Prompt) -> None:
    out = prompt.attention(dense_kernel, "aged", masks(prompt, 64)["aged"])
    assert prompt.agrees(out)
    out[0, 1, 2, 3] = torch.nan
    assert not prompt.agrees(out)


def test_a_wrong_kernel_and_a_blind_check_are_refused(prompt: Prompt) -> None:
    right = dense_kernel(
        prompt._query[None],
        prompt.caches["aged"].keys[None],
        prompt.caches["aged"].values[None],
        block_mask=masks(prompt, 64)["aged"],
    )
    with pytest.raises(
        RuntimeError, match=r"id order, prompt 240, KV tile 64: .* off by 1\.0e\+00"
    ):
        prompt.check_attention(lambda *_, **__: right + 1, 64, masks(prompt, 64))
    with pytest.raises(RuntimeError, match="sees no difference"):
        prompt.check_attention(lambda *_, **__: right, 64, masks(prompt, 64))


def test_what_is_gathered_is_checked(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cache in prompt.caches.items():
        prompt.check_gather(name)
        # Keys and values, read and written: 2 heads, 240 tokens, 8 numbers of 4 bytes.
        assert cache.gathered_bytes() == 2 * 2 * (2 * 240 * 8 * 4)
        slots = np.concatenate([np.arange(16) + 16 * block for block in TABLES[name]])
        for whole, gathered in zip((cache.keys, cache.values), cache.gather(), strict=True):
            assert torch.equal(gathered.flatten(1, 2), whole[:, slots])
    aged = prompt.caches["aged"]
    monkeypatch.setattr(aged, "table", aged.table.flip(0))
    with pytest.raises(RuntimeError, match="aged: what was gathered"):
        prompt.check_gather("aged")


# Times


def test_calls_take_turns_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    times = iter([100.0, 100.0, 1.0, 3.0, 2.0, 4.0, 3.0, 12.0])

    def seconds(device: str, call: Any) -> float:
        call()
        return next(times)

    monkeypatch.setattr(kernel_prefill, "seconds", seconds)
    calls = {name: partial(happened.append, name) for name in (ID_ORDER, "aged")}
    found = in_turn("cpu", 3, calls, before=lambda: happened.append("before"))
    assert happened == ["before", ID_ORDER, "before", "aged"] * 4
    assert found["aged"]["seconds"] == {"median": 4.0, "quartiles": [3.5, 8.0]}
    assert found["aged"]["ratio"] == 2.0
    assert found["aged"]["ratio_quartiles"] == [2.5, 3.5]
    assert found[ID_ORDER]["ratio"] == 1.0


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts 100", "a prompt of 100 tokens is no multiple of 16, .* take 112"),
        ("--prompts 16", "less than two blocks"),
        ("--blocks 2401", "2401 blocks of 16 tokens are no multiple of a KV tile of 32, .* 2402"),
        ("--blocks 104", "103 of 104 can be used: take more --blocks or a shorter prompt"),
        ("--tiles 48", "a KV tile of 48: take a power of two"),
        ("--tiles 16 --block-size 32", "a KV tile of 16 is no multiple of the block size, 32"),
        ("--heads 4 --kv-heads 3", "4 heads cannot share 3 KV heads"),
        ("--repeats 1", "2 or more"),
        ("--repeats 0", "0: 1 or more"),
        ("--trace nowhere.jsonl", "No such file"),
    ],
)
def test_what_cannot_be_measured(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments.split())
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def test_a_trace_sets_the_pool_and_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t.jsonl", header(num_blocks=99), request([5, 6, 9, 60], 64))
    options, traced = parse_options(["--trace", str(trace)])
    assert (options.prompts, options.blocks) == ([64], 104)  # whole tiles of 128 tokens
    assert traced is not None
    assert traced.blocks == [5, 6, 9, 60]
    with pytest.raises(SystemExit):
        parse_options(["--trace", str(trace), "--prompts", "80"])
    assert "the longest table is t.jsonl, request cmpl-1" in capsys.readouterr().err


def test_the_short_form_measures_less() -> None:
    short, full = parse_options(["--short"])[0], parse_options([])[0]
    assert len(short.prompts) == 1 < len(full.prompts)
    assert set(short.tiles) < set(full.tiles)
    assert short.repeats < full.repeats
    assert short.out == full.out == kernel_prefill.RESULTS / "kernel_cpu.json"
