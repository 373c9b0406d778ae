"""Data workers: as many as the loader says on each device, and of no influence on the data."""

import multiprocessing
import random
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from hetflow import runtime as hf
from hetflow.runtime.data import copied, to_device
from hetflow.runtime.job import Job
from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

BATCH, NUM_SAMPLES = 16, 38


class Noisy(Dataset):
    """Items draw from all three streams."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + float(np.random.rand())  # noqa: NPY002
        return torch.rand(4, dtype=torch.float64) + noise, index


@pytest.fixture
def job_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Makes a job of one worker with so many virtual nodes."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    made: list[Job] = []

    def make(num_nodes: int) -> tuple[nn.Module, Job]:
        nodes = tuple(VirtualNode(index=k, batch_size=BATCH // num_nodes) for k in range(num_nodes))
        slot = WorkerSlot(rank=0, device_type="cpu", virtual_nodes=nodes)
        config = LaunchConfig(model="m", global_batch_size=BATCH, workers=(slot,))
        files.write(tmp_path / f"{len(made)}.json", config)
        monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / f"{len(made)}.json"))
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        made.append(hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        return model, made[-1]

    yield make
    for job in made:
        job.finish()


def train(made: tuple[nn.Module, Job], num_workers: int, epochs: int = 1) -> tuple[list, list]:
    """What the passes saw, and the processes that were there beside."""
    model, job = made
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=num_workers)
    seen: list[tuple[list, list]] = []
    processes: list[int] = []

    def loss_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen.append((index.tolist(), x.tolist()))
        processes.append(len(multiprocessing.active_children()))
        return model(x).mean()

    for _ in range(epochs):
        for batch in job.batches(loader):
            job.backward(loss_of, batch)
    return seen, processes


@pytest.mark.slow
def test_virtual_nodes_share_the_data_workers_of_their_device(job_of) -> None:  # type: ignore[no-untyped-def]
    for num_nodes in (1, 4, 16):
        seen, processes = train(job_of(num_nodes), num_workers=2)
        assert max(processes) == 2
        assert len(seen) >= 2 * num_nodes


@pytest.mark.slow
def test_the_number_of_data_workers_changes_no_bit_of_an_item(job_of) -> None:  # type: ignore[no-untyped-def]
    first, _ = train(job_of(4), num_workers=0, epochs=2)
    for num_workers in (1, 2):
        assert train(job_of(4), num_workers, epochs=2)[0] == first
    half = len(first) // 2
    items = {i: x for indices, xs in first[:half] for i, x in zip(indices, xs, strict=True)}
    again = {i: x for indices, xs in first[half:] for i, x in zip(indices, xs, strict=True)}
    assert items.keys() == again.keys() == set(range(NUM_SAMPLES))
    assert all(items[i] != again[i] for i in items)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_data_workers_had_drawn_ahead_is_drawn_again_after_a_stop(  # type: ignore[no-untyped-def]
    job_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int
) -> None:
    """EasyScale queues the states of its data workers; streams keyed by sample need none."""
    whole, _ = train(job_of(4), num_workers=0)
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path / "saved"))
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    model, job = job_of(4)
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2)
    before: list[tuple[list, list]] = []

    def loss_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        before.append((index.tolist(), x.tolist()))
        return model(x).mean()

    for batch in job.batches(loader):
        job.backward(loss_of, batch)
        job.checkpoint()
        break
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    after, _ = train(job_of(4), num_workers)
    assert before + after == whole


class Graph:
    """As a graph of DGL: it moves itself, and takes no further argument."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.values.to(device))


def test_what_moves_itself_moves_as_a_whole() -> None:
    meta, ones = torch.device("meta"), torch.ones(2, 3)
    packed = pack_sequence([ones, ones[:1]])
    named, graph = namedtuple("named", "x, label")(ones, "a"), Graph(ones)
    found = to_device([packed, named, {"graph": graph}], meta)
    assert (found[0].data.device, found[0].batch_sizes.device.type) == (meta, "cpu")
    assert (found[1].x.device, found[1].label) == (meta, "a")
    assert found[2]["graph"].values.device == meta
    again = copied([packed, graph])
    again[0].data.zero_()
    again[1].values.zero_()
    assert packed.data.all()
    assert ones.all()


def test_a_packed_sequence_is_one_argument(job_of) -> None:  # type: ignore[no-untyped-def]
    model, job = job_of(2)
    rows = [torch.ones(number % 3 + 1, 4, dtype=torch.float64) for number in range(BATCH)]
    sorts = partial(pack_sequence, enforce_sorted=False)
    seen: list[int] = []

    def loss_of(packed: PackedSequence) -> torch.Tensor:
        seen.append(len(packed.data))
        return model(packed.data).mean()

    for batch in job.batches(DataLoader(rows, batch_size=BATCH, collate_fn=sorts)):  # type: ignore[arg-type]
        job.backward(loss_of, batch, per_virtual_node=True)
    assert sum(seen) == sum(map(len, rows))
