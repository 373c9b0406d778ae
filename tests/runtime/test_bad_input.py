"""Bad input to a running job, through the command line: one line, a way out, exit code 2."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests import programs

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "bad_input.py"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]) -> Path:
    """A folder with plans, and a checkpoint of eight virtual nodes after step 3 of 7."""
    folder = tmp_path_factory.mktemp("saved")
    for name, devices in {"a": [(4, 2)] * 2, "b": [(2, 4)] * 2, "one": [(8, 2)]}.items():
        files.write(folder / f"{name}.json", plan_of(devices))
    done = launch(folder, "one.json", 8, 100, 3)
    assert done.returncode == 0, done.stderr
    return folder


def launch(
    folder: Path, plan: str, *arguments: int, options: tuple[str, ...] = (), limit: int = 0
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hetflow.cli.main", "launch"]
    command += ["--checkpoint", str(folder / "saved"), *options, str(folder / plan), str(SCRIPT)]
    command += [*map(str, arguments), str(limit)]
    return programs.run(command, timeout=120, cwd=folder)


def refused(done: "subprocess.CompletedProcess[str]", said: str, mend: str) -> None:
    lines = [line for line in done.stderr.splitlines() if "going on from" not in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 2, done.stderr
    assert said in lines[0]
    assert "bad_input.py, line" in lines[0]
    assert lines[1].startswith("hint: ")
    assert mend in lines[1]


def test_a_checkpoint_of_another_plan_says_which_virtual_nodes_differ(saved: Path) -> None:
    done = launch(saved, "b.json", 8, 100, 0)
    refused(done, "has virtual nodes of 8 x 2 samples, this plan has 4 x 4", "the checkpoint's own")


def test_a_checkpoint_of_another_model_says_which_parameter_differs(saved: Path) -> None:
    done = launch(saved, "one.json", 9, 100, 0)
    refused(done, "0.weight is float32 [8, 5] there and float32 [9, 5] here", "own model")


def test_a_dataset_of_another_length_is_refused(saved: Path) -> None:
    done = launch(saved, "one.json", 8, 90, 0)
    refused(done, "the dataset has 90 samples, and had 100", "the same dataset")


def test_the_traceback_is_there_for_who_asks(saved: Path) -> None:
    done = launch(saved, "one.json", 9, 100, 0, options=("--debug",))
    assert done.returncode == 2
    assert "in check_fits" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hint: give the checkpoint's own model")


def test_more_devices_than_virtual_nodes_are_refused_before_a_start(saved: Path) -> None:
    plan = files.read(saved / "one.json", Plan)
    text = (saved / "one.json").read_text().replace('"num_replicas": 1', '"num_replicas": 3')
    assert plan.groups[0].num_devices == 1
    (saved / "three.json").write_text(text)
    done = launch(saved, "three.json", 8, 100, 0)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2, done.stderr


AS_ELSEWHERE = """
import torch
from torch.utils.data import DataLoader
from hetflow import runtime as hf
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "model, optimizer, loader = hf.prepare(model, optimizer, DataLoader(range(8)))",
            "got also a DataLoader",
        ),
        ("model, optimizer = hf.prepare(model, optimizer)", "hf.prepare returns one job"),
    ],
)
def test_prepare_as_other_libraries_have_it_is_refused_under_plain_python(
    tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "bad_input.py").write_text(AS_ELSEWHERE + line)
    done = programs.run([sys.executable, "bad_input.py"], timeout=60, cwd=tmp_path)
    refused(done, said, "job.batches(loader)")


@pytest.mark.slow
def test_a_full_disk_keeps_the_earlier_checkpoints_and_the_run(saved: Path, tmp_path: Path) -> None:
    """Checkpoints on the way that do not fit are warnings; the last and one asked for are not."""
    folder = tmp_path / "full"
    shutil.copytree(saved, folder)
    done = launch(folder, "a.json", 8, 100, 0, options=("--checkpoint-every", "2"), limit=700)
    assert done.returncode == 2, done.stderr
    assert "steps 14" in done.stdout
    assert "hint: earlier checkpoints are untouched; free space" in done.stderr
    assert "the checkpoint was not written: File too large" in done.stderr
    assert [path.name for path in (folder / "saved").glob("[!.]*")] == ["step-000000003"]
    asked = launch(folder, "one.json", 8, 100, 6, limit=700)
    assert asked.returncode == 2, asked.stderr
    assert "Traceback" not in asked.stderr
    assert "step-000000006: the checkpoint was not written: File too large" in asked.stderr
    assert "hint: earlier checkpoints are untouched; free space" in asked.stderr
    assert [path.name for path in (folder / "saved").glob("[!.]*")] == ["step-000000003"]
    after = launch(folder, "a.json", 8, 100, 0)
    assert after.returncode == 0, after.stderr
    assert "step 3)" in after.stderr


NORMS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
form, size = sys.argv[1], int(sys.argv[2])
for batch in job.batches(DataLoader(TensorDataset(torch.randn(16, 5)), batch_size=size)):
    if form == "loop":
        for (x,) in job.parts(batch):
            job.backward(model(x).square().mean())
    job.backward(lambda x: model(x).square().mean(), batch)
"""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "launches"),
    [
        ("function", False),
        pytest.param("loop", False, marks=slow),
        pytest.param("function", True, marks=slow),
        pytest.param("loop", True, marks=slow),
    ],
)
def test_batch_norm_of_one_sample_ends_in_one_line(
    form: str, launches: bool, tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    (tmp_path / "bad_input.py").write_text(NORMS)
    files.write(tmp_path / "plan.json", plan_of([(4, 1), (2, 6)]))
    command = ["-m", "hetflow.cli.main", "launch", "plan.json"] if launches else []
    command += ["bad_input.py", form, "16" if launches else "1"]
    done = programs.run([sys.executable, *command], timeout=120, cwd=tmp_path)
    refused(done, "layer 1 (BatchNorm1d) got one sample", "each virtual node")
    assert ("worker 0 (cpu:" in done.stderr) == launches


LEAVES = """
import os, torch
from hetflow import runtime as hf
job = hf.prepare(torch.nn.Linear(5, 1))
if job.rank == 1:
    os._exit(0)
job.batches(torch.utils.data.DataLoader(torch.randn(16, 5), batch_size=16))
"""


@slow
def test_a_worker_that_leaves_by_os_exit_is_named(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    files.write(tmp_path / "plan.json", plan_of([(2, 4), (2, 4)]))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--timeout", "20", "plan.json"]
    done = programs.run([*command, "leaves.py"], timeout=120, cwd=tmp_path)
    said = "hetflow: worker 1 (cpu:fast) ended its process in the middle of the script"
    assert done.returncode == 1, done.stderr
    assert any(line.startswith(said) for line in done.stderr.splitlines()), done.stderr
