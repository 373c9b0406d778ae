"""Links between pages, to files of the checkout and to headings lead somewhere; no network."""

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, name_of

GENERATED = {ROOT / "docs" / "reference" / "cli.md", ROOT / "docs" / "reference" / "python.md"}
LINKED = sorted({*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.md")})
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without blocks and spans of code, which may hold brackets."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)(?!`).+?\1(?!`)", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site's table of contents makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def slug(heading: str) -> str:
    """A heading's anchor."""
    words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists() or goal in GENERATED, f"{name_of(page)}: {target}"
        assert goal.is_relative_to(ROOT), f"{name_of(page)}: {target} leaves the checkout"
        if anchor and goal not in GENERATED:
            assert anchor in anchors(goal), f"{name_of(page)}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for name in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|md|sh))`", page.read_text(encoding="utf-8")):
        if name.split("/")[0] in rooms:
            assert (ROOT / name).exists(), f"{name_of(page)}: {name}"


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading, `code`\n\n[a](other.md#x) and `[b](no.md)`\n", encoding="utf-8")
    assert _LINK.findall(prose(page)) == ["other.md#x"]
    assert anchors(page) == {"one-heading-code"}
