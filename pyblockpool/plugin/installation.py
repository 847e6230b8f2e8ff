"""What is installed: pyblockpool, once and whole, and a vLLM and a PyTorch that can be imported."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pyblockpool
from pyblockpool.doctor import Facts, Level, Remark, reason
from pyblockpool.errors import NotCompiledError
from pyblockpool.plugin import surface

NAME = "pyblockpool"
GENERAL_PLUGINS = "vllm.general_plugins"
ENDPOINT_PLUGINS = "vllm.endpoint_plugins"
OURS = {
    GENERAL_PLUGINS: "pyblockpool.plugin.entry:register",
    ENDPOINT_PLUGINS: "pyblockpool.plugin.endpoint:FreeBlockQueueEndpoints",
}
TITLES = {"torch": "PyTorch", "vllm": "vLLM"}
INSTALL = "install pyblockpool from a wheel or with `pip install .`"


def _package() -> Path:
    return Path(str(pyblockpool.__file__)).parent


def compiled_modules(*, queue_needed: bool) -> tuple[dict[str, str | None], list[Remark]]:
    """Files of those that load. Each compiled module has a stub beside it; vLLM needs the queue."""
    files: dict[str, str | None] = {}
    remarks = []
    for stub in sorted(_package().glob("_[a-z]*.pyi")):
        name = f"{NAME}.{stub.stem}"
        try:
            file = Path(str(import_module(name).__file__))
        except ImportError as error:
            files[stub.stem] = None
            sentence = f"the compiled module {name} does not load ({error}): {INSTALL}"
            if not _is_compiled(_package()):
                sentence += f", and do not start Python in {_package().parent}"
            needed = queue_needed and stub.stem == "_queue"
            remarks.append(Remark("installation", "bad" if needed else "note", sentence))
        else:
            files[stub.stem] = str(file)
            place = file.name if file.parent == _package() else file
            sentence = f"the compiled module {name} loads, from {place}"
            remarks.append(Remark("installation", "good", sentence))
    return files, remarks


def _is_compiled(package: Path) -> bool:
    return any(package.glob("_queue.*.so"))


def copies() -> Iterator[Remark]:
    """Other folders with the package, which a Python that is started otherwise would import."""
    ours = _package().resolve()
    seen = {ours}
    for folder in map(Path, (os.getcwd(), *sys.path)):
        copy = (folder / NAME).resolve()
        if copy in seen or not (copy / "__init__.py").is_file():
            continue
        seen.add(copy)
        if _is_compiled(copy):
            sentence = f"there is another pyblockpool in {copy}; the one in {ours} was imported"
        else:
            sentence = (
                f"{copy} is the package without its compiled module: `python -c`, `python -m` in "
                f"{copy.parent} and scripts that lie there import that one. Start vLLM elsewhere"
            )
        yield Remark("installation", "note", sentence)


def found_by_vllm() -> Iterator[Remark]:
    """Whether the plugin is where vLLM would find it, once."""
    for group, ours in OURS.items():
        found = entry_points(group=group, name=NAME)
        values = [point.value for point in found]
        # Without the endpoint plugin only the routes are missing.
        trouble: Level = "bad" if group == GENERAL_PLUGINS else "note"
        if values == [ours]:
            # Not that vLLM finds it: an older one looks for no endpoint plugins.
            yield Remark("installation", "good", f"the plugin is installed in the group {group}")
        elif not values:
            yield Remark(
                "installation",
                trouble,
                f"vLLM does not find the plugin: no installed package has it in the group {group}. "
                f"{INSTALL.capitalize()}",
            )
        else:
            yield Remark(
                "installation",
                trouble,
                f"in the group {group}, vLLM finds {', '.join(values)} under the name {NAME}, and "
                f"should find {ours} once: uninstall what is not pyblockpool",
            )
    places = {
        str(each.locate_file("")): f"{each.locate_file('')} ({each.version})"
        for each in distributions(name=NAME)
    }
    if len(places) > 1:
        yield Remark(
            "installation",
            "note",
            f"pyblockpool is installed {len(places)} times: {', '.join(places.values())}. The "
            "first counts; uninstall the others",
        )


def imported(name: str) -> tuple[Any | None, list[Remark]]:
    """A package, or None and why not."""
    title = TITLES[name]
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            return None, [_broken(title, error)]
        if name == "torch":  # which vLLM brings: vLLM is missing, too, or misses it
            return None, []
        sentence = (
            f"vLLM is not installed for {sys.executable}: install it there, or call the Python of "
            "your vLLM (python -m pyblockpool doctor)"
        )
    except Exception as error:
        return None, [_broken(title, error)]
    else:
        if hasattr(package, "__version__"):
            return package, []
        folders = ", ".join(getattr(package, "__path__", ()))
        sentence = f"what Python finds as {name} is {folders}, not {title}: start elsewhere"
    return None, [Remark("installation", "bad", sentence)]


def engine_trouble() -> Remark | None:
    """Why the engine does not load: importing ``vllm`` alone imports little.

    None also where a part of vLLM itself is missing: the probe says which release it takes.
    """
    try:
        import_module(surface.CORE)
    except Exception as error:
        if not isinstance(error, ImportError) or (error.name or "").split(".")[0] != "vllm":
            return _broken("vLLM", error)
    return None


def _broken(title: str, error: Exception) -> Remark:
    return Remark(
        "installation",
        "bad",
        f"{title} is installed but cannot be imported ({reason(error)}): repair that first, by "
        "installing vLLM anew with the PyTorch that it asks for",
    )


def facts_of(compiled: dict[str, str | None], torch: Any | None, vllm: Any | None) -> Facts:
    try:
        version = pyblockpool.__version__
    except NotCompiledError:
        version = None
    gpus, driver = _nvidia_smi()
    return Facts(
        pyblockpool=version,
        package=str(_package()),
        compiled=compiled,
        vllm=None if vllm is None else str(vllm.__version__),
        vllm_package=_folder(vllm),
        torch=None if torch is None else str(torch.__version__),
        python=platform.python_version(),
        executable=sys.executable,
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus,
        # By NVML where there is one: no CUDA context, and CUDA is not initialized.
        gpus_of_torch=None if torch is None else torch.cuda.device_count(),
        driver=driver,
    )


def _folder(package: Any | None) -> str | None:
    file = getattr(package, "__file__", None)
    return None if file is None else str(Path(file).parent)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _nvidia_smi() -> tuple[tuple[str, ...], str | None]:
    """Names of the GPUs of this machine, and the version of the driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return (), None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.rpartition(",") for line in ran.stdout.splitlines() if "," in line]
    return tuple(name.strip() for name, _, _ in rows), rows[0][2].strip() if rows else None


def unseen_gpus(facts: Facts) -> Iterator[Remark]:
    if facts.gpus and facts.gpus_of_torch == 0:
        yield Remark(
            "installation",
            "note",
            f"PyTorch {facts.torch} sees none of the GPUs that nvidia-smi lists: it is a build for "
            "the CPU, CUDA_VISIBLE_DEVICES hides them, or the driver is too old for it",
        )
