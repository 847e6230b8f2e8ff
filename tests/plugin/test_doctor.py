"""What the doctor says: of a host that can be bent, of the environment, of installed packages."""

from __future__ import annotations

import dataclasses
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVLLM

import pyblockpool
from pyblockpool.doctor import Diagnosis, Question, Remark, diagnose
from pyblockpool.plugin import environment, installation
from pyblockpool.plugin.examination import examine
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE

VALUES = ["python", "native", "native:sorted", "native:extent"]
VARIABLES = (*environment.SWITCHES, "VLLM_PLUGINS")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables that count, and no copy of the package in the working directory."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    return FakeVLLM(monkeypatch)


def look(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Diagnosis:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return examine(Question())


def said(diagnosis: Diagnosis, *phrases: str) -> Remark:
    """The one remark with all of these phrases."""
    found = [
        remark
        for remark in diagnosis.remarks
        if all(phrase in remark.sentence for phrase in phrases)
    ]
    assert len(found) == 1, diagnosis.remarks
    return found[0]


def test_nothing_is_asked_for(host: FakeVLLM) -> None:
    diagnosis = examine(Question())
    assert (diagnosis.asked, diagnosis.works) == ({}, True)
    assert diagnosis.probed == "VLLM_BLOCK_QUEUE=native"
    assert said(diagnosis, "VLLM_BLOCK_QUEUE is not set: vLLM's queue stays").level == "good"
    assert said(diagnosis, "VLLM_BLOCK_TRACE is not set: block tables are not").level == "good"
    assert [outcome.value for outcome in diagnosis.outcomes] == VALUES
    assert not [remark for remark in diagnosis.remarks if remark.level == "bad"]
    assert diagnosis.facts is not None
    assert (diagnosis.facts.vllm, diagnosis.facts.pyblockpool) == (
        "0.99.0",
        pyblockpool.__version__,
    )


@pytest.mark.parametrize("value", [*VALUES, "native:extent,size=16"])
def test_what_is_asked_for_works(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE=value)
    assert (diagnosis.asked, diagnosis.works) == ({QUEUE_VARIABLE: value}, True)
    assert diagnosis.probed == f"{QUEUE_VARIABLE}={value}"
    assert {outcome.value for outcome in diagnosis.outcomes} == {*VALUES, value}
    assert all(outcome.works for outcome in diagnosis.outcomes), diagnosis.outcomes
    assert said(diagnosis, f"{QUEUE_VARIABLE}={value} is set").level == "good"
    told = {remark.sentence for remark in diagnosis.remarks if remark.topic == "probe"}
    assert "BlockPool is vLLM's own and has every method that is needed" in told
    assert any("blocks of a request as known" in sentence for sentence in told) == (
        "extent" in value
    )


def test_nothing_is_changed(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native:extent")
    before, environment = host.snapshot(), dict(os.environ)
    assert examine(Question()).works
    assert host.snapshot() == before
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    ("edit", "working", "sentence"),
    [
        (("def evict_blocks(self, block_ids): ...", ""), [], "is too old or too different"),
        (("def popleft_n(self, n):", "def popleft_n(self, n, m=0):"), ["python"], "popleft_n(n, m"),
        (("def touch(self", "def reset_free_block_queue_order(self): ...\n    def touch(self"), [],
         "is there already"),
        (("self.free_block_queue.prepend_n([])", "pass"), ["python", "native"], None),
        (("request_id, num_tokens", "num_tokens"), ["python", "native", "native:sorted"], None),
    ],
)  # fmt: skip
def test_a_host_that_lacks_something(
    host: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    edit: tuple[str, str],
    working: list[str],
    sentence: str | None,
) -> None:
    host.load(edit)
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert [each.value for each in diagnosis.outcomes if each.works] == working
    assert diagnosis.works == ("native" in working)
    if sentence is not None:
        remark = said(diagnosis, sentence)
        assert (remark.topic, remark.level) == ("probe", "bad")
        (outcome,) = [each for each in diagnosis.outcomes if each.value == "native"]
        assert remark.sentence in outcome.sentence
    monkeypatch.delenv(QUEUE_VARIABLE)
    assert examine(Question()).works


def test_a_conflict(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = type("Rival", (host.kv_cache_utils.FreeKVCacheBlockQueue,), {})
    monkeypatch.setattr(host.block_pool, "FreeKVCacheBlockQueue", rival)
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert not diagnosis.works
    assert said(diagnosis, "has been replaced by", "Rival").level == "bad"
    assert [each.value for each in diagnosis.outcomes if each.works] == ["python"]


def test_an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing below vllm is where it is expected: said once, not once a check."""
    vllm = FakeVLLM(monkeypatch).vllm
    vllm.__version__ = "0.9.1"
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native:extent")
    assert not diagnosis.works
    assert said(diagnosis, "vLLM 0.13.0 or later is needed").topic == "probe"
    assert {each.sentence.count("0.13.0") for each in diagnosis.outcomes} == {1}
    assert said(diagnosis, "cannot tell which attention backends there are").level == "unknown"
    assert said(diagnosis, "this vLLM has no endpoint plugins")


def test_a_value_that_is_not_allowed(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="")
    assert (diagnosis.asked, diagnosis.works) == ({QUEUE_VARIABLE: ""}, False)
    assert diagnosis.probed == "VLLM_BLOCK_QUEUE=native"
    assert said(diagnosis, "VLLM_BLOCK_QUEUE='' is not allowed").level == "bad"
    assert all(outcome.works for outcome in diagnosis.outcomes)


@pytest.mark.parametrize("value", ["naive", ""])
def test_a_fault_does_not_hide_another(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    gone = f"{tmp_path}/gone/trace"
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE=value, VLLM_BLOCK_TRACE=gone)
    assert not diagnosis.works
    assert said(diagnosis, f"VLLM_BLOCK_QUEUE={value!r} is not allowed").level == "bad"
    assert said(diagnosis, f"VLLM_BLOCK_TRACE={gone} would record nothing").level == "bad"
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=str(tmp_path / "trace"))
    assert not diagnosis.works
    assert said(diagnosis, "block tables would be recorded in").level == "good"
    assert diagnosis.probed == f"VLLM_BLOCK_TRACE={tmp_path}/trace"
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE="")
    assert said(diagnosis, f"VLLM_BLOCK_QUEUE={value!r} is not allowed").level == "bad"
    assert said(diagnosis, "VLLM_BLOCK_TRACE is empty").level == "bad"
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="python")
    assert not diagnosis.works
    assert said(diagnosis, "VLLM_BLOCK_QUEUE=python is set").level == "good"
    assert said(diagnosis, "VLLM_BLOCK_TRACE is empty").level == "bad"


def test_without_the_compiled_module(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyblockpool._queue", None)
    monkeypatch.delitem(vars(pyblockpool), "FreeBlockQueue", raising=False)
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert not diagnosis.works
    found = [
        each for each in diagnosis.remarks if "pyblockpool._queue does not load" in each.sentence
    ]
    assert [(each.topic, each.level) for each in found] == [
        ("installation", "bad"),
        ("probe", "bad"),
    ]
    assert all("install pyblockpool from a wheel" in each.sentence for each in found)
    assert diagnosis.facts is not None
    assert diagnosis.facts.compiled["_queue"] is None
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    diagnosis = examine(Question())
    assert diagnosis.works
    assert said(diagnosis, "pyblockpool._queue does not load").level == "note"
    assert [each.value for each in diagnosis.outcomes if each.works] == ["python"]


def test_the_plugin_does_without_the_figures(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyblockpool._contiguity", None)
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert said(diagnosis, "pyblockpool._contiguity does not load").level == "note"
    assert said(diagnosis, "pyblockpool._queue loads, from _queue.").level == "good"
    assert diagnosis.works


@pytest.mark.parametrize(
    ("value", "level", "phrase"),
    [
        ("pyblockpool", "good", "names pyblockpool"),
        ("a,pyblockpool", "good", "names pyblockpool"),
        ("", "bad", "Set VLLM_PLUGINS=pyblockpool, or"),
        ("a,b", "bad", "Set VLLM_PLUGINS=a,b,pyblockpool, or"),
        ("a, pyblockpool", "bad", "(blanks count)"),
    ],
)
def test_which_plugins_vllm_loads(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, value: str, level: str, phrase: str
) -> None:
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native", VLLM_PLUGINS=value)
    assert said(diagnosis, phrase).level == level
    assert diagnosis.works == (level == "good")
    assert diagnosis.outcomes[1].works  # it could be done
    monkeypatch.delenv(QUEUE_VARIABLE)
    assert "bad" not in {remark.level for remark in examine(Question()).remarks}


def test_what_has_no_effect_if_the_plugin_is_not_loaded(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    diagnosis = look(monkeypatch, VLLM_PLUGINS="a b", VLLM_BLOCK_QUEUE="native")
    effect = "the plugin, and VLLM_BLOCK_QUEUE would have no effect"
    assert said(diagnosis, effect, "Set VLLM_PLUGINS='a b,pyblockpool', or").level == "bad"
    diagnosis = look(monkeypatch, VLLM_PLUGINS="", VLLM_BLOCK_TRACE=str(tmp_path / "trace"))
    effect = "and VLLM_BLOCK_QUEUE and VLLM_BLOCK_TRACE would have no effect"
    assert said(diagnosis, "VLLM_PLUGINS='' does not name", effect).level == "bad"


@pytest.fixture
def envs(host: FakeVLLM) -> FakeVLLM:
    """vLLM reads its switches as 0 or 1."""
    for name, default in environment.SWITCHES.items():
        host.envs.environment_variables[name] = lambda name=name, default=default: bool(
            int(os.environ.get(name, str(int(default))))
        )
    host.envs.__getattr__ = lambda name: host.envs.environment_variables[name]()
    host._module("vllm.plugins", "ENDPOINT_PLUGINS_GROUP = 'vllm.endpoint_plugins'")
    return host


def test_the_routes_of_a_server(envs: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = "POST /reset_free_block_queue_order and GET /free_block_queue_stats"
    missing = said(examine(Question()), "would not have the routes", routes).sentence
    assert "VLLM_SERVER_DEV_MODE is not 1" in missing
    assert "VLLM_PLUGINS does not name pyblockpool" in missing
    assert "endpoint plugins" not in missing
    diagnosis = look(monkeypatch, VLLM_SERVER_DEV_MODE="1", VLLM_PLUGINS="pyblockpool")
    assert said(diagnosis, "would have the routes", routes).level == "good"
    diagnosis = look(monkeypatch, VLLM_USE_RUST_FRONTEND="1")
    assert said(diagnosis, "would not have the routes", "Rust front end").level == "note"
    assert said(diagnosis, "VLLM_USE_RUST_FRONTEND=1", "the queue itself works").level == "note"


def test_an_engine_in_the_process_of_its_front_end(
    envs: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [each for each in examine(Question()).remarks if "MULTIPROCESSING" in each.sentence]
    diagnosis = look(monkeypatch, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_BLOCK_QUEUE="native")
    assert said(diagnosis, "VLLM_ENABLE_V1_MULTIPROCESSING=0", "log line").level == "note"
    assert diagnosis.works


def test_a_switch_that_vllm_cannot_read(envs: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = look(monkeypatch, VLLM_SERVER_DEV_MODE="yes", VLLM_BLOCK_QUEUE="native")
    assert said(diagnosis, "vLLM cannot read VLLM_SERVER_DEV_MODE='yes'", "0 or 1").level == "bad"
    assert not diagnosis.works


def test_a_trace_that_would_be_recorded(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is written, not even where vLLM's queue stays."""
    file = tmp_path / "trace-%p.jsonl"
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=str(file))
    assert (diagnosis.asked, diagnosis.works) == ({TRACE_VARIABLE: str(file)}, True)
    assert diagnosis.probed == f"{TRACE_VARIABLE}={file}"
    assert said(diagnosis, "would be recorded in", f"{file} (%p: the process id").level == "good"
    assert said(diagnosis, "the blocks that requests give up can be recorded").topic == "probe"
    assert [outcome.value for outcome in diagnosis.outcomes] == VALUES
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert diagnosis.works
    assert diagnosis.probed == f"{QUEUE_VARIABLE}=native {TRACE_VARIABLE}={file}"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "trace").touch()
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "trace"))
    assert said(examine(Question()), f"{tmp_path}/trace, behind what is there").level == "good"


@pytest.mark.parametrize(
    ("file", "trouble"),
    [
        ("", "VLLM_BLOCK_TRACE is empty"),
        ("gone/trace.jsonl", "there is no folder"),
        ("folder", "that is not a regular file"),
        ("notes", "it holds something else than a block trace"),
    ],
)
def test_a_trace_that_could_not_be_written(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, trouble: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes").write_text("of mine\n", encoding="utf-8")
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=file, VLLM_BLOCK_QUEUE="native")
    assert said(diagnosis, trouble).level == "bad"
    assert not diagnosis.works


def test_a_trace_that_vllm_does_not_allow(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host.load(("def update_from_output", "def update"))
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=str(tmp_path / "trace"))
    assert not diagnosis.works
    assert (
        said(diagnosis, "that the block trace needs: Scheduler.update_from_output()").level == "bad"
    )
    assert all(outcome.works for outcome in diagnosis.outcomes)


def test_a_trace_whose_name_has_a_blank(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Assignments are shown as a shell takes them, and a trouble is told once all the same."""
    file = tmp_path / "block trace"
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=str(file))
    assert diagnosis.works
    assert diagnosis.probed == f"VLLM_BLOCK_TRACE='{file}'"
    gone = look(monkeypatch, VLLM_BLOCK_TRACE=f"{file}/gone")
    assert said(gone, f"VLLM_BLOCK_TRACE='{file}/gone' would record nothing").level == "bad"
    host.load(("def update_from_output", "def update"))
    diagnosis = look(monkeypatch, VLLM_BLOCK_TRACE=str(file))
    assert [each.topic for each in diagnosis.remarks if each.level == "bad"] == ["probe"]


# --- what is installed


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``distribution(name, group, entry points, module text)``: an installed package."""

    def install(name: str, group: str, points: str, text: str = "", version: str = "1.0") -> Path:
        folder = tmp_path / f"site-{name}-{version}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        (folder / f"{name}_module.py").write_text(text)
        monkeypatch.syspath_prepend(folder)
        return folder

    return install


def test_the_plugin_is_found_once(host: FakeVLLM) -> None:
    for group, value in installation.OURS.items():
        (point,) = entry_points(group=group, name="pyblockpool")
        assert point.value == value
        assert said(examine(Question()), "plugin is installed in the", group).level == "good"


def test_the_plugin_is_not_found(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "entry_points", lambda **selection: [])
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert not diagnosis.works
    assert said(diagnosis, "does not find the plugin", "vllm.general_plugins").level == "bad"
    assert said(diagnosis, "does not find the plugin", "vllm.endpoint_plugins").level == "note"


def test_somebody_else_under_our_name(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    distribution("rival", "vllm.general_plugins", "pyblockpool = rival_module:register")
    diagnosis = look(monkeypatch, VLLM_BLOCK_QUEUE="native")
    assert not diagnosis.works
    assert said(diagnosis, "rival_module:register", "should find", "once").level == "bad"


def test_installed_twice(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    point = f"pyblockpool = {installation.OURS[installation.GENERAL_PLUGINS]}"
    older = distribution("pyblockpool", "vllm.general_plugins", point, version="0.0.9")
    assert said(examine(Question()), "installed 2 times", f"{older} (0.0.9)").level == "note"


def test_other_plugins_are_named_and_not_run(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    group = "vllm.general_plugins"
    distribution("rival", group, "quick = rival_module:register", "raise SystemExit('was run')")
    distribution("vllm-like", group, "lora = vllm.plugins.lora:register")
    remark = said(examine(Question()), "quick (rival_module:register)", "--load-plugins")
    assert (remark.topic, remark.level) == ("environment", "note")
    assert not [each for each in examine(Question()).remarks if "lora" in each.sentence]
    diagnosis = look(monkeypatch, VLLM_PLUGINS="pyblockpool")
    assert not [each for each in diagnosis.remarks if "quick" in each.sentence]


RIVAL = """
def register():
    from vllm.v1.core import block_pool
    class QuickQueue(block_pool.FreeKVCacheBlockQueue): ...
    block_pool.FreeKVCacheBlockQueue = QuickQueue
"""


def test_other_plugins_are_run_if_asked(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    group = "vllm.general_plugins"
    distribution("rival", group, "quick = rival_module:register", RIVAL)
    distribution("broken", group, "broken = broken_module:register", "raise ValueError('no luck')")
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    assert examine(Question()).works
    diagnosis = examine(Question(load_plugins=True))
    assert not diagnosis.works
    assert said(diagnosis, "has been replaced by rival_module.register.<locals>.QuickQueue")
    assert said(diagnosis, "broken (broken_module:register)", "ValueError: no luck").level == "note"


def test_cuda_is_not_initialized(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, distribution: Any
) -> None:
    cuda: Any = pytest.importorskip("torch").cuda
    before = cuda._lazy_init
    text = "def register():\n    import torch\n    torch.cuda.get_device_properties(0)\n"
    distribution("greedy", "vllm.general_plugins", "greedy = greedy_module:register", text)
    diagnosis = examine(Question(load_plugins=True))
    assert said(
        diagnosis, "greedy_module:register", "CUDA is not initialized for pyblockpool doctor"
    )
    assert cuda._lazy_init is before
    assert not cuda.is_initialized()


def test_a_source_folder_in_the_way(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "pyblockpool"
    source.mkdir()
    (source / "__init__.py").touch()
    remark = said(examine(Question()), str(source), "without its compiled module")
    assert remark.level == "note"
    assert f"`python -m` in {tmp_path}" in remark.sentence
    (source / "_queue.cpython-311-x86_64-linux-gnu.so").touch()
    assert said(examine(Question()), "there is another pyblockpool in", str(source))


def test_gpus(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA H200, 570.86.10'; done\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    diagnosis = examine(Question())
    assert diagnosis.facts is not None
    assert diagnosis.facts.gpus == ("NVIDIA H200",) * 2
    assert (diagnosis.facts.driver, diagnosis.facts.gpus_of_torch) == ("570.86.10", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert said(examine(Question()), "PyTorch", "sees none of the GPUs").level == "note"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    diagnosis = examine(Question())
    assert diagnosis.facts is not None
    assert (diagnosis.facts.gpus, diagnosis.facts.driver) == ((), None)


# --- in a process of its own


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        (
            "raise ModuleNotFoundError('No module named vllm', name='vllm')",
            ["vLLM is not installed for", sys.executable, "python -m pyblockpool doctor"],
        ),
        (
            "raise ImportError('libcudart.so.12: cannot open\\nshared object file')",
            [
                "vLLM is installed but cannot be imported",
                "ImportError: libcudart.so.12: cannot open",
            ],
        ),
        (
            "import os, sys; print('loading kernels', file=sys.stderr, flush=True); os.abort()",
            ["ended with signal SIGABRT", "the last it printed was: loading kernels"],
        ),
        (
            "import os; os._exit(3)",
            ["ended with exit status 3", "the last it printed was: nothing"],
        ),
    ],
)
def test_a_vllm_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, phrases: list[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    diagnosis = diagnose(Question())
    assert said(diagnosis, *phrases).level == "bad"
    assert (diagnosis.works, diagnosis.outcomes, diagnosis.attention) == (True, (), None)
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    assert not diagnose(Question()).works


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said of PyTorch first, before what vLLM makes of it."""
    for name, text in (
        ("torch", "raise OSError('libcudart.so.12: cannot open shared object file')"),
        ("vllm", "import torch"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    diagnosis = diagnose(Question())
    troubles = [each.sentence.split(" (")[0] for each in diagnosis.remarks if each.level == "bad"]
    assert troubles == [
        "PyTorch is installed but cannot be imported",
        "vLLM is installed but cannot be imported",
    ]
    assert diagnosis.facts is not None
    assert (diagnosis.facts.torch, diagnosis.facts.gpus_of_torch) == (None, None)


def test_an_engine_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tmp_path / "vllm" / "v1" / "engine"
    engine.mkdir(parents=True)
    for package in (engine, engine.parent):
        (package / "__init__.py").touch()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.40.0'")
    (engine / "core.py").write_text("import a_kernel_library")
    monkeypatch.syspath_prepend(tmp_path)
    diagnosis = diagnose(Question())
    assert said(diagnosis, "cannot be imported", "No module named 'a_kernel_library'")
    assert not [remark for remark in diagnosis.remarks if remark.topic == "probe"]
    assert diagnosis.facts is not None
    assert diagnosis.facts.vllm == "0.40.0"


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Question().block_size = 16  # type: ignore[misc]
