"""What SimpleCPUOffloadConnector's worker needs to run without CUDA.

Only what moves the bytes is replaced: the connector, its scheduler, which walks the free-block
queue and holds blocks while they are copied, and its worker are vLLM's. A copy is done as late as
it may be, so that a block that is given away before its copy is over ends up with wrong tokens.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector as connector
from vllm.v1.simple_kv_offload import worker

# Steps between the launch of a copy and its end.
STEPS = 3


class Copy:
    """A copy on its way; to vLLM's worker it is the event that follows it in a CUDA stream."""

    def __init__(self, pairs: list[tuple[Any, Any]], source: list[int], target: list[int]) -> None:
        self._pairs, self._source, self._target = pairs, source, target
        self._steps = STEPS

    def query(self) -> bool:
        self._steps -= 1
        if self._steps == 0:
            self._move()
        return self._steps <= 0

    def synchronize(self) -> None:
        if self._steps > 0:
            self._steps = 0
            self._move()

    def _move(self) -> None:
        for source, target in self._pairs:
            target[self._target] = source[self._source]


class HostCopyBackend:
    """In the place of DmaCopyBackend.

    Attributes:
        stored, loaded: blocks whose copies were launched.
    """

    stored = loaded = 0

    def init(self, gpu_caches: Any, cpu_caches: Any, *_: Any) -> None:
        self._pairs = [(gpu_caches[name], cpu_caches[name]) for name in gpu_caches]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
    ) -> None:
        pairs = self._pairs
        if is_store:
            type(self).stored += len(src_blocks)
        else:
            type(self).loaded += len(src_blocks)
            pairs = [(cpu, gpu) for gpu, cpu in pairs]
        events_list.append((event_idx, Copy(pairs, src_blocks, dst_blocks)))


class HostOffloadWorker(worker.SimpleCPUOffloadWorker):  # type: ignore[misc, unused-ignore]
    def register_kv_caches(self, kv_caches: Any) -> None:
        with mock.patch("torch.cuda.Stream") as stream:
            stream.priority_range.return_value = (0, 0)
            super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        """As vLLM's, but for the event that tells the copying stream that the step is over."""
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                is_store=True,
                event_idx=metadata.store_event,
                events_list=self._store_events,
            )


def install() -> None:
    worker.DmaCopyBackend = HostCopyBackend
    connector.SimpleCPUOffloadWorker = HostOffloadWorker
