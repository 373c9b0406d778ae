"""A launch of a plan whose schedule is a plug-in's: workers find it as the controller does."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.run import RunRecord
from hetflow.schema.schedule import SCHEDULES
from hetflow.tests import programs
from hetflow.tests.examples.plugins import PLUGINS, forget, install

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))
for batch in job.batches(DataLoader(data, batch_size=8)):
    job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_workers_find_the_schedule_and_train_as_1f1b_does(
    tmp_path: Path, two_stages: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(PLUGINS / "eager_1f1b", site)
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "train.py").write_text(SCRIPT)
    digests = []
    try:
        for schedule in ("1f1b", "eager-1f1b"):
            plan, run = tmp_path / f"{schedule}.json", tmp_path / schedule
            files.write(plan, dataclasses.replace(two_stages, schedule=schedule))
            done = programs.run(
                [sys.executable, "-m", "hetflow", "launch", "-o", run, plan, tmp_path / "train.py"],
                timeout=300,
                env={**os.environ, "PYTHONPATH": str(site)},
            )
            assert done.returncode == 0, done.stderr
            digests.append(files.read(run / "run.json", RunRecord).parameters_digest)
    finally:
        forget(SCHEDULES, "eager-1f1b", modules=("eager_1f1b",))
    assert digests[0] is not None
    assert digests[1] == digests[0]
