"""A SkyPilot task; hosts of unlike devices become the tasks of a job group.

All nodes of a SkyPilot task are alike. The tasks of a job group (``execution: parallel``; for
``sky jobs launch``) start together in one place, and find each other by names. The plan is
written by the task itself, so that no path of this machine is in the file.
"""

import re
import shlex

from ...schema.deployment import PORT, Deployment, HostGroup, Machine
from ...schema.errors import ProblemError
from ...schema.options import option
from .hosts import launch_command, preparation
from .registry import exporter
from .yaml_text import Value, yaml_text

_PLAN = '"$HOME/hetflow-plan.json"'
_AWS_ZONE = re.compile(r"([a-z]{2}(?:-[a-z]+)+-\d+)[a-z]")
_AWS_REGION = re.compile(r"[a-z]{2}(?:-[a-z]+)+-\d+")
_CLOUDS = ("aws", "azure", "gcp")


@exporter("skypilot", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def skypilot_task(deployment: Deployment, name: str) -> str:
    """Write the task for ``sky launch``, or the job group for ``sky jobs launch``.

    Args:
        deployment: What to launch. Its ``names`` are SkyPilot's names of accelerators.
        name: The plan's path, for errors.

    Raises:
        ProblemError: A host has devices of several types, or emulated ones.
    """
    if len(deployment.groups) == 1:
        return yaml_text(_task(deployment, 0, deployment.name))
    header: Value = {"name": deployment.name, "execution": "parallel"}
    tasks = [
        _task(deployment, number, f"{deployment.name}-{number}")
        for number in range(len(deployment.groups))
    ]
    return yaml_text(header, *tasks)


def _task(deployment: Deployment, number: int, task_name: str) -> Value:
    group = deployment.groups[number]
    task: dict[str, Value] = {"name": task_name}
    if group.num_hosts > 1 or len(deployment.groups) == 1:
        task["num_nodes"] = group.num_hosts
    task["workdir"] = "."
    task["resources"] = _resources(deployment, group)
    task["run"] = _program(deployment, number)
    return task


def _resources(deployment: Deployment, group: HostGroup) -> Value:
    device_type, count = group.one_type("SkyPilot")
    processors: dict[str, Value] = {"cpus": f"{deployment.cpus_per_device * count}+"}
    if device_type in deployment.host_types:
        return processors
    called = deployment.name_of(device_type, "SkyPilot")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", called):
        raise ProblemError(
            f"{called!r} is no accelerator of SkyPilot",
            hint=f"`sky gpus list` has their names: {option('names', f'{device_type}=V100-32GB')}",
        )
    wanted: dict[str, Value] = {"accelerators": f"{called}:{count}"}
    ordered: list[Value] = []
    for machine in group.machines:
        choice = {**wanted, **_place(machine)}
        if machine.cloud in _CLOUDS and choice not in ordered:
            ordered.append(choice)
    if not ordered:
        return {**wanted, **processors}
    return {"ordered": ordered}


def _place(machine: Machine) -> dict[str, Value]:
    """Where a machine is, as far as SkyPilot knows the place by the market's name."""
    zone, infra = _AWS_ZONE.fullmatch(machine.place), machine.cloud
    if machine.cloud == "aws" and zone is not None:
        infra = f"aws/{zone[1]}/{machine.place}"
    elif machine.cloud == "aws" and _AWS_REGION.fullmatch(machine.place):
        infra = f"aws/{machine.place}"
    found: dict[str, Value] = {"infra": infra, "use_spot": machine.is_spot}
    if machine.cloud == "aws":
        found["instance_type"] = machine.instance_type
    return found


def _program(deployment: Deployment, number: int) -> str:
    group, first = deployment.groups[number], deployment.first_ranks[number]
    lines = ["set -e", f"printf %s {shlex.quote(deployment.plan_text)} > {_PLAN}"]
    if deployment.num_hosts > 1:
        host = 'host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
        if len(deployment.groups) > 1:
            host = f'host="{deployment.name}-0-0.$SKYPILOT_JOBGROUP_NAME"'
        lines += [
            f"rank=$(({first} + SKYPILOT_NODE_RANK))",
            host,
            f"port={PORT}",
            f"devices={shlex.quote(group.offered)}",
        ]
    lines += preparation(deployment)
    lines.append(f"exec {launch_command(deployment, plan=_PLAN)}")
    return "\n".join(lines) + "\n"
