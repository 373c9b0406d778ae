"""Trainings that several worlds run and must agree on. A script for the launcher, not a test.

Usage: scenarios.py OUTPUT_FOLDER [SCENARIO...]. Every worker writes what it saw
and its results.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from hetflow import runtime as hf

GLOBAL_BATCH_SIZE = 24
NUM_SAMPLES = 58  # 24 + 24 + 10: the last batch is short
EPOCHS = 2


class Points(Dataset):
    """Fixed random points. ``noisy`` items draw from all three global streams."""

    def __init__(self, noisy=False, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=dtype)
        self.y = torch.randint(3, (NUM_SAMPLES,), generator=generator)
        self.noisy = noisy

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        x = self.x[index]
        if self.noisy:
            noise = random.random() + np.random.rand()  # noqa: NPY002
            x = x + 0.1 * noise + 0.1 * torch.randn(6, dtype=x.dtype)
        return x, self.y[index], index


class Net(nn.Module):
    """Two layers that share one weight, and a parameter that no pass uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def noisy_net():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 3)
    ).double()


def loader_of(dataset, **options):
    return DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE, **{"shuffle": True, **options})


def tools(model):
    """Momentum and weight decay make a wrong gradient of an unused parameter visible."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def finish_step(model, optimizer, scheduler, norms):
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain(seen):
    """Clipping, a schedule, tied and unused parameters, a short last batch."""
    model = Net()
    optimizer, scheduler = tools(model)
    job = hf.prepare(model, optimizer)
    loader, losses, norms = loader_of(Points()), [], []
    for _ in range(EPOCHS):
        for batch in job.batches(loader):

            def loss_of(x, y, index):
                seen.append(index.tolist())
                return nn.functional.cross_entropy(model(x), y)

            losses.append(float(job.backward(loss_of, batch)))
            unused_is_none = model.unused.weight.grad is None
            finish_step(model, optimizer, scheduler, norms)
    job.finish()
    return {
        "state": state_of(model),
        "losses": losses,
        "norms": norms,
        "unused_is_none": unused_is_none,
    }


def noisy(seen, workers=0):
    """Dropout, batch-norm and random augmentation: fixed by virtual node and sample."""
    model = noisy_net()
    optimizer, _ = tools(model)
    job = hf.prepare(model, optimizer)
    loader, losses, inputs = loader_of(Points(noisy=True), num_workers=workers), [], {}
    for epoch in range(EPOCHS):
        for batch in job.batches(loader):

            def loss_of(x, y, index, epoch=epoch):
                keys = [f"{epoch} {i}" for i in index.tolist()]
                inputs.update(zip(keys, x.tolist(), strict=True))
                return nn.functional.cross_entropy(model(x), y)

            losses.append(float(job.backward(loss_of, batch)))
            optimizer.step()
            optimizer.zero_grad()
    with job.evaluation():
        score = float(model(Points().x).sum())
    job.finish()
    seen.append(inputs)
    return {"state": state_of(model), "losses": losses, "score": score}


def drawn(seen):
    """A sampler with its own idea of order, on dict batches."""
    model = Net()
    optimizer, _ = tools(model)
    job = hf.prepare(model, optimizer)

    def as_dict(items):
        x, y, index = torch.utils.data.default_collate(items)
        return {"x": x, "y": y, "index": index}

    sampler = WeightedRandomSampler([1.0 + i for i in range(NUM_SAMPLES)], 40)
    loader = loader_of(Points(), shuffle=None, sampler=sampler, collate_fn=as_dict, drop_last=True)
    steps = 0
    for batch in job.batches(loader):

        def loss_of(data):
            seen.append(data["index"].tolist())
            return nn.functional.cross_entropy(model(data["x"]), data["y"])

        job.backward(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        steps += 1
    job.finish()
    return {"state": state_of(model), "steps": steps}


def tokens(seen):
    """A mean over tokens, of which samples have unlike numbers, some none."""
    model = Net()
    optimizer, _ = tools(model)
    job = hf.prepare(model, optimizer)
    losses = []
    for batch in job.batches(loader_of(Points())):

        def loss_of(x, y, index):
            return token_loss(model, x, y, index)

        losses.append(float(job.backward(loss_of, batch)))
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return {"state": state_of(model), "losses": losses}


def token_loss(model, x, y, index):
    weights = (index % 5).double()
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    return hf.Weighted((each * weights).sum() / weights.sum().clamp(min=1), int(weights.sum()))


def mixed(seen):
    """Autocast to bfloat16 with a GradScaler; one sample overflows once on one worker."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = hf.prepare(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, batch in enumerate(job.batches(loader_of(Points(dtype=torch.float32)))):

        def loss_of(x, y, index, step=step):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            bad = step == 1 and NUM_SAMPLES - 1 in index.tolist() + [NUM_SAMPLES - 1]
            return loss * float("inf") if bad else loss

        job.backward(loss_of, batch, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    job.finish()
    return {"state": state_of(model), "scales": scales}


SCENARIOS = {
    "plain": plain,
    "noisy": noisy,
    "noisy_workers": lambda seen: noisy(seen, workers=2),
    "drawn": drawn,
    "tokens": tokens,
    "mixed": mixed,
}


def main(folder, rank, names):
    results, saw = {}, {}
    for name in names or SCENARIOS:
        seen = []
        results[name] = SCENARIOS[name](seen)
        saw[name] = seen
    (folder / f"seen{rank}.json").write_text(json.dumps(saw))
    torch.save(results, folder / f"results{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["HETFLOW_SLOT"]), sys.argv[2:])
