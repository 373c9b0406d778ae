"""Join the other workers: which slot this process fills, on which device, over which backend."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..devices.backend import backend_of
from ..devices.collectives import choose_collective
from ..devices.emulated import base_type
from ..devices.host import TORCH_DEVICE
from ..devices.local import device_of_type, own_type
from ..protocol.environment import DEVICE_TYPE, JOINS, Start, assign_slots, read_environment
from ..protocol.handover import wait_for_turn
from ..protocol.launch_token import prefix_of, take_token
from ..protocol.messages import Recover, Resize
from ..schema.errors import HetflowError, TargetError
from ..schema.launch import WorkerSlot
from . import peers
from .builds import check_builds, own_build, parse_build
from .elastic.control import Control
from .meeting import Meeting
from .peers import SharedStore

RELEASE_SECONDS = 2.0  # a group's end takes milliseconds


@dataclass(frozen=True, slots=True)
class Place:
    """This worker among the others. ``store`` is None for a single worker without a launcher.

    ``is_outside`` says that it was started while the others train, and has not met them yet.
    """

    start: Start
    slot: WorkerSlot | None
    device: torch.device
    rank: int = 0
    world_size: int = 1
    store: SharedStore | None = None
    control: Control | None = None
    is_outside: bool = False

    @property
    def distributed(self) -> bool:
        """Whether there is anyone to talk to."""
        return self.world_size > 1


class _Jobs:
    """The jobs of this process share one process group; the last to leave destroys it."""

    opened = 0
    left = 0
    own_group = False


def leave() -> None:
    """End one job's use of the process group."""
    _Jobs.left += 1
    if _Jobs.own_group and _Jobs.left >= _Jobs.opened and dist.is_initialized():
        dist.destroy_process_group()
        _Jobs.own_group = False


def complete(device: torch.device) -> None:
    """Wait until the device has done all that this worker asked of it.

    Over NCCL a collective returns at once: who leaves before it is done leaves the others in it.
    """
    backend_of(device).synchronize(device)


def join(start: Start, device: torch.device | None = None) -> Place:
    """Take this process's place, and initialise torch.distributed where there are several.

    Args:
        start: What the environment said.
        device: The device to use; by default the slot's.

    Raises:
        TargetError: The types on hand are not the plan's, or a type finds no device.
    """
    if start.config is None:
        return Place(start=start, slot=None, device=device or torch.device(TORCH_DEVICE))
    control = Control.of_process()
    if control is None:
        return _join(start, device)
    control.open_job()
    if start.joins is not None:
        slot = start.config.workers[start.rank]
        return Place(
            start=start,
            slot=slot,
            device=_device_of(slot, start, device),
            rank=start.rank,
            world_size=start.world_size,
            control=control,
            is_outside=True,
        )
    with control.connections.opening():
        return replace(_join(start, device), control=control)


def _join(start: Start, device: torch.device | None) -> Place:
    assert start.config is not None
    store = _connect(start, _Jobs.opened) if start.address else None
    if start.follows and store is not None and not _Jobs.opened:
        wait_for_turn(store)
    _Jobs.opened += 1
    if start.world_size == 1:
        slot = start.config.workers[0]
        return Place(start=start, slot=slot, device=_device_of(slot, start, device), store=store)
    if store is None:
        raise TargetError(
            "MASTER_ADDR is not set, so the workers cannot meet",
            hint="start the script with `hetflow launch`, torchrun or srun",
        )
    _meeting(start, store).arrive(start.rank)
    slot = start.config.workers[_slot_of(start, store)]
    chosen = _device_of(slot, start, device)
    _init_group(slot.rank, chosen, start, store)
    return Place(
        start=start,
        slot=slot,
        device=chosen,
        rank=slot.rank,
        world_size=start.world_size,
        store=store,
    )


def subgroup(
    place: Place, ranks: Sequence[int] | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group of some workers, with the launch's time limit; call it on all of them.

    ``torch.distributed.new_group`` by itself takes half an hour, whatever the default group has.
    """
    limit = timedelta(seconds=place.start.timeout_seconds)
    made: dist.ProcessGroup = peers.new_group(
        None if ranks is None else list(ranks), timeout=limit, backend=backend
    )
    return made


def enter_generation(place: Place, message: Resize | Recover, control: Control) -> Place:
    """Come together with the workers of another generation; the group of the last is closed.

    Args:
        place: This worker's place before.
        message: The controller's: the generation, its config, and the rank of each worker.
        control: The line to the controller, which can end the wait for the others.
    """
    config, rank = message.config, message.ranks[control.worker]
    start = replace(place.start, config=config, rank=rank, world_size=config.world_size, joins=None)
    control.generation = message.generation
    with control.connections.opening():
        store = _connect(start).under(f"generation/{control.generation}")
        _Jobs.opened = max(_Jobs.opened, 1)
        if config.world_size > 1:
            _init_group(rank, place.device, start, store)
    return replace(
        place,
        start=start,
        slot=config.workers[rank],
        rank=rank,
        world_size=config.world_size,
        store=store,
        is_outside=False,
    )


def enter_handover(place: Place, message: Resize, control: Control) -> None:
    """Come together with the whole next generation and the guest that leaves its state there.

    The guest has the rank after the last.
    """
    size = len(message.ranks) + 1
    rank = message.ranks.get(control.worker, size - 1)
    start = replace(place.start, config=message.config, world_size=size)
    with control.connections.opening():
        store = _connect(start).under(f"handover/{message.generation}")
        _init_group(rank, place.device, start, store)


def num_groups() -> int:
    """Process groups of this process; more than one where the script makes its own."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def close_group() -> None:
    """Leave the process group, if this worker is in one of ours."""
    if _Jobs.own_group and dist.is_initialized():
        groups: list[object] = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        release_apart(groups)
    _Jobs.own_group = False


def release_apart(held: list[object], patience_seconds: float = RELEASE_SECONDS) -> None:
    """Let go of objects whose end may take long, and wait for it no longer than that.

    The end of a hosts' group joins its threads. One of them was seen in a send that nothing ended,
    though the sockets were cut: that lasts until the group's own time limit, and the others would
    wait for this worker. A thread waits in its place.

    Args:
        held: The last references; emptied.
        patience_seconds: How long to wait for their end.
    """
    waiter = threading.Thread(target=held.clear, name="hetflow-old-groups", daemon=True)
    waiter.start()
    waiter.join(patience_seconds)


def _connect(start: Start, number: int = 0) -> SharedStore:
    """The store of the launcher; under srun or Kubernetes the first process holds it.

    ``number`` is the job's in this process.
    """
    assert start.address is not None
    held_outside = start.is_slot or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = not held_outside and start.rank == 0
    # Where this process holds it, a port that is taken is no loss of anybody.
    make = TCPStore if holds else peers.guarded("store", TCPStore)
    store = make(
        start.address,
        start.port or 0,
        world_size=None,
        is_master=holds,
        timeout=timedelta(seconds=start.timeout_seconds),
        wait_for_workers=False,
    )
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The launcher reads the first job's keys; a script that prepares two models has two jobs.
    job = f"/job{number}" if number else ""
    return SharedStore(store).under(prefix_of(take_token())).under(f"hetflow/{restarts}{job}")


def _slot_of(start: Start, store: SharedStore) -> int:
    if start.is_slot:
        return start.rank
    assert start.config is not None
    store.set(f"type/{start.rank}", json.dumps(_own_type(start)))
    types = [json.loads(word) for word in _meeting(start, store).read("type")]
    return assign_slots(start.config, types)[start.rank]


def _own_type(start: Start) -> str | None:
    """The device type of this process under a foreign launcher; None fits any slot."""
    assert start.config is not None
    known = {slot.device_type for slot in start.config.workers}
    if start.stated_type is not None:
        if start.stated_type not in known:
            raise TargetError(
                f"{DEVICE_TYPE}={start.stated_type!r} is not in the plan, which needs "
                f"{', '.join(sorted(known))}"
            )
        return start.stated_type
    if len(known) == 1:
        return None
    return own_type(start.local_rank, known)


def _device_of(slot: WorkerSlot, start: Start, asked: torch.device | None) -> torch.device:
    if asked is not None:
        return asked
    found = device_of_type(base_type(slot.device_type, start.config), start.local_rank)
    if found is None:
        raise TargetError(
            f"rank {slot.rank} needs a {slot.device_type}, but this process sees no such device",
            hint="`hetflow doctor` says what is missing",
        )
    return found


def _init_group(rank: int, device: torch.device, start: Start, store: SharedStore) -> None:
    """Initialise the default group, unless an earlier job or the script has."""
    backend = backend_of(device)
    backend.set_current(device)
    if dist.is_initialized():
        if dist.get_rank() != rank or dist.get_world_size() != start.world_size:
            raise TargetError(
                "the script initialised torch.distributed with other ranks than the plan's",
                hint="call hf.prepare first, and leave init_process_group out",
            )
        return
    store.set(f"build/{rank}", own_build(device).text())
    store.set(f"device/{rank}", json.dumps(_identity(device)))
    meeting = _meeting(start, store)
    identities = [json.loads(word) for word in meeting.read("device")]
    collective = choose_collective(device, identities)
    builds = [parse_build(text) for text in meeting.read("build")]
    check_builds(builds, collective, start.determinism)
    peers.init_process_group(
        backend=collective,
        store=store.under("group").of_torch,
        rank=rank,
        world_size=start.world_size,
        timeout=timedelta(seconds=start.timeout_seconds),
        device_id=None if backend.is_host else device,
    )
    _Jobs.own_group = True


def _identity(device: torch.device) -> str | None:
    own = backend_of(device).identity(device)
    return None if own is None else f"{socket.gethostname()}/{own}"


def _meeting(start: Start, store: SharedStore) -> Meeting:
    assert start.config is not None
    types = [slot.device_type for slot in start.config.workers]
    types += ["leaving"] * (start.world_size - len(types))  # the guest of `enter_handover`
    return Meeting(store=store, device_types=types, limit_seconds=start.timeout_seconds)


def tell_left() -> None:
    """The script has ended well; where it never came to ``hf.prepare``, tell who waits there."""
    if _Jobs.opened or os.environ.get(JOINS):
        return
    # Nobody is left who could wait, or the script has changed what the environment says.
    with contextlib.suppress(HetflowError):
        start = read_environment()
        if start.world_size > 1 and start.address:
            _meeting(start, _connect(start)).leave(start.rank)
