"""Leases on machines that SkyPilot rents: one cluster a lease, in the zone that is asked for.

Each server of a lease's devices is a node of its cluster, which has spot machines or none. Of
several nodes, the first one's launch holds the rendezvous; if one goes, the lease is over.

Only SkyPilot's Python functions are called (versions after 0.8, which answer with requests). A
lease's folder must be at the same path on the rented machine, on storage that both see: the task
that ``HETFLOW_SKYPILOT_TASK`` names (YAML) says how, with its ``file_mounts`` or ``volumes``, and
what to set up. A cluster goes down by itself when its launch has ended, also if nobody asks.
"""

import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...devices.cpu import DEVICE_TYPE
from ...schema.cluster import Cluster
from ...schema.deployment import PORT
from ...schema.errors import BackendError, ProblemError
from .protocol import (
    ASKED,
    ENDED,
    FIRST_STEP,
    STOPPED,
    SUBMITTED,
    WORK,
    EngineDevice,
    Fate,
    Work,
    digest_of,
    document_of,
    engine,
    progress,
    read_json,
    write_atomically,
)

TASK = "HETFLOW_SKYPILOT_TASK"
_IDLE_MINUTES = 5  # until a cluster without a launch goes down
_LOOK_EVERY_SECONDS = 10.0
_CODES: Mapping[str, int | None] = {
    "SUCCEEDED": 0,
    "FAILED": 1,
    "FAILED_SETUP": 1,
    "CANCELLED": STOPPED,
    "FAILED_DRIVER": None,
}
"""Of what is over, by SkyPilot's name for it; None: the machine went."""


@dataclass(slots=True)
class _Look:
    """What was seen of a lease, and when."""

    fate: Fate
    at: float


class SkyPilotEngine:
    """Machines of clouds; leases outlive the scheduler."""

    name = "skypilot"
    rents = True

    def __init__(self, pool: Cluster) -> None:
        """Rent machines with the devices of a pool's servers.

        Raises:
            BackendError: SkyPilot is not installed.
        """
        try:
            self._sky: Any = import_module("sky")
        except ImportError as error:
            raise BackendError(
                f"SkyPilot cannot be imported: {error}", hint="pip install 'skypilot>=0.9'"
            ) from None
        servers = [group.devices for group in pool.servers for _ in range(group.count)]
        self._devices = tuple(
            EngineDevice(f"rented-{place}/{name}:{number}", name, f"rented-{place}")
            for place, devices in enumerate(servers)
            for name, count in devices.items()
            for number in range(count)
        )
        self._looks: dict[Path, _Look] = {}

    def devices(self) -> tuple[EngineDevice, ...]:
        """Return the devices that the machines are to have."""
        return self._devices

    def start(self, work: Work) -> None:
        """Ask for machines that run the launch.

        Raises:
            ProblemError: The devices are of several types, or not as many on each machine.
        """
        if read_json(work.folder / SUBMITTED) is not None:
            return
        sky, cluster = self._sky, _cluster_of(work.folder)
        kinds = dict.fromkeys(device.device_type for device in work.devices)
        machines = Counter(device.server for device in work.devices)
        numbers = set(machines.values())
        if len(kinds) > 1 or len(numbers) > 1:
            raise ProblemError(
                f"a rented machine has devices of one type, not of {', '.join(kinds)}"
                if len(kinds) > 1
                else f"rented machines are alike, but have {sorted(numbers)} devices",
                hint="give a plan for one type, on as many devices of each machine",
            )
        (kind,), (number,) = kinds, numbers
        write_atomically(work.folder / WORK, document_of(work))
        template = os.environ.get(TASK)
        task = sky.Task(name=cluster) if template is None else sky.Task.from_yaml(template)
        task.run = _program(work, len(machines), f"{number}x{kind}")
        if len(machines) > 1:
            task.num_nodes = len(machines)
        task.update_envs(dict(work.environment))
        wanted = {"use_spot": work.is_spot, "zone": work.zone, "accelerators": {kind: number}}
        if kind == DEVICE_TYPE:
            del wanted["accelerators"]
        task.set_resources_override(wanted)
        request = sky.launch(
            task, cluster_name=cluster, down=True, idle_minutes_to_autostop=_IDLE_MINUTES
        )
        write_atomically(work.folder / SUBMITTED, {"request": str(request)})

    def stop(self, folder: Path) -> None:
        """Cancel the launch, which then saves and ends, once."""
        if (folder / ASKED).exists() or not self.fate(folder).is_open:
            return
        write_atomically(folder / ASKED, {})
        self._sky.cancel(_cluster_of(folder), all=True)

    def kill(self, folder: Path) -> None:
        """Give the machine back."""
        if read_json(folder / ENDED) is None:
            self._end(folder, None)

    def fate(self, folder: Path) -> Fate:
        """What became of a lease; the clouds are asked each 10 seconds."""
        ended = read_json(folder / ENDED)
        if ended is not None:
            return Fate("ended", ended["exit_code"], has_begun=ended["has_begun"])
        seen, now = self._looks.get(folder), time.monotonic()
        if seen is None or now - seen.at > _LOOK_EVERY_SECONDS:
            seen = self._looks[folder] = _Look(self._fate(folder), now)
        return seen.fate

    def _fate(self, folder: Path) -> Fate:
        submitted = read_json(folder / SUBMITTED)
        if submitted is None:
            return Fate("absent")
        sky, cluster = self._sky, _cluster_of(folder)
        answers = sky.api_status(request_ids=[submitted["request"]])
        status = _name(answers[0].status) if answers else "FAILED"
        if status in ("FAILED", "CANCELLED"):  # there was no machine
            return self._end(folder, None, has_begun=False)
        if status != "SUCCEEDED":
            return Fate("waiting")
        gone = sky.exceptions.ClusterDoesNotExist, sky.exceptions.ClusterNotUpError
        try:
            jobs = sky.get(sky.job_status(cluster))
        except gone:
            return self._end(folder, None)
        names = [_name(job) for job in jobs.values() if job is not None]
        if names and names[-1] in _CODES:
            return self._end(folder, _CODES[names[-1]])
        fate = progress(folder)
        return fate if fate.state == "training" else Fate("running")

    def _end(self, folder: Path, code: int | None, *, has_begun: bool = True) -> Fate:
        """Note how a lease ended, and give its machine back."""
        write_atomically(folder / ENDED, {"exit_code": code, "has_begun": has_begun})
        self._looks.pop(folder, None)
        self._sky.down(_cluster_of(folder))
        return Fate("ended", code, has_begun=has_begun)


def _program(work: Work, num_nodes: int, devices: str) -> str:
    """What each node runs; those of several differ in their rank, and in the run's folder."""
    words = [shlex.quote(word) for word in work.command[1:]]
    if num_nodes == 1:
        return " ".join(["exec", "python3", *words])
    output = shlex.quote(str((work.folder / FIRST_STEP).parent))
    hosts = f'--nnodes {num_nodes} --node-rank "$rank" --rdzv-endpoint "$host:{PORT}"'
    verb = words.index("launch") + 1
    words[verb:] = [hosts, "--devices", devices] + [
        '"$output"' if word == output else word for word in words[verb:]
    ]
    return "\n".join(
        (
            'host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f"rank=$SKYPILOT_NODE_RANK output={output}",
            '[ "$rank" = 0 ] || output="$output-host$rank"',
            " ".join(["exec", "python3", *words]),
        )
    )


def _cluster_of(folder: Path) -> str:
    return f"hetflow-{digest_of(folder)}"


def _name(status: Any) -> str:
    """A status is a text, or an enumeration's member."""
    return str(getattr(status, "value", status))


engine("skypilot")(SkyPilotEngine)
