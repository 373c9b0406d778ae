"""A pipeline of a model that fits none of its devices as a whole."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests.launcher.elastic_runs import plan_of
from hetflow.tests.plan_parts import with_replicas
from hetflow.tests.testing.hosts import GpuHost

from .test_changes import two_stages

# Weights take twice a device's memory. A stage of 8 layers needs 8 MiB for weights and 8 for
# gradients.
MIB, LIMIT, LAYERS = 1 << 20, 20 << 20, 40
CUT, OTHER_CUT = (8, 8, 8, 8, 8), (9, 7, 8, 9, 7)
SCRIPT = """
import os
import sys
from contextlib import nullcontext
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from hetflow.runtime import initial_values

run, computed = initial_values._run, []

def counted(*given):
    made = run(*given)
    computed.append(sum(tensor.nbytes for tensor in made))
    return made

initial_values._run = counted
torch.manual_seed(int(os.environ.get("RANK", "0")))
with nullcontext() if sys.argv[2] == "built" else hf.deferred():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
    for layer in model:
        layer.weight.data.mul_(3**0.5)
assert next(model.parameters()).is_meta == (sys.argv[2] != "built")
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, foreach=False)
job = hf.prepare(model, optimizer)
print("computed", len(computed), "largest", max(computed, default=0), flush=True)
torch.manual_seed(1)
data = TensorDataset(torch.randn(16, 512), torch.randn(16, 512))
loader = DataLoader(data, batch_size=8)

def train():
    for batch in job.batches(loader):
        loss = job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item(), flush=True)

def look(whole):
    where = next(whole.parameters()).device
    seen = whole(data.tensors[0].to(where)).square().mean()
    print("seen", seen.device.type, seen.item(), flush=True)

train()
with job.evaluation() as parts:
    look(parts)
print("peak", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, flush=True)
if sys.argv[1] == "whole":
    job.sync_buffers()
    train()
    with job.evaluation(whole=True) as whole:
        look(whole)
    train()
    job.finish()
    print("trained", sum(p.detach().double().square().sum().item() for p in model.parameters()))
"""
ON_THE_HOST = "is too small for the whole model, which is on the host outside of steps"


def stages(kind: str, layers: Sequence[int]) -> Plan:
    """A plan with so many layers in each stage."""
    plan, ends = two_stages((kind, kind)), [sum(layers[: n + 1]) for n in range(len(layers))]
    return replace(
        plan,
        stages=tuple(
            replace(
                with_replicas(plan.stages[0], first_device=stage),
                layers=tuple(str(layer) for layer in range(end - number, end)),
                num_in_flight=len(layers) - stage,
            )
            for stage, (number, end) in enumerate(zip(layers, ends, strict=True))
        ),
    )


def test_a_model_twice_as_large_as_any_device_trains_and_goes_on_under_another_cut(
    software: GpuHost,
) -> None:
    host = software(",".join([f"V100:{LIMIT // MIB}MiB"] * len(CUT) + ["A100"]))
    (host.folder / "script.py").write_text(SCRIPT)
    for name, cut in (("first", CUT), ("second", OTHER_CUT)):
        files.write(host.folder / f"{name}.json", stages("V100", cut))
    files.write(host.folder / "alone.json", plan_of([4], ["A100"], samples=2))
    said, digests = {}, {}
    ways = {"first": "parts deferred", "second": "whole deferred", "alone": "whole built"}
    for name, how in ways.items():
        saving = [] if name == "alone" else ["--checkpoint", host.folder / "saved"]
        plan = f"{name}.json"
        found = host.run("launch", *saving, "-o", name, plan, "script.py", *how.split())
        assert found.returncode == 0, found.stderr
        # Neither steps, evaluation, checkpoints nor the digest bring the whole model anywhere.
        assert (ON_THE_HOST in found.stderr) == (name == "second"), found.stderr
        logs = sorted((host.folder / name / "logs").glob("rank*.out"))
        said[name] = [log.read_text() for log in logs]
        record = json.loads((host.folder / name / "run.json").read_text())
        digests[name] = record["parameters_digest"]
        assert "events" not in record
    assert [len(said[name]) for name in said] == [len(CUT), len(CUT), 1]
    for run in ("first", "second"):
        # The first worker draws each layer's two parameters, one after another, and sends them.
        assert f"computed {LAYERS * 5} largest {MIB}\n" in said[run][0]
        assert all("computed 0 largest 0\n" in log for log in said[run][1:])
    for log in said["first"] + said["second"]:
        assert int(re.search(r"peak (\d+)", log)[1]) <= LIMIT
    parts, whole = re.findall(r"seen cuda (\S+)", said["alone"][0])
    trained = re.search(r"trained (\S+)", said["alone"][0])[1]
    for log in said["first"] + said["second"]:
        assert float(re.search(r"seen cuda (\S+)", log)[1]) == pytest.approx(float(parts), rel=1e-4)
    for log in said["second"]:
        assert float(re.search(r"seen cpu (\S+)", log)[1]) == pytest.approx(float(whole), rel=1e-4)
        assert float(re.search(r"trained (\S+)", log)[1]) == pytest.approx(float(trained), rel=1e-4)
    assert digests["second"] == digests["alone"] != digests["first"]
