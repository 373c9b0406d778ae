"""A shell script that is started by hand on each host, with its rank: ``hetflow launch``."""

from ...schema.deployment import PORT, Deployment
from .registry import exporter
from .shell import case_of_host, launch_command, offers, on_each_host, preparation, remark


@exporter("hosts", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def hosts_script(deployment: Deployment, name: str) -> str:
    """Write a script that runs ``hetflow launch`` on one host.

    Args:
        deployment: What to launch.
        name: The plan's path, for a comment.
    """
    lines = [
        "#!/usr/bin/env bash",
        f"# Plan: {remark(name)}; {remark(deployment.summary)}",
        *on_each_host(deployment, "the same HETFLOW_TOKEN"),
        "set -e",
    ]
    if deployment.num_hosts > 1:
        lines += [
            "rank=${1:?give the rank of this host}",
            "host=${2:?give the name of host 0}",
            f"port=${{3:-{PORT}}}",
            *case_of_host(deployment, offers(deployment.groups)),
        ]
    lines += [*preparation(deployment), f"exec {launch_command(deployment)}"]
    return "\n".join(lines) + "\n"
