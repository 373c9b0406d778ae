"""Shell scripts that are started by hand on each host, with its rank.

``hosts`` runs ``hetflow launch``, ``torchrun`` its launcher: torchrun's role states each host's
device type, by which workers find their places in the plan (``runtime/protocol/environment.py``).
Its restart rules apply, not hetflow's.
"""

import json
import shlex
from collections.abc import Iterator, Sequence

from ...schema.deployment import PORT, Deployment, HostGroup
from .registry import exporter


def remark(text: str) -> str:
    """A text within a comment: it has no line break."""
    return json.dumps(text)[1:-1].replace("\x7f", "")


def case_of_host(deployment: Deployment, values: Sequence[str]) -> Iterator[str]:
    """Lines that run one of several shell commands, by the host's ``$rank``."""
    if len(values) == 1:
        yield values[0]
        return
    ends = [*deployment.first_ranks[1:], deployment.num_hosts]
    for number, (end, value) in enumerate(zip(ends, values, strict=True)):
        yield f'{"elif" if number else "if"} [ "$rank" -lt {end} ]; then'
        yield f"  {value}"
    yield "else"
    yield (
        f'  echo "host $rank: the plan has {deployment.num_hosts} hosts, 0 to'
        f' {deployment.num_hosts - 1}" >&2'
    )
    yield "  exit 2"
    yield "fi"


def preparation(deployment: Deployment) -> Iterator[str]:
    """Lines before the launch: the folder to start in, and the user's own."""
    if deployment.directory is not None:
        yield f"cd -- {shlex.quote(deployment.directory)}"
    yield from deployment.setup


def launch_command(
    deployment: Deployment,
    *,
    plan: str | None = None,
    folder: str | None = None,
) -> str:
    """``hetflow launch`` on one host of a deployment.

    Args:
        deployment: What to launch.
        plan: The shell's word for the plan's path; None takes the user's.
        folder: The shell's word for the run's folder; None takes one that no other host has,
            should they share a folder.
    """
    words = ["hetflow", "launch"]
    if deployment.num_hosts > 1:
        words += ["--nnodes", str(deployment.num_hosts), "--node-rank", '"$rank"']
        words += ["--rdzv-endpoint", '"$host:$port"', "--devices", '"$devices"']
    words += ["--seed", str(deployment.seed), "--determinism", deployment.determinism]
    if deployment.checkpoint is not None:
        words += ["--checkpoint", shlex.quote(deployment.checkpoint)]
        words += ["--checkpoint-every", str(deployment.checkpoint_every)]
    if folder is None and deployment.num_hosts > 1:
        folder = f'"hetflow-runs/{deployment.name}-$(date +%Y%m%d-%H%M%S)-host$rank"'
    if folder is not None:
        words += ["--output", folder]
    words += ["--", plan or shlex.quote(deployment.plan), shlex.join(deployment.script)]
    return " ".join(words)


def offers(groups: Sequence[HostGroup]) -> list[str]:
    """The assignments of ``devices`` for each group."""
    return [f"devices={shlex.quote(group.offered)}" for group in groups]


@exporter("torchrun", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def torchrun_script(deployment: Deployment, name: str) -> str:
    """Write a script that runs torchrun on one host.

    Raises:
        ProblemError: A host has devices of several types: one torchrun states one.
    """
    held = [group.one_type("torchrun") for group in deployment.groups]
    roles = [f"role={shlex.quote(device_type)} workers={number}" for device_type, number in held]
    words = ["torchrun", '--nproc-per-node "$workers"', '--role "$role"']
    if deployment.num_hosts > 1:
        words += [
            f"--nnodes {deployment.num_hosts}",
            "--rdzv-backend c10d",
            f"--rdzv-id {deployment.name}",
            '--rdzv-endpoint "$host:$port"',
        ]
    else:
        words.append("--standalone")
    variables = {
        "HETFLOW_PLAN": deployment.plan,
        "HETFLOW_SEED": str(deployment.seed),
        "HETFLOW_DETERMINISM": deployment.determinism,
        **deployment.pins,
    }
    if deployment.checkpoint is not None:
        variables["HETFLOW_CHECKPOINT"] = deployment.checkpoint
        variables["HETFLOW_CHECKPOINT_EVERY"] = str(deployment.checkpoint_every)
    script = list(deployment.script)
    module = ["-m"] if script[0] == "-m" else []
    words += [*module, shlex.join(script[len(module) :])]
    lines = [
        *_head(deployment, name),
        *case_of_host(deployment, roles),
        *preparation(deployment),
        *(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
        f'export HETFLOW_RUN="${{HETFLOW_RUN:-hetflow-runs/{deployment.name}-torchrun}}"',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',  # more threads than cores are slow
        f"exec {' '.join(words)}",
    ]
    return "\n".join(lines) + "\n"


@exporter("hosts", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def hosts_script(deployment: Deployment, name: str) -> str:
    """Write a script that runs ``hetflow launch`` on one host."""
    lines = _head(deployment, name)
    if deployment.num_hosts > 1:
        lines += case_of_host(deployment, offers(deployment.groups))
    lines += [*preparation(deployment), f"exec {launch_command(deployment)}"]
    return "\n".join(lines) + "\n"


def _head(deployment: Deployment, name: str) -> list[str]:
    """The first lines: how the script is started on each host, and what it takes there."""
    lines = ["#!/usr/bin/env bash", f"# Plan: {remark(name)}; {remark(deployment.summary)}"]
    if deployment.num_hosts == 1:
        machine = _machine(deployment.groups[0])
        rented = [f"# Rent {machine}"] if machine else []
        return [*lines, *rented, "# Start it on the host: bash THIS_FILE", "set -e"]
    lines.append(
        "# Start it on each host, with the same HETFLOW_TOKEN: bash THIS_FILE RANK HOST0 [PORT]"
    )
    for first, group in zip(deployment.first_ranks, deployment.groups, strict=True):
        last = first + group.num_hosts - 1
        ranks = f"host {first}" if last == first else f"hosts {first} to {last}"
        machine = _machine(group)
        rent = f" each; rent {machine}" if machine else ""
        lines.append(f"#   {ranks}: {remark(group.offered)}{rent}")
    return [
        *lines,
        "set -e",
        "rank=${1:?give the rank of this host}",
        "host=${2:?give the name of host 0}",
        f"port=${{3:-{PORT}}}",
    ]


def _machine(group: HostGroup) -> str:
    """The cheapest machine to rent for a host, and its price; empty if no market names any."""
    if not group.machines:
        return ""
    one = group.machines[0]
    kind = "spot" if one.is_spot else "on demand"
    title = f"{one.cloud} {one.place} {one.instance_type} {kind}"
    return f"{remark(title)} at {one.dollars_per_hour:g} $/h"
