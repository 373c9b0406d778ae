"""The host waits for no step: steps in the steady state, with what used to cost a wait."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests.launcher.elastic_runs import plan_of
from hetflow.tests.parallel_plans import parallel_plan
from hetflow.tests.runtime.test_pipeline import BRANCH2, CHAIN2, CHAIN4, make_plan
from hetflow.tests.runtime.test_tensor import FIRST, LAST, WHOLE
from hetflow.tests.testing.hosts import GpuHost

from . import pipeline_steps

# On a real GPU torch itself refuses what synchronises; the software device counts it.
STEADY = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

weighted = sys.argv[1] == "weighted"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
rate = torch.tensor(0.1, device="cuda") if weighted else 0.1
optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=weighted)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(160, 6), torch.randint(3, (160,)))
software = sys.modules.get("_fakecuda")

def loss_of(x, y):
    if weighted and batch.step == 9 and job.rank == 1:
        y = torch.full_like(y, -100)  # a mean over nothing
    loss = nn.functional.cross_entropy(model(x), y)
    return hf.Weighted(loss, (y >= 0).sum()) if weighted else loss

for batch in job.batches(DataLoader(data, batch_size=16)):
    if batch.step == 4 and software is None:
        torch.cuda.set_sync_debug_mode("error")
    if batch.step == 4 and software is not None:
        software.reset_counts()
    job.backward(loss_of, batch, per_virtual_node=True)
    optimizer.step()
    optimizer.zero_grad()
    if batch.step == 8:
        found = 0 if software is None else software.counts().get("host_sync", 0)
        torch.cuda.set_sync_debug_mode("default") if software is None else None
        print("waits", found, flush=True)
        found = software.counts() if software is not None else {"nccl": 5}
        print("collectives", found["nccl"] / 5, flush=True)
    if batch.step == 9:
        print("finite", all(p.isfinite().all().item() for p in model.parameters()), flush=True)
"""


@pytest.mark.parametrize("level", ["none", "elastic"])
@pytest.mark.parametrize("losses", ["plain", "weighted"])
def test_no_step_waits_for_the_device(gpus: GpuHost, losses: str, level: str) -> None:
    host = gpus(2)
    kind = host.types[0]
    (host.folder / "train.py").write_text(STEADY)
    files.write(host.folder / "plan.json", plan_of([5, 3], [kind, kind]))
    saving = ["--checkpoint", "saved", "--checkpoint-every", "100", "--determinism", level]
    found = host.run("launch", *saving, "plan.json", "train.py", losses)
    assert found.returncode == 0, found.stderr
    assert "waits 0\n" in found.stdout  # the first worker's
    assert "finite True\n" in found.stdout
    if level == "none":  # the sums of a step travel with its one bucket of gradients
        assert "collectives 1.0\n" in found.stdout


def test_a_worker_alone_copies_nothing_but_its_batch(software: GpuHost) -> None:
    """Its host knows all of a step's sums but the losses, which stay on the device."""
    text = STEADY.replace('sys.argv[1] == "weighted"', "False")
    text = text.replace("(model, optimizer)", '(model, optimizer, device="cuda")')
    text = text.replace('found["nccl"] / 5', 'found["h2d"] / 5, found.get("d2h", 0)')
    assert "collectives 2.0 0\n" in software("V100").python(text)


KEPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
kernels, software = [], sys.modules["_fakecuda"]
for batch in job.batches(DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)):
    software.reset_counts()
    job.backward(lambda x: model(x).square().mean(), batch, per_virtual_node=True)
    optimizer.step()
    kernels.append(software.counts()["kernel"])
    optimizer.zero_grad(set_to_none=batch.step < 5)  # from the seventh step on gradients are kept
print("kernels", kernels[5], kernels[9], flush=True)
"""


def test_gradients_that_are_kept_take_no_kernel_each(software: GpuHost) -> None:
    host = software("V100,V100")
    (host.folder / "train.py").write_text(KEPT)
    files.write(host.folder / "plan.json", plan_of([1, 1], ["V100", "V100"]))
    found = host.done("launch", "--determinism", "none", "plan.json", "train.py")
    numbers = [line.split() for line in found.splitlines() if line.startswith("kernels")]
    assert numbers
    for _, fresh, kept in numbers:
        # Autograd adds each of the 40 gradients to the one that is there. A copy of all, to repeat
        # a step by, is one kernel.
        assert int(kept) - int(fresh) <= 40 + 2


SPOILT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(160, 6), torch.randint(3, (160,)))

def loss_of(x, y):
    counts = (y >= 0) & (batch.step != int(sys.argv[1]) or job.rank == 0)
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return hf.Weighted((losses * counts).sum() / counts.sum(), counts.sum())

for batch in job.batches(DataLoader(data, batch_size=16)):
    job.backward(loss_of, batch)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("step", ["5", "9"], ids=["amid", "last"])
def test_a_mean_over_nothing_that_spoils_the_parameters_is_an_error(
    gpus: GpuHost, step: str
) -> None:
    host = gpus(2)
    kind = host.types[0]
    (host.folder / "train.py").write_text(SPOILT)
    files.write(host.folder / "plan.json", plan_of([5, 3], [kind, kind]))
    found = host.run("launch", "plan.json", "train.py", step)
    assert found.returncode == 2
    assert "no numbers after a step in which a pass had weight 0" in found.stderr
    assert "clamp(min=1)" in found.stderr


# By the name of its plan, what is trained under it.
STEPS = {
    "1f1b": "branches:2",
    "gpipe": "chain:inf",
    "interleaved": "chain:",
    "2bw": "chain:",
    "parallel": "gpt:inf",
    "replicas": "gpt:2",
    "unlike": "gpt:",
    "weights": "gpt:2",
    "chunks": "chain:2",
}
DEGREES = {
    "parallel": [(FIRST, (2,)), (LAST, (2,))],
    "replicas": [(FIRST, (1, 1)), (LAST, (1, 1))],
    "unlike": [(WHOLE, (2, 1, 1))],
    "weights": [(FIRST, (1, 1)), (LAST, (1, 1))],
}


def plan_on(kind: str, name: str) -> Plan:
    """A plan for four workers: stages on replicas, on tensor-parallel groups, or on both."""
    if name in DEGREES:
        plan = parallel_plan(DEGREES[name])
        shard, share = ("all", 1) if name == "weights" else (None, None)
        stages = []
        for s in plan.stages:
            own = (replace(r, device_type=kind, state_share_bytes=share) for r in s.replicas)
            stages.append(replace(s, replicas=tuple(own), shard=shard))
        return replace(plan, stages=tuple(stages))
    shares = (1, 1) if name == "chunks" else ()
    schedule = "interleaved" if shares else name
    layers = {"1f1b": BRANCH2, "interleaved": CHAIN4}.get(schedule, CHAIN2)
    made = make_plan(schedule, layers, (2, 2), 8 if schedule == "interleaved" else 6, shares=shares)
    stages = []
    for stage in made.stages:
        own = tuple(replace(group, device_type=kind) for group in stage.replicas)
        stages.append(replace(stage, replicas=own))
    return replace(made, stages=tuple(stages))


def test_no_worker_of_a_pipeline_waits_for_its_device(gpus: GpuHost) -> None:
    host = gpus(4)
    cases = []
    for name, case in STEPS.items():
        path = host.folder / f"{name}.json"
        files.write(path, plan_on(host.types[0], name))
        cases.append(f"{path}={case}")
    script = Path(__file__).with_name("pipeline_steps.py")
    found = host.run("launch", "-o", "out", host.folder / "1f1b.json", script, *cases)
    assert found.returncode == 0, found.stderr
    logs = [log.read_text() for log in sorted((host.folder / "out" / "logs").glob("rank*.out"))]
    told = [[json.loads(line) for line in log.splitlines()] for log in logs]
    assert [len(lines) for lines in told] == [len(STEPS)] * 4
    assert [[line.pop("waits") for line in lines] for lines in told] == [[0] * len(STEPS)] * 4
    assert all(lines == told[0] for lines in told)  # the same bits on all workers
    for name, line in zip(STEPS, told[0], strict=True):
        if name != "2bw":
            loss, norm = pipeline_steps.plain(line["case"])
            assert line["loss"] == pytest.approx(loss, rel=1e-10)
            assert line["norm"] == (None if norm is None else pytest.approx(norm, rel=1e-10))


COPIES = """
import sys
import torch
from hetflow.runtime.checkpoints.saving import HostCopies

software = sys.modules.get("_fakecuda")
made = [torch.full((3, 5), float(n), device="cuda").t() for n in range(20)] + [torch.ones(2)]
copies = HostCopies()
torch.cuda.synchronize()
if software is None:
    torch.cuda.set_sync_debug_mode("error")
else:
    software.reset_counts()
found = [copies.take(tensor) for tensor in made]
copies.close()
for tensor in made:
    tensor.zero_()  # as the next step would
print("waits", 0 if software is None else software.counts().get("host_sync", 0))
copies.wait()
print([int(copy.mean()) for copy in found] == [*range(20), 1], {copy.shape for copy in found})
"""


def test_a_checkpoint_is_copied_without_a_wait(gpus: GpuHost) -> None:
    said = gpus(1).python(COPIES).splitlines()
    assert said[0] == "waits 0"
    assert said[1].startswith("True")
    assert "[5, 3]" in said[1]


# A script for torchrun: what each pass tells other workers of its loss is read in the next one.
WRAPPED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

kind = sys.argv[1]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(240, 6), torch.randint(3, (240,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=True)
software = sys.modules.get("_fakecuda")
for step, (x, y) in enumerate(loader):
    if step == 8 and software is None and kind != "gathered":
        torch.cuda.set_sync_debug_mode("error")
    if step == 8 and software is not None:
        software.reset_counts()
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    out = model(x)
    if kind == "gathered":
        means = [torch.empty((), device="cuda") for _ in range(dist.get_world_size())]
        dist.all_gather(means, out.detach().mean())
    if kind in ("targets", "gathered"):
        loss = nn.functional.cross_entropy(out, y)
    elif kind == "samples":
        loss = out.square().mean()
    else:
        mask = (y > 0).float()
        loss = (out.square().sum(1) * mask).sum() / mask.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 12:
        found = 0 if software is None else software.counts().get("host_sync", 0)
        torch.cuda.set_sync_debug_mode("default") if software is None else None
        print("waits", found / 5, flush=True)
print("loss", f"{loss.item():.9f}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("loss", "waits"), [("samples", 0), ("targets", 0), ("divisor", 0), ("gathered", 1)]
)
def test_no_step_of_a_script_as_it_is_waits_for_the_device(
    gpus: GpuHost, loss: str, waits: int
) -> None:
    """But for the sizes of what it gathers, which may be unlike."""
    host = gpus(2)
    waits = 0 if host.is_real else waits  # which are not counted there
    files.write(host.folder / "plan.json", plan_of([1, 1], [host.types[0]] * 2, samples=8))
    script = host.folder / "train.py"
    script.write_text(WRAPPED)
    found = host.run("launch", "-o", "out", host.folder / "plan.json", script, loss)
    assert found.returncode == 0, found.stderr
    logs = [log.read_text() for log in sorted((host.folder / "out" / "logs").glob("rank*.out"))]
    assert [log.splitlines()[0] for log in logs] == [f"waits {waits}.0"] * 2
    assert logs[0] == logs[1]  # the loss of the whole batch
