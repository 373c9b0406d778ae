"""``hetflow launch`` of a pipeline plan: the record, and a worker killed in the middle."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

pytestmark = pytest.mark.processes

SCRIPT = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

how, where = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else ("", -1)
here = os.path.dirname(__file__)
torch.manual_seed(0)

class Labels(nn.Module):
    def forward(self, x):
        return {"x": x + 1 if bool(x.sum() > 1e9) else x}

class Head(nn.Linear):
    def forward(self, labelled):
        x = labelled["x"]
        return super().forward(x if bool(x.sum() < 1e9) else x * 2)

inner, last = (Labels(), Head(8, 3)) if how == "labels" else (nn.Tanh(), nn.Linear(8, 3))
model = nn.Sequential(nn.Linear(6, 8), inner, last)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
job.register(scheduler)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
for epoch in range(2):
    for batch in job.batches(DataLoader(data, batch_size=8, shuffle=True)):
        calls = []
        def loss_of(x, y):
            calls.append(x)
            # In the middle of a step: one microbatch has passed, others are on their way.
            if how in ("die", "hang") and (job.num_steps, job.rank, len(calls)) == (where, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)
            if how == "stop" and (job.num_steps, job.rank, len(calls)) == (where, 0, 2):
                pathlib.Path(here, "stopping").touch()
                while not pathlib.Path(here, "stopped").exists():
                    time.sleep(0.01)
            over = "sum" if how == "sum" else "mean"
            loss = nn.functional.cross_entropy(model(x), y, reduction=over)
            return loss + model[0].weight.pow(2).sum() if how == "decay" else loss
        job.backward(loss_of, batch)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def plan(tmp_path: Path, two_stages: Plan) -> Path:
    files.write(tmp_path / "plan.json", two_stages)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "plan.json"


def command(plan: Path, *arguments: str, flags: tuple[str, ...] = (), run: str = "run"):
    folder = plan.parent
    launch = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", str(folder / run), *flags]
    return [*launch, str(plan), str(folder / "train.py"), *arguments]


def launch(plan: Path, *arguments: str, flags: tuple[str, ...] = (), run: str = "run"):
    return programs.run(command(plan, *arguments, flags=flags, run=run), timeout=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, two_stages: Plan):
    """The record of a run that nothing disturbs, by schedule; each made once."""
    records: dict[str, RunRecord] = {}

    def of(schedule: str) -> RunRecord:
        if schedule not in records:
            folder = tmp_path_factory.mktemp(schedule)
            plan = folder / "plan.json"
            files.write(plan, dataclasses.replace(two_stages, schedule=schedule))
            (folder / "train.py").write_text(SCRIPT)
            done = launch(plan, flags=saving(plan))
            assert done.returncode == 0, done.stderr
            records[schedule] = files.read(folder / "run" / "run.json", RunRecord)
        return records[schedule]

    return of


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory, two_stages: Plan):
    """A launch in which a worker hangs; it waits beside the tests that ask for it first."""
    folder = tmp_path_factory.mktemp("hanging")
    plan = folder / "plan.json"
    files.write(plan, two_stages)
    (folder / "train.py").write_text(SCRIPT)
    started = programs.start(
        command(plan, "hang", "1", flags=("--timeout", "5")),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    yield started
    started.kill()
    started.communicate()


@pytest.mark.usefixtures("hanging")
@pytest.mark.slow
def test_the_record_holds_prediction_beside_measurement(whole) -> None:
    record = whole("1f1b")
    assert record.plan.kind == "pipeline"
    assert [device.predicted_compute_seconds for device in record.devices] == [0.08, 0.08]
    assert record.num_steps == 10
    # Emulated passes are held: no step can be shorter than (4 + 1) passes of 20 ms.
    assert record.measured_step_seconds is not None
    assert record.measured_step_seconds > 0.095
    assert record.parameters_digest is not None
    assert record.events == ()


def saving(plan: Path) -> tuple[str, ...]:
    saved = str(plan.parent / "saved")
    return ("--checkpoint", saved, "--checkpoint-every", "2", "--determinism", "static")


def go_on(plan: Path) -> tuple[str, str | None]:
    """The same command again: what it says, and the digest it ends with."""
    again = launch(plan, flags=saving(plan), run="again")
    assert again.returncode == 0, again.stderr
    record = files.read(plan.parent / "again" / "run.json", RunRecord)
    return again.stderr, record.parameters_digest


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("pipedream", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_all_is_named_and_a_restart_ends_as_if_undisturbed(
    plan: Path, two_stages: Plan, whole, schedule: str
) -> None:
    files.write(plan, dataclasses.replace(two_stages, schedule=schedule), force=True)
    died = launch(plan, "die", "5", flags=(*saving(plan), "--on-failure", "stop"), run="died")
    assert died.returncode == 137
    assert "worker 1 (stage 1, cpu:slow) was killed by SIGKILL" in died.stderr
    record = json.loads((plan.parent / "died" / "run.json").read_text())
    assert record["status"] == "failed"
    said, digest = go_on(plan)
    assert "step-000000004 (step 4)" in said
    assert digest == whole(schedule).parameters_digest


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.slow
def test_a_stop_saves_and_a_restart_ends_as_if_undisturbed(
    plan: Path, two_stages: Plan, whole, schedule: str
) -> None:
    files.write(plan, dataclasses.replace(two_stages, schedule=schedule), force=True)
    stopped = programs.run_until_stopped(
        command(plan, "stop", "4", flags=saving(plan), run="interrupted"),
        plan.parent / "stopping", plan.parent / "stopped", timeout=300,
    )  # fmt: skip
    assert stopped.returncode == 143, stopped.stderr
    assert "asked to stop; " in stopped.stderr
    newest = max((plan.parent / "saved").glob("step-*"))
    assert {part.name for part in newest.iterdir()} == {"part-0-of-2", "part-1-of-2", "complete"}
    if schedule == "1f1b":
        assert f"saved {plan.parent / 'saved'}, step {int(newest.name[5:])}" in stopped.stderr
    assert go_on(plan)[1] == whole(schedule).parameters_digest


def test_a_worker_that_hangs_is_named_after_the_time_limit(hanging) -> None:
    _, said = hanging.communicate(timeout=300)
    assert hanging.returncode == 1
    last = [line for line in said.splitlines() if line.startswith("hetflow: ")][-1]
    assert last.startswith("hetflow: worker 1 (stage 1, cpu:slow) hangs: worker 0 (stage 0, cpu:")


@pytest.mark.parametrize("level", ["elastic", "heterogeneous"])
def test_levels_over_mappings_are_refused_before_anything_starts(plan: Path, level: str) -> None:
    refused = launch(plan, flags=("--determinism", level))
    assert (refused.returncode, refused.stdout) == (2, "")
    first, hint = refused.stderr.splitlines()
    assert first.startswith(f"hetflow: determinism {level} is for split plans")
    assert hint.startswith("hint: use --determinism static")
    assert not (plan.parent / "run").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "decay",
            "worker 1 (stage 1, cpu:slow) failed with exit code 2: 0.weight is read, and only",
        ),
        pytest.param(
            "sum",
            "worker 1 (stage 1, cpu:slow) failed with exit code 2: the loss of 2 samples is ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "labels",
            "'_1', which crosses from stage 0 to stage 1, is a dict",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_one_line(plan: Path, how: str, said: str) -> None:
    refused = launch(plan, how, "0")
    assert refused.returncode == 2
    assert said in [line for line in refused.stderr.splitlines() if "hetflow: " in line][-1]
    assert "Traceback" not in refused.stderr
