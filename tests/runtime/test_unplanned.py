"""A script that trains, but not under its plan, ends with exit code 2 before its first update."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests import programs

pytestmark = pytest.mark.processes

START = """
import pathlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 5)), batch_size=8)
"""
LOOP = """
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    pathlib.Path("updated").touch()
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
"""
PREPARED = """
from hetflow import runtime as hf
job = hf.prepare(model, optimizer)
"""
BY_HAND = """
for (x,) in loader:
    model(x).square().mean().backward()
"""
UPDATED_BY_HAND = """
for (x,) in loader:
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""
UNPLANNED = {
    "a plain loop": (
        START + LOOP,
        "SGD steps, and the script has not called hf.prepare, so 2 trainings would run side by "
        "side, each on whole batches (batch_size 8)",
    ),
    "DDP": (
        START + DDP + LOOP,
        "trains on a batch of no loader that hetflow has cut",
    ),
    "the old loop was left": (
        START + PREPARED + LOOP,
        "SGD steps, and there was no job.backward since hf.prepare",
    ),
    "without an optimizer": (START + BY_HAND, "there are gradients, and the script has not called"),
    "updated by hand": (
        START + UPDATED_BY_HAND,
        "there are gradients, and the script has not called",
    ),
    "prepared, and updated by hand": (
        START + PREPARED + UPDATED_BY_HAND,
        "trained by backward passes of its own",
    ),
}


def launch(folder: Path, plan: Plan, script: str) -> tuple[int, str]:
    files.write(folder / "plan.json", plan)
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "plan.json", "script.py"]
    done = programs.run(command, timeout=120, cwd=folder)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNPLANNED)
def test_a_training_that_is_not_under_its_plan_is_refused(
    kind: str, tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    script, said = UNPLANNED[kind]
    code, stderr = launch(tmp_path, plan_of([(2, 2), (2, 2)]), script)
    assert code == 2, stderr
    last = [line for line in stderr.splitlines() if line.startswith("hetflow: ")][-1]
    assert said in last
    assert "hint: " in stderr
    assert "Traceback" not in stderr
    assert (
        "hand" in kind
        or kind == "without an optimizer"
        or "script.py, line" in last.rpartition("(")[2]
    )
    assert not (tmp_path / "updated").exists()


@pytest.mark.slow
def test_a_script_that_does_not_train_ends_well_and_is_told_the_truth(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    code, stderr = launch(tmp_path, plan_of([(2, 2), (2, 2)]), START + "print(model)\n")
    assert code == 0, stderr
    assert "every worker ran all of it, and nothing was trained under the plan" in stderr
