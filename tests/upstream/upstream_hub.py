"""A hub cache with nothing in it but configurations, so that vLLM's tests run offline.

vLLM's scheduler tests name public models, but read no more of them than the shape: lengths, heads,
layers. Each shape below is a few public facts; no file of any model is copied or fetched.
"""

import json
from pathlib import Path
from typing import Any

JSON = dict[str, Any]

# The hub names a snapshot by its commit; any 40 hex digits will do.
REVISION = "0" * 40


def _opt(hidden_size: int, layers: int, heads: int, embedding: int, norm_before: bool) -> JSON:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "word_embed_proj_dim": embedding,
        "do_layer_norm_before": norm_before,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "torch_dtype": "float16",
    }


def _image_model(max_position_embeddings: int) -> JSON:
    # A stand-in: the scheduler needs no more than some image encoder of about 576 tokens. This
    # architecture knows its token count; the real ones ask a processor that needs torchvision.
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "image_sizes": [336, 336],
        "text_config": {
            "model_type": "llama",
            "max_position_embeddings": max_position_embeddings,
            "vocab_size": 32064,
        },
    }


CONFIGS: dict[str, JSON] = {
    "facebook/opt-125m": _opt(768, layers=12, heads=12, embedding=768, norm_before=True),
    "facebook/opt-350m": _opt(1024, layers=24, heads=16, embedding=512, norm_before=False),
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen1.5-7B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "llava-hf/llava-1.5-7b-hf": _image_model(4096),
    "Qwen/Qwen2.5-VL-3B-Instruct": _image_model(128000),
}

# Models with an image encoder are asked for a tokenizer; three words are enough.
TOKENIZER: JSON = {
    "version": "1.0",
    "added_tokens": [],
    "model": {
        "type": "WordLevel",
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2},
    },
}
TOKENIZER_CONFIG: JSON = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def write_hub(home: Path) -> None:
    """Write the cache that HF_HOME=home, HF_HUB_OFFLINE=1 makes the hub client read."""
    for name, config in CONFIGS.items():
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        files = {"config.json": config}
        if config["model_type"] == "openvla":
            files |= {"tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
        snapshot = model / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        for file_name, content in files.items():
            (snapshot / file_name).write_text(json.dumps(content))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(REVISION)
