"""The shell that starts hetflow on one host; exporters of scripts put it into theirs."""

import json
import shlex
from collections.abc import Iterator, Sequence

from ...schema.deployment import Deployment, HostGroup


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
