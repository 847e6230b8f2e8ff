"""README and docs: links, commands and examples, as far as they need no vLLM; see documents.py."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from block_traces import header, request, reset, write
from documents import (
    DOCUMENTS,
    KINDS,
    ROOT,
    Command,
    all_blocks,
    all_commands,
    anchors,
    commands,
    examples,
    links,
    needs_vllm,
    run_examples,
    spans,
)

from pyblockpool.cli import VERBS, _parser
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.name))


@each_document
def test_links(path: Path) -> None:
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert file.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(file), link


def test_each_document_can_be_found_from_the_readme() -> None:
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        found.add(path)
        targets = {(path.parent / link.partition("#")[0]).resolve() for link in links(path)}
        waiting += [each for each in targets if each.suffix == ".md" and each not in found]
    assert found >= set(DOCUMENTS)


def test_each_command_is_of_a_kind_that_is_checked() -> None:
    found = [(block, each) for block in all_blocks("bash") for each in commands(block)]
    assert found
    for block, command in found:
        assert command.words[0] in KINDS, f"{block}: {command}"


@each_document
def test_no_command_hides_in_another_block(path: Path) -> None:
    blocks = [block for block in all_blocks("") if block.path == path]
    for block in blocks:
        for line in block.text.splitlines():
            word = re.sub("^[$>#] ", "", line).split(" ")[0]
            assert word not in KINDS, f"{block}: mark it as bash"
            assert not word.startswith("VLLM_"), f"{block}: mark it as bash"
    assert {each.language for each in all_blocks("") + all_blocks("bash")} == {"", "bash"}


@pytest.mark.parametrize("command", all_commands("make"), ids=str)
def test_make(command: Command) -> None:
    ran = subprocess.run(
        ["make", "--dry-run", *command.words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", all_commands("pip"), ids=str)
def test_pip(command: Command) -> None:
    assert command.words[1] == "install"
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in command.words[2:]:
        if ours := re.fullmatch(r"(?:\.|pyblockpool)(?:\[([a-z,]+)\])?", word):
            extras = ours[1].split(",") if ours[1] else []
            assert set(extras) <= set(
                metadata.metadata("pyblockpool").get_all("Provides-Extra") or []
            )
        else:
            assert f'"{word}>=' in known, word


@pytest.mark.parametrize("command", all_commands("cmake"), ids=str)
def test_cmake(command: Command) -> None:
    known = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    for option in re.findall("-D([A-Z_]+)=", str(command)):
        assert f"option({option} " in known


@pytest.mark.parametrize("kind", KINDS)
def test_variables(kind: str) -> None:
    """Ours have values that are allowed."""
    for command in all_commands(kind):
        ours = {n: value for n, value in command.variables if n in (QUEUE_VARIABLE, TRACE_VARIABLE)}
        settings = Settings.from_environ(ours)
        assert settings.variables() == ours


@each_document
def test_values_in_the_text(path: Path) -> None:
    value = re.compile(f"(?:{QUEUE_VARIABLE}=)?((?:python|native)(?::.*)?)")
    for span in spans(path):
        if found := value.fullmatch(span):
            Settings.from_environ({QUEUE_VARIABLE: found[1].replace("size=E", "size=8")})


@each_document
def test_commands_in_the_text(path: Path) -> None:
    for span in spans(path):
        if span.startswith("make "):
            test_make(Command((), tuple(word for word in span.split() if word != "…")))
        elif span.startswith("pyblockpool ") and span.split()[1].isalpha():
            assert span.split()[1] in VERBS, span


def options() -> set[str]:
    verbs = next(each.choices for each in _parser([])._actions if each.dest == "verb")
    assert isinstance(verbs, dict)
    return {name for verb in verbs.values() for name in verb._option_string_actions}


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.parent == ROOT / "docs"], ids=str)
def test_options_in_the_text(path: Path) -> None:
    for span in spans(path):
        if span.startswith("--"):
            assert span.split()[0] in options(), span


@pytest.mark.parametrize(
    "command", [each for each in all_commands("pyblockpool") if "report" in each.words], ids=str
)
def test_report(command: Command, tmp_path: Path) -> None:
    """It runs as it stands; what it shows of engines is tested in tests/engine."""
    table = [1, 2, 3, 4]
    for word in command.words[2:]:
        if word.endswith(".jsonl"):
            write(tmp_path / word, header(), request(table, 64), reset(), request(table[::-1], 64))
    ran = subprocess.run(
        [sys.executable, "-m", "pyblockpool", *command.words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for word in command.words[2:]:
        if not word.startswith("-"):
            assert (tmp_path / word).stat().st_size, word
            assert Path(word).stem in ran.stdout + ran.stderr


EXAMPLES = [path for path in DOCUMENTS if examples(path) and not needs_vllm(path)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_examples(path: Path) -> None:
    run_examples(path)
