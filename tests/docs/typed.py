"""Write the guide's Python, a file for each page, for type checkers: ``python -m ... FOLDER``."""

import sys
from pathlib import Path

from hetflow.tests.docs.pages import ROOT, blocks

PAGES = ("docs/howto/python.md",)


def main() -> None:
    """Write each page's blocks, which share their names, as one program."""
    folder = Path(sys.argv[1])
    for page in PAGES:
        texts = [b.text for b in blocks(ROOT / page) if b.language == "python" and not b.title]
        name = page.removesuffix(".md").replace("/", "_")
        (folder / f"{name}.py").write_text("\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
