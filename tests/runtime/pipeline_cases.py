"""Trainings under pipeline plans. A script for the launcher, not a test.

Usage: pipeline_cases.py FOLDER NUMBER=CASE...: each case trains under FOLDER/NUMBER.json, one after
another in the same processes; every worker writes what came out.
"""

import copy
import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.pipeline import ownership, replica_sums, transport
from hetflow.schema.errors import HetflowError

GLOBAL_BATCH_SIZE, NUM_SAMPLES, EPOCHS = 24, 58, 2


class Branches(nn.Module):
    """A skip connection over several layers, an input used late, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.first.weight
        self.last = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, scale=0.5):
        a = torch.tanh(self.first(x))
        b = torch.relu(self.second(a))
        c = self.third(b) + a * scale + x
        return self.last(c)


def chain():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8),
        nn.ReLU(inplace=True), nn.Linear(8, 3),
    )  # fmt: skip


def normed():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )  # fmt: skip


MODELS = {"chain": chain, "branches": Branches, "normed": normed}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


def data(num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (num_samples,), generator=generator))


def build(name, deferred=False):
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the first worker's values are taken
    with hf.deferred() if deferred else nullcontext():
        return MODELS[name]().double()


def loss_of(model, options=""):
    def function(x, y):
        if "padded" in options:  # microbatches with nothing else have no loss, and weight 0
            y = torch.where(x[:, 0] > 0.5, y, -100)
            return hf.Weighted(nn.functional.cross_entropy(model(x), y), (y >= 0).sum())
        loss = nn.functional.cross_entropy(model(x), y)
        return hf.Weighted(loss, float(y.sum())) if "weighted" in options else loss

    return function


def refused(call):
    try:
        call()
    except HetflowError as error:
        return str(error)
    return None


def calls_of(job, whole, model, optimizer):
    """Calls that only some workers make, or each with its own rows; and uses that are refused."""
    x, made = data().tensors[0], job._engine._evaluation
    found = {"runs": made.num_runs}
    if job.rank == 1:
        found["alone"] = whole(x[:5])
    if job.rank != 0:
        found["own"] = whole(x[job.rank : job.rank + 2])
    found["first layer"] = refused(lambda: whole[0](x))
    found["saving"] = refused(model.state_dict)
    found["saving the first layer"] = refused(model[0].state_dict)
    found["saving the optimizer"] = refused(optimizer.state_dict)
    model.train()
    found["training"] = refused(lambda: whole(x))
    model.eval()
    return found


@torch.no_grad()
def looks_of(model):
    """What a script may do between steps with parameters of other stages, and what is refused."""
    weight, others, average = model[0].weight, list(model.parameters()), build("chain")
    found = {"shape": (weight.shape, weight.numel(), torch.zeros_like(weight).shape)}
    found["norm"] = refused(lambda: weight.data.norm())
    averaged = copy.deepcopy(model)[0].weight
    found["copy"] = refused(lambda: averaged.lerp_(weight, 0.5).sum())
    found["saved"] = refused(lambda: pickle.dumps(averaged.detach().cpu()))
    found["average"] = refused(lambda: list(average.parameters())[0].data.lerp_(weight, 0.5))
    found["list"] = refused(lambda: torch._foreach_norm(others))
    # What is written is written where the parameter is.
    weight.mul_(2.0)
    torch._foreach_mul_(others, 0.5)
    weight.data = weight.data.mul_(0.5)
    torch._foreach_mul_(others, [2.0] * len(others))
    if found["norm"] is not None:
        weight.copy_(torch.ones(8, 6))
        nn.init.normal_(weight)
        assert weight.is_contiguous()
        assert f"{weight}" == "<0.weight, [8, 6], of another stage>"
    return found


def train(case):
    """``model:optimizer:options``, options out of clip, weighted, padded, whole, apart, far, calls,
    deferred (where there are several workers).

    ``apart`` sends payloads as between CUDA devices, with gloo in the place of NCCL; ``far`` sends
    messages as between hosts.
    """
    name, kind, options = case.split(":")
    transport.payload_collective = lambda *_: "gloo" if "apart" in options else None
    if "far" in options:
        transport.meet_neighbours = lambda *_: {}
    # Models this small would fill one bucket only.
    replica_sums.LEAST_BUCKET_BYTES = 300
    ownership.PIECE_BYTES = 100
    model = build(name, "deferred" in options and "RANK" in os.environ)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    job = hf.prepare(model, optimizer)
    rows, norms, losses = (48 if "whole" in options else NUM_SAMPLES), [], []
    calls = reads = None
    loader = DataLoader(data(rows), batch_size=GLOBAL_BATCH_SIZE, shuffle="whole" not in options)
    for _ in range(EPOCHS):
        for batch in job.batches(loader):
            losses.append(
                float(job.backward(loss_of(model, options), batch, per_virtual_node=True))
            )
            if "clip" in options:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            if "whole" not in options:
                scheduler.step()
            optimizer.zero_grad()
        with job.evaluation() as whole, torch.no_grad():
            losses.append(float(whole(data().tensors[0]).sum()))
            if "calls" in options and job.world_size > 1:
                calls = calls_of(job, whole, model, optimizer)
            if "normed" in case:
                reads = refused(lambda: whole[1].running_mean.sum())
    looks = looks_of(model) if "calls" in options and job.world_size > 1 else None
    held = (getattr(job._engine, "weight_versions", 0), getattr(job._engine, "activations_held", 0))
    owned = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    blocks = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in model.buffers()}
    buffers = sum(blocks.values())
    job.finish()
    pickle.dumps(model)  # it is the script's again, with no hook
    assert not any(vars(parameter) for parameter in model.parameters())
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    told = {"state": state, "losses": losses, "norms": norms, "held": held, "owned": owned}
    return told | {"calls": calls, "looks": looks, "buffers": buffers, "reads": reads}


if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    for case in sys.argv[2:]:
        number, text = case.split("=", 1)
        os.environ["HETFLOW_PLAN"] = str(folder / f"{number}.json")
        try:
            results[number] = train(text)
        except HetflowError as error:
            results[number] = {"error": str(error)}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
