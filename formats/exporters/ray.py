"""A Python script that starts a plan on a Ray cluster: one actor a host, which runs the launch.

The actors hold the hosts' devices by a placement group, each on a node of its own. A SIGTERM, as
``ray job stop`` sends it, is passed on to all launches, so that they save and leave.
"""

from ...schema.deployment import Deployment, HostGroup
from .hosts import launch_command, preparation, remark
from .registry import exporter

_RESOURCE = "resource:"
_SCRIPT = '''\
"""Starts a plan of hetflow on a Ray cluster; written by `hetflow export --to ray`.

Plan: {plan}; {summary}
Run it on the cluster: ray job submit --working-dir . -- python THIS_FILE
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# The hosts in order of ranks: devices for the launch; processors, GPUs and resources of Ray.
HOSTS = {hosts}
PLAN = {plan_text}
PROGRAM = {program}


@ray.remote(num_cpus=0)
class Host:
    """Runs the launch of one host."""

    def __init__(self):
        self.process = None

    def endpoint(self):
        """This host's address and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, variables):
        """Run the launch; its exit code."""
        path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as plan:
            plan.write(PLAN)
            plan.flush()
            environment = {{**os.environ, **variables, "PATH": path, "plan": plan.name}}
            self.process = subprocess.Popen(["bash", "-c", PROGRAM], env=environment)
            code = self.process.wait()
        return code if code >= 0 else 128 - code

    def stop(self):
        """Ask the launch to save and leave."""
        if self.process is not None:
            self.process.terminate()


def main():
    """Start all hosts; leave with the first failure's code."""
    ray.init()
    bundles = [{{"CPU": cpus, "GPU": gpus, **others}} for _, cpus, gpus, others in HOSTS]
    bundles = [{{name: n for name, n in one.items() if n}} for one in bundles]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    while not group.wait(60):  # Ray itself would wait in silence
        print(f"waiting for free nodes, one for each of {{bundles}}", flush=True)
    hosts = []
    for number, (_, cpus, gpus, others) in enumerate(HOSTS):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {{
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": others,
            "scheduling_strategy": place,
            "max_concurrency": 2,  # `stop` comes while `run` waits
        }}
        hosts.append(Host.options(**options).remote())
    signal.signal(signal.SIGTERM, lambda *_: [host.stop.remote() for host in hosts])
    address, port = ray.get(hosts[0].endpoint.remote())
    shared = {{"host": address, "port": str(port), "HETFLOW_TOKEN": secrets.token_hex(16)}}
    codes = ray.get([
        host.run.remote({{**shared, "rank": str(rank), "devices": offered}})
        for rank, (host, (offered, *_)) in enumerate(zip(hosts, HOSTS))
    ])
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    main()
'''


@exporter("ray", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def ray_script(deployment: Deployment, name: str) -> str:
    """Write the script for ``ray job submit``.

    Args:
        deployment: What to launch. Its ``names`` are Ray's: of an accelerator, or of a custom
            resource (``resource:cpu_slow``).
        name: The plan's path, for a comment.

    Raises:
        ProblemError: A device type is emulated and has no name.
    """
    hosts = [
        _host(deployment, group) for group in deployment.groups for _ in range(group.num_hosts)
    ]
    launch = launch_command(deployment, plan='"$plan"')
    program = "\n".join(["set -e", *preparation(deployment), f"exec {launch}"])
    return _SCRIPT.format(
        plan=remark(remark(name)).replace('"', "'"),
        summary=remark(deployment.summary),
        hosts="[\n" + "".join(f"    {host!r},\n" for host in hosts) + "]",
        plan_text=ascii(deployment.plan_text),
        program=ascii(program),
    )


def _host(deployment: Deployment, group: HostGroup) -> tuple[str, int, int, dict[str, float]]:
    """What a host offers the launch, and what it asks of Ray."""
    gpus, others = 0, dict[str, float]()
    for device_type, number in group.devices.items():
        if device_type in deployment.host_types:
            continue
        called = deployment.name_of(device_type, "Ray")
        if called.startswith(_RESOURCE):
            others[called.removeprefix(_RESOURCE)] = number
        else:
            gpus += number
            others[f"accelerator_type:{called}"] = 0.001
    return group.offered, deployment.cpus_per_device * group.num_devices, gpus, others
