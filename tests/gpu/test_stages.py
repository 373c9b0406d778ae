"""A pipeline of a model that fits none of its devices as a whole."""

import json
import re
from dataclasses import replace

import pytest

from hetflow.schema import files
from hetflow.schema.pipeline import PipelinePlan
from hetflow.tests.fakecuda.hosts import GpuHost

from .test_changes import two_stages

LAYERS_PER_STAGE, STAGES, MIB = 4, 3, 1 << 20
# Each layer has 4 MiB of weights: 48 MiB in all, 16 MiB a stage, and gradients of the same size.
SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
torch.manual_seed(int(os.environ.get("RANK", "0")))
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
job = hf.prepare(model, optimizer)
torch.manual_seed(1)
data = TensorDataset(torch.randn(16, 1024), torch.randn(16, 1024))
for batch in job.batches(DataLoader(data, batch_size=8)):
    loss = job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item(), flush=True)
print("peak", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, flush=True)
"""
END = """
job.sync_buffers()
for batch in job.batches(DataLoader(data, batch_size=8)):
    job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
with job.evaluation() as whole:
    where = next(whole.parameters()).device
    print("seen", where.type, whole(data.tensors[0].to(where)).square().mean().item(), flush=True)
for batch in job.batches(DataLoader(data, batch_size=8)):
    job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
job.finish()
print("trained", sum(p.detach().double().square().sum().item() for p in model.parameters()))
"""


def three_stages(kind: str) -> PipelinePlan:
    plan = two_stages((kind, kind))
    return replace(
        plan,
        stages=tuple(
            replace(
                plan.stages[0],
                layers=tuple(str(4 * number + layer) for layer in range(LAYERS_PER_STAGE)),
                first_device=number,
                num_in_flight=STAGES - number,
            )
            for number in range(STAGES)
        ),
    )


def test_a_model_larger_than_any_device_trains(software: GpuHost) -> None:
    host = software(",".join(["V100:40MiB"] * STAGES))
    (host.folder / "script.py").write_text(SCRIPT + END)
    files.write(host.folder / "plan.json", three_stages("V100"))
    found = host.run("launch", "-o", "run", "plan.json", "script.py")
    assert found.returncode == 0, found.stderr
    logs = [(host.folder / f"run/logs/rank{rank}.out").read_text() for rank in range(STAGES)]
    for log in logs:
        assert int(re.search(r"peak (\d+)", log)[1]) < 40 * MIB
    alone = host.also(CUDA_VISIBLE_DEVICES="").python(SCRIPT + END)
    for said in (r"loss (\S+)", r"seen cpu (\S+)", r"trained (\S+)"):
        found = [float(re.search(said, log)[1]) for log in (*logs, alone)]
        assert found == pytest.approx([found[-1]] * 4, rel=1e-4)
    record = json.loads((host.folder / "run/run.json").read_text())
    assert record["parameters_digest"]
    assert "events" not in record
