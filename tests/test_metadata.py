"""What the installed distribution says of itself to pip and to a package index."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from documents import links

ROOT = Path(__file__).parent.parent
TOLD = metadata.metadata("pyblockpool")

# A link of Markdown, or with its mark a picture: the text, and where it leads.
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)]*)\)")


def requirements(marked: bool) -> set[str]:
    found = metadata.requires("pyblockpool") or []
    return {re.split("[^a-z-]", each)[0] for each in found if ("extra ==" in each) == marked}


def test_it_brings_neither_vllm_nor_torch_nor_a_compiler() -> None:
    assert requirements(marked=False) == {"numpy", "rich"}
    assert requirements(marked=True) == {"matplotlib"}


def test_each_requirement_has_a_floor_and_no_ceiling() -> None:
    """A ceiling of ours would stand in the way of the vLLM in the same environment."""
    for each in metadata.requires("pyblockpool") or []:
        assert re.fullmatch(r"[a-z]+>=[0-9.]+(; extra == .plot.)?", each), each


def test_no_link_of_the_description_leads_into_the_checkout() -> None:
    description = TOLD["Description"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert links(ROOT / "README.md"), "nothing to test"
    assert "![" not in description
    for text, target in LINK.findall(description):
        assert target.startswith("https://"), text
    outside = [target for _, target in LINK.findall(readme) if target.startswith("https://")]
    assert [target for _, target in LINK.findall(description)] == outside


def test_the_description_is_the_readme() -> None:
    """All of its text, that of links included, less the pictures."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = re.sub(r"\n!\[[^\]]*\]\([^)]*\)\n", "", readme)
    expected = LINK.sub(r"\1", plain)
    description = LINK.sub(r"\1", TOLD["Description"])
    assert description.strip().startswith(expected.strip())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("License-Expression", "Apache-2.0"),
        ("License-File", "LICENSE"),
        ("Requires-Python", ">=3.10"),
        ("Description-Content-Type", "text/markdown"),
    ],
)
def test_fields(field: str, value: str) -> None:
    assert TOLD.get_all(field) == [value]


def test_entry_points() -> None:
    found = metadata.distribution("pyblockpool").entry_points
    assert {(each.group, each.name) for each in found} == {
        ("console_scripts", "pyblockpool"),
        ("vllm.general_plugins", "pyblockpool"),
        ("vllm.endpoint_plugins", "pyblockpool"),
    }
    for each in found:
        if each.group != "vllm.endpoint_plugins":  # imports the web framework of vLLM
            assert callable(each.load())


def test_each_python_that_is_named_has_wheels() -> None:
    """In the classifiers, and in the settings of cibuildwheel."""
    classifiers = "\n".join(TOLD.get_all("Classifier") or [])
    named = re.findall(r":: Python :: (3\.[0-9]+)$", classifiers, re.MULTILINE)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    built = re.findall(r'"cp3([0-9]+)-\*"', pyproject)
    assert named == [f"3.{minor}" for minor in built] != []
    assert f">={named[0]}" == TOLD["Requires-Python"]
