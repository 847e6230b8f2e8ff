"""A scheduler of vLLM without a model: what the engine core does in a step, but for the forward."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
_MAX_LEN = 8192


def make_scheduler(
    model: Path,
    *,
    num_blocks: int,
    scheduler_class: Any = None,
    kv_cache_specs: Sequence[Any] = (),
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    caching: bool = True,
) -> Any:
    """As the engine core builds it.

    Args:
        model: folder with the configuration of a model; no weights are loaded.
        num_blocks: in the pool, the null block included.
        scheduler_class: vLLM's `Scheduler` by default.
        kv_cache_specs: one for each KV-cache group; by default one of full attention.
        max_num_seqs, max_num_batched_tokens: of a step.
        caching: whether there is a prefix cache.
    """
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=_MAX_LEN
        ),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=_MAX_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
    )
    cache_config.num_gpu_blocks = num_blocks
    specs = kv_cache_specs or [full_attention()]
    return (scheduler_class or Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)
            ],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def full_attention() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


def sliding_window(tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def make_request(request_id: str, prompt: list[int], output: int) -> Any:
    """A request that ends after so many tokens."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    older = {"eos_token_id": None} if "eos_token_id" in signature(Request).parameters else {}
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **older,
    )


def schedule(scheduler: Any) -> tuple[Any, Any]:
    """What is to be computed, and what the model will return.

    A token for each request whose prompt is computed with that: the arguments of
    ``scheduler.update_from_output()``, which may come after further calls.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    return scheduled, ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[
            [] if _is_prefill_chunk(request) else [request.num_computed_tokens % 512]
            for request in requests
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _is_prefill_chunk(request: Any) -> bool:
    before = request.num_computed_tokens < request.num_tokens  # vLLM 0.18
    return bool(getattr(request, "is_prefill_chunk", before))


def step(scheduler: Any) -> Any:
    """One step of the engine core."""
    return scheduler.update_from_output(*schedule(scheduler))
