"""The routes of the API server, in a real FastAPI application of the installed vLLM's packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from implementations import HAS_VLLM

from pyblockpool.errors import InactiveError

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

STATS = {"pid": 1, "free": 47}
MakeApp = Callable[..., Any]


class Client:
    """An engine client with the plugin, whose engine answers as it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def reset_free_block_queue_order(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    free_block_queue_stats = reset_free_block_queue_order


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> MakeApp:
    """``browser(engine client, dev_mode="1")``: an HTTP client of an application."""
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    def make(client: Any, dev_mode: str = "1") -> Any:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
        (entry_point,) = entry_points(group="vllm.endpoint_plugins", name="pyblockpool")
        plugin = entry_point.load()()
        app = FastAPI()
        plugin.attach_router(app)
        if client is not None:
            app.state.engine_client = client
        return TestClient(app)

    return make


def test_what_vllm_asks_of_an_endpoint_plugin() -> None:
    interface = pytest.importorskip("vllm.plugins.endpoint_plugins.interface")
    (entry_point,) = entry_points(group="vllm.endpoint_plugins", name="pyblockpool")
    plugin = entry_point.load()()
    assert isinstance(plugin, interface.EndpointPlugin)
    assert (plugin.name, plugin.required_tasks) == ("pyblockpool", None)
    general = entry_points(group="vllm.general_plugins", name="pyblockpool")
    assert general, "one name in VLLM_PLUGINS loads both"


@pytest.mark.parametrize("success", [True, False])
def test_the_truth_comes_back(browser: MakeApp, success: bool) -> None:
    """SkyRL#1824, NeMo-RL#3839"""
    answer = browser(Client(success)).post("/reset_free_block_queue_order")
    assert (answer.status_code, answer.json()) == (200, {"success": success})


@pytest.mark.parametrize("stats", [STATS, [STATS, STATS]])
def test_stats(browser: MakeApp, stats: Any) -> None:
    answer = browser(Client(stats)).get("/free_block_queue_stats")
    assert (answer.status_code, answer.json()) == (200, stats)


def test_a_reset_is_no_get(browser: MakeApp) -> None:
    assert browser(Client(True)).get("/reset_free_block_queue_order").status_code == 405


@pytest.mark.parametrize(
    "client",
    [None, SimpleNamespace(), Client(InactiveError("set VLLM_BLOCK_QUEUE=native"))],
    ids=["no engine", "front end without", "engine core without"],
)
def test_where_the_plugin_is_not_active(browser: MakeApp, client: Any) -> None:
    answers = browser(client)
    for answer in (
        answers.post("/reset_free_block_queue_order"),
        answers.get("/free_block_queue_stats"),
    ):
        assert answer.status_code == 501
        assert "VLLM_BLOCK_QUEUE=native" in answer.json()["detail"]


def test_no_routes_without_the_dev_mode(browser: MakeApp) -> None:
    answers = browser(Client(True), dev_mode="0")
    assert answers.post("/reset_free_block_queue_order").status_code == 404
    assert answers.get("/free_block_queue_stats").status_code == 404
