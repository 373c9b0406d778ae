"""The host waits for no step: steps in the steady state, with what used to cost a wait."""

from dataclasses import replace

import pytest

from hetflow.schema import files
from hetflow.tests.fakecuda.hosts import GpuHost
from hetflow.tests.launcher.elastic_runs import plan_of

from .test_stages import stages

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(160, 6), torch.randint(3, (160,)))
software = sys.modules.get("_fakecuda")

def loss_of(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    return (loss, float(1 + len(y))) if weighted else loss

for batch in job.batches(DataLoader(data, batch_size=16)):
    if batch.step == 4 and software is None:
        torch.cuda.set_sync_debug_mode("error")
    if batch.step == 4 and software is not None:
        software.reset_counts()
    job.backward(loss_of, batch)
    optimizer.step()
    optimizer.zero_grad()
    if batch.step == 8:
        found = 0 if software is None else software.counts().get("host_sync", 0)
        torch.cuda.set_sync_debug_mode("default") if software is None else None
        print("waits", found, flush=True)
        found = software.counts() if software is not None else {"nccl": 5}
        print("collectives", found["nccl"] / 5, flush=True)
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
    if level == "none":  # the sums of a step travel with its one bucket of gradients
        assert "collectives 1.0\n" in found.stdout


REPLICATED = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(80, 6), torch.randint(3, (80,)))
software = sys.modules["_fakecuda"]
for batch in job.batches(DataLoader(data, batch_size=8)):
    if batch.step == 4:
        software.reset_counts()
    job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if batch.step == 8:
        print("waits", software.counts().get("host_sync", 0) / 5, flush=True)
"""


def test_workers_of_a_pipeline_wait_for_losses_and_norms_only(software: GpuHost) -> None:
    host = software("V100,V100,V100")
    (host.folder / "train.py").write_text(REPLICATED)
    first, second = stages("V100", (2, 2)).stages
    both = (replace(first, num_replicas=2), replace(second, first_device=2))
    files.write(host.folder / "plan.json", replace(stages("V100", (2, 2)), stages=both))
    found = host.run("launch", "-o", "out", "plan.json", "train.py")
    assert found.returncode == 0, found.stderr
    logs = sorted((host.folder / "out" / "logs").glob("rank*.out"))
    # The first replica tells norms, the second nothing, the last stage losses and norms.
    assert [log.read_text() for log in logs] == ["waits 1.0\n", "waits 0.0\n", "waits 2.0\n"]


COPIES = """
import sys
import torch
from hetflow.runtime.host_copies import HostCopies

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
