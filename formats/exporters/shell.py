"""The shell that starts hetflow on one host; exporters of scripts put it into theirs."""

import json
import shlex
from collections.abc import Iterator, Sequence

from ...schema.deployment import Deployment, HostGroup


def quoted(text: str) -> str:
    """A text as one word of a shell, whatever is in it."""
    return shlex.quote(text)


def joined(words: Sequence[str]) -> str:
    """Words as one command of a shell, whatever is in them."""
    return shlex.join(words)


def remark(text: str) -> str:
    """A text within a comment: it has no line break."""
    return json.dumps(text)[1:-1].replace("\x7f", "")


def case_of_host(deployment: Deployment, values: Sequence[str]) -> Iterator[str]:
    """Lines that run one of several shell commands, by the host's ``$rank``.

    Args:
        deployment: The hosts.
        values: One command for each group.
    """
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
        yield f"cd -- {quoted(deployment.directory)}"
    yield from deployment.setup


def launch_command(
    deployment: Deployment,
    *,
    plan: str | None = None,
    devices: str = '"$devices"',
    endpoint: str = '"$host:$port"',
    folder: str | None = None,
) -> str:
    """``hetflow launch`` on one host of a deployment.

    Args:
        deployment: What to launch.
        plan: The shell's word for the plan's path; None takes the user's.
        devices: The shell's word for what this host offers.
        endpoint: The shell's word for the rendezvous.
        folder: The shell's word for the run's folder; None takes one that no other host has,
            should they share a folder.
    """
    words = ["hetflow", "launch"]
    if deployment.num_hosts > 1:
        words += ["--nnodes", str(deployment.num_hosts), "--node-rank", '"$rank"']
        words += ["--rdzv-endpoint", endpoint, "--devices", devices]
    words += ["--seed", str(deployment.seed), "--determinism", deployment.determinism]
    if deployment.checkpoint is not None:
        words += ["--checkpoint", quoted(deployment.checkpoint)]
        words += ["--checkpoint-every", str(deployment.checkpoint_every)]
    if folder is None and deployment.num_hosts > 1:
        folder = f'"hetflow-runs/{deployment.name}-$(date +%Y%m%d-%H%M%S)-host$rank"'
    if folder is not None:
        words += ["--output", folder]
    words += ["--", plan or quoted(deployment.plan), joined(deployment.script)]
    return " ".join(words)


def offers(groups: Sequence[HostGroup]) -> list[str]:
    """The assignments of ``devices`` for each group."""
    return [f"devices={quoted(group.offered)}" for group in groups]


def on_each_host(deployment: Deployment, token: str) -> list[str]:
    """Comments that say how a script for all hosts is started.

    Args:
        deployment: The hosts.
        token: What the hosts must have besides.
    """
    if deployment.num_hosts == 1:
        machine = _machine(deployment.groups[0])
        return [
            *([f"# Rent {machine}"] if machine else []),
            "# Start it on the host: bash THIS_FILE",
        ]
    lines = [f"# Start it on each host, with {token}: bash THIS_FILE RANK HOST0 [PORT]"]
    for first, group in zip(deployment.first_ranks, deployment.groups, strict=True):
        last = first + group.num_hosts - 1
        ranks = f"host {first}" if last == first else f"hosts {first} to {last}"
        machine = _machine(group)
        rented = f" each; rent {machine}" if machine else ""
        lines.append(f"#   {ranks}: {remark(group.offered)}{rented}")
    return lines


def _machine(group: HostGroup) -> str:
    """The cheapest machine to rent for a host, and its price; empty if no market names any."""
    if not group.machines:
        return ""
    one = group.machines[0]
    kind = "spot" if one.is_spot else "on demand"
    title = f"{one.cloud} {one.place} {one.instance_type} {kind}"
    return f"{remark(title)} at {one.dollars_per_hour:g} $/h"
