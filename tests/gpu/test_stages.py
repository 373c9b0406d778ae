"""A pipeline of a model that fits none of its devices as a whole."""

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
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(16, 1024), torch.randn(16, 1024))
for batch in job.batches(DataLoader(data, batch_size=8)):
    loss = job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item(), flush=True)
print("peak", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, flush=True)
"""
END = "job.abandon()\n"


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
    alone = host.also(CUDA_VISIBLE_DEVICES="").python(SCRIPT)
    losses = [float(re.search(r"loss (\S+)", log)[1]) for log in (*logs, alone)]
    assert losses == pytest.approx([losses[-1]] * 4, rel=1e-4)
