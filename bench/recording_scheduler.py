"""A vLLM scheduler that writes down, from inside the engine core, what the block queue did.

Through vLLM's own extension point: ``scheduler_cls="recording_scheduler.RecordingScheduler"``
with this folder on ``PYTHONPATH``, and the name of the file to append to in ``PYBLOCKPOOL_RECORD``.
One JSON object a line:

    engine   once, at start: process id, class of the free-block queue, size of the pool
    request  per finished request, the moment before its blocks are freed: its block tables
    reset    per ``reset_prefix_cache()``: did it succeed, what is free now, in which order
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

RECORD_VARIABLE = "PYBLOCKPOOL_RECORD"


class RecordingScheduler(Scheduler):  # type: ignore[misc, unused-ignore]
    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> "RecordingScheduler":
        # vLLM chooses between its two schedulers by this flag, but only when none was named.
        chosen = RecordingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else cls
        recorder: RecordingScheduler = super().__new__(chosen)
        return recorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if RECORD_VARIABLE not in os.environ:
            raise RuntimeError(f"RecordingScheduler needs the name of a file in {RECORD_VARIABLE}.")
        super().__init__(*args, **kwargs)
        self._record = Path(os.environ[RECORD_VARIABLE])
        pool = self.kv_cache_manager.block_pool
        queue_class = type(pool.free_block_queue)
        self._write(
            {
                "kind": "engine",
                "pid": os.getpid(),
                "queue": f"{queue_class.__module__}.{queue_class.__qualname__}",
                "num_gpu_blocks": pool.num_gpu_blocks,
                "block_size": self.block_size,
            }
        )

    def _free_blocks(self, request: Request) -> None:
        self._write(
            {
                "kind": "request",
                "request_id": request.request_id,
                "status": request.status.name,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_preemptions": request.num_preemptions,
                "table": self.kv_cache_manager.get_block_ids(request.request_id),
            }
        )
        super()._free_blocks(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        success = bool(super().reset_prefix_cache(*args, **kwargs))
        queue = self.kv_cache_manager.block_pool.free_block_queue
        order = [block.block_id for block in queue.get_all_free_blocks()]
        self._write(
            {
                "kind": "reset",
                "success": success,
                "num_free_blocks": queue.num_free_blocks,
                "order_digest": hashlib.sha256(json.dumps(order).encode()).hexdigest(),
                "check": queue.check() if hasattr(queue, "check") else "",
            }
        )
        return success

    def _write(self, line: dict[str, Any]) -> None:
        # Written and closed at once: who has seen a call return finds its line in the file.
        with self._record.open("a", encoding="utf-8") as record:
            record.write(json.dumps(line) + "\n")


class RecordingAsyncScheduler(RecordingScheduler, AsyncScheduler):  # type: ignore[misc, unused-ignore]
    """The same, above vLLM's asynchronous scheduler."""
