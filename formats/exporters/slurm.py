"""A Slurm batch script; hosts of unlike devices become the components of a heterogeneous job.

One ``srun`` step covers all components: its tasks, one a host, are numbered through, and
``SLURM_PROCID`` is the host's rank. Slurm sends a signal to all processes of a step, and a second
SIGTERM ends a worker before it has saved. So the step is asked by SIGURG, which all but the task's
own shell ignore; this one sends the launch SIGTERM.
"""

import re
from collections.abc import Iterator

from ...schema.deployment import Deployment, HostGroup
from ...schema.errors import ProblemError
from ...schema.options import option
from .hosts import case_of_host, launch_command, offers, preparation, remark
from .registry import exporter

_NOTICE_SECONDS = 120
"""Before the end of the job's time limit; what a checkpoint may take."""
_FEATURE = "feature:"


@exporter("slurm", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def slurm_script(deployment: Deployment, name: str) -> str:
    """Write the script for ``sbatch``.

    Args:
        deployment: What to launch. Its ``names`` are GRES types (``tesla_v100``), or features of
            nodes whose GPUs have no type (``feature:v100``).
        name: The plan's path, for a comment.

    Raises:
        ProblemError: A device type is emulated and has no name, or a directive is not one.
    """
    for directive in deployment.directives:
        if not re.fullmatch(r"--[a-z][^\r\n]*", directive):
            raise ProblemError(
                f"{option('directives', repr(directive))} is no option of sbatch",
                hint=f"write it as on its command line: {option('directives', '--partition=gpu')}",
            )
    lines = [
        "#!/bin/bash",
        f"# Submit with sbatch, from a folder that all nodes see. Plan: {remark(name)}",
        f"# {remark(deployment.summary)}",
        f"#SBATCH --job-name={deployment.name}",
        "#SBATCH --no-requeue",
    ]
    for number, group in enumerate(deployment.groups):
        if number:
            lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {option}" for option in _request(deployment, group)]
        lines += [f"#SBATCH {directive}" for directive in deployment.directives]
    step = " : ".join(
        f"{f'--het-group={number} ' if len(deployment.groups) > 1 else ''}"
        f"--nodes={group.num_hosts} --ntasks={group.num_hosts} "
        f"--cpus-per-task={_processors(deployment, group)} "
        'bash -c "$program"'
        for number, group in enumerate(deployment.groups)
    )
    lines += [
        "",
        *preparation(deployment),
        "# The first node holds the rendezvous; a token keeps other launches out.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'export host=$(scontrol --oneliner show node "$first" | '
        "sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')",
        "export port=$((20000 + SLURM_JOB_ID % 10000))",
        "export HETFLOW_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
        "",
        "on_each_host() {",
        *_program(deployment),
        "}",
        'program="$(declare -f on_each_host); on_each_host"',
        f"exec srun --kill-on-bad-exit=0 {step}",
    ]
    return "\n".join(lines) + "\n"


def _processors(deployment: Deployment, group: HostGroup) -> int:
    return deployment.cpus_per_device * group.num_devices


def _request(deployment: Deployment, group: HostGroup) -> Iterator[str]:
    """The options of one component."""
    yield f"--nodes={group.num_hosts} --ntasks-per-node=1"
    yield f"--cpus-per-task={_processors(deployment, group)}"
    found = [
        (deployment.name_of(device_type, "Slurm"), number)
        for device_type, number in group.devices.items()
        if device_type not in deployment.host_types
    ]
    for called, _ in found:
        if not re.fullmatch(r"(?:feature:)?[A-Za-z0-9_.:&|-]+", called):
            raise ProblemError(
                f"{called!r} is no type of a GPU that Slurm could have",
                hint="`sinfo -N -o '%N %G %f'` lists them: "
                f"{option('names', 'V100=tesla_v100')}, or {option('names', 'V100=feature:v100')} "
                "where nodes are told apart by a feature",
            )
    features = [called[len(_FEATURE) :] for called, _ in found if called.startswith(_FEATURE)]
    if features:
        yield f"--constraint={'&'.join(dict.fromkeys(features))}"
    if found:
        yield "--gres=" + ",".join(
            f"gpu:{number}"
            if called.startswith(_FEATURE)
            else f"gpu:{called.removeprefix('gpu:')}:{number}"
            for called, number in found
        )
    yield f"--signal=URG@{_NOTICE_SECONDS}"


def _program(deployment: Deployment) -> Iterator[str]:
    """What the task of each host runs; ``wait`` returns early when a signal comes."""
    folder = f'"hetflow-runs/{deployment.name}-$SLURM_JOB_ID/host$rank"'
    yield "rank=$SLURM_PROCID"
    yield from case_of_host(deployment, offers(deployment.groups))
    yield f"{launch_command(deployment, folder=folder)} &"
    yield "launch=$!"
    yield "trap 'kill -TERM $launch' URG"
    yield "while kill -0 $launch 2>/dev/null; do wait $launch; code=$?; done"
    yield "exit $code"
