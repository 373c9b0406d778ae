"""Leases as actors of a Ray cluster: one detached actor a lease, on the node of its devices.

The actor holds the lease's devices as Ray resources and runs its keeper, so Ray itself lets a
successor wait until they are free. All nodes must see a lease's folder at the same path. The
scheduler connects to the cluster that ``RAY_ADDRESS`` names, or to the one of its own host.
"""

import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...schema.cluster import Cluster
from ...schema.errors import ProblemError
from .local import is_locked
from .protocol import (
    ASKED,
    CLAIM,
    ENDED,
    SUBMITTED,
    EngineDevice,
    Fate,
    UnsuitableDevicesError,
    Work,
    digest_of,
    document_of,
    engine,
    fate_of_lost,
    progress,
    read_json,
    revoke,
    write_atomically,
)

_NAMESPACE = "hetflow"
_ACCELERATOR = "accelerator_type:"
_CONNECT_SECONDS = 10.0


def actor_name(folder: Path) -> str:
    """The name of a lease's actor: the same for whoever knows its folder, and no other's."""
    return f"lease-{digest_of(folder)}"


def devices_of(nodes: list[dict[str, Any]], device_types: list[str]) -> dict[tuple[str, str], int]:
    """How many devices of which type the nodes have.

    Args:
        nodes: As ``ray.nodes()`` lists them.
        device_types: Those looked for: a custom resource of the type's name, or Ray's own name of
            an accelerator (``V100`` is the resource ``accelerator_type:V100`` beside ``GPU``).

    Returns:
        Numbers by (node's name, device type), for nodes that are up.

    Raises:
        ProblemError: Two nodes have one name.
    """
    up = [node for node in nodes if node["Alive"]]
    named = Counter(node["NodeName"] for node in up)
    for name, number in named.items():
        if number > 1:
            raise ProblemError(
                f"{number} of Ray's nodes are called {name}",
                hint="start each with a name of its own: ray start --node-name NAME",
            )
    found = {}
    for node in up:
        has = node["Resources"]
        for device_type in device_types:
            own = _ACCELERATOR + device_type in has
            number = int(has.get("GPU", 0.0) if own else has.get(device_type, 0.0))
            if number:
                found[node["NodeName"], device_type] = number
    return found


class RayEngine:
    """Actors of a Ray cluster; they outlive the scheduler, which finds them by their names."""

    name = "ray"

    def __init__(self, pool: Cluster) -> None:
        """Offer devices of Ray's nodes.

        Args:
            pool: How many devices of each type to use, from the first nodes that have some.

        Raises:
            ProblemError: Ray is not installed, no cluster is there, or it has too few devices.
        """
        self._ray = _connected()
        self._num_devices = dict(pool.num_devices)
        now = devices_of(self._ray.nodes(), list(self._num_devices))
        found: list[tuple[EngineDevice, int]] = []
        for device_type, wanted in self._num_devices.items():
            have = [
                (EngineDevice(f"{node}/{kind}:{number}", kind, node), number)
                for (node, kind), count in sorted(now.items())
                if kind == device_type
                for number in range(count)
            ]
            if len(have) < wanted:
                raise ProblemError(
                    f"the pool has {wanted} x {device_type}, Ray's nodes have {len(have)}",
                    hint="`ray status` lists what they have; a node's own devices are named by "
                    f"ray start --resources '{{\"{device_type}\": {wanted}}}'",
                )
            found += have[:wanted]
        self._chosen = found

    def devices(self) -> tuple[EngineDevice, ...]:
        """The pool's devices; those of nodes that are gone are down.

        Raises:
            ProblemError: Two nodes have one name.
        """
        now = devices_of(self._ray.nodes(), list(self._num_devices))
        return tuple(
            replace(device, is_up=number < now.get((device.server, device.device_type), 0))
            for device, number in self._chosen
        )

    def start(self, work: Work) -> None:
        """Make a lease's actor, unless it was made before.

        Raises:
            UnsuitableDevicesError: The devices are on several nodes, or on one that is gone.
        """
        folder = work.folder
        if (folder / SUBMITTED).exists() or (folder / CLAIM).exists():
            return
        node = self._node(work.server)
        self._make(work, node, document_of(work))
        write_atomically(folder / SUBMITTED, {"node": node["NodeID"]})

    def _node(self, name: str) -> dict[str, Any]:
        for node in self._ray.nodes():
            if node["Alive"] and node["NodeName"] == name:
                found: dict[str, Any] = node
                return found
        raise UnsuitableDevicesError(f"it waits for the node {name}, which is down")

    def _make(self, work: Work, node: dict[str, Any], document: Mapping[str, object]) -> None:
        from .ray_actor import LeaseActor

        device_type, number = work.devices[0].device_type, len(work.devices)
        own = _ACCELERATOR + device_type in node["Resources"]
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=node["NodeID"], soft=False
        )
        (
            self._ray.remote(LeaseActor)
            .options(
                name=actor_name(work.folder),
                namespace=_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_cpus=0,
                num_gpus=number if own else 0,
                resources={} if own else {device_type: number},
                scheduling_strategy=affinity,
            )
            .remote(str(work.folder), document, _environment())
        )

    def stop(self, folder: Path) -> None:
        """Let the actor send the launch SIGTERM, once; what has not begun never does."""
        if (folder / ENDED).exists() or (folder / ASKED).exists():
            return
        actor = self._actor(folder)
        if revoke(folder):
            if actor is not None:
                self._ray.kill(actor)
        elif actor is not None:
            actor.stop.remote()

    def kill(self, folder: Path) -> None:
        """End a lease's launch, and what waits to begin."""
        actor = self._actor(folder)
        if actor is None:
            return
        if revoke(folder):
            self._ray.kill(actor)
        else:
            actor.kill.remote()

    def fate(self, folder: Path) -> Fate:
        """What became of a lease: by what its keeper wrote, or else by its actor."""
        is_over = self._actor(folder) is None and not is_locked(folder)
        ended = read_json(folder / ENDED)  # written before the actor and the lock are gone
        if ended is not None:
            return Fate("ended", ended["exit_code"])
        if not is_over:
            return progress(folder)
        if not (folder / SUBMITTED).exists() and not (folder / CLAIM).exists():
            return Fate("absent")
        return fate_of_lost(folder)

    def _actor(self, folder: Path) -> Any:
        """A lease's actor, which runs or waits for its devices; None where there is none."""
        with suppress(ValueError):
            return self._ray.get_actor(actor_name(folder), namespace=_NAMESPACE)
        return None


def _environment() -> dict[str, str]:
    """The scheduler's variables, but for those by which Ray says which devices an actor has."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and not name.endswith("VISIBLE_DEVICES")
    }


def _connected() -> Any:
    """Ray, connected to a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ProblemError("the engine ray needs Ray", hint="pip install 'hetflow[ray]'") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        host, colon, port = address.rpartition(":")
        try:
            if colon and port.isdigit():  # Ray itself would try for many minutes
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            ray.init(
                address="auto",
                namespace=_NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            where = f" at {address}" if address else " here"
            raise ProblemError(
                f"no Ray cluster answers{where}: {str(error).partition(chr(10))[0]}",
                hint="start one (ray start --head), or name it with RAY_ADDRESS=HOST:PORT",
            ) from None
    return ray


engine("ray")(RayEngine)
