"""Join the other workers: choose this process's rank, its device and the collectives' backend."""

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
from torch import Tensor
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ..devices.backend import backend_of
from ..devices.collectives import choose_collective, is_on_devices, wire_device
from ..devices.emulated import base_type
from ..devices.host import TORCH_DEVICE
from ..devices.local import device_of_type, own_type
from ..schema.errors import HetflowError, TargetError
from ..schema.launch import WorkerSlot
from . import peers
from .elastic.control import Control
from .meeting import Meeting, check_builds, own_build, parse_build
from .peers import SharedStore
from .protocol.environment import (
    DEVICE_TYPE,
    JOINS,
    Start,
    assign_slots,
    prefix_of,
    read_environment,
    take_token,
)
from .protocol.handover import wait_for_turn
from .protocol.messages import Recover, Resize

RELEASE_SECONDS = 2.0  # destroying a group normally takes milliseconds


@dataclass(frozen=True, slots=True)
class Place:
    """This worker among the others.

    Attributes:
        start: What the environment said.
        slot: The worker assignment of the plan; None under plain python.
        device: The device of its passes.
        rank: Its rank, 0 to world_size - 1.
        world_size: Number of workers.
        store: Keys and values that all workers share; None for one worker without a launcher.
        control: The control channel to the controller, if there is one.
        is_outside: Whether it was started while the others train, and has not joined them yet.
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
        """Whether there are other workers."""
        return self.world_size > 1


class _Jobs:
    """Count the jobs of this process: they share one process group; the last destroys it."""

    opened = 0
    left = 0
    own_group = False
    joining = False


def has_joined() -> bool:
    """Whether the script has reached ``hf.prepare``, also under plain python."""
    return _Jobs.joining


def leave() -> None:
    """End one job's use of the process group."""
    _Jobs.left += 1
    if _Jobs.own_group and _Jobs.left >= _Jobs.opened and dist.is_initialized():
        dist.destroy_process_group()
        _Jobs.own_group = False


def complete(device: torch.device) -> None:
    """Wait until the device has done all that this worker asked of it.

    Over NCCL a collective returns at once. A worker that left before the collective was done would
    leave the others waiting in it.
    """
    backend_of(device).synchronize(device)


def join(start: Start, device: torch.device | None = None) -> Place:
    """Find this process's rank and device, and join torch.distributed where there are several.

    Raises:
        TargetError: The available device types are not those of the plan, or a type has no device.
        LaunchError: Another worker ended without joining.
    """
    _Jobs.joining = True
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
        return replace(_join(start, device, control), control=control)


def _join(start: Start, device: torch.device | None, control: Control | None = None) -> Place:
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
    _init_group(slot.rank, chosen, start, store, control)
    return Place(
        start=start,
        slot=slot,
        device=chosen,
        rank=slot.rank,
        world_size=start.world_size,
        store=store,
    )


def make_group_of_one(place: Place) -> None:
    """Make the only worker's process group, unless there is one: libraries train in a group."""
    store = place.store or SharedStore(HashStore())
    _init_group(place.rank, place.device, place.start, store)


def subgroup(
    place: Place, ranks: Sequence[int] | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of some workers, with the launch's time limit; call it on all workers.

    ``torch.distributed.new_group`` by itself uses half an hour, whatever limit the default group
    has.
    """
    limit = timedelta(seconds=place.start.timeout_seconds)
    made: dist.ProcessGroup = peers.new_group(
        None if ranks is None else list(ranks), timeout=limit, backend=backend
    )
    return made


def gathered(numbers: Tensor, *, place: Place) -> Tensor:
    """[workers, n] the numbers [n] of every worker, in order of ranks; call it on all workers."""
    if not place.distributed:
        return numbers[None]
    sent = numbers.to(wire_device(place.device)).contiguous()
    found = sent.new_empty(place.world_size * len(sent))
    peers.all_gather(found, sent)
    return found.view(place.world_size, -1).to(numbers.device)


def enter_generation(place: Place, message: Resize | Recover, control: Control) -> Place:
    """Join the workers of the next generation; the group of the last one is closed.

    Raises:
        PeerLostError: Another worker did not come.
    """
    config, rank = message.config, message.ranks[control.worker]
    start = replace(place.start, config=config, rank=rank, world_size=config.world_size, joins=None)
    control.generation = message.generation
    with control.connections.opening():
        store = _connect(start).under(f"generation/{control.generation}")
        _Jobs.opened = max(_Jobs.opened, 1)
        if config.world_size > 1:
            _init_group(rank, place.device, start, store, control)
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
    """Join the next generation and the leaving worker that hands its state over.

    The leaving worker's rank is the one after the last.
    """
    size = len(message.ranks) + 1
    rank = message.ranks.get(control.worker, size - 1)
    start = replace(place.start, config=message.config, world_size=size)
    with control.connections.opening():
        store = _connect(start).under(f"handover/{message.generation}")
        _init_group(rank, place.device, start, store, control)


def num_groups() -> int:
    """The number of process groups here; more than one where the script makes its own."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def close_group(*, is_lost: bool = False) -> None:
    """Leave the process group, if hetflow made the one that this worker is in."""
    if is_lost and _Jobs.own_group and is_on_devices():
        peers.forget_aborted_groups()
        _Jobs.own_group = False
    if _Jobs.own_group and dist.is_initialized():
        groups: list[object] = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        release_apart(groups)
    _Jobs.own_group = False


def release_apart(held: list[object], patience_seconds: float = RELEASE_SECONDS) -> None:
    """Free objects whose destruction may block, and wait for it no longer than a limit.

    Destroying a gloo group joins its threads. A thread can be stuck in a send until the group's own
    time limit, even after its sockets were closed. The others would wait for this worker that long.
    So a separate thread frees the objects.
    """
    waiter = threading.Thread(target=held.clear, name="hetflow-old-groups", daemon=True)
    waiter.start()
    waiter.join(patience_seconds)


def _connect(start: Start, number: int = 0) -> SharedStore:
    """Connect to the launcher's store; under srun or Kubernetes the first process holds it.

    ``number`` counts the jobs of this process, from 0.
    """
    assert start.address is not None
    held_outside = start.is_slot or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = not held_outside and start.rank == 0
    # Where this process holds the store, a port in use does not mean that another worker is lost.
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
    # The launcher reads the keys of the first job; a script may prepare several.
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
    """This process's device type under a foreign launcher; None fits any worker assignment."""
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


def _init_group(
    rank: int,
    device: torch.device,
    start: Start,
    store: SharedStore,
    control: Control | None = None,
) -> None:
    """Initialise the default group, unless an earlier job or the script has done so."""
    survives = control is not None and control.survives_on_devices
    backend = backend_of(device)
    backend.set_current(device)
    if dist.is_initialized():
        if dist.get_rank() != rank or dist.get_world_size() != start.world_size:
            raise TargetError(
                "the script initialised torch.distributed with other ranks than the plan's",
                hint="call hf.prepare first, and leave init_process_group out",
            )
        return
    if survives:
        for name, value in (backend.abortable_with or {}).items():
            os.environ.setdefault(name, value)
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
    """Tell waiting workers that this script ended well without reaching ``hf.prepare``."""
    if _Jobs.opened or os.environ.get(JOINS):
        return
    # Ignored where no worker is left, or where the script has changed the environment.
    with contextlib.suppress(HetflowError):
        start = read_environment()
        if start.world_size > 1 and start.address:
            _meeting(start, _connect(start)).leave(start.rank)
