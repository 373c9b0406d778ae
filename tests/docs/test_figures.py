"""The committed figures are what their scripts draw."""

import importlib
import sys

import pytest

from .pages import ROOT

FOLDER = ROOT / "docs" / "figures"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("svg", "even_split", "concepts"):
        sys.modules.pop(name, None)


def test_the_split_of_the_readme(scripts: None) -> None:
    drawn = importlib.import_module("even_split").draw()
    assert drawn == (FOLDER / "even_split.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_concepts(scripts: None) -> None:
    for name, draw in importlib.import_module("concepts").FIGURES.items():
        assert draw() == (FOLDER / f"{name}.svg").read_text(encoding="utf-8"), name
