"""vLLM's own FlexAttention backend on a CPU, which vLLM keeps for GPUs.

Two things are missing for that: vLLM's CPU platform takes no other backend than its own, and its
CPU build has no `reshape_and_cache_flash`, the operation that writes keys and values into the paged
cache. Attention itself, its block mask and its kernel are vLLM's and PyTorch's, unchanged.
"""

from __future__ import annotations

from typing import Any

import torch


def enable() -> None:
    """Let this process's engines take ``attention_config={"backend": "FLEX_ATTENTION"}``."""
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
    _add_cache_operation()


def _add_cache_operation() -> None:
    if hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        return
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, "
        "Tensor v_scale) -> ()"
    )
    library.impl("reshape_and_cache_flash", _reshape_and_cache, "CPU")
    _libraries.append(library)


_libraries: list[Any] = []  # what a library has registered goes with it


def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *_: Any,
) -> None:
    """Shapes: keys and values [tokens, heads, size]; caches [blocks, block size, heads, size]."""
    block_size = key_cache.shape[1]
    stored = slot_mapping >= 0  # padding has no slot
    slots = slot_mapping[stored]
    at = slots // block_size, slots % block_size
    key_cache[at] = key[: len(slot_mapping)][stored]
    value_cache[at] = value[: len(slot_mapping)][stored]
