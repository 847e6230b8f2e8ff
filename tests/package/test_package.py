"""The source distribution and wheels of this checkout, built anew: `make package`.

With each Python of PYBLOCKPOOL_PYTHONS (names or paths, divided by blanks; this one if there are
none). Building needs a compiler and the package index; the environments that wheels are installed
into have no compiler. What has passed lies in the folder PYBLOCKPOOL_DIST.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("PYBLOCKPOOL_PYTHONS", "").split() or [sys.executable]
WORKERS = os.environ.get("PYBLOCKPOOL_WORKERS", "2")

# Of the checkout, but not of the source distribution: what only CI reads.
ONLY_CI = (".ci/", ".github/")

# For these Pythons NumPy has wheels of the release that is our floor.
PYTHONS_OF_THE_FLOORS = {"3.10", "3.11", "3.12"}

each_python = pytest.mark.parametrize("python", PYTHONS)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Its stdout; both streams in the failure."""
    ran = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def git(*arguments: str) -> str:
    return run("git", *arguments, cwd=ROOT)


def tool(name: str) -> Path:
    """Of the environment of this test."""
    return Path(sys.executable).parent / name


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def epoch() -> str:
    """The time of the commit, in seconds: that of every file in what is built."""
    return git("log", "-1", "--format=%ct").strip()


@pytest.fixture(scope="session")
def files() -> list[str]:
    """The checkout: what git tracks, and what it would if it were added."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted(name for name in set(listed) if name and (ROOT / name).exists())


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("package")


@pytest.fixture(scope="session")
def build_sdist(work: Path, files: list[str], epoch: str) -> Callable[..., Path]:
    def build(folder: str, umask: int, litter: tuple[str, ...]) -> Path:
        """From a copy of the checkout in a folder of that name, with files that git ignores."""
        tree = work / folder
        before = os.umask(umask)
        try:
            for name in files:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes((ROOT / name).read_bytes())
                (tree / name).chmod((ROOT / name).stat().st_mode & ~umask)
            for name in litter:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text("left by an earlier build")
            run(tool("python"), "-m", "build", "--sdist", cwd=tree, SOURCE_DATE_EPOCH=epoch)
        finally:
            os.umask(before)
        (made,) = (tree / "dist").iterdir()
        return made

    return build


@pytest.fixture(scope="session")
def sdist(build_sdist: Callable[..., Path]) -> Path:
    return build_sdist("one", 0o022, ())


@pytest.fixture(scope="session")
def folder_of(work: Path) -> Callable[[str], Path]:
    """A Python -> a folder for what is made with it."""

    def folder(python: str) -> Path:
        place = work / f"python {PYTHONS.index(python)}"
        place.mkdir(exist_ok=True)
        return place

    return folder


@pytest.fixture(scope="session")
def build_wheel(folder_of: Callable[[str], Path], sdist: Path, epoch: str) -> Callable[..., Path]:
    @cache
    def build(python: str, folder: str, flags: str, umask: int) -> Path:
        """From the source distribution, unpacked below the folder, in an environment of its own."""
        place = folder_of(python) / folder
        place.mkdir(parents=True)
        environment = folder_of(python) / "builder"
        if not environment.exists():
            run(python, "-m", "venv", environment, cwd=environment.parent)
        before = os.umask(umask)
        try:
            run(
                *(environment / "bin" / "pip", "wheel", "--no-deps", "--no-cache-dir", sdist),
                "--config-settings=cmake.define.PYBLOCKPOOL_WARNINGS_AS_ERRORS=ON",
                cwd=place,
                TMPDIR=str(place),
                CXXFLAGS=flags,
                SOURCE_DATE_EPOCH=epoch,
            )
        finally:
            os.umask(before)
        (made,) = place.glob("*.whl")
        return made

    return build


@pytest.fixture(scope="session")
def repair(epoch: str) -> Callable[[Path], Path]:
    @cache
    def repaired(wheel: Path) -> Path:
        """As cibuildwheel does it."""
        out = wheel.parent / "repaired"
        run(
            *(tool("auditwheel"), "repair", "--wheel-dir", out, wheel),
            cwd=wheel.parent,
            PATH=f"{tool('patchelf').parent}:{os.environ['PATH']}",
            SOURCE_DATE_EPOCH=epoch,
        )
        (made,) = out.iterdir()
        return made

    return repaired


@pytest.fixture(scope="session")
def wheel_of(
    build_wheel: Callable[..., Path], repair: Callable[[Path], Path]
) -> Callable[[str], Path]:
    """A Python -> its wheel, as it would be published."""
    return lambda python: repair(build_wheel(python, "one", "", 0o022))


@pytest.fixture(scope="session", autouse=True)
def dist(work: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """What was tested; outside of here only when all has passed."""
    tested = work / "dist"
    tested.mkdir()
    yield tested
    if out := os.environ.get("PYBLOCKPOOL_DIST"):
        for old in Path(out).glob("pyblockpool-*"):
            old.unlink()
        if not request.session.testsfailed:
            shutil.copytree(tested, out, dirs_exist_ok=True)


def test_the_source_distribution_is_the_checkout(sdist: Path, files: list[str], dist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    expected = {name for name in files if not name.startswith(ONLY_CI)}
    assert {"LICENSE", "csrc/queue.pyx", "tests/test_contract.py"} < expected
    assert members == expected | {"PKG-INFO"}
    run(tool("twine"), "check", "--strict", sdist, cwd=sdist.parent)
    shutil.copy(sdist, dist)


def test_a_source_distribution_of_the_same_bytes(
    sdist: Path, build_sdist: Callable[..., Path]
) -> None:
    """From another folder, by somebody with another umask, between the remains of a build."""
    litter = ("pyblockpool/_queue.cpython-311-x86_64-linux-gnu.so", "build/x.cpp", ".venv/x.py")
    for name in litter:
        git("check-ignore", name)
    assert digest(sdist) == digest(build_sdist("of a longer name/two", 0o077, litter))


@pytest.mark.parametrize("flags", ["", "-g"])
def test_wheels_of_the_same_bytes(
    build_wheel: Callable[..., Path], repair: Callable[[Path], Path], flags: str
) -> None:
    """Debug information is stripped, but the build id is a hash of the folders that it names."""
    one = build_wheel(PYTHONS[0], f"one{flags}", flags, 0o022)
    other = build_wheel(PYTHONS[0], f"of a longer name/two{flags}", flags, 0o077)
    assert digest(one) == digest(other)
    assert digest(repair(one)) == digest(repair(other))


@each_python
def test_a_wheel(
    python: str, wheel_of: Callable[[str], Path], files: list[str], work: Path
) -> None:
    """The package, its two modules, and no library that auditwheel would have to graft in."""
    wheel = wheel_of(python)
    run(tool("twine"), "check", "--strict", wheel, cwd=wheel.parent)
    run(tool("check-wheel-contents"), "--no-config", wheel, cwd=wheel.parent)
    assert re.fullmatch(r"pyblockpool-.*-manylinux_2_[0-9]+_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = [each for each in archive.namelist() if not each.endswith("/")]
        contents = {name for name in names if ".dist-info/" not in name}
        ours = {name for name in files if name.startswith("pyblockpool/")}
        assert ours < contents
        compiled = contents - ours
        assert {name.partition(".")[0] for name in compiled} == {
            "pyblockpool/_queue",
            "pyblockpool/_contiguity",
        }
        for name in compiled:
            content = archive.read(name)
            for path in (work, ROOT, Path(sys.prefix)):
                assert os.fsencode(path) not in content, f"{name} names {path}"
            assert b"pip-build-env" not in content


@each_python
def test_a_wheel_in_an_empty_environment(
    python: str,
    wheel_of: Callable[[str], Path],
    folder_of: Callable[[str], Path],
    sdist: Path,
    dist: Path,
) -> None:
    """No compiler, no vLLM; NumPy and rich at their floors where they have wheels.

    The tests are those of the source distribution.
    """
    wheel = wheel_of(python)
    place = folder_of(python) / "empty"
    place.mkdir()
    run(python, "-m", "venv", place / "env", cwd=place)
    scripts = place / "env" / "bin"
    version = run(
        scripts / "python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=place
    ).strip()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        told = archive.read(name).decode()
    floors = re.findall(r"^Requires-Dist: (\w+)>=([0-9.]+)$", told, re.MULTILINE)
    assert [name for name, _ in floors] == ["numpy", "rich"]
    constraints = place / "constraints.txt"
    oldest = version in PYTHONS_OF_THE_FLOORS
    constraints.write_text("".join(f"{name}=={floor}\n" for name, floor in floors if oldest))
    nothing = {"PATH": str(scripts), "CC": "/bin/false", "CXX": "/bin/false"}
    pip = (scripts / "pip", "install", "--only-binary=:all:", f"--constraint={constraints}")
    run(*pip, wheel, cwd=place, **nothing)
    listed = run(scripts / "pip", "list", "--format=freeze", cwd=place, **nothing)
    assert {line.partition("==")[0].lower() for line in listed.splitlines()} <= {
        *("pyblockpool", "numpy", "rich"),
        *("markdown-it-py", "mdurl", "pygments"),  # of rich
        *("typing-extensions", "typing_extensions", "pip", "setuptools"),
    }
    told = run(scripts / "pyblockpool", "--version", cwd=place, **nothing)
    assert told.startswith("pyblockpool ")
    run(scripts / "python", "-c", "import pyblockpool._queue, pyblockpool.contiguity", cwd=place)

    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = re.search(r"^test-wheel = \[(.*)\]$", pyproject, re.MULTILINE)
    assert group
    run(*pip, f"{wheel}[plot]", *re.findall('"(.*?)"', group[1]), cwd=place, **nothing)
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = (each for each in place.iterdir() if each.name.startswith("pyblockpool-"))
    tests = sorted(unpacked.glob("tests/test_*.py"))
    assert " passed" in run(scripts / "pytest", "-n", WORKERS, *tests, cwd=unpacked)
    shutil.copy(wheel, dist)
