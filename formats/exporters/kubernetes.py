"""A Kubernetes manifest: an Indexed Job for each group of hosts, and a headless service.

The service gives pods names, so that host 0 is found before it is ready. A ConfigMap holds the plan
and the script that each pod runs; Kubernetes would expand ``$(NAME)`` in commands and variables,
but not there.
"""

import re
from collections.abc import Mapping

from ...schema.deployment import PORT, Deployment, HostGroup
from ...schema.errors import ProblemError
from ...schema.options import option
from .hosts import case_of_host, launch_command, offers, preparation
from .registry import exporter
from .yaml_text import Value, yaml_text

_FOLDER = "/hetflow"
"""Where pods see the plan and their script."""
_GPU = "nvidia.com/gpu"
_LABEL = "nvidia.com/gpu.product"
"""What NVIDIA's feature discovery says of a node's GPUs."""
_MOST_PLAN_BYTES = 900_000
"""A ConfigMap holds at most 1 MiB."""
_LABEL_KEY = r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_GRACE_SECONDS = 60


@exporter("kubernetes", takes=(Deployment,), wrote=lambda deployment: deployment.summary)
def kubernetes_manifest(deployment: Deployment, name: str) -> str:
    """Write the manifest for ``kubectl apply``.

    Args:
        deployment: What to launch. Its ``names`` are values of the label that NVIDIA's feature
            discovery gives nodes, or ``KEY=VALUE`` of another label.
        name: The plan's path, for errors.

    Raises:
        ProblemError: No image, a device type without a label, a host with several types, or a plan
            too large for a ConfigMap.
    """
    if deployment.image is None:
        raise ProblemError(
            "Kubernetes runs containers, and no image is given",
            hint=f"add {option('image', 'NAME')}, with Python, torch, hetflow and the script in it",
        )
    if not re.fullmatch(r"[!-~]+", deployment.image):
        raise ProblemError(
            f"{option('image', repr(deployment.image))} is no container image",
            hint="write it as `docker pull` takes it, such as registry.example/me/train:1",
        )
    if len(deployment.plan_text.encode()) > _MOST_PLAN_BYTES:
        raise ProblemError(
            f"{name}: larger than {_MOST_PLAN_BYTES} bytes, which a ConfigMap does not hold",
            hint=f"put it into the image, and use {option('target', 'hosts')} there",
        )
    labels = {"app.kubernetes.io/name": "hetflow", "hetflow/job": deployment.name}
    files: Value = {"plan.json": deployment.plan_text, "start.sh": _program(deployment)}
    documents: list[Value] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": deployment.name, "labels": labels},
            "data": files,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": deployment.name, "labels": labels},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"hetflow/job": deployment.name},
            },
        },
    ]
    for number, (first, group) in enumerate(
        zip(deployment.first_ranks, deployment.groups, strict=True)
    ):
        documents.append(_job(deployment, number, first, group, labels))
    return yaml_text(*documents)


def _program(deployment: Deployment) -> str:
    lines = ["#!/bin/bash", "set -e"]
    if deployment.num_hosts > 1:
        lines += [
            "rank=$((FIRST_RANK + JOB_COMPLETION_INDEX))",
            f"host={deployment.name}-0-0.{deployment.name}",
            f"port={PORT}",
            *case_of_host(deployment, offers(deployment.groups)),
        ]
    lines += preparation(deployment)
    lines.append(f"exec {launch_command(deployment, plan=f'{_FOLDER}/plan.json')}")
    return "\n".join(lines) + "\n"


def _job(
    deployment: Deployment, number: int, first: int, group: HostGroup, labels: Mapping[str, Value]
) -> Value:
    device_type, count = group.one_type("Kubernetes")
    mounts: list[Value] = [
        {"name": "plan", "mountPath": _FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Value] = [
        {"name": "plan", "configMap": {"name": deployment.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if deployment.volume is not None:
        claim, path = deployment.volume
        mounts.append({"name": "volume", "mountPath": path})
        volumes.append({"name": "volume", "persistentVolumeClaim": {"claimName": claim}})
    resources: dict[str, Value] = {"requests": dict(cpu=str(deployment.cpus_per_device * count))}
    if device_type not in deployment.host_types:
        resources["limits"] = {_GPU: count}
    pod: dict[str, Value] = {
        "subdomain": deployment.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [
            {
                "name": "hetflow",
                "image": deployment.image or "",
                "command": ["/bin/bash", f"{_FOLDER}/start.sh"],
                "env": [
                    {"name": "FIRST_RANK", "value": str(first)},
                    {
                        "name": "HETFLOW_TOKEN",
                        "valueFrom": {
                            "secretKeyRef": {
                                "name": f"{deployment.name}-token",
                                "key": "token",
                                "optional": True,
                            }
                        },
                    },
                ],
                "resources": resources,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if device_type not in deployment.host_types:
        pod["nodeSelector"] = dict([_node_label(deployment, device_type)])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{deployment.name}-{number}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": group.num_hosts,
            "parallelism": group.num_hosts,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _node_label(deployment: Deployment, device_type: str) -> tuple[str, str]:
    called = deployment.name_of(device_type, "Kubernetes")
    hint = (
        f"`kubectl get nodes -L {_LABEL}` lists them: "
        f"{option('names', f'{device_type}=Tesla-V100-SXM2-16GB')}, "
        f"or another label: {option('names', f'{device_type}=KEY=VALUE')}"
    )
    if device_type not in deployment.names:
        raise ProblemError(
            f"which nodes have {device_type}? Kubernetes tells them by a label, and none is given",
            hint=hint,
        )
    key, equals, value = called.rpartition("=")
    if not equals:
        key = _LABEL
    patterns = ((_LABEL_KEY, key), (_LABEL_VALUE, value))
    if not all(re.fullmatch(pattern, text, re.ASCII) for pattern, text in patterns):
        raise ProblemError(f"{called!r} is no label of a node", hint=hint)
    return key, value
