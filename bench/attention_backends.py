"""Which attention backends the vLLM here can run, and why not the others.

    python bench/attention_backends.py --device cuda

Lines of name, tab, reason, where an empty reason means that it can run: one for vLLM and, where it
can be imported, one for each backend. vLLM is asked as it asks itself when an engine starts: for
the model of bench/e2e_prefill.py on that device, without starting an engine. A last line names the
operations that this vLLM lacks, and that bench/vllm_fallbacks.py has put in their place.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

BACKENDS = ("FLEX_ATTENTION", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
# Type, and numbers in a head, as of bench/e2e_prefill.py.
MODELS = {"cuda": ("bfloat16", 128), "cpu": ("float32", 32)}
VLLM = "vLLM"
IN_PYTORCH = "in PyTorch"


def reasons(device: str) -> dict[str, str]:
    """Why vLLM, or a backend, cannot run; "" where it can."""
    if find_spec("vllm") is None:
        return {VLLM: "vLLM is not installed"}
    try:
        import vllm_fallbacks
        from vllm.platforms import current_platform

        in_pytorch = vllm_fallbacks.enable()
    except Exception as error:  # of a build for another PyTorch, CUDA or machine: anything
        return {VLLM: f"vLLM cannot be imported: {sentence(error)}"}
    if current_platform.device_type == device:
        found = {name: reason_of(name, device) for name in BACKENDS}
    else:
        other = current_platform.device_type or "no device"
        found = dict.fromkeys(BACKENDS, f"vLLM runs on {other} here, not on {device}")
    lacks = ", ".join(name.partition("::")[2] for name in in_pytorch)
    return {VLLM: "", **found, IN_PYTORCH: lacks}


def reason_of(name: str, device: str) -> str:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    dtype, head_size = MODELS[device]
    try:
        backend = AttentionBackendEnum[name]
        with set_current_vllm_config(VllmConfig()):
            taken = current_platform.get_attn_backend_cls(
                backend,
                attn_selector_config=AttentionSelectorConfig(
                    head_size, getattr(torch, dtype), kv_cache_dtype="auto", block_size=16
                ),
            )
    except Exception as error:
        return sentence(error)
    other = taken.rpartition(".")[2]
    if other != backend.get_path().rpartition(".")[2]:
        return f"vLLM takes its {other} in place of it on this device"
    return ""


def sentence(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="instead of standard output, where vLLM logs")
    options = parser.parse_args()
    lines = "".join(f"{name}\t{reason}\n" for name, reason in reasons(options.device).items())
    if options.out:
        options.out.write_text(lines)
    else:
        print(lines, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
