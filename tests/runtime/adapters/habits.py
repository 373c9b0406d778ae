"""Habits of scripts for torchrun: hooks on parameters, loops over sequences; and what is refused.

Usage: habits.py ANSWER [refused | by hand]
"""

import gc
import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

answer, *asked = sys.argv[1:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
drawn = torch.Generator().manual_seed(0)
x, y = 3 + torch.randn(90, 6, generator=drawn), torch.randint(3, (90,), generator=drawn)
rows = TensorDataset(x, y)
sampler = DistributedSampler(rows, seed=2)
loader = DataLoader(rows, batch_size=30 // world_size, sampler=sampler)


def made(kind=None):
    """A wrapped model and its optimizer."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    model = DistributedDataParallel(layers if kind is None else kind())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Recurrent(nn.Module):
    """Its graph is as long as the longest sequence of its samples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.cells = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, tokens):
        """The logits of all places."""
        return self.out(self.cells(self.embedding(tokens))[0])


def padded(samples):
    """Sequences of unlike lengths."""
    lengths = [int(values.sum()) % 5 + 2 for values, _ in samples]
    tokens = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, ((values, _), length) in enumerate(zip(samples, lengths, strict=True)):
        tokens[row, :length] = (values.repeat(2)[:length].abs() * 2).long().clamp(1, 9)
    return tokens


def train(change=None, *, after=False, steps=3):
    """The parameters after a training with a hook on each of them."""
    model, optimizer = made()
    for parameter in model.parameters() if change else ():
        add = parameter.register_post_accumulate_grad_hook if after else parameter.register_hook
        add(change)
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=after)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def read_sequences():
    """The parameters after a training on sequences."""
    model, optimizer = made(Recurrent)
    batches = DataLoader(rows, batch_size=30 // world_size, sampler=sampler, collate_fn=padded)
    for _ in range(2):
        for tokens in batches:
            logits = model(tokens[:, :-1]).flatten(0, 1)
            optimizer.zero_grad()
            cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=0).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def align():
    """Summed CTC losses, for which PyTorch runs another operator while they are recorded."""
    model, optimizer = made(lambda: nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (6, 4))))
    for inputs, targets in loader:
        heard = model(inputs).log_softmax(-1).transpose(0, 1)
        words = torch.stack([targets + 1, (targets + 1) % 3 + 1], 1)
        ends = torch.full((2, len(inputs)), 6)
        ends[1] = 2
        optimizer.zero_grad()
        nn.functional.ctc_loss(heard, words, *ends, reduction="sum").backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train_on_folds():
    """On the first worker the second fold's dataset has the address of the first one's."""
    (model, optimizer), kept, fold_rows = made(), [], None
    for inputs, targets in ((x[0::2], y[0::2]), (x[1::2], y[1::2])):
        kept += [fold_rows] if rank else []  # another worker's has another address
        address, fold_rows = id(fold_rows), None
        for _ in range(10_000):
            kept.append(fold_rows)
            fold_rows = TensorDataset(inputs, targets)
            if rank or id(fold_rows) == address:
                break
        order = DistributedSampler(fold_rows, seed=1)
        batches = DataLoader(fold_rows, batch_size=30 // world_size, sampler=order)
        for some, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model(some), labels).backward()
            optimizer.step()
        del order, batches
        gc.collect()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


class Normed(nn.Module):
    """Layers with batch norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12))
        self.out = nn.Linear(12, 3)

    def forward(self, inputs):
        """The logits."""
        return self.out(self.first(inputs).tanh())


def average():
    """An averaged model, whose batch norm sees the batches once more."""
    model, optimizer = made(Normed)
    averaged = AveragedModel(model.module)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        averaged.update_parameters(model.module)
    update_bn(loader, averaged)
    return torch.cat([value.flatten() for value in averaged.state_dict().values()]).tolist()


def clamp_in_place(parameter):
    """Change a gradient that has come."""
    parameter.grad.clamp_(-0.01, 0.01)


# What is refused


def have_a_floor():
    """A loss that is a mean in its first batches only."""
    model, optimizer = made()
    for step, (inputs, targets) in enumerate(batch for _ in range(6) for batch in loader):
        floor = 1.1 if step > 3 else 0.0
        optimizer.zero_grad()
        ((cross_entropy(model(inputs), targets) - floor).abs() + floor).backward()
        optimizer.step()


def clamp_parts():
    """A hook that changes what is added up over several batches."""
    model, optimizer = made()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for step, (inputs, targets) in enumerate(loader):
        with nullcontext() if step % 2 else model.no_sync():
            cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def gather_features():
    """The outputs of all workers."""
    model, _ = made()
    for inputs, _ in loader:
        found = model(inputs).detach()
        dist.all_gather([torch.empty_like(found) for _ in range(world_size)], found)


def set_rates_alone():
    """A learning rate by the worker's own loss."""
    model, optimizer = made()
    for inputs, targets in (batch for _ in range(20) for batch in loader):
        loss = cross_entropy(model(inputs), targets)
        optimizer.param_groups[0]["lr"] = 0.1 * loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def add_a_term_alone():
    """A loss of another form on one worker, which the other knows."""
    model, optimizer = made()
    for step, (inputs, targets) in enumerate(batch for _ in range(3) for batch in loader):
        outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
        optimizer.zero_grad()
        (loss + outputs.square().mean() if step > 4 and rank == 1 else loss).backward()
        optimizer.step()


def sum_later():
    """A sum that comes when no loss is tried, and so counts as a mean at first."""
    model, optimizer = made()
    for step, (inputs, _) in enumerate(batch for _ in range(3) for batch in loader):
        squares = model(inputs).square()
        optimizer.zero_grad()
        (squares.sum() if step > 4 else squares.mean()).backward()
        optimizer.step()


def keep_a_centre():
    """A mean over batches, each worker's of its own share, from the fifth batch on."""
    model, optimizer = made()
    centre = torch.zeros(3)
    for step, (inputs, _) in enumerate(batch for _ in range(40) for batch in loader):
        outputs = model(inputs)
        optimizer.zero_grad()
        (outputs - centre).square().mean().backward()
        optimizer.step()
        if step > 4:
            centre = outputs.detach().mean(0)


def take_gradients():
    """Gradients without a backward pass, summed by hand."""
    model, _ = made()
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        for gradient in torch.autograd.grad(loss, list(model.parameters())):
            dist.all_reduce(gradient)


class Convolved(nn.Module):
    """Its last place reads what is behind the sequence."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 8), nn.Conv1d(8, 10, 3, padding=1)

    def forward(self, tokens):
        """The logits of all places."""
        return self.out(self.embedding(tokens).transpose(1, 2))


def read_padding():
    """Targets that padding does not count in, and a model that reads it."""
    model, optimizer = made(Convolved)
    batches = DataLoader(rows, batch_size=30 // world_size, sampler=sampler, collate_fn=padded)
    for tokens in batches:
        optimizer.zero_grad()
        cross_entropy(model(tokens), tokens, ignore_index=0).backward()
        optimizer.step()


class Resumed(DistributedSampler):
    """Goes on behind the first samples of a worker."""

    def __iter__(self):
        """The rest."""
        return iter(list(super().__iter__())[30 // world_size :])


def resume_by_position():
    """An epoch from its second batch on."""
    model, optimizer = made()
    for inputs, targets in DataLoader(rows, 30 // world_size, sampler=Resumed(rows)):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def take_gradients_by_hand():
    """Gradients that are summed by hand, without a wrapped model, and means of shares too."""
    weight = torch.zeros(6, 3)
    for inputs, targets in loader:
        gradient = torch.func.grad(lambda w: cross_entropy(inputs @ w, targets))(weight)  # noqa: B023
        dist.all_reduce(gradient)
        dist.all_reduce((inputs @ weight).mean())
        weight = weight - 0.1 * gradient / world_size


def call_a_part():
    """Batch norm in a part of the model that is called by itself."""
    model, _ = made(Normed)
    for inputs, targets in loader:
        cross_entropy(model.module.out(model.module.first(inputs)), targets).backward()


def take_a_root_in_16_bits():
    """What differs from a mean by less than a loss in 16 bits is rounded by."""
    model, optimizer = made()
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs).bfloat16(), targets).sqrt().backward()
        optimizer.step()


if asked == ["by hand"]:
    take_gradients_by_hand()
    found = {}
elif asked:
    from hetflow.schema.errors import TargetError

    said = {}
    for act in (
        have_a_floor,
        clamp_parts,
        gather_features,
        add_a_term_alone,
        sum_later,
        keep_a_centre,
        take_a_root_in_16_bits,
        read_padding,
        resume_by_position,
        take_gradients,
        call_a_part,
        set_rates_alone,  # its workers stay unlike
    ):
        try:
            act()
        except TargetError as error:
            said[act.__name__] = str(error)
    found = said
else:
    seen = []
    found = {  # hooks are called in order of the parameters, and not as their gradients come
        "clamped": {"parameters": train(lambda gradient: gradient.clamp(-0.01, 0.01))},
        "clamped after": {"parameters": train(clamp_in_place, after=True)},
        "recorded": {"parameters": train(lambda gradient: seen.append(gradient.norm().item()))},
        "norms": {"parameters": sorted(seen)},
        "sequences": {"parameters": read_sequences()},
        "aligned": {"parameters": align()},
        "averaged": {"parameters": average()},
        "folds": {"parameters": train_on_folds()},
    }
if rank == 0:
    with open(answer, "w") as stream:
        json.dump(found, stream)
dist.destroy_process_group()
