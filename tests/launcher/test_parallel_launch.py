"""``hetflow launch`` of a parallel plan: two devices share every layer."""

import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

from ..parallel_plans import parallel_plan

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from hetflow.profilers.zoo.models import GPT

torch.manual_seed(0)
model = GPT(vocabulary=16, max_tokens=6, depth=1, num_heads=4, channels=16).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randint(16, (16, 7), generator=torch.Generator().manual_seed(1)))
for epoch in range(2):
    for batch in job.batches(DataLoader(data, batch_size=8, shuffle=True)):
        def loss_of(ids):
            logits = model(ids[:, :-1]).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        job.backward(loss_of, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
"""


def launched(folder: Path, degree: int) -> RunRecord:
    plan, run = folder / f"{degree}.json", folder / f"run{degree}"
    files.write(plan, parallel_plan([(("all",), (degree,))]))
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", str(run), str(plan)]
    done = programs.run([*command, str(folder / "train.py")], timeout=300)
    assert done.returncode == 0, done.stderr
    return files.read(run / "run.json", RunRecord)


@pytest.mark.slow
def test_two_devices_that_share_layers_train_as_one(tmp_path: Path) -> None:
    one, two = launched(tmp_path, 1), launched(tmp_path, 2)
    assert (one.world_size, two.world_size, two.plan.kind) == (1, 2, "parallel")
    assert two.num_steps == one.num_steps == 4
    assert two.final_loss == pytest.approx(one.final_loss, rel=1e-10)
    assert two.events == ()
    assert {run.stage for device in two.devices for run in device.stages} == {0}
