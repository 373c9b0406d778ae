"""A microbatch whose loss has weight 0 (all its tokens are ignored): its loss may be NaN."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.schema import files

from .test_pipeline import make_plan

IGNORED = -100


def trained(
    kind: str, ignored: slice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[torch.Tensor | None]]:
    """The loss and the gradients of a step of 24 samples in four passes; some are ignored."""
    if kind == "pipeline":
        files.write(folder / "plan.json", make_plan("1f1b", (("0", "1", "2"),), (1,), 4))
        monkeypatch.setenv("HETFLOW_PLAN", str(folder / "plan.json"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.randint(3, (24,))
    y[ignored] = IGNORED

    def loss(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return hf.Weighted(nn.functional.cross_entropy(model(x), y), int((y != IGNORED).sum()))

    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DataLoader(TensorDataset(x, y), batch_size=24)):
        found = float(job.backward(loss, batch))
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    job.finish()
    return found, gradients


def test_a_microbatch_of_no_weight_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETFLOW_PLAN", raising=False)
    whole, expected = trained("plain", slice(6, 12), tmp_path, monkeypatch)
    found, gradients = trained("pipeline", slice(6, 12), tmp_path, monkeypatch)
    assert found == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_a_batch_of_no_weight_has_no_gradient(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETFLOW_PLAN", raising=False)
    loss, gradients = trained(kind, slice(None), tmp_path, monkeypatch)
    assert math.isnan(loss)
    assert gradients == [None] * 4
