"""Ways to sum virtual nodes' gradients so that the mapping does not change the bits.

Every candidate runs a whole step's gradient work without the model: each pass adds its gradient
into the buffer (as backward does), then the workers exchange. Seconds are medians over rounds in
which the candidates take turns; CPU seconds are a worker's, of all its threads (mean over workers),
in all and of the exchange alone. Bytes are what one worker sends, buffers what it holds beside the
gradient buffer. The last part is a whole training step against DistributedDataParallel.

    python benchmarks/reduction.py --quick
"""

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from runtime_overhead import JOBS, OTHERS, config_of, ddp_stepper, job_stepper, parts
from torch import Tensor
from torch.utils.data import DataLoader

from hetflow import runtime as hf
from hetflow.devices.backend import backend_of
from hetflow.runtime import peers
from hetflow.runtime.invariant import Collectives, InvariantSum
from hetflow.runtime.protocol.environment import pins
from hetflow.schema import files

# Virtual nodes of each worker: 4 and 8 in all, even, uneven and not aligned with the tree.
HOLDINGS = [(4, 4), (5, 3), (2, 2, 2, 2), (5, 2, 1)]
BUCKET = (
    backend_of("cpu").bucket_bytes // 4 // 24 * 24
)  # elements, a multiple of every number of workers
GRID_BITS = 40  # fixed point: 24 bits of room above the largest gradient, 40 below
RESNET18 = 11_689_512


class ByCollectives(InvariantSum):
    """The tree as it was exchanged over gloo before, and is over NCCL."""

    def _exchange(self, trees: list[Tensor]) -> Collectives:
        return Collectives(trees, self._trees, self._num_leaves)


class Bench:
    """One worker's part of a candidate: gradients of its virtual nodes, and a buffer."""

    def __init__(self, counts: tuple[int, ...], rank: int, numel: int) -> None:
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        self.holdings = [list(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)]
        self.own, self.rank, self.size = self.holdings[rank], rank, len(counts)
        self.gradients = [gradient_of(node, numel) for node in self.own]
        self.flat = torch.zeros(numel)
        self.tree = InvariantSum(self.holdings, rank)
        self.tree.allocate([self.flat])
        self.collective_tree = ByCollectives(self.holdings, rank)
        self.collective_tree.allocate([self.flat])
        self.wide = {
            dtype: torch.zeros(numel, dtype=dtype) for dtype in (torch.int64, torch.double)
        }
        self.kept = [torch.zeros(numel) for _ in self.own]
        self.passes_ended_at = 0.0  # CPU seconds of this process

    def passes_end(self) -> None:
        """All gradients are in their buffers: what follows is the exchange."""
        self.passes_ended_at = time.process_time()

    def all_reduce(self) -> None:
        """What plain data parallelism does; the bits depend on the mapping."""
        self.flat.zero_()
        for gradient in self.gradients:
            self.flat.add_(gradient)
        self.passes_end()
        dist.all_reduce(self.flat)

    def invariant_tree(self) -> None:
        """runtime/invariant.py."""
        self.sum_by(self.tree)

    def sum_by(self, tree: InvariantSum) -> None:
        """Every pass and the exchange."""
        tree.begin()
        self.flat.zero_()
        for node, gradient in zip(self.own, self.gradients, strict=True):
            tree.enter(node)
            self.flat.add_(gradient)
            tree.leave()
        self.passes_end()
        tree.settle()
        for start in range(0, len(self.flat), BUCKET):
            tree.launch(0, start, min(start + BUCKET, len(self.flat)))
        tree.wait()

    def tree_by_collectives(self) -> None:
        """The same tree by all-to-all and all-gather, as NCCL has it."""
        self.sum_by(self.collective_tree)

    def chain(self) -> None:
        """Slice owners add g0, g1, g2, ...: a buffer for each virtual node of the device."""
        for buffer, gradient in zip(self.kept, self.gradients, strict=True):
            buffer.zero_().add_(gradient)
        self.passes_end()
        part = len(self.flat) // self.size
        sent = torch.stack([buffer.view(self.size, part) for buffer in self.kept], 1).reshape(-1)
        lengths = [len(nodes) * part for nodes in self.holdings]
        received = torch.empty(sum(lengths))
        inputs = [len(self.own) * part] * self.size
        dist.all_to_all_single(received, sent, lengths, inputs)
        rows = received.view(-1, part)
        for row in rows[1:]:
            rows[0].add_(row)
        peers.all_gather(self.flat, rows[0].contiguous())

    def fixed_point(self) -> None:
        """Exact in any order: int64 multiples of one step, an ordinary all-reduce twice as wide."""
        total = self.wide[torch.int64].zero_()
        for gradient in self.gradients:
            self.flat.zero_().add_(gradient)
            total.add_((self.flat.double() * 2.0**GRID_BITS).round_().long())
        self.passes_end()
        dist.all_reduce(total)
        self.flat.copy_(total.double().mul_(2.0**-GRID_BITS))

    def rounded_doubles(self) -> None:
        """Exact in any order while sums stay on a grid: float64, also twice as wide."""
        total, to_grid = self.wide[torch.double].zero_(), 1.5 * 2.0 ** (52 - GRID_BITS)
        for gradient in self.gradients:
            self.flat.zero_().add_(gradient)
            total.add_(self.flat.double().add_(to_grid).sub_(to_grid))
        self.passes_end()
        dist.all_reduce(total)
        self.flat.copy_(total)

    def sent_bytes(self, name: str) -> int:
        """Bytes this worker sends in a step, by the algorithms' own count (ring all-reduce)."""
        share = len(self.flat) * 4 * (self.size - 1) // self.size
        trees = len(self.tree._trees[self.rank])
        return {
            "all_reduce": 2 * share,
            "invariant_tree": (trees + 1) * share,
            "tree_by_collectives": (trees + 1) * share,
            "chain": (len(self.own) + 1) * share,
            "fixed_point": 4 * share,
            "rounded_doubles": 4 * share,
        }[name]

    def received_bytes(self) -> int:
        """The others' subtrees of the slices that this worker sums, all at once."""
        others = sum(len(held) for held in self.tree._trees) - len(self.tree._trees[self.rank])
        return 0 if self.tree._has_two_trees else others * len(self.flat) * 4 // self.size

    def buffer_bytes(self, name: str) -> int:
        """Bytes held through a step beside the gradient buffer."""
        one = len(self.flat) * 4
        return {
            "all_reduce": 0,
            "invariant_tree": self.tree.num_spares * one + self.tree.num_received_bytes,
            "tree_by_collectives": self.tree.num_spares * one + self.received_bytes(),
            "chain": (len(self.own) - 1) * one,
            "fixed_point": 2 * one,
            "rounded_doubles": 2 * one,
        }[name]


CANDIDATES = (
    *("all_reduce", "invariant_tree", "tree_by_collectives", "chain", "fixed_point"),
    "rounded_doubles",
)


def gradient_of(node: int, numel: int) -> Tensor:
    """A virtual node's gradient: the same wherever it is made."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(node)) * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small gradient, few rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    numel = 240_000 if arguments.quick else RESNET18 // 24 * 24
    rounds = 3 if arguments.quick else 5
    rows = []
    for counts in HOLDINGS:
        rows += spawn(exchange_worker, counts, numel, rounds)
    models = ["mlp"] if arguments.quick else ["mlp", "resnet18"]
    steps = [row for name in models for row in spawn(step_worker, (1, 1), name, rounds)]
    document = {
        "benchmark": "reduction",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "gradient_bytes": numel * 4,
        "results": rows,
        "steps": steps,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows, steps))


def spawn(work: Callable[..., list], counts: tuple[int, ...], *arguments: object) -> list[dict]:
    """Run ``work`` on one process a worker; what the first returned."""
    os.environ |= {"OMP_NUM_THREADS": "1", **pins("elastic")}
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(_run, args=(work, folder, port, counts, arguments), nprocs=len(counts))
        return json.loads((Path(folder) / "results.json").read_text())


def _run(rank: int, work, folder: str, port: int, counts: tuple[int, ...], arguments) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HETFLOW_SLOT": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(counts)), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo")
    rows = work(rank, Path(folder), counts, *arguments)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(rows))
    for job in JOBS:
        job.finish()
    dist.destroy_process_group()


def exchange_worker(
    rank: int, folder: Path, counts: tuple[int, ...], numel: int, rounds: int
) -> list[dict]:
    """Time the candidates on one mapping, and hold the tree to the serial sum."""
    bench = Bench(counts, rank, numel)
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    for number in range(rounds + 1):
        for name in CANDIDATES:
            began = time.process_time()
            taken = timed(getattr(bench, name))
            ended = time.process_time()
            if number:
                seconds[name].append(taken)
                cpu[name].append((ended - began, ended - bench.passes_ended_at))
    bench.invariant_tree()
    expected = tree_sum([gradient_of(node, numel) for node in range(sum(counts))])
    assert torch.equal(bench.flat, expected), "the tree's bits depend on the mapping"
    return [
        {
            "virtual_nodes": list(counts),
            "candidate": name,
            "seconds": median(seconds[name]),
            "cpu_seconds": mean_over_workers(median(a for a, _ in cpu[name])),
            "exchange_cpu_seconds": mean_over_workers(median(b for _, b in cpu[name])),
            "over_all_reduce": over(seconds[name], seconds["all_reduce"]),
            "sent_bytes": bench.sent_bytes(name),
            "buffer_bytes": bench.buffer_bytes(name),
        }
        for name in CANDIDATES
    ]


def mean_over_workers(value: float) -> float:
    """The mean of all workers' values; all call it."""
    total = torch.tensor(value, dtype=torch.double)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tree_sum(values: list[Tensor]) -> Tensor:
    """The aligned tree on one device, from its definition."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def step_worker(
    rank: int, folder: Path, counts: tuple[int, ...], name: str, rounds: int
) -> list[dict]:
    """A training step of DDP, of hetflow at level none, and at elastic."""
    size = {"mlp": 32, "resnet18": 2}[name]
    variants = {
        "ddp": ddp_stepper(name, size, rank),
        "none": job_stepper(name, size, 1, folder, rank),
        "elastic": elastic_stepper(name, size, 1, folder, rank),
        "none, 4 a device": job_stepper(name, size, 4, folder, rank),
        "elastic, 4 a device": elastic_stepper(name, size, 4, folder, rank),
    }
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds + 3):
        for variant, step in variants.items():
            taken = timed(step)
            if number >= 3:
                seconds[variant].append(taken)
    base = {"elastic, 4 a device": "none, 4 a device"}
    return [
        {
            "model": name,
            "variant": variant,
            "seconds": median(taken),
            "base": base.get(variant, "ddp"),
            "over_base": over(taken, seconds[base.get(variant, "ddp")]),
        }
        for variant, taken in seconds.items()
    ]


def elastic_stepper(
    name: str, size: int, nodes: int, folder: Path, rank: int
) -> Callable[[], None]:
    """``job_stepper`` at level elastic."""
    path = folder / f"{name}-{nodes}-{rank}-elastic.json"
    config = replace(config_of(name, size, nodes), determinism="elastic")
    files.write(path, config)
    os.environ["HETFLOW_PLAN"] = str(path)
    model, dataset, loss = parts(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = hf.prepare(model, optimizer)
    JOBS.append(job)
    job.register(*OTHERS)
    # A switch of the whole process: off, so that only the sums differ between the variants.
    torch.use_deterministic_algorithms(False)
    loader = DataLoader(dataset, batch_size=config.global_batch_size, shuffle=True, drop_last=True)
    source = (batch for _ in iter(int, 1) for batch in job.batches(loader))

    def step() -> None:
        job.backward(lambda *batch: loss(model, batch), next(source))
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(work: Callable[[], None]) -> float:
    """Seconds until the slowest worker is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def over(above: list[float], below: list[float]) -> float:
    """Median ratio of neighbouring runs."""
    return median(a / b for a, b in zip(above, below, strict=True))


def table(rows: list[dict], steps: list[dict]) -> str:
    lines = [
        f"{'virtual nodes':<14} {'candidate':<20} {'ms':>8} {'/ plain':>8} {'CPU ms':>8} "
        f"{'exchange':>8} {'sent MB':>8} MB held"
    ]
    for row in rows:
        held = "+".join(str(count) for count in row["virtual_nodes"])
        lines.append(
            f"{held:<14} {row['candidate']:<20} {row['seconds'] * 1e3:8.1f} "
            f"{row['over_all_reduce']:8.2f} {row['cpu_seconds'] * 1e3:8.1f} "
            f"{row['exchange_cpu_seconds'] * 1e3:8.1f} {row['sent_bytes'] / 1e6:8.1f} "
            f"{row['buffer_bytes'] / 1e6:7.1f}"
        )
    lines.append(f"{'whole step':<14} {'variant':<22} {'ms':>8}  ratio")
    for row in steps:
        lines.append(
            f"{row['model']:<14} {row['variant']:<22} {row['seconds'] * 1e3:8.1f} "
            f"{row['over_base']:6.2f} of {row['base']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
