"""A torch that is too old is refused in one line, before anything starts."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import hetflow
from hetflow.devices.torch_support import OLDEST, check_torch, is_too_old
from hetflow.schema.errors import HetflowError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("2.4.1", True),
        ("1.13.1+cu117", True),
        ("2.8.0", True),
        ("2.9.0", False),
        ("2.13.0+cpu", False),
        ("3.0.0a0+git", False),
        ("unknown", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, answer: bool) -> None:
    assert is_too_old(version) is answer


def test_the_declared_range_is_the_one_that_is_held() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "torch>=" + ".".join(map(str, OLDEST)) in declared["project"]["dependencies"]
    check_torch(torch.__version__)


def test_prepare_refuses_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(HetflowError, match="torch 2.4.1.cpu is too old: training needs 2.9"):
        hetflow.prepare(nn.Linear(2, 1))


def test_launch_refuses_an_old_torch_before_it_reads_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.4.1")
    with pytest.raises(HetflowError, match="torch 2.4.1 is too old") as refused:
        hetflow.launch("no-such-plan.json", "no-such-script.py")
    assert refused.value.hint == "pip install 'torch>=2.9'"
