"""A GradScaler on one type of device and none on another: one sum, one update, one skipped step."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow.schema import files
from hetflow.tests import programs
from hetflow.tests.launcher.elastic_runs import plan_of

pytestmark = pytest.mark.processes

SCRIPT = """
import subprocess
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

form, who = sys.argv[1:]
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
job = hf.prepare(model, optimizer)
scaled = {"first": job.rank == 0, "both": True}[who]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + job.rank), enabled=scaled)
x = torch.randn(64, 6, dtype=torch.float64)
data = TensorDataset(x, torch.arange(64) % 3)

def loss_of(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    return loss * float("inf") if batch.step == 2 and job.rank == 0 else loss

for batch in job.batches(DataLoader(data, batch_size=16)):
    if form == "parts":
        for x, y in job.parts(batch):
            job.backward(loss_of(x, y), scaler=scaler, per_virtual_node=True)
    else:
        job.backward(loss_of, batch, scaler=scaler, per_virtual_node=True)
    if scaled:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, f"state{job.rank}.pt")
"""


def alone() -> dict[str, torch.Tensor]:
    """The same training in one process without scaling; the third step is skipped."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    x, y = torch.randn(64, 6, dtype=torch.float64), torch.arange(64) % 3
    for step in (0, 1, 3):
        part = slice(16 * step, 16 * (step + 1))
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def launch(
    folder: Path, types: list[str], level: str, *how: str
) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(SCRIPT)
    files.write(folder / "plan.json", plan_of([5, 3], types))
    command = ["-m", "hetflow.cli.main", "launch", "--determinism", level, "plan.json", "train.py"]
    return programs.run([sys.executable, *command, *how], timeout=240, cwd=folder)


@pytest.mark.parametrize(
    ("level", "form", "who"), [("none", "whole", "first"), ("elastic", "parts", "both")]
)
def test_unlike_scales_train_as_none(tmp_path: Path, level: str, form: str, who: str) -> None:
    done = launch(tmp_path, ["cpu:fast", "cpu:slow"], level, form, who)
    assert done.returncode == 0, done.stderr
    expected = alone()
    for rank in range(2):
        found = torch.load(tmp_path / f"state{rank}.pt")
        for name, value in expected.items():
            assert math.isclose((found[name] - value).abs().max(), 0, abs_tol=1e-7), name


def test_workers_of_one_type_that_do_not_all_scale_end_in_one_line(tmp_path: Path) -> None:
    done = launch(tmp_path, ["cpu:fast"] * 2, "none", "whole", "first")
    assert done.returncode == 2
    assert "1 of 2 workers gave job.backward a GradScaler" in done.stderr
