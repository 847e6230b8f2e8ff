"""Operations in PyTorch, against those that the installed vLLM has compiled."""

from __future__ import annotations

from importlib import import_module

import pytest
from implementations import HAS_VLLM

pytest.importorskip("torch")
import torch
import vllm_fallbacks  # bench/

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is what is compared with")

TOKENS, HEADS, SIZE = 7, 4, 64


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    import_module("vllm._custom_ops")


def numbers(*size: int, dtype: str) -> torch.Tensor:
    return torch.randn(size, dtype=getattr(torch, dtype))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.float().abs().sum() > 0
    torch.testing.assert_close(ours, theirs)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_silu_and_mul(dtype: str) -> None:
    given = numbers(TOKENS, 2 * SIZE, dtype=dtype)
    ours, theirs = (torch.zeros_like(given[:, :SIZE]) for _ in range(2))
    vllm_fallbacks.silu_and_mul(ours, given)
    torch.ops._C.silu_and_mul(theirs, given)
    assert_same(ours, theirs)


def test_rms_norm(dtype: str) -> None:
    given, weight = numbers(TOKENS, SIZE, dtype=dtype), numbers(SIZE, dtype=dtype)
    ours, theirs = torch.zeros_like(given), torch.zeros_like(given)
    vllm_fallbacks.rms_norm(ours, given, weight, 1e-5)
    torch.ops._C.rms_norm(theirs, given, weight, 1e-5)
    assert_same(ours, theirs)


def test_fused_add_rms_norm(dtype: str) -> None:
    given, residual = (numbers(TOKENS, SIZE, dtype=dtype) for _ in range(2))
    weight = numbers(SIZE, dtype=dtype)
    ours, theirs = (given.clone(), residual.clone()), (given.clone(), residual.clone())
    vllm_fallbacks.fused_add_rms_norm(*ours, weight, 1e-5)
    torch.ops._C.fused_add_rms_norm(*theirs, weight, 1e-5)
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])


@pytest.mark.parametrize("with_keys", [True, False])
def test_rotary_embedding(dtype: str, with_keys: bool) -> None:
    positions = torch.randint(100, (TOKENS,))
    angles = torch.rand(100, SIZE // 2)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(getattr(torch, dtype))
    query, key = (numbers(TOKENS, heads * SIZE, dtype=dtype) for heads in (HEADS, 2))
    ours, theirs = (query.clone(), key.clone()), (query.clone(), key.clone())
    for operation, (q, k) in (
        (vllm_fallbacks.rotary_embedding, ours),
        (torch.ops._C.rotary_embedding, theirs),
    ):
        operation(positions, q, k if with_keys else None, SIZE, cache, True)
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert torch.equal(ours[1], key) is not with_keys
    with pytest.raises(NotImplementedError, match="only that of a Llama"):
        vllm_fallbacks.rotary_embedding(positions, query, key, SIZE, cache, False)


def test_reshape_and_cache_flash() -> None:
    key, value = (numbers(4, 2, SIZE, dtype="float32") for _ in range(2))
    caches = torch.zeros(3, 16, 2, SIZE), torch.zeros(3, 16, 2, SIZE)
    slots = torch.tensor([17, 0, -1])  # the last is padding, and so is a fourth token
    scale = torch.ones(())
    vllm_fallbacks.reshape_and_cache_flash(key, value, *caches, slots, "auto", scale, scale)
    for cache, given in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, 1], given[0])
        assert torch.equal(cache[0, 0], given[1])
        assert cache.count_nonzero() == given[:2].count_nonzero()
    quantized = caches[0].to(torch.uint8), caches[1].to(torch.uint8)
    with pytest.raises(NotImplementedError, match=r"a KV cache of torch\.uint8"):
        vllm_fallbacks.reshape_and_cache_flash(key, value, *quantized, slots, "fp8", scale, scale)
