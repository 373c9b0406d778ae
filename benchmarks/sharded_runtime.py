"""Shared states against torch's ``fully_shard`` (FSDP2): the same decoder on the same processes.

    python benchmarks/sharded_runtime.py --quick
    python benchmarks/sharded_runtime.py --turns 30 --json FILE
    python benchmarks/sharded_runtime.py --redundancy       # shares kept twice against once

Two gloo workers share all states of a float32 decoder in equal parts. In a turn each way makes one
step after the other: forward and backward passes, clipping by the global norm, AdamW. Wall seconds
begin at a barrier; CPU seconds are those of a worker's process. Ratios are hetflow's steps over
``fully_shard``'s, medians over the turns with quartiles. Losses must agree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORKERS, VOCABULARY, LENGTH = 2, 512, 64
NEAR = 1e-4


def model_of(width: int, layers: int) -> Any:
    """A decoder of torch's own layers."""
    from torch import Tensor, nn

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            for block in self.blocks:
                x = block(x)
            found: Tensor = self.head(x)
            return found

    return Decoder()


def hetflow_step(model: Any, *, copies: int = 0) -> Callable[[Any], float]:
    """A function that makes a step with hetflow's shared states."""
    import torch
    import torch.distributed as dist

    from hetflow.runtime.group import Place
    from hetflow.runtime.peers import SharedStore
    from hetflow.runtime.protocol.environment import Start
    from hetflow.runtime.sharding.states import SharedStates

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place = Place(
        Start(), None, torch.device("cpu"), rank=dist.get_rank(), world_size=WORKERS,
        store=SharedStore(dist.distributed_c10d._get_default_store()),
    )  # fmt: skip
    session: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()), optimizers=(optimizer,), place=place,
        model=model, device=place.device,
    )  # fmt: skip
    kept = [range(WORKERS)] * WORKERS if copies else None  # by both workers of a pair
    states = SharedStates(session, "all", [1] * WORKERS, kept=kept)

    def step(ids: Any) -> float:
        optimizer.zero_grad()
        states.begin(num_passes=1)
        states.enter(0)
        loss = loss_of(model, ids)
        (loss / WORKERS).backward()
        states.leave()
        states.launch_rest()
        states.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def fsdp_step(model: Any) -> Callable[[Any], float]:
    """A function that makes a step with FSDP2, one unit for each layer and one for the rest."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORKERS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def loss_of(model: Any, ids: Any) -> Any:
    """The cross entropy of the next words."""
    from torch.nn import functional as F

    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def work(asked: argparse.Namespace) -> None:
    """Be one worker; the first prints what was measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(asked.store, WORKERS)
    dist.init_process_group("gloo", store=store, rank=asked.rank, world_size=WORKERS)
    torch.manual_seed(0)
    model = model_of(asked.width, asked.layers)
    ways = {
        "hetflow": hetflow_step(deepcopy(model), copies=int(asked.redundancy)),
        "other": hetflow_step(model) if asked.redundancy else fsdp_step(model),
    }
    generator = torch.Generator().manual_seed(asked.rank)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(asked.turns + 2):  # the first two are for warming up
        ids = torch.randint(VOCABULARY, (asked.samples, LENGTH), generator=generator)
        losses = []
        for name in [*ways] if turn % 2 else [*ways][::-1]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses.append(ways[name](ids))
            if turn > 1:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        if abs(losses[0] - losses[1]) > NEAR * abs(losses[0]):
            raise SystemExit(f"turn {turn}: losses {losses} differ")
    if asked.rank == 0:
        sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, few turns")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--redundancy", action="store_true", help="shares kept twice, not FSDP2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.quick:
        asked.turns, asked.width, asked.layers = min(asked.turns, 6), 64, 3
    if asked.rank is not None:
        work(asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--{name}={getattr(asked, name)}" for name in ("turns", "width", "layers")]
        command = [sys.executable, __file__, *sizes, f"--samples={asked.samples}"]
        command += ["--redundancy"] if asked.redundancy else []
        workers = [
            subprocess.Popen(
                [*command, f"--rank={rank}", f"--store={folder}/store"],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(WORKERS)
        ]
        said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed")
    found = json.loads(said[0])
    rows, name = {}, "once" if asked.redundancy else "fully_shard"
    for place, kind in enumerate(("wall", "CPU")):
        own, other = ([each[place] for each in found[way]] for way in ("hetflow", "other"))
        ratios = [ours / theirs for ours, theirs in zip(own, other, strict=True)]
        rows[kind] = {
            "hetflow_ms": 1e3 * statistics.median(own),
            f"{name}_ms": 1e3 * statistics.median(other),
            "ratio": statistics.median(ratios),
            "low": statistics.quantiles(ratios, n=4)[0],
            "high": statistics.quantiles(ratios, n=4)[2],
        }
        row = rows[kind]
        sys.stdout.write(
            f"{kind}: hetflow {row['hetflow_ms']:.1f} ms, {name} {row[f'{name}_ms']:.1f} "
            f"ms, ratio {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})\n"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"asked": vars(asked) | {"json": None}, **rows}))


if __name__ == "__main__":
    main()
