"""Routes of vLLM's API server: POST /reset_free_block_queue_order, GET /free_block_queue_stats.

A vLLM endpoint plugin (0.26 and later): vLLM loads it in its API servers if ``VLLM_PLUGINS`` names
it. The routes ask for no API key, as vLLM's own POST /reset_prefix_cache does not: like that one
they exist only under ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from vllm import envs

from pyblockpool.errors import InactiveError
from pyblockpool.plugin.surface import RESET_ORDER, STATS, log
from pyblockpool.settings import QUEUE_VARIABLE

NOT_IMPLEMENTED = 501

router = APIRouter()


class FreeBlockQueueEndpoints:
    """What vLLM asks of an endpoint plugin."""

    name = "pyblockpool"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        if envs.VLLM_SERVER_DEV_MODE:
            app.include_router(router)
        else:
            log().info("pyblockpool adds no routes: VLLM_SERVER_DEV_MODE is not 1")

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing: the routes ask the client of the server, as vLLM's own do."""


@router.post(f"/{RESET_ORDER}")
async def reset_free_block_queue_order(request: Request) -> dict[str, bool]:
    """``{"success": false}`` while a block is in use: nothing was changed, try again."""
    return {"success": bool(await _call(request, RESET_ORDER))}


@router.get(f"/{STATS}")
async def free_block_queue_stats(request: Request) -> dict[str, Any] | list[dict[str, Any]]:
    """One object; from several data-parallel engines a list of them, by rank."""
    stats: dict[str, Any] | list[dict[str, Any]] = await _call(request, STATS)
    return stats


async def _call(request: Request, method: str) -> Any:
    client = getattr(request.app.state, "engine_client", None)
    call: Callable[[], Awaitable[Any]] | None = getattr(client, method, None)
    if call is None:
        raise HTTPException(
            NOT_IMPLEMENTED,
            f"pyblockpool is not active in this server: start it with {QUEUE_VARIABLE}=native (or "
            "python, which keeps vLLM's queue)",
        )
    try:
        return await call()
    except (InactiveError, NotImplementedError) as error:
        # One that the engine core has raised itself arrives as an Exception, and so as a 500.
        raise HTTPException(NOT_IMPLEMENTED, str(error)) from error
