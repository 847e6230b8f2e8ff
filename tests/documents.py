"""README, docs and the like: their fenced blocks, the commands in them, their headings and links.

Who runs or checks what is in `KINDS`; a command that is none of them makes a test fail. The checks
that need no vLLM are in tests/test_documents.py, those that do in tests/plugin/test_documents.py,
and what needs an engine in tests/engine/test_documents.py.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "bench" / "RESULTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

# The first word of a command -> how it is held to be right.
KINDS = {
    "pyblockpool": "runs as it stands, on small files of the names that it is given",
    "make": "the target is there; `make test` and `make rollout` are run by CI and tests/engine",
    "pip": "extras and packages are those of pyproject.toml; make builds and installs the wheel",
    "cmake": "the options are there; make builds with them",
    "python": "my_loop.py runs in tests/engine, as do the examples, on a tiny model",
    "vllm": "the variables are allowed and known; tests/engine runs a server",
    "curl": "route and method are there; tests/engine calls them",
    "export": "the value of the variable is allowed",
    "cd": "changes nothing",
}

_ASSIGNMENT = re.compile("([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        path: of the document.
        line: of its first line.
        language: behind the fence, "" if there is none.
        text: what is in it.
    """

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a shell, without its comment.

    Attributes:
        variables: that are set before it, or by `export`.
        words: the first one is a key of KINDS.
    """

    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables), *self.words])


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document."""
    found = []
    fence: tuple[int, str] | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if fence is None:
            fence = number, line[3:]
        else:
            begin, language = fence
            text = "\n".join(lines[begin : number - 1])
            found.append(Block(path, begin + 1, language, text))
            fence = None
    assert fence is None, f"{path.name}: the block of line {fence} has no end"
    return found


def all_blocks(language: str) -> list[Block]:
    return [each for path in DOCUMENTS for each in blocks(path) if each.language == language]


def commands(block: Block) -> list[Command]:
    """The commands of a block in bash."""
    found = []
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        variables = []
        if words[:1] == ["export"]:
            variables = [_ASSIGNMENT.fullmatch(word) for word in words[1:]]
            words = words[:1]
        else:
            while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
                variables.append(assignment)
                del words[0]
        assert all(variables), f"{block}: {line}"
        if words:
            set_to = tuple((each[1], each[2]) for each in variables if each is not None)
            found.append(Command(set_to, tuple(words)))
    return found


def all_commands(kind: str) -> list[Command]:
    """The commands that begin with a word, each once."""
    found = [each for block in all_blocks("bash") for each in commands(block)]
    return list(dict.fromkeys(each for each in found if each.words[0] == kind))


def prose(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def spans(path: Path) -> list[str]:
    """What stands between backquotes in a document."""
    return re.findall("`([^`]+)`", prose(path))


def anchors(path: Path) -> set[str]:
    """What links can point to in a document: its headings, spelled as GitHub does."""
    headings = re.findall("^#+ (.*)$", prose(path), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def links(path: Path) -> list[str]:
    """Targets of the links and pictures of a document that lie in the repository."""
    targets = re.findall(r"\]\(([^()\s]+)\)", prose(path))
    return [target for target in targets if not target.startswith("https://")]


def calls_an_engine(block: Block) -> bool:
    """Whether a block in Python is a fragment of a program with an engine: it is not run."""
    names = {node.id for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)}
    return bool(names & {"llm", "engine"})


def needs_vllm(path: Path) -> bool:
    """Whether the examples of a document import vLLM."""
    return any("vllm" in block.text for block in examples(path))


def examples(path: Path) -> list[Block]:
    """The blocks in Python of a document that are run, one after the other."""
    found = [block for block in blocks(path) if block.language == "python"]
    return [block for block in found if not calls_an_engine(block)]


def run_examples(path: Path) -> None:
    """Run them, in one namespace."""
    namespace: dict[str, object] = {"__name__": path.name}
    for block in examples(path):
        # Lines are counted from the beginning of the document, for tracebacks.
        text = "\n" * (block.line - 1) + block.text
        exec(compile(text, str(path), "exec", dont_inherit=True), namespace)
