"""Profile, solve, launch, correct, solve, launch: on a real core, nothing emulated."""

import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

pytestmark = pytest.mark.measures

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

def make():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

def workload():
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    return make(), lambda n: (torch.randn(n, 256), torch.zeros(n, dtype=torch.long)), loss

if __name__ == "__main__":
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job = hf.prepare(model, optimizer)
    data = TensorDataset(torch.randn(64 * 40, 256), torch.zeros(64 * 40, dtype=torch.long))
    for batch in job.batches(DataLoader(data, batch_size=64)):
        job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
"""


def hetflow(folder: Path, *arguments: str) -> str:
    done = programs.run(
        [sys.executable, "-m", "hetflow.cli.main", *arguments],
        cwd=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_corrected_profile_gives_the_run_its_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    sizes = ("--batch-sizes", "8,16,32", "--sync-devices", "0", "--optimizer", "sgd-momentum")
    hetflow(tmp_path, "profile", "train.py:workload", "--device", "cpu", "--quick", *sizes)
    solve = ("solve", "--gpus", "1xcpu", "--batch-size", "64", "--virtual-nodes", "4")
    hetflow(tmp_path, *solve, "--profiles", "profiles", "-o", "plan.json")
    said = hetflow(tmp_path, "launch", "-o", "runs/first", "plan.json", "train.py")
    assert "4 virtual nodes of 16" in said
    run = files.read(tmp_path / "runs" / "first" / "run.json", RunRecord)
    measured = run.measured_step_seconds
    assert measured is not None
    of_plan = [entry.term for entry in run.terms if not entry.term.startswith("passes, if only")]
    assert of_plan[-2:] == ["fixed cost", "update"]

    from_run = ("profile", "--from-run", "runs/first", "--profiles", "profiles", "-o", "corrected")
    hetflow(tmp_path, *from_run)
    profile = files.read(tmp_path / "corrected" / "train.workload.cpu.json", Profile)
    points = {point.batch_size: point for point in profile.batch_curve}
    by_terms = 4 * points[16].step_seconds + (profile.fixed_seconds or 0) + profile.update_seconds
    assert by_terms == pytest.approx(measured, rel=0.03)
    assert profile.provenance is not None
    assert profile.provenance["corrections"][0]["runs"][0]["run"] == "runs/first"

    hetflow(tmp_path, *solve, "--profiles", "corrected", "-o", "again.json")
    hetflow(tmp_path, *solve, "--profiles", "profiles", "--runs", "runs", "-o", "folded.json")
    again, folded = (files.read(tmp_path / name, Plan) for name in ("again.json", "folded.json"))
    assert again.predicted == folded.predicted
    assert again.groups == folded.groups
    hetflow(tmp_path, "launch", "-o", "runs/second", "again.json", "train.py")
    second = files.read(tmp_path / "runs" / "second" / "run.json", RunRecord)
    errors = [run.step_seconds_error, second.step_seconds_error]
    print(f"errors of the first and the second launch: {errors}")  # noqa: T201
