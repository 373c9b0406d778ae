"""Trainings under pipeline plans that stop and go on. A script for the launcher, not a test.

Usage: pipeline_restarts.py FOLDER NAME...: runs FOLDER/NAME.json (see ``Run``) one after another in
the same processes; every worker writes what came out. A run that stops leaves its checkpoints as a
killed one would; one that goes on builds everything anew.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hetflow import runtime as hf
from hetflow.runtime.checkpoints import saving
from hetflow.schema.errors import HetflowError
from hetflow.tests.runtime.pipeline_cases import GLOBAL_BATCH_SIZE, OPTIMIZERS, build, data, loss_of

EPOCHS, ROWS = 2, 120


class Stop(Exception):
    """The run is killed here."""


def train(case, *, stop_at=None, asked=(), sigterm_at=None):
    """``model:optimizer``, over two epochs of five batches."""
    name, kind = case.split(":")
    model = build(name)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    job = hf.prepare(model, optimizer)
    job.register(scheduler)
    losses = {}
    loader = DataLoader(data(ROWS), batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    code, state = 0, {}
    try:
        for _ in range(EPOCHS):
            for batch in job.batches(loader):
                losses[job.num_steps] = float(job.backward(loss_of(model), batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if job.num_steps == sigterm_at and job.rank == job.world_size - 1:
                    job._session.wants_stop = True
                if job.num_steps in asked:
                    job.checkpoint()
                if job.num_steps == stop_at:
                    raise Stop
    except Stop:
        job.abandon()
    except SystemExit as stop:
        code = stop.code
    else:
        job.finish()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"state": state, "losses": losses, "lr": scheduler.get_last_lr()[0], "code": code}


def harm(saved, how):
    """Make the newest checkpoint incomplete. The others wait for the first worker's choice."""
    part = max(saved.glob("step-*")) / "part-1-of-2"
    if how == "absent":
        shutil.rmtree(part)
    elif how == "torn":
        content = (part / "tensors.bin").read_bytes()
        (part / "tensors.bin").write_bytes(content[:-9])
    else:
        shutil.rmtree(part)
        shutil.copytree(saved.parent / "flush-kept" / part.parent.name / part.name, part)


def run(folder, name):
    """One run, as its file says."""
    told = json.loads((folder / f"{name}.json").read_text())
    saving.OpenedFolders.jobs = 0
    own = f"/of-{os.environ['RANK']}" if told.get("apart") else ""  # hosts that share no disk
    settings = {
        "HETFLOW_PLAN": str(folder / told["plan"]),
        "HETFLOW_CHECKPOINT": f"{folder / told['saved']}{own}" if told["saved"] else "",
        "HETFLOW_CHECKPOINT_EVERY": str(told["every"]),
    }
    if dist.is_initialized():
        dist.barrier()  # As after a kill: all have left before any starts again.
    if told["damage"] and os.environ["RANK"] == "0":
        harm(folder / told["saved"], told["damage"])
    with mock.patch.dict(os.environ, settings):  # tests run this in their own process, too
        try:
            return train(told["case"], **told["options"])
        except HetflowError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    found = {name: run(where, name) for name in sys.argv[2:]}
    torch.save(found, where / f"rank{os.environ['RANK']}-{sys.argv[2]}.pt")
    os._exit(0)
