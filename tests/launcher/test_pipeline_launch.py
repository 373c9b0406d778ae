"""``hetflow launch`` of a pipeline plan: the record, and a worker killed in the middle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.pipeline import PipelinePlan, StagePlan
from hetflow.schema.plan import Prediction, Proof
from hetflow.schema.run import RunRecord

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
for step, batch in enumerate(job.batches(DataLoader(data, batch_size=8))):
    def loss_of(x, y):
        if len(sys.argv) > 1 and step == 2 and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(x), y)
    job.backward(loss_of, batch)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    stages = tuple(
        StagePlan(
            layers=layers,
            num_replicas=1,
            device_type="cpu:slow",
            first_device=number,
            num_in_flight=2 - number,
            weight_versions=1,
            seconds_per_input=0.02,
            compute_seconds=0.02,
            output_seconds=0.0,
            memory_bytes=1000,
        )
        for number, layers in enumerate((("0", "1"), ("2",)))
    )
    plan = PipelinePlan(
        model="small",
        global_batch_size=8,
        microbatch_size=2,
        microbatches=4,
        schedule="1f1b",
        recompute=False,
        stages=stages,
        predicted=Prediction(step_seconds=0.1, samples_per_second=80.0),
        proof=Proof(
            termination="feasible", objective=0.02, lower_bound=None, gap=None, method="by hand"
        ),
        noam=2,
        stage_cost="ring",
        solved="flat",
    )
    files.write(tmp_path / "plan.json", plan)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "plan.json"


def launch(plan: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = plan.parent
    return subprocess.run(
        [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", str(folder / "run")]
        + [str(plan), str(folder / "train.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_record_holds_prediction_beside_measurement(plan: Path) -> None:
    done = launch(plan)
    assert done.returncode == 0, done.stderr
    record = files.read(plan.parent / "run" / "run.json", RunRecord)
    assert isinstance(record.plan, PipelinePlan)
    assert [device.predicted_compute_seconds for device in record.devices] == [0.08, 0.08]
    assert record.num_steps == 5
    # Emulated passes are held: no step can be shorter than (4 + 1) passes of 20 ms.
    assert record.measured_step_seconds is not None
    assert record.measured_step_seconds > 0.095
    assert record.parameters_digest is not None
    assert record.events == ()


def test_a_killed_worker_ends_all_and_is_named(plan: Path) -> None:
    done = launch(plan, "die")
    assert done.returncode == 137
    assert "worker 1 (cpu:slow)" in done.stderr
    record = json.loads((plan.parent / "run" / "run.json").read_text())
    assert record["status"] == "failed"
