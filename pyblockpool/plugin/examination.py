"""What `pyblockpool.doctor` asks for, found out in this process.

Imports vLLM; tries each value of the variable out as `entry.register()` does, and takes it back.
Puts the environment of the process back, too, into which vLLM writes. CUDA is not initialized.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pyblockpool.doctor import (
    VARIABLES,
    Attention,
    Diagnosis,
    Outcome,
    Question,
    RefusedTileError,
    Remark,
    UnknownBackendError,
    asked_for,
    reason,
)
from pyblockpool.errors import BlockQueueError, NotCompiledError
from pyblockpool.plugin import entry, environment, installation, surface
from pyblockpool.plugin.attention import examine_attention
from pyblockpool.settings import QUEUE_VARIABLE, QUEUES, Settings, assignments

# The values that are tried out, without options; the one that is asked for comes on top.
VALUES = tuple(
    Settings.from_environ({QUEUE_VARIABLE: value}) for value in QUEUES if "," not in value
)


def examine(question: Question) -> Diagnosis:
    """Everything, for the environment of this process, in which no value was switched on yet.

    Raises:
        UnknownBackendError: vLLM has no attention backend of that name.
        RefusedTileError: vLLM refuses that KV tile of FlexAttention.
    """
    with _environment_kept():
        torch, troubles = installation.imported("torch")
        with _without_cuda(torch):
            return _examine(question, torch, troubles)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _without_cuda(torch: Any | None) -> Iterator[None]:
    """Refuse to initialize CUDA: a context takes memory of a GPU that a server may be using.

    Everything in PyTorch that needs a context comes by here, and what we need does not.
    """

    def refuse() -> None:
        raise RuntimeError("CUDA is not initialized for pyblockpool doctor")

    if torch is None:
        yield
        return
    original = torch.cuda._lazy_init
    torch.cuda._lazy_init = refuse
    try:
        yield
    finally:
        torch.cuda._lazy_init = original


def _examine(question: Question, torch: Any | None, troubles: list[Remark]) -> Diagnosis:
    asked = asked_for()
    settings, remarks = environment.what_is_asked()
    compiled, found = installation.compiled_modules(
        queue_needed=settings.queue == "native" or not asked
    )
    remarks += found
    remarks += installation.copies()
    remarks += installation.found_by_vllm()
    vllm, found = installation.imported("vllm")
    remarks += troubles + found
    facts = installation.facts_of(compiled, torch, vllm)
    remarks += installation.unseen_gpus(facts)
    remarks += environment.whether_loaded(asked)
    outcomes: list[Outcome] = []
    attention: Attention | None = None
    probed = settings if settings.variables() else Settings("native")
    trouble = installation.engine_trouble() if vllm is not None else None
    if trouble is not None:
        remarks.append(trouble)
    elif vllm is not None:
        remarks += environment.switches()
        remarks += environment.other_plugins(run=question.load_plugins)
        remarks += _probe(probed)
        if settings.trace is not None:
            remarks += _trial_of_trace(settings, remarks)
        values = (*VALUES, replace(probed, trace=None)) if probed.queue else VALUES
        outcomes = [_outcome(each) for each in dict.fromkeys(values)]
        try:
            attention, found = examine_attention(question)
            remarks += found
        except (UnknownBackendError, RefusedTileError):
            raise
        except Exception as error:
            sentence = f"cannot tell which attention backends there are: {reason(error)}"
            remarks.append(Remark("attention", "unknown", sentence))
    works = settings.trace is not None and bool(outcomes)
    if settings.queue is not None:
        works = any(each.works and each.value == str(settings) for each in outcomes)
    return Diagnosis(
        asked=asked,
        works=not asked or (works and not any(remark.level == "bad" for remark in remarks)),
        probed=assignments(probed.variables()),
        facts=facts,
        remarks=tuple(remarks),
        outcomes=tuple(outcomes),
        attention=attention,
    )


def _probe(settings: Settings) -> Iterator[Remark]:
    try:
        for finding in surface.probe(settings):
            yield Remark("probe", "bad" if finding.error else "good", finding.sentence)
    except NotCompiledError as error:
        yield Remark("probe", "bad", str(error))


def _trial_of_trace(settings: Settings, remarks: list[Remark]) -> Iterator[Remark]:
    """What stands against all that is asked for, as far as it is not told yet."""
    obstacle = _obstacle(settings.variables())
    if obstacle and not any(remark.sentence in obstacle for remark in remarks):
        yield Remark("probe", "bad", obstacle)


def _outcome(settings: Settings) -> Outcome:
    value = str(settings)
    obstacle = _obstacle({QUEUE_VARIABLE: value})
    return Outcome(value, not obstacle, obstacle or environment.meaning(settings))


def _obstacle(variables: Mapping[str, str]) -> str:
    """Why they cannot be switched on, which proves it on a pool of eight blocks; "" if they can."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        entry.register()
        entry.restore()
    except BlockQueueError as error:
        _, _, why = str(error).partition(" cannot be done here: ")
        return why or str(error)
    except Exception as error:
        return reason(error)
    return ""
