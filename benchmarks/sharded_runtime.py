"""Shared states against torch's ``fully_shard`` (FSDP2): the same decoder on the same processes.

    python benchmarks/sharded_runtime.py --quick
    python benchmarks/sharded_runtime.py --turns 30 --json FILE
    python benchmarks/sharded_runtime.py --redundancy       # shares kept twice against once
    python benchmarks/sharded_runtime.py --bfloat16         # both run in it by one mp_policy
    python benchmarks/sharded_runtime.py --unlike           # devices of 1:2 speed, 2:1 memory
    DS_ACCELERATOR=cpu python benchmarks/sharded_runtime.py --deepspeed   # ZeRO-3 beside them

Two gloo workers share all states of a float32 decoder in equal parts. In a turn each way makes one
step after the other: forward and backward passes, clipping by the global norm, AdamW. Wall seconds
begin at a barrier; CPU seconds are those of a worker's process. Ratios are hetflow's steps over
``fully_shard``'s, medians over the turns with quartiles. Losses must agree.

With ``--unlike`` the first device has twice the memory, and takes twice as long for a pass, held
to a table of times. Memory is counted from the model's operators, by the planner's formula.
hetflow trains by its plan. The two others share evenly, as FSDP2 and DeepSpeed do: equal shares,
and equal passes, the largest that fit the smaller device. One of them is ``fully_shard``, the other
hetflow's own runtime. ``least`` is hetflow in the least memory in which a plan fits.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORKERS, VOCABULARY, LENGTH = 2, 512, 64
BATCH, SIZES = 24, (1, 2, 3, 4, 6, 8, 12, 16)
"""Of unlike devices: the batch, and sizes of passes."""
NEAR, ROUGH = 1e-4, 1e-2


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


Hold = Callable[[int], AbstractContextManager[None]]
"""What a pass of so many samples runs in."""
Step = Callable[[list[Any], int], float]
"""Makes a step of this worker's passes (ids each) of a batch; answers its part of the loss."""


def hetflow_step(
    model: Any,
    hold: Hold,
    *,
    shares: Sequence[int] = (1,) * WORKERS,
    copies: int = 0,
    policy: Any = None,
) -> Step:
    """A step with hetflow's shared states."""
    import torch
    import torch.distributed as dist

    from hetflow.runtime.group import Place
    from hetflow.runtime.peers import SharedStore
    from hetflow.runtime.protocol.environment import Start
    from hetflow.runtime.sharding.precision import precision_of
    from hetflow.runtime.sharding.states import SharedStates

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = SharedStore(dist.distributed_c10d._get_default_store()).under(str(id(model)))
    place = Place(
        Start(), None, torch.device("cpu"), rank=dist.get_rank(), world_size=WORKERS, store=store
    )
    session: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()), optimizers=(optimizer,), place=place,
        model=model, device=place.device,
    )  # fmt: skip
    kept = [range(WORKERS)] * WORKERS if copies else None  # by both workers of a pair
    states = SharedStates(session, "all", shares, kept=kept, precision=precision_of(policy))

    def step(passes: list[Any], batch_size: int) -> float:
        optimizer.zero_grad()
        states.begin(num_passes=len(passes))
        losses = []
        for ids in passes:
            with hold(len(ids)):
                states.enter(0)
                losses.append(loss_of(model, ids) * (len(ids) / batch_size))
                losses[-1].backward()
                states.leave()
        states.launch_rest()
        states.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(sum(losses).detach())

    return step


def fsdp_step(model: Any, hold: Hold, policy: Any = None) -> Step:
    """A step with FSDP2, one unit for each layer and one for the rest."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, policy = init_device_mesh("cpu", (WORKERS,)), policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(passes: list[Any], batch_size: int) -> float:
        optimizer.zero_grad()
        losses = []
        for ids in passes:
            with hold(len(ids)):
                losses.append(loss_of(model, ids) * (len(ids) / batch_size))
                (losses[-1] * WORKERS).backward()  # it takes the mean over workers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(sum(losses).detach())

    return step


def deepspeed_step(model: Any, samples: int) -> Step:
    """A step with DeepSpeed's ZeRO-3, its own clipping and torch's AdamW; one pass a step."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(passes: list[Any], batch_size: int) -> float:
        (ids,) = passes
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return float(loss.detach()) * len(ids) / batch_size

    return step


def loss_of(model: Any, ids: Any) -> Any:
    """The cross entropy of the next words."""
    from torch.nn import functional as F

    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def planned(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Who takes what on devices of 1:2 speed and 2:1 memory.

    Returns:
        ``seconds``: [workers] by samples of a pass. ``ways``: by name ``shares`` and ``passes``
        [workers][rounds]. ``least``: the least memory, in bytes of the smaller device, with which
        each kind of shares fits.
    """
    import hetflow
    from hetflow.planning.costs.sharding import peak_bytes
    from hetflow.planning.split_problem import split_problem
    from hetflow.schema.cluster import Cluster
    from hetflow.schema.errors import InfeasibleError
    from hetflow.schema.problem import Problem, ShardedProblem

    logging.getLogger("hetflow").setLevel(logging.ERROR)  # that the links' rates are not known
    file = Path(folder, "decoder.py")
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch\nfrom sharded_runtime import LENGTH, VOCABULARY, loss_of, model_of\n"
        "def decoder():\n    make = lambda n: torch.randint(VOCABULARY, (n, LENGTH))\n"
        f"    return model_of({asked.width}, {asked.layers}), make, loss_of\n"
    )
    (counted,) = hetflow.profile(
        f"{file}:decoder", ["spec:T4"], batch_sizes=SIZES, layers=True, optimizer="adamw"
    )
    pool, reserve = Cluster.parse("1xslow,1xfast"), counted.base_memory_bytes or 0
    seconds = [{n: (1 + 2 * n) * pace for n in SIZES} for pace in (asked.pace, asked.pace / 2)]

    def problem(small_bytes: int) -> Problem:
        profiles = [
            replace(
                counted, device_type=name, device_memory_bytes=small_bytes * times, sync=None,
                update_seconds=0.0, links=None, base_memory_bytes=0, estimate=None, step_error=None,
                tensor_layers=(), sequence_layers=(),
                batch_curve=tuple(
                    replace(
                        point,
                        step_seconds=table[point.batch_size],
                        peak_memory_bytes=point.peak_memory_bytes - reserve,
                    )
                    for point in counted.batch_curve
                ),
            )
            for name, times, table in zip(("slow", "fast"), (2, 1), seconds, strict=True)
        ]  # fmt: skip
        return Problem(profiles, pool, BATCH)

    def plan(small_bytes: int) -> Any:
        given = problem(small_bytes)
        return hetflow.solve(given.profiles, pool, batch_size=BATCH, strategy="split", shard="all")

    view = split_problem(problem(1 << 40), shards=("all",))
    assert isinstance(view, ShardedProblem)
    peaks = [
        peak_bytes(view, point, "all", 2, view.weight_bytes // 2)
        for point in view.devices[0].batch_curve
    ]
    small = peaks[SIZES.index(asked.even)]
    low, high = 0, small  # where a plan fits
    while high - low > high // 200:
        middle = (low + high) // 2
        try:
            plan(middle)
            high = middle
        except InfeasibleError:
            low = middle

    def way(small_bytes: int) -> dict[str, Any]:
        chosen = sorted(plan(small_bytes).groups, key=lambda g: g.device_type, reverse=True)
        return {
            "shares": [group.state_share_bytes for group in chosen],
            "passes": [[g.virtual_node_batch_size] * g.virtual_nodes for g in chosen],
        }

    passes = [[asked.even] * (BATCH // WORKERS // asked.even)] * WORKERS
    evenly = {"shares": [1, 1], "passes": passes}
    ways = {"hetflow": way(small), "fully_shard": evenly, "evenly": evenly, "least": way(high)}
    return {"seconds": seconds, "ways": ways, "least": {"hetflow": high, "evenly": peaks[0]}}


def work(asked: argparse.Namespace) -> None:
    """Be one worker; the first prints what was measured."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from hetflow.runtime.emulation import PassHolder
    from hetflow.schema.plan import PassTime

    torch.set_num_threads(1)
    store = dist.FileStore(asked.store, WORKERS)
    dist.init_process_group("gloo", store=store, rank=asked.rank, world_size=WORKERS)
    torch.manual_seed(0)
    model, rank = model_of(asked.width, asked.layers), asked.rank
    passes = {name: [[asked.samples]] * WORKERS for name in ("hetflow", "deepspeed", "other")}
    hold: Hold = lambda size: nullcontext()  # noqa: E731
    begin = lambda: None  # noqa: E731
    ways: dict[str, Step]
    if asked.plan:
        stated = json.loads(asked.plan.read_text())
        passes = {name: way["passes"] for name, way in stated["ways"].items()}
        table = stated["seconds"][rank].items()
        holder = PassHolder([PassTime(batch_size=int(n), step_seconds=t) for n, t in table])
        hold, begin = holder.hold, holder.begin_step
        ways = {
            name: fsdp_step(deepcopy(model), hold)
            if name == "fully_shard"
            else hetflow_step(deepcopy(model), hold, shares=way["shares"])
            for name, way in stated["ways"].items()
        }
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if asked.bfloat16 else None
        copies = int(asked.redundancy)
        ways = {"hetflow": hetflow_step(deepcopy(model), hold, copies=copies, policy=policy)}
        if asked.deepspeed:
            ways["deepspeed"] = deepspeed_step(deepcopy(model), asked.samples)
        is_own = asked.redundancy
        ways["other"] = hetflow_step(model, hold) if is_own else fsdp_step(model, hold, policy)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    batch_size = sum(map(sum, passes["hetflow"]))
    for turn in range(asked.turns + 2):  # the first two are for warming up
        batch = torch.randint(VOCABULARY, (batch_size, LENGTH), generator=generator)
        losses = []
        for name in [*ways] if turn % 2 else [*ways][::-1]:
            parts = batch.split([size for own in passes[name] for size in own])
            before = sum(map(len, passes[name][:rank]))
            own = list(parts[before : before + len(passes[name][rank])])
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            begin()
            loss = torch.tensor(ways[name](own, batch_size))
            if turn > 1:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            dist.all_reduce(loss)
            losses.append(float(loss))
        if max(losses) - min(losses) > (ROUGH if asked.bfloat16 else NEAR) * losses[0]:
            raise SystemExit(f"turn {turn}: losses {losses} differ")
    if rank == 0:
        sys.stdout.write("\n" + json.dumps(found))
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
    parser.add_argument("--bfloat16", action="store_true", help="by an mp_policy, sums in float32")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's ZeRO-3 too")
    parser.add_argument("--unlike", action="store_true", help="devices of unlike speed and memory")
    parser.add_argument(
        "--even", type=int, default=4, help="samples of a pass that fit the smaller, evenly shared"
    )
    parser.add_argument("--pace", type=float, default=0.02, help="half a slow sample's seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.deepspeed and (asked.unlike or asked.redundancy):
        parser.error("--deepspeed goes with neither --unlike nor --redundancy")
    if asked.bfloat16 and (asked.unlike or asked.redundancy or asked.deepspeed):
        parser.error("--bfloat16 goes with none of --unlike, --redundancy, --deepspeed")
    if asked.quick:
        asked.turns, asked.width, asked.layers = min(asked.turns, 6), 64, 3
    if asked.rank is not None:
        work(asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--{name}={getattr(asked, name)}" for name in ("turns", "width", "layers")]
        command = [sys.executable, __file__, *sizes, f"--samples={asked.samples}"]
        flags = ("redundancy", "deepspeed", "bfloat16")
        command += [f"--{name}" for name in flags if getattr(asked, name)]
        names = {"other": "once" if asked.redundancy else "fully_shard"}
        names |= {"deepspeed": "DeepSpeed"} if asked.deepspeed else {}
        if asked.unlike:
            stated = planned(asked, folder)
            names = {name: name for name in stated["ways"] if name != "hetflow"}
            for name, way in stated["ways"].items():
                sys.stdout.write(f"{name}: shares {way['shares']}, passes {way['passes']}\n")
            least = {name: f"{size / 2**20:.1f} MiB" for name, size in stated["least"].items()}
            sys.stdout.write(f"least memory of the smaller device: {least}\n")
            Path(folder, "plan.json").write_text(json.dumps(stated))
            command += [f"--plan={folder}/plan.json"]
        workers = [
            subprocess.Popen(
                [*command, f"--rank={rank}", f"--store={folder}/store"],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)},
                text=True,
            )
            for rank in range(WORKERS)
        ]
        said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a worker failed")
    found = json.loads(said[0].splitlines()[-1])  # libraries may say something, too
    rows: dict[str, Any] = {}
    for (way, name), (place, kind) in product(names.items(), enumerate(("wall", "CPU"))):
        own, other = ([each[place] for each in found[one]] for one in ("hetflow", way))
        ratios = [ours / theirs for ours, theirs in zip(own, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows[f"{kind} {name}"] = row = {
            "hetflow_ms": 1e3 * statistics.median(own),
            "other_ms": 1e3 * statistics.median(other),
            "ratio": middle,
            "low": low,
            "high": high,
        }
        sys.stdout.write(
            f"{kind}: hetflow {row['hetflow_ms']:.1f} ms, {name} {row['other_ms']:.1f} "
            f"ms, ratio {middle:.2f} ({low:.2f} to {high:.2f})\n"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"asked": {**vars(asked), "json": None}, **rows}))


if __name__ == "__main__":
    main()
