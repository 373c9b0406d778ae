"""What scripts do under pipeline plans. A script for the launcher, not a test.

Usage: pipeline_scripts.py FOLDER NUMBER=CASE...: CASE is ``function:argument`` of this file,
trained under FOLDER/NUMBER.json, one after another in the same processes.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from hetflow import runtime as hf
from hetflow.runtime.pipeline import norms
from hetflow.schema.errors import HetflowError, TargetError
from hetflow.tests.runtime.pipeline_cases import GLOBAL_BATCH_SIZE, OPTIMIZERS, build, data, loss_of


def start(kind="momentum", name="chain", *, reads_first_feature=True):
    model = build(name)
    if not reads_first_feature:
        with torch.no_grad():
            model[0].weight[:, 0] = 0.0
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, hf.prepare(model, optimizer)


def loader(rows=48):
    return DataLoader(data(rows), batch_size=GLOBAL_BATCH_SIZE)


def clip(argument):
    """Clipping by a norm, or by value."""
    model, optimizer, job = start()
    norms = []
    for _ in range(2):
        for batch in job.batches(loader()):
            job.backward(loss_of(model), batch)
            if argument == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, float(argument))
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    return model, job, norms


def turns(argument):
    """Another norm with each batch, of which some are asked late; or with a part left out."""
    model, optimizer, job = start()
    if argument == "frozen":
        for parameter in model[:4].parameters():
            parameter.requires_grad_(False)
    noted = []
    for _ in range(3):
        for batch, norm in zip(job.batches(loader()), ORDERS[job.num_steps :], strict=False):
            job.backward(loss_of(model), batch)
            if argument != "adds" or job.num_steps % 2 == 0:
                noted.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                # Of gradients that are clipped already.
                noted.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm)))
                optimizer.step()
                optimizer.zero_grad()
    return model, job, noted


def alone(argument):
    """A norm that one worker asks for, and only after the first step."""
    model, _, job = start()
    norms.PATIENCE_SECONDS = 0.5
    for batch in job.batches(loader()):
        job.backward(loss_of(model), batch)
    if not job.is_main:
        raise TargetError("the main worker asks by itself")
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, math.inf)


ORDERS = [2.0, 2.0, math.inf, 1.0, 2.0, math.inf]


def scaled(argument):
    """A GradScaler; at the second step the first layer's gradient overflows, and no other."""
    model, optimizer, job = start(reads_first_feature=False)
    enabled = argument != "first" or job.rank == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)

    def loss(x, y):
        first = torch.full_like(x[:, :1], 1e308 if job.num_steps == 1 else 0.0)
        return loss_of(model)(torch.cat([first, x[:, 1:]], 1), y)

    noted = []
    for _ in range(3):
        for batch in job.batches(loader()):
            job.backward(loss, batch, scaler=scaler)
            scaler.unscale_(optimizer)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            noted += [scaler.get_scale(), norm if job.num_steps != 2 else 0.0]
    return model, job, noted


def hooked(argument):
    """A hook on a parameter, put there after prepare."""
    model, _, job = start()
    model[6].weight.register_hook(torch.relu)
    for batch in job.batches(loader()):
        job.backward(loss_of(model), batch)


def decayed(argument):
    """A loss that reads the last stage's parameters, which is as on one device."""
    model, optimizer, job = start()

    def loss(x, y):
        return nn.functional.cross_entropy(model(x), y) + 0.01 * (model[6].weight ** 2).sum()

    for batch in job.batches(loader()):
        job.backward(loss, batch)
        optimizer.step()
        optimizer.zero_grad()
    return model, job, []


def slower(argument):
    """A learning rate that halves with each batch."""
    model, optimizer, job = start(argument)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        for batch in job.batches(loader()):
            job.backward(loss_of(model), batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, job, [scheduler.get_last_lr()[0]]


def left(argument):
    """An epoch that is left after its first batch, or has no more than that."""
    model, optimizer, job = start("adam")
    first = loader()
    if argument == "short":
        first = DataLoader(Subset(data(48), range(24)), batch_size=GLOBAL_BATCH_SIZE)
    for epoch in range(2):
        for batch in job.batches(loader() if epoch else first):
            job.backward(loss_of(model), batch)
            optimizer.step()
            if not epoch:
                break
    return model, job, []


def one_epoch(argument):
    """As many rows as the argument says, with whatever stands after a comma."""
    rows, _, what = argument.partition(",")
    if what == "lbfgs":
        model = build("chain")
        return model, hf.prepare(model, torch.optim.LBFGS(model.parameters())), []
    model, _, job = start()
    for batch in job.batches(loader(int(rows))):
        job.backward(loss_of(model), batch)
    return model, job, []


def train(case):
    """One case; what came out."""
    name, _, argument = case.partition(":")
    model, job, noted = globals()[name](argument)
    job.finish()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"state": state, "noted": noted}


if __name__ == "__main__":
    where, results = Path(sys.argv[1]), {}
    for case in sys.argv[2:]:
        number, text = case.split("=", 1)
        os.environ["HETFLOW_PLAN"] = str(where / f"{number}.json")
        try:
            results[number] = train(text)
        except HetflowError as error:
            results[number] = {"error": f"{error} ({error.hint})"}
    torch.save(results, where / f"rank{os.environ['RANK']}.pt")
    os._exit(0)
