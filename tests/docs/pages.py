"""The pages of the documentation, and their blocks of code.

A comment directly above a block says what the tests do with it:

- nothing: it runs in the fast suite, after the page's blocks before it, in one folder for the page;
- ``<!-- slow -->``: it runs in the slow suite;
- ``<!-- not run: REASON -->``: it is only parsed (the command and its options exist).

``<!-- setup ... -->`` holds Python that runs unseen. A Python block with a title is a file of that
name. In a ``console`` block each command's output follows it, with ``...`` for what may differ.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SHELL = {"", "bash", "console"}
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[^\n]*?) -->\n *)?"
    r"(?:```(?P<info>[^\n]*)\n(?P<text>.*?)^ *```|<!-- setup\n(?P<setup>.*?)^ *-->)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    title: str | None
    mark: str
    text: str

    @property
    def where(self) -> str:
        """The page and line, for messages."""
        return f"{name_of(self.page)}:{self.line}"

    @property
    def is_parsed_only(self) -> bool:
        """Whether it needs what a test does not have."""
        return self.mark.startswith("not run: ")

    def commands(self) -> Iterator["Command"]:
        """The shell commands of the block; nothing where it is no shell."""
        if self.language not in SHELL:
            return
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language != "console":
            for line in lines:
                yield Command(block=self, line=line, output=None)
            return
        groups: list[list[str]] = []
        for line in lines:
            if line.startswith("$ "):
                groups.append([line[2:]])
            else:
                groups[-1].append(line)
        for first, *output in groups:
            yield Command(block=self, line=first, output=output)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One line of shell."""

    block: Block
    line: str
    output: list[str] | None

    @property
    def words(self) -> list[str]:
        """The words of the line, without comments and variables set in front."""
        try:
            words = shlex.split(self.line, comments=True)
        except ValueError:  # a picture, or text with an apostrophe: no shell
            return []
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words

    def hetflow(self) -> list[str] | None:
        """The arguments of the hetflow command on this line, also inside ``sh -c '...'``."""
        words = self.words
        if words and words[0] == "hetflow":
            return words[1:]
        for word in words:
            if " hetflow " in f" {word}" and word.startswith("hetflow "):
                return shlex.split(word)[1:]
        return None


def name_of(page: Path) -> str:
    """A page's path in the checkout."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["setup"] is not None:
            info, body = "python", match["setup"]
        else:
            info, body = match["info"], match["text"]
        title = re.search(r'title="([^"]+)"', info)
        found.append(
            Block(
                page=page,
                line=line,
                language=info.split(" ")[0],
                title=title[1] if title else None,
                mark=match["mark"] or "",
                text=dedent(body),
            )
        )
    return found
