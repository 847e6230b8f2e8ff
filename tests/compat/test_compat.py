"""What the version matrix makes of its findings; the releases are run by `make compat`."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import compat
import pytest
import table
from provenance import provenance

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
TOO_OLD = "its BlockPool has no evict_blocks; install vLLM 0.13.0 or later"


def changed(*path: Any, to: Any) -> dict[str, Any]:
    found = copy.deepcopy(WELL)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return found


def row(version: str, found: dict[str, Any]) -> list[str]:
    results = provenance() | {"releases": {version: found}}
    return [cell.strip() for cell in table.compat_table(results)[2].strip("|").split("|")]


def test_a_release_that_is_well() -> None:
    assert compat.troubles("0.30.0", WELL) == []
    assert row("0.30.0", WELL) == [
        *("0.30.0", "yes", "yes", "yes", "yes", "500 passed", "200 / 200 passed", "9 passed")
    ]


@pytest.mark.parametrize(
    ("found", "sentence", "column", "cell"),
    [
        (changed("scene", "verdicts", "native", to="no"), "native: no", 1, "refused"),
        (changed("scene", "lives", "native", to="other blocks"), "native: other", 1, "differs"),
        (changed("scene", "lives", "native:extent", to="broken"), "extent: broken", 2, "differs"),
        (changed("scene", "walk", to="other blocks"), "lazy offload: other", 4, "differs"),
        (changed("ours", "failed", to=["a::b"]), "fails: a::b", 5, "500 passed, 1 failed"),
        (changed("ours", "passed", to=0), "only 0 tests of the part ours", 5, "0 passed"),
        (changed("engine", "passed", to=0), "only 0 tests of the part engine", 7, "0 passed"),
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


def test_a_policy_that_is_refused_is_no_trouble() -> None:
    found = changed("scene", "verdicts", "native:sorted", to="install vLLM 0.24.0 or later")
    assert compat.troubles("0.30.0", found) == []
    assert row("0.30.0", found)[2] == "refused"


def test_what_was_not_run_does_not_look_run() -> None:
    found = {"scene": WELL["scene"] | {"walk": None}}
    assert compat.troubles("0.30.0", found) == []
    assert row("0.30.0", found)[4:] == ["-", "not run", "not run", "not run"]
    with pytest.raises(ValueError, match="has not come to its end"):
        row("0.30.0", {"scene": {"error": "status 1"}})


def test_the_commits_of_all_parts_are_told() -> None:
    results = provenance() | {"releases": {"0.30.0": changed("engine", "commit", to="def")}}
    assert "(abc, def)" in table.compat_table(results)[-1]


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
