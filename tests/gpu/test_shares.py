"""States that devices share: the memory that a plan says, and the memory that training takes."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.tests.launcher.elastic_runs import plan_of
from hetflow.tests.runtime.sharded_plans import shared
from hetflow.tests.testing.hosts import GpuHost, Host

RESERVE_BYTES = 41 << 20
TARGET = """
import torch
from torch import nn

WIDTH, LAYERS, WORDS, LENGTH = 192, 12, 256, 16

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(),
                          nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def model_of():
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block[3].requires_grad_(True)
    return model

def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

def batch_of(size):
    return torch.randint(WORDS, (size, LENGTH))

def partly():
    return model_of(), batch_of, loss_of
"""
TRAIN = """
import json
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from target import batch_of, loss_of, model_of

torch.manual_seed(1)
model = model_of()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
job = hf.prepare(model, optimizer)
for batch in job.batches(DataLoader(TensorDataset(batch_of(48)), batch_size=16)):
    job.backward(lambda ids: loss_of(model, ids), batch)
    optimizer.step()
    optimizer.zero_grad()
held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
with open(f"peak{job.rank}.json", "w") as file:
    json.dump([torch.cuda.max_memory_allocated(), held], file)
"""


def asked_of(host: Host) -> list[str]:
    """What ``hetflow profile`` is asked beside its target."""
    asked = ["--quick", "--batch-sizes", "2,8", "--optimizer", "adamw"]
    asked += ["--sync-devices", "0", "--no-links"]
    return [*asked, *(f"--device={name}" for name in host.types), "-o", "profiles"]


def test_no_device_takes_more_than_its_plan_says(software: GpuHost, tmp_path: Path) -> None:
    """Frozen weights have no state. An update's workspace shrinks with the share.

    Only with activations on the host do both devices take half of the batch at once.
    """
    host = software("V100:64MiB,A100:64MiB", FAKECUDA_THREADS="1")
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "train.py").write_text(TRAIN)
    host.done("profile", "target.py:partly", *asked_of(host), "--offload")
    profile = files.read(tmp_path / f"profiles/target.partly.{host.types[0]}.json", Profile)
    trained, frozen = profile.weight_bytes, profile.frozen_weight_bytes
    assert frozen is not None
    assert frozen > trained
    pool = "1x" + ",1x".join(host.types)
    solve = ["solve", "split", "--profiles", "profiles", "--gpus", pool, "--shard", "all"]
    solve += ["--memory-reserve", f"{RESERVE_BYTES >> 20}MiB"]
    host.done(*solve, "--batch-size", "16", "-o", "plan.json")
    host.done("launch", "plan.json", "train.py")
    shares = []
    groups = files.read(tmp_path / "plan.json", Plan).groups
    assert "offloaded" in [group.activations for group in groups]
    for group, state in zip(groups, states_within_plan(tmp_path), strict=True):
        assert group.state_share_bytes is not None
        most = 2 * trained * group.state_share_bytes / (trained + frozen)
        assert state == pytest.approx(most, rel=0.01)
        shares.append(state)
    assert sum(shares) == 2 * trained


def states_within_plan(folder: Path) -> list[int]:
    """[workers] bytes of the optimizer's state, where peaks were the plan's, at most 5 % less."""
    states = []
    for rank, group in enumerate(files.read(folder / "plan.json", Plan).groups):
        peak, state = json.loads((folder / f"peak{rank}.json").read_text())
        assert group.memory_bytes is not None
        planned = group.memory_bytes - RESERVE_BYTES
        assert 0.95 * planned < peak <= planned
        states.append(state)
    return states


NAMED = """
WIDTH = 96

class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abcdefghijkl":
            setattr(self, name, nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(),
                                              nn.Linear(4 * WIDTH, WIDTH)))

    def forward(self, x):
        for block in self.children():
            x = x + block(x)
        return x

def model_of():
    torch.manual_seed(0)
    model = Decoder()
    model.blocks = nn.ModuleList([Trunk()])
    return model
"""


@pytest.mark.slow
def test_no_device_takes_more_than_a_plan_of_listed_blocks_says(
    software: GpuHost, tmp_path: Path
) -> None:
    """All is in one numbered layer: only in blocks can the two devices hold it."""
    host = software("V100:64MiB,A100:64MiB", FAKECUDA_THREADS="1")
    (tmp_path / "target.py").write_text(TARGET + NAMED)
    (tmp_path / "train.py").write_text(TRAIN)
    pool = "1x" + ",1x".join(host.types)
    solve = ["solve", "split", "--gpus", pool, "--shard", "all", "--batch-size", "16"]
    host.done("profile", "target.py:partly", *asked_of(host), "--block", "blocks.0.a,Sequential")
    solve += ["--memory-reserve", f"{RESERVE_BYTES >> 20}MiB"]
    host.done(*solve, "--profiles", "profiles", "-o", "plan.json")
    host.done("check", "plan.json", "--profiles", "profiles", "--gpus", pool)
    plan = files.read(tmp_path / "plan.json", Plan)
    assert plan.blocks == tuple(f"blocks.0.{name}" for name in "abcdefghijkl")
    host.done("launch", "plan.json", "train.py")
    assert sum(states_within_plan(tmp_path)) > 0


SIXTEEN_BITS = """
def model_of():
    torch.manual_seed(0)
    return Decoder().bfloat16()

WIDTH = 128
"""


@pytest.mark.slow
def test_no_device_takes_more_than_a_plan_of_masters_says(
    software: GpuHost, tmp_path: Path
) -> None:
    """Float32 masters of bfloat16 weights, by memory: a third of them where there is less.

    So is a float32 model that a policy of FSDP2 runs in bfloat16, planned by the same profile.
    """
    host = software("V100:64MiB,A100:64MiB", FAKECUDA_THREADS="1")
    (tmp_path / "target.py").write_text(TARGET + SIXTEEN_BITS)
    masters = "hf.prepare(model, optimizer, masters=torch.float32)"
    (tmp_path / "train.py").write_text(TRAIN.replace("hf.prepare(model, optimizer)", masters))
    policy = "hf.prepare(model, optimizer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))"
    cast = "from torch.distributed.fsdp import MixedPrecisionPolicy\n" + TRAIN
    cast = cast.replace("hf.prepare(model, optimizer)", policy)
    cast = cast.replace("model_of()", "model_of().float()")
    (tmp_path / "cast.py").write_text(cast)
    pool = "1x" + ",1x".join(host.types)
    host.done("profile", "target.py:partly", *asked_of(host))
    profile = files.read(tmp_path / f"profiles/target.partly.{host.types[0]}.json", Profile)
    solve = ["solve", "split", "--gpus", pool, "--batch-size", "16", "--profiles", "profiles"]
    solve += ["--memory-reserve", f"{RESERVE_BYTES >> 20}MiB", "--masters", "-o", "plan.json"]
    for shard in ("all", "gradients", "optimizer"):
        host.done(*solve, "--shard", shard, "--force")
        host.done("check", "plan.json", "--profiles", "profiles", "--gpus", pool)
        for script in ("train.py", "cast.py") if shard == "all" else ("train.py",):
            said = host.run("launch", "plan.json", script)
            assert (said.returncode, "masters" in said.stderr) == (0, False), said.stderr
            assert sum(states_within_plan(tmp_path)) == 2 * 2 * profile.weight_bytes
    host.done(*solve[:-3], "-o", "plan.json", "--shard", "all", "--force")
    (tmp_path / "cast.py").write_text(cast.replace("batch_of(48)", "batch_of(16)"))
    assert "keeps masters" in host.run("launch", "plan.json", "cast.py").stderr


EVEN = """
import json
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(160, 128), torch.randint(128, (160,)))
job = hf.prepare(model, optimizer)
software = sys.modules["_fakecuda"]
for batch in job.batches(DataLoader(data, batch_size=16)):
    if batch.step == 8:
        software.reset_counts()
    job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
    calls = software.counts()["nccl"]
job.finish()
if job.rank == 0:
    weights = [p.detach().cpu().tolist() for p in model.parameters()]
    json.dump([calls / 2, weights], open("even.json", "w"))
"""


@pytest.mark.slow
def test_equal_shares_meet_in_one_call(software: GpuHost) -> None:
    """Three layers' weights come and their gradients go; the step's own sum is the seventh."""
    host = software("V100,V100")
    (host.folder / "train.py").write_text(EVEN)
    plan = shared(plan_of([1, 1], [host.types[0]] * 2, samples=8), "gradients", (1, 1))
    files.write(host.folder / "plan.json", plan)
    host.done("launch", "plan.json", "train.py")
    calls, weights = json.loads((host.folder / "even.json").read_text())
    assert calls == 7
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(
        torch.randn(160, 128).split(16), torch.randint(128, (160,)).split(16), strict=True
    ):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own, found in zip(model.parameters(), weights, strict=True):
        assert torch.allclose(own.detach(), torch.tensor(found), atol=1e-5)
