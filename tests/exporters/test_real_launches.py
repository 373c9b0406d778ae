"""Exported scripts start plans for real: on Slurm's and Ray's nodes, by torchrun, and by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetflow.api.export import export
from hetflow.schema import files
from hetflow.schema.plan import DeviceGroup, Prediction, Proof, SplitPlan
from hetflow.tests import programs
from hetflow.tests.engines import ray_nodes, slurm_daemons

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
assert sys.argv[1:] == ["it's; $(touch x)", "two\\nlines", "%d"], sys.argv
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
for epoch in range(int(__import__("os").environ.get("EPOCHS", "2"))):
    for batch in job.batches(DataLoader(data, batch_size=16)):
        job.backward(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[3] != "%d":
            time.sleep(0.1)
"""
ARGUMENTS = ("it's; $(touch x)", "two\nlines", "%d")


def plan_of(*groups: tuple[str, int, int]) -> SplitPlan:
    """(device type, number, virtual nodes of 4 samples each)."""
    made = tuple(
        DeviceGroup(device_type=name, num_devices=number, device_batch_size=4 * nodes,
                    virtual_nodes=nodes, virtual_node_batch_size=4)
        for name, number, nodes in groups
    )  # fmt: skip
    return SplitPlan(
        model="a model's",
        global_batch_size=sum(group.num_devices * group.device_batch_size for group in made),
        groups=made,
        predicted=Prediction(step_seconds=0.5, samples_per_second=16.0),
        proof=Proof(
            termination="feasible", objective=0.5, lower_bound=None, gap=None, method="hand"
        ),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script and a plan for unlike devices, under names that a shell would stumble over."""
    made = tmp_path_factory.mktemp("a folder's $(x)")
    files.write(made / "the plan's $(y).json", plan_of(("cpu:fast", 1, 2), ("cpu:slow", 2, 1)))
    files.write(made / "alone.json", plan_of(("cpu", 1, 4)))
    (made / "train it.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def digest(folder: Path) -> str:
    """What one device alone ends with."""
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", "alone"]
    command += ["--determinism", "elastic", "alone.json", "train it.py", *ARGUMENTS]
    started = programs.start(
        command, cwd=folder, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    _, error = started.communicate(timeout=120)
    assert started.wait() == 0, error
    return digest_of(folder / "alone")


def digest_of(run: Path) -> str:
    found: str = json.loads((run / "run.json").read_text())["parameters_digest"]
    return found


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{more.get('PATH', os.environ['PATH'])}"
    return {**os.environ, **more, "PATH": path, "OMP_NUM_THREADS": "1"}


def written(folder: Path, target: str, **options: object) -> Path:
    text = export(
        folder / "the plan's $(y).json", target, "train it.py", ARGUMENTS, determinism="elastic",
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    path = folder / f"start {target}"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    reason = slurm_daemons.why_not()
    if reason:
        pytest.skip(reason)
    with slurm_daemons.slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield environment(**variables)


def test_a_heterogeneous_job_of_slurm_trains_the_plan(
    folder: Path, digest: str, slurm: dict[str, str]
) -> None:
    names = {"cpu:fast": "cpu_fast", "cpu:slow": "feature:cpu_slow"}
    script = written(folder, "slurm", names=names, directives=["--mem=300M"])
    done = subprocess.run(
        ["sbatch", "--wait", "--parsable", "-o", "out", str(script)],
        cwd=folder, env=slurm, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = (folder / "out").read_text()
    assert done.returncode == 0, (done.stderr, said)
    [run] = (folder / "hetflow-runs").glob("a-model-s-*")
    assert digest_of(run / "host0") == digest
    held = json.loads((run / "host0" / "run.json").read_text())["devices"]
    assert [one["device_type"] for one in held] == ["cpu:fast", "cpu:slow", "cpu:slow"]
    assert not (folder / "x").exists()


def test_a_job_of_slurm_that_is_asked_to_leave_saves(folder: Path, slurm: dict[str, str]) -> None:
    names = {"cpu:fast": "cpu_fast", "cpu:slow": "feature:cpu_slow"}
    text = export(
        folder / "the plan's $(y).json", "slurm", "train it.py", (*ARGUMENTS[:2], "slow"),
        determinism="elastic", names=names, checkpoint="its states", directives=["--mem=300M"],
    )  # fmt: skip
