"""A tiny Llama on disk, so that a real vLLM engine has something to serve without a download."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
BLOCK_SIZE = 32  # tokens; vLLM's CPU attention wants a multiple of 32

#: What vLLM's CPU engine needs to serve it, as arguments of ``vllm.LLM``.
ENGINE_OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK_SIZE,
    "disable_log_stats": False,  # for the time stamps of the requests
    # A fixed size: otherwise vLLM claims 92 % of the machine, and fails where that is not free.
    "kv_cache_memory_bytes": 1 << 28,
    "scheduler_cls": "recording_scheduler.RecordingScheduler",
}


def engine_environment(record: Path, block_queue: str | None) -> dict[str, str]:
    """This process's environment, for an engine that writes to ``record`` under this block queue.

    ``block_queue`` is a value of ``VLLM_BLOCK_QUEUE``; None leaves it unset.
    """
    environment = dict(os.environ)
    environment.pop("VLLM_BLOCK_QUEUE", None)
    environment.pop("VLLM_BLOCK_TRACE", None)
    if block_queue is not None:
        environment["VLLM_BLOCK_QUEUE"] = block_queue
    # The engine core is a spawned process: it finds the recording scheduler through PYTHONPATH.
    search_path = [str(BENCH), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYBLOCKPOOL_RECORD": str(record),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def tiny_engine(model: Path, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` that serves the model, shut down at the end."""
    import vllm  # here: it reads its environment variables at import

    engine = vllm.LLM(str(model), **ENGINE_OPTIONS, **options)
    try:
        yield engine
    finally:
        # vLLM leaves this to the exit of the interpreter. If TemporaryDirectory was used before
        # vLLM was imported, that is too late: weakref's exit hook is then the older one and runs
        # after that of multiprocessing, which waits for the engine core for ever.
        engine.llm_engine.engine_core.shutdown()


def write_tiny_llama(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 512,
    max_positions: int = 8192,
    seed: int = 0,
) -> Path:
    """Writes ``config.json`` and seeded float32 weights to ``directory`` and returns it.

    There is no tokenizer: use ``skip_tokenizer_init=True`` and prompts of token ids below
    ``vocabulary``. ``load_format="dummy"`` works too, but vLLM's dummy weights are so small that
    all tokens are equally likely whatever the KV cache holds. A test that compares tokens would
    then compare nothing but the random seeds, so the weights here are of a size that makes the
    tokens depend on the prompt.
    """
    import torch  # here: who only wants the options above need not wait for it
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (gain / math.sqrt(columns))

    kv_hidden = kv_heads * (hidden // heads)
    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, gain=math.sqrt(hidden)),
        "model.norm.weight": torch.ones(hidden),
        # Logits with a standard deviation of 3: neither a flat nor a one-token distribution.
        "lm_head.weight": matrix(vocabulary, hidden, gain=3.0),
    }
    for layer in range(layers):
        block = f"model.layers.{layer}"
        weights |= {
            f"{block}.input_layernorm.weight": torch.ones(hidden),
            f"{block}.post_attention_layernorm.weight": torch.ones(hidden),
            # Queries four times as large as usual: heads that pick single tokens out of a long
            # prompt, so that one wrong block is not averaged away.
            f"{block}.self_attn.q_proj.weight": matrix(hidden, hidden, gain=4.0),
            f"{block}.self_attn.k_proj.weight": matrix(kv_hidden, hidden),
            f"{block}.self_attn.v_proj.weight": matrix(kv_hidden, hidden),
            f"{block}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{block}.mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            f"{block}.mlp.up_proj.weight": matrix(2 * hidden, hidden),
            f"{block}.mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
