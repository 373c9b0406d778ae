"""A shell script that is started by hand on each host, with its rank: ``torchrun``.

torchrun's role states each host's device type, by which workers find their places in the plan
(``runtime/protocol/environment.py``). Its restart rules apply, not hetflow's.
"""

from ...schema.deployment import PORT, Deployment
from .registry import exporter
from .shell import case_of_host, joined, on_each_host, preparation, quoted, remark


@exporter("torchrun", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def torchrun_script(deployment: Deployment, name: str) -> str:
    """Write a script that runs torchrun on one host.

    Args:
        deployment: What to launch.
        name: The plan's path, for a comment.

    Raises:
        ProblemError: A host has devices of several types: one torchrun states one.
    """
    held = [group.one_type("torchrun") for group in deployment.groups]
    roles = [f"role={quoted(device_type)} workers={number}" for device_type, number in held]
    lines = [
        "#!/usr/bin/env bash",
        f"# Plan: {remark(name)}; {remark(deployment.summary)}",
        *on_each_host(deployment, "the same HETFLOW_TOKEN"),
        "set -e",
    ]
    words = ["torchrun", '--nproc-per-node "$workers"', '--role "$role"']
    if deployment.num_hosts > 1:
        lines += [
            "rank=${1:?give the rank of this host}",
            "host=${2:?give the name of host 0}",
            f"port=${{3:-{PORT}}}",
        ]
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
    lines += [
        *case_of_host(deployment, roles),
        *preparation(deployment),
        *(f"export {key}={quoted(value)}" for key, value in variables.items()),
        f'export HETFLOW_RUN="${{HETFLOW_RUN:-hetflow-runs/{deployment.name}-torchrun}}"',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',  # more threads than cores are slow
    ]
    script = list(deployment.script)
    module = ["-m"] if script[0] == "-m" else []
    words += module
    lines.append(f"exec {' '.join(words)} {joined(script[len(module) :])}")
    return "\n".join(lines) + "\n"
