"""First batch after a resume, with data workers shared by a device's virtual nodes or not.

EasyScale's measurement (3.2, figure 12): eight virtual nodes on a device, each training worker
configured with so many data workers. Without sharing each virtual node has a loader of its own, as
its training worker had; with sharing, hetflow's one loader serves all. Timed is one step from the
start of the iteration: data workers start (by fork), load and augment, and all virtual nodes run.
The variants take turns; both give the same samples, and the step ends with the same loss.
``kept`` is a later epoch with ``persistent_workers``: nothing has to start.

    python benchmarks/first_batch.py --quick
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hetflow import runtime as hf
from hetflow.runtime.data import Batch, KeyedDataset
from hetflow.runtime.job import Job
from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

VIRTUAL_NODES = 8
NODE_SAMPLES = 16
BATCH = VIRTUAL_NODES * NODE_SAMPLES
NUM_SAMPLES = 32 * BATCH


class Images(Dataset):
    """Images that are decompressed, cropped, mirrored and disturbed at random."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.full((3, 72, 72), index % 251, dtype=torch.uint8).float().div(255)
        top, left = torch.randint(8, (2,)).tolist()
        image = image[:, top : top + 64, left : left + 64]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image + 0.1 * torch.randn(image.shape), index % 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, one number of workers")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts, rounds = ([2], 3) if arguments.quick else ([1, 2, 4], 11)
    results = [measure(workers, rounds) for workers in counts]
    document = {
        "benchmark": "first_batch",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "virtual_nodes": VIRTUAL_NODES,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


def measure(num_workers: int, rounds: int) -> dict[str, object]:
    """Seconds to the end of the first step of each variant, in turn."""
    model, job = job_of()
    variants = {
        "own": Stepper(model, job, num_workers, own_batches),
        "shared": Stepper(model, job, num_workers, shared_batches),
        "kept": Stepper(model, job, num_workers, shared_batches, persistent=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        taken = {name: stepper.first_step() for name, stepper in variants.items()}
        assert len({stepper.loss for stepper in variants.values()}) == 1, "unlike samples"
        for name, value in taken.items():
            if number:
                seconds[name].append(value)
    job.finish()
    return {
        "data_workers": num_workers,
        "processes": {"own": VIRTUAL_NODES * num_workers, "shared": num_workers, "kept": 0},
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "over_own": {
            name: spread([a / b for a, b in zip(values, seconds["own"], strict=True)])
            for name, values in seconds.items()
        },
    }


def job_of() -> tuple[nn.Module, Job]:
    """A small CNN on one device with all virtual nodes."""
    nodes = tuple(VirtualNode(index=k, batch_size=NODE_SAMPLES) for k in range(VIRTUAL_NODES))
    slot = WorkerSlot(rank=0, device_type="cpu", virtual_nodes=nodes)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launch.json"
        config = LaunchConfig(model="cnn", global_batch_size=BATCH, workers=(slot,))
        files.write(path, config)
        os.environ["HETFLOW_PLAN"] = str(path)
        return model, hf.prepare(model)


class Stepper:
    """One variant: how the first step of an epoch gets its data."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        num_workers: int,
        batches: Callable[[Job, DataLoader], Iterator[Batch]],
        *,
        persistent: bool = False,
    ) -> None:
        self._model, self._job, self._batches = model, job, batches
        self._loader = DataLoader(
            Images(),
            batch_size=BATCH,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=persistent,
        )
        self.loss = 0.0

    def first_step(self) -> float:
        """Seconds from the start of an epoch to the end of its first step."""
        began = time.perf_counter()
        source = self._batches(self._job, self._loader)
        loss = self._job.backward(
            lambda x, y: nn.functional.cross_entropy(self._model(x), y), next(source)
        )
        taken = time.perf_counter() - began
        self.loss = loss.item()
        self._model.zero_grad()
        source.close()  # data workers end, outside the timed part
        return taken


def shared_batches(job: Job, loader: DataLoader) -> Iterator[Batch]:
    """One loader a device, as hetflow has it."""
    yield from job.batches(loader, epoch=0)


def own_batches(job: Job, loader: DataLoader) -> Iterator[Batch]:
    """The same passes, each virtual node's from a loader of its own."""
    epoch = job.batches(loader, epoch=0)
    sampler = epoch._sampler
    keys = list(sampler)
    loaders = [
        DataLoader(
            KeyedDataset(loader.dataset, 0),
            batch_sampler=keys[node::VIRTUAL_NODES],
            num_workers=loader.num_workers,
        )
        for node in range(VIRTUAL_NODES)
    ]
    own = [iter(one) for one in loaders]  # all data workers start, as after a resume
    num_samples, _, passes = sampler.passes(0)
    feed = chain.from_iterable([next(one)] for one in own)
    yield Batch(epoch=0, step=0, num_samples=num_samples, is_full=True, passes=passes, _feed=feed)


def spread(values: list[float]) -> dict[str, float]:
    first, middle, third = statistics.quantiles(values, n=4)
    return {"median": middle, "first_quartile": first, "third_quartile": third}


def table(results: list[dict]) -> str:
    lines = ["| data workers | own loaders | shared | kept | shared / own | kept / own |"]
    lines += ["|---" * 6 + "|"]
    for row in results:
        ms = {name: f"{value * 1e3:.0f} ms" for name, value in row["seconds"].items()}
        ratios = [
            f"{r['median']:.2f} ({r['first_quartile']:.2f}-{r['third_quartile']:.2f})"
            for r in (row["over_own"]["shared"], row["over_own"]["kept"])
        ]
        number = row["data_workers"]
        lines.append(
            f"| {number} ({number * VIRTUAL_NODES} without sharing) | {ms['own']} | "
            f"{ms['shared']} | {ms['kept']} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
