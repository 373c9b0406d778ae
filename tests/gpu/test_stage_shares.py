"""Replicas of pipeline stages that share states, or weights too: what they hold."""

from dataclasses import replace

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests.parallel_plans import parallel_plan
from hetflow.tests.testing.hosts import GpuHost, Host

WIDTH, LAYERS = 256, 12  # a layer has 257 KiB of weights
SCRIPT = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from hetflow.runtime.pipeline import optimizer as pipeline_optimizer
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)
pipeline_optimizer.BUCKET_BYTES = 1 << 18
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(24, {WIDTH}), torch.randn(24, {WIDTH}))
for batch in job.batches(DataLoader(data, batch_size=8)):
    loss = job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    optimizer.zero_grad()
print("found", loss.item(), norm.item(), held, torch.cuda.max_memory_allocated())
job.finish()
"""


def planned(kind: str, shares: tuple[int, int] | None, *, weights: bool = False) -> Plan:
    """Two stages on two replicas each, which share the optimizer's state and gradients, or all."""
    halves = [range(LAYERS // 2), range(LAYERS // 2, LAYERS)]
    plan = parallel_plan([(tuple(map(str, half)), (1, 1)) for half in halves])
    stages = tuple(
        replace(
            stage,
            shard="all" if weights else None,
            replicas=tuple(
                replace(group, device_type=kind, state_share_bytes=shares and shares[place])
                for place, group in enumerate(stage.replicas)
            ),
        )
        for stage in plan.stages
    )
    is_shared = None if shares is None or weights else True
    return replace(plan, stages=stages, shard_optimizer=is_shared, shard_gradients=is_shared)


def test_replicas_hold_their_shares(gpus: GpuHost) -> None:
    """To 1 % of the weights, of which Adam's state is twice as many: between steps, and at peaks.

    At its peak a replica has all gradients, so only the state's share is less then; but where
    weights are shared too.
    """
    host = gpus(4)
    (host.folder / "script.py").write_text(SCRIPT)
    said: dict[str, list[list[float]]] = {}
    for name, shares in (("whole", None), ("shared", (1, 5)), ("weights", (1, 5))):
        plan = planned(host.types[0], shares, weights=name == "weights")
        files.write(host.folder / f"{name}.json", plan)
        host.done("launch", "-o", name, f"{name}.json", "script.py")
        logs = sorted((host.folder / name / "logs").glob("rank*.out"))
        said[name] = [list(map(float, log.read_text().split()[1:])) for log in logs]
    weights = 4 * (WIDTH * WIDTH + WIDTH) * LAYERS / 2
    for rank, (whole, shared) in enumerate(zip(said["whole"], said["shared"], strict=True)):
        assert whole[:2] == shared[:2]  # loss and norm
        elsewhere = weights * (1 / 6 if rank % 2 else 5 / 6)
        assert abs(whole[2] - shared[2] - (2 + 1) * elsewhere) < 0.01 * weights
        assert whole[3] - shared[3] > 2 * elsewhere - 0.01 * weights
        _, _, held, peak = said["weights"][rank]
        states = 4 * (weights - elsewhere)  # with gradients
        assert said["weights"][rank][:2] == whole[:2]
        assert abs(held - states) < 0.02 * weights
        # Whole are two layers and their gradients, and what autograd adds to one of these.
        assert peak - states < 5.3 * weights / (LAYERS / 2)


RESERVE_KIB = (64 << 10) - 3800
"""Without shared weights a device of two stages takes 4.1 MiB for states alone."""
TARGET = f"""
import torch
from torch import nn

def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range(7)))

def loss_of(model, x):
    return model(x).square().mean()

def batch_of(size):
    return torch.randn(size, {WIDTH})

def whole():
    return model_of(), batch_of, loss_of
"""
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from target import batch_of, loss_of, model_of

torch.manual_seed(1)
model = model_of()
optimizer = torch.optim.AdamW(model.parameters())
job = hf.prepare(model, optimizer)
for batch in job.batches(DataLoader(TensorDataset(batch_of(32)), batch_size=8)):
    loss = job.backward(lambda x: loss_of(model, x), batch)
    optimizer.step()
    optimizer.zero_grad()
print("found", loss.item(), torch.cuda.max_memory_allocated())
"""


def profile(host: Host, size: int) -> None:
    """The target's layers at one size: their memory, and of times only what a solver needs."""
    asked = ["--quick", "--layers", "--batch-sizes", str(size), "--microbatch-size", str(size)]
    asked += ["--steps", "1", "--sync-devices", "0", "--no-links"]
    asked += ["--optimizer", "adamw", f"--device={host.types[0]}"]
    host.done("profile", "target.py:whole", *asked, "-o", "profiles")


@pytest.mark.slow
def test_devices_of_several_stages_hold_no_more_than_planned(software: GpuHost) -> None:
    """Two replicas of an interleaved pipeline share the weights of both their stages."""
    host = software(",".join(["V100:64MiB"] * 4), FAKECUDA_THREADS="1")
    (host.folder / "target.py").write_text(TARGET)
    (host.folder / "train.py").write_text(TRAIN)
    profile(host, 2)
    solve = ["solve", "parallel", "--profiles", "profiles", "--gpus", f"4x{host.types[0]}"]
    solve += ["--memory-reserve", f"{RESERVE_KIB}KiB", "--batch-size", "8", "--shard", "all"]
    solve += ["--chunks-per-device", "2", "--no-recompute", "--link-bytes-per-second", "1e9"]
    host.done(*solve, "-o", "plan.json")
    plan = files.read(host.folder / "plan.json", Plan)
    assert (plan.shard, plan.num_model_chunks, plan.config) == ("all", 2, "2-2-2-2")
    host.done("launch", "-o", "run", "plan.json", "train.py")
    logs = sorted((host.folder / "run" / "logs").glob("rank*.out"))
    said = [list(map(float, log.read_text().split()[1:])) for log in logs]
    assert len({loss for loss, _ in said}) == 1
    for rank, (_, peak) in enumerate(said):
        planned = (plan.stages[rank // 2].memory_bytes or 0) - (RESERVE_KIB << 10)
        assert 0.8 * planned < peak <= planned


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_stages_of_single_devices_hold_no_more_than_planned(
    software: GpuHost, schedule: str
) -> None:
    """Between the halves of a backward pass the gradients of layers' outputs wait."""
    host = software("V100:64MiB,V100:64MiB", FAKECUDA_THREADS="1")
    (host.folder / "target.py").write_text(TARGET)
    (host.folder / "train.py").write_text(TRAIN.replace("32", "2048").replace("=8", "=512"))
    profile(host, 64)
    solve = ["solve", "pipeline", "--profiles", "profiles", "--gpus", f"2x{host.types[0]}"]
    solve += ["--batch-size", "512", "--schedule", schedule, "--num-stages", "2"]
    host.done(*solve, "--link-bytes-per-second", "1e9", "-o", "plan.json")
    host.done("launch", "-o", "run", "plan.json", "train.py")
    plan = files.read(host.folder / "plan.json", Plan)
    for rank, stage in enumerate(plan.stages):
        (line,) = (host.folder / f"run/logs/rank{rank}.out").read_text().splitlines()
        planned, taken = stage.memory_bytes or 0, float(line.split()[2])
        assert 0.85 * planned < taken <= planned
