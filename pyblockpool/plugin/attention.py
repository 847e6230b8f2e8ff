"""What of the KV cache the attention backends of the installed vLLM read at once.

Scattered blocks make a prefill slower where a kernel reads tiles of the cache that are larger than
a block: it visits every tile that holds a block of the request. What is said here is read from the
installed vLLM: its FlexAttention is built and asked for its tile, and of the other backends it is
looked up whether they hand block tables to their kernels, as they do in the vLLM that was read.
What is not where it is expected is unknown.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyblockpool.doctor import (
    Attention,
    Backend,
    Question,
    RefusedTileError,
    Remark,
    UnknownBackendError,
    reason,
)
from pyblockpool.plugin.surface import vllm_version

FLEX_ATTENTION = "FLEX_ATTENTION"
READ_VLLM = "0.32.0"
HEAD_SIZE = 128
# The option of vLLM's AttentionConfig for the KV tile of FlexAttention, in tokens.
KV_TILE = "flex_attn_kv_block_size"


@dataclass(frozen=True)
class Lookup:
    """A call that shows where a kernel has the blocks of a request from, in `READ_VLLM`.

    Attributes:
        file: below the package of vLLM; the first that exists.
        call: name of the function that is called there.
        argument: a name among its arguments, or the keyword of one.
        meaning: what that shows.
    """

    file: tuple[str, ...]
    call: str
    argument: str
    meaning: str


class _OtherwiseError(Exception):
    """Something is not as it was read, or is refused."""


_HANDED_OVER = "its kernel gets the block tables, and reads the blocks of a request where they lie"
_LOOKED_UP = "its kernel looks up the block of each token in the block table"
LOOKUPS = {
    "FLASH_ATTN": Lookup(
        ("v1/attention/backends/flash_attn.py",),
        "flash_attn_varlen_func",
        "block_table",
        _HANDED_OVER,
    ),
    "FLASH_ATTN_DIFFKV": Lookup(
        ("v1/attention/backends/flash_attn_diffkv.py",),
        "flash_attn_varlen_func",
        "block_table",
        _HANDED_OVER,
    ),
    "FLASHINFER": Lookup(
        ("v1/attention/backends/flashinfer.py",), "plan", "paged_kv_indices", _HANDED_OVER
    ),
    "CPU_ATTN": Lookup(
        ("v1/attention/backends/cpu_attn.py",),
        "cpu_attention_with_kv_cache",
        "block_table",
        _HANDED_OVER,
    ),
    "TRITON_ATTN": Lookup(
        (
            "v1/attention/ops/triton_unified_attention.py",
            "attention/ops/triton_unified_attention.py",
        ),
        "load",
        "block_tables_ptr",
        _LOOKED_UP,
    ),
    "TRITON_ATTN_DIFFKV": Lookup(
        ("v1/attention/ops/triton_unified_attention_diffkv.py",),
        "load",
        "block_tables_ptr",
        _LOOKED_UP,
    ),
}


def examine_attention(question: Question) -> tuple[Attention, list[Remark]]:
    """What vLLM uses here, and whether scattered blocks can cost it prefill time.

    Builds configurations of vLLM, which write into the environment of the process.

    Raises:
        UnknownBackendError: vLLM has no attention backend of that name.
        RefusedTileError: vLLM refuses that KV tile of FlexAttention.
        ImportError: vLLM has no list of its backends in any of the places that are known.
    """
    members = _either("attention.backends.registry").AttentionBackendEnum.__members__
    asked = question.attention_backend
    if asked is not None and asked not in members:
        raise UnknownBackendError(
            f"vLLM {vllm_version()} has no attention backend {asked!r}; it has {', '.join(members)}"
        )
    remarks = []
    platform = chosen = None
    block_size = question.block_size
    try:
        platform = str(import_module("vllm.platforms").current_platform.device_type)
        block_size = block_size or int(_config().cache_config.block_size)
        chosen = _chosen(asked)
    except Exception as error:
        taken = "block size and attention backend" if block_size is None else "attention backend"
        remarks.append(_cannot_tell(f"the {taken} that vLLM takes here", reason(error)))
    else:
        remarks.append(_choice(asked, chosen, platform))
    if block_size is not None:
        remarks.append(_block_size(block_size, question, platform))
    flex, tile = _flex_attention(question.flex_attn_kv_block_size, block_size)
    backends = tuple(
        Backend(name, "unknown", f"{member.get_path()} has been put in its place")
        if member.is_overridden()
        else (flex if name == FLEX_ATTENTION else _backend(name))
        for name, member in members.items()
    )
    reads = None
    if name := asked or chosen:
        unlisted = Backend(name, "unknown", "it is not in vLLM's list of attention backends")
        in_question = next((each for each in backends if each.name == name), unlisted)
        reads = in_question.reads
        remarks.append(_verdict(in_question))
    if flex in backends and name != FLEX_ATTENTION:
        remarks.append(_aside(flex, either=reads == "blocks"))
    costs = {"blocks": False, "tiles": True}.get(reads or "unknown")
    return Attention(platform, chosen, name, block_size, tile, costs, backends), remarks


def _either(name: str) -> Any:
    """A module of vLLM that has moved into v1 at some time."""
    try:
        return import_module(f"vllm.v1.{name}")
    except ModuleNotFoundError:
        return import_module(f"vllm.{name}")


def _config(backend: str | None = None) -> Any:
    """A VllmConfig without a model, as the platform completes it."""
    config = import_module("vllm.config")
    return config.VllmConfig(attention_config=config.AttentionConfig(backend=backend))


def _chosen(asked: str | None) -> str:
    """The backend that vLLM takes for an ordinary decoder layer, if it is asked for one."""
    choose = _either("attention.selector").get_attn_backend
    arguments = {
        "head_size": HEAD_SIZE,
        "dtype": import_module("torch").bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,  # up to 0.14 or so
    }
    known = inspect.signature(choose).parameters
    with import_module("vllm.config").set_current_vllm_config(_config(asked)):
        chosen = choose(**{name: arguments[name] for name in arguments if name in known})
    return str(chosen.get_name())


def _choice(asked: str | None, chosen: str, platform: str | None) -> Remark:
    layer = f"a decoder layer of head size {HEAD_SIZE} in bfloat16"
    if asked in (None, chosen):
        return Remark("attention", "good", f"on {platform}, vLLM takes {chosen} for {layer}")
    return Remark(
        "attention",
        "note",
        f"on {platform}, vLLM takes {chosen} for {layer} even if it is asked for {asked}: what "
        f"follows is for an engine that does take {asked}",
    )


def _block_size(block_size: int, question: Question, platform: str | None) -> Remark:
    if question.block_size is None:
        origin = (
            f"vLLM's default on {platform} (a backend or a hybrid model can ask for another: vLLM "
            "logs it; --block-size tells the doctor)"
        )
    else:
        origin = "as given"
    return Remark("attention", "good", f"a KV-cache block holds {block_size} tokens, {origin}")


def _flex_attention(kv_tile: int | None, block_size: int | None) -> tuple[Backend, int | None]:
    """What FlexAttention reads, and its KV tile in tokens."""
    if block_size is None:
        return Backend(FLEX_ATTENTION, "unknown", "the size of a block is not known"), None
    try:
        tile = _kv_tile(kv_tile, block_size)
    except _OtherwiseError as error:
        return Backend(FLEX_ATTENTION, "unknown", str(error)), None
    except Exception as error:
        # vLLM names the option in what it says against its value.
        if kv_tile is not None and isinstance(error, ValueError) and KV_TILE in str(error):
            raise RefusedTileError(
                f"vLLM {vllm_version()} refuses {KV_TILE} {kv_tile}: {reason(error)}"
            ) from error
        return Backend(FLEX_ATTENTION, "unknown", reason(error)), None
    if tile > block_size:
        sentence = (
            f"its KV tile is {tile} tokens and a block is {block_size}: it visits every tile of "
            "the cache that holds a block of the request"
        )
        return Backend(FLEX_ATTENTION, "tiles", sentence), tile
    size = "is a block" if tile == block_size else "lies in a block"
    return Backend(FLEX_ATTENTION, "blocks", f"its KV tile of {tile} tokens {size}"), tile


def _kv_tile(kv_tile: int | None, block_size: int) -> int:
    """As vLLM's own builder of the metadata works it out, for this torch; made on the CPU."""
    torch = import_module("torch")
    flex: Any = import_module("vllm.v1.attention.backends.flex_attention")
    # The mask is over the tokens of the whole cache, in tiles: that is what makes it tile.
    mask = flex.FlexAttentionMetadata.build_block_mask.__code__.co_names
    if not {"total_cache_tokens", "kv_block_size"} <= set(mask):
        raise _OtherwiseError(
            f"its block mask is not made of tiles of the cache, as it is in vLLM {READ_VLLM}"
        )
    if not flex.FlexAttentionBackend.supports_block_size(block_size):
        raise _OtherwiseError(f"it does not take blocks of {block_size} tokens")
    given = {} if kv_tile is None else {KV_TILE: kv_tile}
    # What the builder reads of a VllmConfig, which itself cannot be made without a device.
    config = SimpleNamespace(
        attention_config=import_module("vllm.config").AttentionConfig(**given),
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel_config: 1,
            get_num_kv_heads=lambda parallel_config: 1,
            get_head_size=lambda: HEAD_SIZE,
            max_model_len=block_size,
            rswa_window=None,
        ),
        parallel_config=None,
        cache_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=block_size),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    layer = import_module("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    builder = flex.FlexAttentionMetadataBuilder(layer, [], config, torch.device("cpu"))
    return int(builder.kv_block_size)


def _backend(name: str) -> Backend:
    lookup = LOOKUPS.get(name)
    if lookup is None:
        return Backend(name, "unknown", "its kernels were not read")
    package = Path(str(import_module("vllm").__file__)).parent
    for file in lookup.file:
        if (package / file).exists() and _calls(package / file, lookup.call, lookup.argument):
            return Backend(name, "blocks", lookup.meaning)
    return Backend(
        name,
        "unknown",
        f"vLLM {vllm_version()} has no {lookup.call}(… {lookup.argument} …) in {lookup.file[0]}, "
        f"as vLLM {READ_VLLM} has",
    )


def _calls(path: Path, function: str, argument: str) -> bool:
    """Whether a file has a call of a function with a name among its arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            names = {keyword.arg for keyword in node.keywords}
            for each in node.args:
                names |= {name.id for name in ast.walk(each) if isinstance(name, ast.Name)}
            if called == function and argument in names:
                return True
    return False


def _verdict(backend: Backend) -> Remark:
    if backend.reads == "unknown":
        return _cannot_tell(
            f"whether scattered blocks cost {backend.name} prefill time", backend.reason
        )
    if backend.reads == "tiles":
        return Remark(
            "attention",
            "note",
            f"with {backend.name}, scattered blocks cost prefill time: {backend.reason}. Let the "
            "tile be a block (leave flex_attn_kv_block_size alone, with PyTorch 2.9 or later), or "
            "keep the blocks of a request together (VLLM_BLOCK_QUEUE=native:extent, or the order "
            "reset between rounds)",
        )
    return Remark(
        "attention",
        "good",
        f"with {backend.name}, scattered blocks cost prefill nothing: {backend.reason}. Copies "
        "of blocks (KV connectors, offloading) may still gain from neighbours",
    )


def _aside(flex: Backend, *, either: bool) -> Remark:
    """Of FlexAttention where another backend is in question, which may gain nothing either."""
    if flex.reads == "unknown":
        return _cannot_tell(f"what {flex.name} would read at once", flex.reason)
    if flex.reads == "tiles":
        sentence = f"{flex.name} would lose prefill time to scattered blocks: {flex.reason}"
    else:
        sentence = (
            f"{flex.name} would gain nothing{' either' if either else ''}: {flex.reason} "
            "(--flex-attn-kv-block-size asks about another)"
        )
    return Remark("attention", "good", sentence)


def _cannot_tell(what: str, why: str) -> Remark:
    return Remark("attention", "unknown", f"cannot tell {what}: {why}")
