"""What the installed vLLM lacks of what these benchmarks ask of it, in PyTorch.

Three cases:

* vLLM's CPU platform takes no other attention backend than its own, so FlexAttention is kept for
  GPUs;
* vLLM's CPU build has no `reshape_and_cache_flash`, the operation that writes keys and values into
  the paged cache;
* a vLLM without compiled code (built with VLLM_TARGET_DEVICE=empty, for a PyTorch that no build
  of vLLM is made for) has none of the operations that a Llama needs on a GPU.

An operation that is there is left alone. Attention itself, its block mask and its kernel are vLLM's
and PyTorch's, unchanged; the other operations are slower than vLLM's, for all queues alike.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F


def enable() -> list[str]:
    """Let this process's engines take ``attention_config={"backend": "FLEX_ATTENTION"}``.

    Returns:
        the operations that vLLM lacked, and that are PyTorch's from now on.
    """
    from vllm.platforms import current_platform

    import_module("vllm._custom_ops")  # loads those that are compiled
    if current_platform.is_cpu():
        _take_flex_attention()
    return [name for name in OPERATIONS if _add(name)]


def _take_flex_attention() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    original = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if selected_backend == AttentionBackendEnum.FLEX_ATTENTION:
            return str(selected_backend.get_path())
        return str(original(cls, selected_backend, attn_selector_config, *args, **kwargs))

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


_libraries: list[Any] = []  # what a library has registered goes with it


def _add(name: str) -> bool:
    """Register the operation, unless there is one."""
    namespace, operation = name.split("::")
    if hasattr(getattr(torch.ops, namespace), operation):
        return False
    arguments, function = OPERATIONS[name]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{operation}({arguments}) -> ()")
    library.impl(operation, function, "CompositeExplicitAutograd")  # for all devices
    _libraries.append(library)
    return True


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Shapes: keys and values [tokens, heads, size]; caches [blocks, block size, heads, size]."""
    if key_cache.dtype != key.dtype:
        raise NotImplementedError(f"a KV cache of {key_cache.dtype} for keys of {key.dtype}")
    block_size = key_cache.shape[1]
    stored = slot_mapping >= 0  # padding has no slot
    slots = slot_mapping[stored]
    at = slots // block_size, slots % block_size
    key_cache[at] = key[: len(slot_mapping)][stored]
    value_cache[at] = value[: len(slot_mapping)][stored]


def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    """Shapes: result [..., size], input [..., 2 * size]."""
    gate, up = input.chunk(2, dim=-1)
    result.copy_(F.silu(gate) * up)


def rms_norm(
    result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Over the last dimension, in float32."""
    weight = None if weight is None else weight.float()
    result.copy_(F.rms_norm(input.float(), input.shape[-1:], weight, epsilon))


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """The residual becomes the sum, the input its norm."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Queries and keys [tokens, heads * size], in place; the cache is [positions, size]."""
    if not is_neox or rope_dim_offset or inverse or cos_sin_cache.shape[1] != head_size:
        raise NotImplementedError("rotary embedding: here only that of a Llama, of whole heads")
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    for each in (query, key):
        if each is not None:
            heads = each.view(len(positions), -1, head_size)
            first, second = heads.float().chunk(2, dim=-1)
            turned = first * cos - second * sin, second * cos + first * sin
            heads.copy_(torch.cat(turned, dim=-1))


# The operations of a Llama in vLLM 0.26 to 0.33 -> arguments, as vLLM declares them; function.
OPERATIONS: dict[str, tuple[str, Callable[..., None]]] = {
    "_C_cache_ops::reshape_and_cache_flash": (
        "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale",
        reshape_and_cache_flash,
    ),
    "_C::silu_and_mul": ("Tensor(a!) result, Tensor input", silu_and_mul),
    "_C::rms_norm": (
        "Tensor(a!) result, Tensor input, Tensor? weight, float epsilon",
        rms_norm,
    ),
    "_C::fused_add_rms_norm": (
        "Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon",
        fused_add_rms_norm,
    ),
    "_C::rotary_embedding": (
        "Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False",
        rotary_embedding,
    ),
}
