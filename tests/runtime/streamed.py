"""Trainings on data without an index. A script for the launcher: streamed.py OUTPUT_FOLDER NAME...

With STOP set the script fails before that step of the first training.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hetflow import runtime as hf

GLOBAL_BATCH_SIZE, NUM_SAMPLES, EPOCHS, STEPS = 32, 74, 2, 3
Result = tuple[list[float], dict[str, torch.Tensor], list[int]]


def sample(index: int) -> tuple[torch.Tensor, int, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, generator=generator, dtype=torch.float64), index % 3, index


class Stream(IterableDataset):
    """Samples in order, shared out over data workers; noise is drawn anew each time."""

    def __init__(self, *, noisy: bool = False) -> None:
        self._noisy = noisy

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, NUM_SAMPLES, every):
            x, y, index = sample(index)
            noise = 0.1 * (torch.rand(4, dtype=x.dtype) + random.random()) if self._noisy else 0
            yield x + noise, y, index


class Stateful(Stream):
    """A stream that knows where it is, as that of ``datasets`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < NUM_SAMPLES:
            self.at += 1
            yield sample(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Texts(Dataset):
    """Sequences of unlike lengths."""

    lengths = [1 + (7 * index) % 12 for index in range(NUM_SAMPLES)]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y, index = sample(index)
        return x.repeat(self.lengths[index], 1), y, index


class Buckets:
    """Batches of like lengths with a budget of tokens, in random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = [[]]
        for index in sorted(range(NUM_SAMPLES), key=lambda n: Texts.lengths[n]):
            tokens = Texts.lengths[index] * (len(batches[-1]) + 1)
            if tokens > 90 or len(batches[-1]) == GLOBAL_BATCH_SIZE:
                batches.append([])
            batches[-1].append(index)
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return len(list(iter(self)))


def padded(items: list[Any]) -> dict[str, Any]:
    x, y, index = zip(*items, strict=True)
    lengths = [len(one) for one in x]
    return {
        "x": nn.utils.rnn.pad_sequence(list(x), batch_first=True),
        "length": torch.tensor(lengths),
        "y": torch.tensor(y),
        "name": [str(number) for number in index],
        "kind": "padded",
    }


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def stop_where_asked(job: hf.Job) -> None:
    if job.num_steps == int(os.environ.get("STOP") or -1):
        raise RuntimeError("stopped")


def trained(
    make: Callable[..., Any],
    sources: Callable[[], Any],
    *,
    registers: Any = None,
    tests: bool = False,
    **options: Any,
) -> Result:
    """Train on what comes; the last batches are short."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    job, losses, seen = make(model, optimizer), [], []
    if registers is not None:
        job.register(registers)

    def loss_of(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen.extend(index.tolist())
        return cross_entropy(model(x), y)

    for _ in range(EPOCHS):
        for batch in job.batches(sources(), **options):
            stop_where_asked(job)
            losses.append(float(job.backward(loss_of, batch, per_virtual_node=not tests)))
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict(), seen


def iterable(make: Callable[..., Any]) -> Result:
    return trained(make, lambda: DataLoader(Stream(), batch_size=GLOBAL_BATCH_SIZE))


def noisy(make: Callable[..., Any]) -> Result:
    loader = DataLoader(Stream(noisy=True), batch_size=GLOBAL_BATCH_SIZE)
    return trained(make, lambda: loader, tests=True)


def workers(make: Callable[..., Any]) -> Result:
    loader = DataLoader(Stream(noisy=True), batch_size=GLOBAL_BATCH_SIZE, num_workers=2)
    return trained(make, lambda: loader)


def drawn(make: Callable[..., Any]) -> Result:
    """nanoGPT's get_batch."""

    def get_batch() -> Any:
        items = [sample(int(i)) for i in torch.randint(NUM_SAMPLES, (GLOBAL_BATCH_SIZE,))]
        return torch.utils.data.default_collate(items)

    return trained(make, lambda: get_batch, steps=STEPS, tests=True)


def read_on(make: Callable[..., Any]) -> Result:
    """A generator that a second epoch reads on."""
    loader = DataLoader(Stream(), batch_size=GLOBAL_BATCH_SIZE)
    endless = (batch for _ in range(100) for batch in loader)
    return trained(make, lambda: endless, steps=STEPS - 1)


def stateful(make: Callable[..., Any]) -> Result:
    stream = Stateful()
    loader = DataLoader(stream, batch_size=GLOBAL_BATCH_SIZE)
    return trained(make, lambda: loader, registers=stream)


def bucketed(make: Callable[..., Any]) -> Result:
    """A mean over tokens of padded texts."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    job, losses, seen = make(model, optimizer), [], []
    loader = DataLoader(Texts(), batch_sampler=Buckets(), collate_fn=padded)

    def loss_of(batch: dict[str, Any]) -> hf.Weighted:
        seen.extend(map(int, batch["name"]))
        x, length = batch["x"], batch["length"]
        mask = (torch.arange(x.shape[1])[None] < length[:, None]).double()
        y = batch["y"][:, None].expand(mask.shape)
        each = cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        return hf.Weighted((each * mask).sum() / mask.sum(), mask.sum())

    for _ in range(EPOCHS):
        for batch in job.batches(loader):
            stop_where_asked(job)
            losses.append(float(job.backward(loss_of, batch, per_virtual_node=True)))
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict(), seen


TRAININGS = {f.__name__: f for f in (iterable, noisy, workers, drawn, read_on, stateful, bucketed)}


def main() -> None:
    found = {name: TRAININGS[name](hf.prepare) for name in sys.argv[2:]}
    torch.save(found, Path(sys.argv[1]) / f"results{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
