"""What mkdocs does beyond its configuration: two generated pages, and links that leave docs/.

mkdocs puts this folder on ``sys.path`` while it loads the file.
"""

import re
from pathlib import Path

from cli_reference import cli_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from python_reference import python_page

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"reference/cli.md": cli_page, "reference/python.md": python_page}
# A link to a file of the checkout that is no page: [text](../examples/cluster).
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+(?!docs/)[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated from the package."""
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into their path: the site does not hold these files."""
    folder = Path(config.docs_dir) / Path(page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or path.is_relative_to(config.docs_dir):
            return found.group()
        name = f"`{path.relative_to(ROOT)}`"
        return name if text.strip("`") == name.strip("`") else f"{text} ({name})"

    return OUTSIDE.sub(replace, markdown)
