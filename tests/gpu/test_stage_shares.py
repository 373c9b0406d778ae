"""Replicas of pipeline stages that share states, or weights too: what they hold."""

from dataclasses import replace

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests.parallel_plans import parallel_plan
from hetflow.tests.testing.hosts import GpuHost

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
