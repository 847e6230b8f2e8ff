"""What the workflows call is there. `make lint` checks them against their schema, and for risks."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(
    not (ROOT / ".github").exists(), reason="a source distribution has no workflows"
)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_and_groups(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    groups = re.findall("--group ([a-z-]+)", text)
    for group in groups:
        assert f"\n{group} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    targets = re.findall(r"run: make ([a-z-]+)", text)
    for target in targets:
        subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
    assert groups or targets, "what does it do?"


def test_unit_tests_run_on_each_python_that_is_named() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python: \[(.*)\]", text)
    classifiers = "\n".join(metadata.metadata("pyblockpool").get_all("Classifier") or [])
    named = re.findall(r":: Python :: (3\.[0-9]+)$", classifiers, re.MULTILINE)
    assert re.findall('"(.*?)"', matrix) == named


def test_what_ci_runs_is_there() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "run: .ci/run\n" in text
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
