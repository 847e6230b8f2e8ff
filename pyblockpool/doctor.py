"""What is installed, and what ``VLLM_BLOCK_QUEUE`` and ``VLLM_BLOCK_TRACE`` would do here.

`diagnose()` looks in a process of its own, which ends with the answer. vLLM writes into the
environment of a process that imports it and logs to its stdout, the queue is tried out there, and
what kills that process (a broken build of torch, say) is a finding, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from pyblockpool.errors import BlockQueueError
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, assignments

VARIABLES = (QUEUE_VARIABLE, TRACE_VARIABLE)

# good: as it should be; note: works, but know this; bad: does not work, with the fix; unknown:
# cannot be told, with the reason.
Level = Literal["good", "note", "bad", "unknown"]
# installation: of pyblockpool, torch and vLLM; probe: of vLLM, for what the variable asks for;
# environment: variables and plugins; attention: what of the cache is read at once.
Topic = Literal["installation", "probe", "environment", "attention"]


class UnknownBackendError(BlockQueueError, ValueError):
    """An attention backend was asked about that the installed vLLM does not have."""


class RefusedTileError(BlockQueueError, ValueError):
    """A KV tile of FlexAttention was asked about that the installed vLLM refuses."""


@dataclass(frozen=True)
class Question:
    """What to look at beside the environment.

    Attributes:
        attention_backend: a name of vLLM's AttentionBackendEnum; None for the one that vLLM takes.
        block_size: tokens in a KV-cache block; None for what vLLM takes.
        flex_attn_kv_block_size: as in vLLM's AttentionConfig; None for what vLLM takes.
        load_plugins: run the other general plugins, as vLLM does when it starts, before the probe.
    """

    attention_backend: str | None = None
    block_size: int | None = None
    flex_attn_kv_block_size: int | None = None
    load_plugins: bool = False


@dataclass(frozen=True)
class Facts:
    """What is installed and what it runs on; None for what is not there or cannot be told.

    Attributes:
        pyblockpool: its version.
        package: the folder that the package was imported from.
        compiled: the file of each compiled module by its name, None if it does not load.
        vllm: its version.
        vllm_package: the folder it was imported from.
        torch: its version, with what it was built for.
        python: version of the interpreter.
        executable: the interpreter.
        cpu: the model.
        cores: that this process may use.
        gpus: names, as nvidia-smi lists them: all of the machine, whatever CUDA_VISIBLE_DEVICES is.
        gpus_of_torch: how many of them torch sees (by NVML, without a CUDA context).
        driver: its version, of NVIDIA's.
    """

    pyblockpool: str | None
    package: str
    compiled: dict[str, str | None]
    vllm: str | None
    vllm_package: str | None
    torch: str | None
    python: str
    executable: str
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    gpus_of_torch: int | None
    driver: str | None


@dataclass(frozen=True)
class Remark:
    """One finding: a sentence that can be read on its own."""

    topic: Topic
    level: Level
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """What a value of VLLM_BLOCK_QUEUE would do here.

    Attributes:
        value: of the variable.
        works: whether the plugin can do it: it was switched on, proved and taken back again.
        sentence: what the value means, or why it does not work.
    """

    value: str
    works: bool
    sentence: str


@dataclass(frozen=True)
class Backend:
    """What is known of an attention backend of the installed vLLM.

    Attributes:
        name: in vLLM's AttentionBackendEnum.
        reads: ``"blocks"``: those of the request, wherever they lie; ``"tiles"`` of the cache,
            whoever their blocks belong to; ``"unknown"``.
        reason: where that is from.
    """

    name: str
    reads: Literal["blocks", "tiles", "unknown"]
    reason: str


@dataclass(frozen=True)
class Attention:
    """Whether scattered blocks can make a prefill slower.

    Attributes:
        platform: vLLM's name of it.
        chosen: the backend that vLLM takes here, for an ordinary decoder layer.
        backend: the one in question: `Question.attention_backend`, or else `chosen`.
        block_size: tokens in a block.
        flex_attention_tile: tokens in a KV tile of FlexAttention, whatever the backend in question.
        fragmentation_costs: whether it can cost prefill time; None if that cannot be told.
        backends: all that the installed vLLM has.
    """

    platform: str | None
    chosen: str | None
    backend: str | None
    block_size: int | None
    flex_attention_tile: int | None
    fragmentation_costs: bool | None
    backends: tuple[Backend, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The answer.

    Attributes:
        asked: variables of pyblockpool that are set, and their values.
        works: whether what they ask for would work; True if none is set.
        probed: what the probe was made for: what is asked for, or else VLLM_BLOCK_QUEUE=native.
        facts: None if the process that looked at them has died.
        remarks: in the order in which they are worth reading.
        outcomes: of the values of the variable; empty without vLLM.
        attention: None if vLLM has no attention backends, or cannot be imported.
    """

    asked: dict[str, str]
    works: bool
    probed: str
    facts: Facts | None
    remarks: tuple[Remark, ...]
    outcomes: tuple[Outcome, ...]
    attention: Attention | None


def asked_for() -> dict[str, str]:
    """The variables of pyblockpool that are set in this process, and their values."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def reason(error: BaseException) -> str:
    """An error in one line, for a sentence; some have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def diagnose(question: Question) -> Diagnosis:
    """Look at the environment of this process, in a child process.

    Call it from a script only under ``if __name__ == "__main__"``: the process is spawned.

    Raises:
        UnknownBackendError: vLLM has no attention backend of that name.
        RefusedTileError: vLLM refuses that KV tile of FlexAttention.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        process = spawn.Process(target=_examine_in_child, args=(theirs, question, output))
        process.start()
        theirs.close()  # so that the end of the process is seen at our end
        try:
            answer: Diagnosis | BaseException = ours.recv()
        except (EOFError, OSError):
            process.join()
            answer = _died(process.exitcode, output)
        finally:
            process.kill()  # it has nothing left to do, and interpreters with vLLM end slowly
            process.join()
            ours.close()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _examine_in_child(connection: Connection, question: Question, output: Path) -> None:
    """Send the diagnosis or the error; everything that is printed goes into a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    answer: Any
    try:
        from pyblockpool.plugin.examination import examine

        answer = examine(question)
    except Exception as error:
        answer = error
    connection.send(answer)


def _died(status: int | None, output: Path) -> Diagnosis:
    cause = f"exit status {status}"
    if status is not None and status < 0:
        cause = f"signal {signal.Signals(-status).name}"
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    asked = asked_for()
    sentence = (
        f"the process that imported vLLM ended with {cause}; the last it printed was: {last}. "
        'Nothing can be told before `python -c "import vllm.v1.engine.core"` works here'
    )
    remark = Remark("installation", "bad", sentence)
    return Diagnosis(asked, not asked, assignments(asked), None, (remark,), (), None)
