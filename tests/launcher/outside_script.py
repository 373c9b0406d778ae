"""What a script does between steps, for deaths there: predictions, and a collective of its own.

``outside_script.py RESULT EPOCHS SECONDS``, as elastic_script.py takes them. With WHAT set to
``main`` or ``all`` it predicts after each epoch, for the main worker or for all; with ``own`` it
calls a collective of its own, with ``wait`` one that it waits for itself, with ``group`` one in a
process group of its own. A worker whose file
``stop-NAME`` is there stops in the middle of that, leaves ``stopped-NAME`` with its process id,
and waits. The outputs go into RESULT.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.nested_tensors import digest_of
from hetflow.tests.launcher.saved_log import Log

NUM_SAMPLES, BATCH = 48, 16
result, epochs = Path(sys.argv[1]), int(sys.argv[2])
what, worker = os.environ["WHAT"], os.environ["HETFLOW_WORKER"]
stop = result.parent / f"stop-{worker}"


def hold(place: str) -> None:
    """Stop here for good, if the test wants it."""
    if stop.exists() and stop.read_text() == place:
        stop.with_name(f"stopped-{worker}").write_text(str(os.getpid()))
        time.sleep(600)


torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
(optimizer,) = job._session.optimizers
log = Log()
job.register(log)
data = TensorDataset(torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(4)))
loader, in_order = DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
outputs: list[float] = []


def predicted(x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] in data.tensors[0][[20, 22], 0]:  # the first two workers' of the second batch
        hold("pass")
    return model(x).sum(1) + torch.rand(len(x))


group = dist.new_group() if what == "group" and job.world_size > 1 else None
for epoch in range(epochs):
    for batch in job.batches(loader):
        job.backward(lambda x: model(x).square().mean(), batch)
        optimizer.step()
        optimizer.zero_grad()
    if what in ("own", "wait", "group"):
        hold("own")
        if job.world_size > 1:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=what == "wait")
            if work is not None:
                work.wait()
    elif len(log.values) == epoch:  # else the others have done it before this worker came
        outputs = []
        for number, part in enumerate(job.predict(in_order, predicted, on_all=what == "all")):
            outputs += part.tolist()
            if number == 10:
                hold("body")
        log.values.append(sum(outputs) if what == "all" else 0.0)
job.finish()
if job.is_main:
    told = [digest_of(dict(model.state_dict())), log.values, outputs, job.num_steps]
    result.write_text(hashlib.sha256(json.dumps(told).encode()).hexdigest())
