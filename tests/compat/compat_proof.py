"""A pytest plugin: which vLLM the processes had that ran the tests.

Loaded with `-p compat_proof`. Each of these processes adds a line to the file COMPAT_PROOF.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("numprocesses") and not in_worker:
        return  # the controller of pytest-xdist, which runs no test
    # Tests of engines import it in processes of their own, with the same path.
    vllm = importlib.import_module("vllm")
    with Path(os.environ["COMPAT_PROOF"]).open("a", encoding="utf-8") as proof:
        proof.write(f"{vllm.__file__}\n")
