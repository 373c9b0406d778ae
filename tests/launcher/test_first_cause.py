"""What a user is told when a script fails while the others are in the middle of an exchange."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.run import RunRecord

from .elastic_runs import Launch, around_script
from .test_launch import here, run, write_script

pytestmark = pytest.mark.processes

__all__ = ["here"]

# Worker 1 fails in its second pass; worker 0 has met it by then and waits for its gradients.
TRAINS = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
def loss_of(x):
    if job.rank == 1 and job.num_steps == 1:
        raise RuntimeError("Connection reset by peer")
    return model(x).pow(2).mean()
for batch in job.batches(DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=8)):
    job.backward(loss_of, batch)
"""
LOSES_A_FILE = """
import os
import torch
drawn = torch.randn
def randn(*sizes):
    if sizes == (3, 6, 6) and os.environ["RANK"] == "1":
        randn.calls += 1
        if randn.calls > 20:
            raise FileNotFoundError(2, "No such file or directory", "/data/igloo/3.jpg")
    return drawn(*sizes)
randn.calls = 0
torch.randn = randn
"""


def failed(folder: Path, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        (folder / "logs" / f"rank{rank}.failed.json").read_text(encoding="utf-8")
    )
    return found


@pytest.mark.slow
def test_an_error_that_reads_like_a_lost_peer_is_the_first_cause(here: Path) -> None:
    write_script(here, TRAINS)
    done = run("-o", "run", "plan.json", "script.py")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    last = [line for line in lines if line.startswith("hetflow: ")][-1]
    said = "failed with exit code 1: RuntimeError: Connection reset by peer"
    assert last == f"hetflow: worker 1 (cpu:slow) {said}"
    assert 'raise RuntimeError("Connection reset by peer")' in done.stderr
    assert "runtime/worker.py" not in done.stderr
    assert said in files.read(here / "run" / "run.json", RunRecord).events[0].detail
    assert failed(here / "run", 1)["lost_peer"] is False
    assert "loss_of" in str(failed(here / "run", 1)["traceback"])
    assert "raise RuntimeError" in (here / "run" / "logs" / "rank1.err").read_text()


@pytest.mark.slow
def test_a_missing_file_ends_a_launch_that_survives_deaths(tmp_path: Path) -> None:
    saving = ("--on-failure", "replace", "--checkpoint", str(tmp_path / "saved"))
    script = around_script(tmp_path / "script.py", LOSES_A_FILE)
    launch = Launch(tmp_path, [5, 3], *saving, script=script)
    code, said = launch.end()
    assert code == 1
    last = [line for line in said.splitlines() if line.startswith("hetflow: ")][-1]
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '/data/igloo/3.jpg'"
    assert last == f"hetflow: worker 1 (cpu:fast) failed with exit code 1: {missing}"
    assert "starting again" not in said
    assert missing in str(failed(launch.run, 1)["error"])
    assert "__getitem__" in str(failed(launch.run, 1)["traceback"])
    assert "'/data/igloo/3.jpg'" in (launch.run / "logs" / "rank1.err").read_text()
    assert launch.record()["events"][0]["detail"].endswith(missing)
