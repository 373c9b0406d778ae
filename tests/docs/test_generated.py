"""The pages that are generated at build time hold every command, option and public name."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import typer

import hetflow
from hetflow import runtime
from hetflow.cli.main import app

from .pages import ROOT

MODULES = ("cli_reference", "python_reference")


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_command_line_page_has_every_command_and_option(
    generators: dict[str, ModuleType],
) -> None:
    page = generators["cli_reference"].cli_page()
    root = typer.main.get_command(app)
    for path, command in generators["cli_reference"].commands(root, ["hetflow"]):
        head = f"## `{' '.join(path)}`\n"
        assert page.count(head) == 1
        section = page.split(head)[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in (
                "help",
                "show_config",
            ):
                assert parameter.opts[0] in section, f"{path}: {parameter.name}"
    assert "env var" not in page


def test_the_python_page_has_every_public_name(generators: dict[str, ModuleType]) -> None:
    page = generators["python_reference"].python_page()
    for name in hetflow.__all__:
        assert f"### `hetflow.{name}`" in page
    for name in runtime.__all__:
        assert f"### `hetflow.runtime.{name}`" in page


def test_a_docstring_becomes_markdown(generators: dict[str, ModuleType]) -> None:
    def example(first: int, *, second: float = 1.0) -> str:
        """Say what it does.

        Args:
            first: A number of ``things``.
            second: Another,
                over two lines.

        Raises:
            ValueError: It is wrong.
        """
        return f"{first} {second}"

    render = generators["python_reference"]
    assert render.signature("f", example) == "f(first: int, *, second: float = 1.0) -> str"
    assert "\n".join(render.docstring(example)).split("\n") == [
        "Say what it does.",
        "",
        "**Args:**",
        "",
        "- `first`: A number of `things`.",
        "- `second`: Another,",
        "  over two lines.",
        "",
        "**Raises:**",
        "",
        "- `ValueError`: It is wrong.",
        "",
    ]
