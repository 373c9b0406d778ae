"""A plan and a script under names that a shell would stumble over, and what they must end with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hetflow.api.formats import export
from hetflow.runtime.protocol.environment import pins
from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests import programs
from hetflow.tests.plan_parts import split_plan, whole_group

ARGUMENTS = ("it's; $(touch x)", "two\nlines", "%d")
PLAN, SCRIPT = "the plan's $(y).json", "train it.py"
_TRAINS = f"""
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
assert sys.argv[1:] == {list(ARGUMENTS)!r}, sys.argv
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
for batch in job.batches(DataLoader(data, batch_size=16)):
    job.backward(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
"""


def plan_of(*groups: tuple[str, int, int]) -> Plan:
    """(device type, number, virtual nodes of 4 samples each)."""
    made = tuple(
        whole_group(device_type=name, num_devices=number, device_batch_size=4 * nodes,
                    virtual_nodes=nodes, virtual_node_batch_size=4)
        for name, number, nodes in groups
    )  # fmt: skip
    return split_plan(
        model="a model's",
        global_batch_size=sum(group.num_devices * group.device_batch_size for group in made),
        groups=made,
        predicted=Prediction(step_seconds=0.5, samples_per_second=16.0),
        proof=Proof(
            termination="feasible", objective=0.5, lower_bound=None, gap=None, method="hand"
        ),
    )


def write_case(folder: Path) -> str:
    """Write the plan, for two unlike hosts, and the script; the digest of one device alone."""
    files.write(folder / PLAN, plan_of(("cpu:fast", 1, 2), ("cpu:slow", 2, 1)))
    files.write(folder / "alone.json", plan_of(("cpu", 1, 4)))
    (folder / SCRIPT).write_text(_TRAINS)
    variables = {
        "HETFLOW_PLAN": "alone.json",
        "HETFLOW_DETERMINISM": "elastic",
        "HETFLOW_RUN": "alone",
        **pins("elastic"),
    }
    command = [sys.executable, SCRIPT, *ARGUMENTS]
    with programs.start(command, cwd=folder, env=environment(**variables),
                        stderr=subprocess.PIPE) as alone:  # fmt: skip
        _, error = alone.communicate(timeout=120)
    assert alone.returncode == 0, error
    return digest_of(folder / "alone")


def environment(**more: str) -> dict[str, str]:
    """Variables of a script: it finds hetflow, and workers are forked from the tests' process."""
    path = f"{Path(sys.executable).parent}:{more.get('PATH', os.environ['PATH'])}"
    own = {"HETFLOW_PRELOAD": programs.preloaded(), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more, "PATH": path}


def digest_of(run: Path) -> str:
    """The digest of the parameters that a run ended with, on the devices of the plan."""
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    found: str = record["parameters_digest"]
    return found


def types_of(run: Path) -> list[str]:
    """The device types of a run's workers, in order of ranks."""
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    return [one["device_type"] for one in record["devices"]]


def write_script(folder: Path, target: str, **options: Any) -> Path:
    """Export the plan; the script's path."""
    path = folder / f"start {target}"
    path.write_text(
        export(folder / PLAN, target, SCRIPT, ARGUMENTS, determinism="elastic", **options)
    )
    return path
