"""Data workers that do not start are replaced."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hetflow.runtime import data
from hetflow.runtime.data import PassSampler, pass_loader

HANGS: list[Path] = []


def hang_once() -> None:
    """In a forked child, before it gets out of ``os.fork``: the first that finds the file hangs."""
    for path in HANGS:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        time.sleep(3600)


os.register_at_fork(after_in_child=hang_once)


@pytest.fixture(autouse=True)
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "PATIENCE_SECONDS", 0.3)
    marker = tmp_path / "hang"
    HANGS[:] = [marker]
    yield marker
    HANGS.clear()


def batches(num_workers: int = 2, **options: object) -> list[list[int]]:
    loader = DataLoader(TensorDataset(torch.arange(12)), num_workers=num_workers, **options)
    sampler = PassSampler([2, 2], [0, 1], drop_last=False)
    sampler.set_epoch(0, range(12))
    made = pass_loader(loader, sampler, 0, torch.device("cpu"))
    return [batch.tolist() for (batch,) in made]


def test_a_data_worker_that_hangs_in_the_fork_is_replaced(hangs: Path) -> None:
    before = set(multiprocessing.active_children())  # other tests' data workers may stay
    hangs.touch()
    assert batches() == [[i, i + 1] for i in range(0, 12, 2)]
    assert not hangs.exists()
    assert set(multiprocessing.active_children()) <= before


def test_none_that_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(data, "ATTEMPTS", 2)
    monkeypatch.setattr(os, "fork", lambda fork=os.fork: fork() or time.sleep(3600))
    with pytest.raises(OSError, match="no data worker started"):
        batches()


@pytest.mark.parametrize(
    ("num_workers", "wanted"),
    [(0, None), (1, "spawn"), (1, multiprocessing.get_context("forkserver"))],
)
def test_other_ways_to_start_them_stay(num_workers: int, wanted: object) -> None:
    assert data.context_of(num_workers, wanted) is wanted
