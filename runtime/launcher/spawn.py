"""Seat workers on devices, and make the exact commands and environments that start them."""

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from typing import Literal

from ...devices.backend import DEVICES
from ...devices.collectives import INTERFACE_VARIABLES
from ...devices.cpu import DEVICE_TYPE as CPU
from ...devices.cpu import base_type
from ...devices.local import IMAGINED, accelerators, devices_of_types, known_as, may_be
from ...devices.torch_support import emulated_bfloat16, mixed_tf32
from ...schema.errors import HetflowError, TargetError
from ...schema.launch import LaunchConfig, WorkerSlot
from ...schema.options import option
from ..preload import Forked
from ..protocol import environment as names
from ..protocol.environment import pins
from .request import LaunchRequest

# Assign local devices to the workers of this host.


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker slot on this host, the kind of its device, and torch's name of that device here."""

    slot: WorkerSlot
    kind: str
    device: str

    @property
    def is_host(self) -> bool:
        """Whether the device is a part of the host itself."""
        return DEVICES.get(self.kind).is_host


@dataclass(frozen=True, slots=True)
class View:
    """The devices of its host that a worker sees.

    Its own device is the one at place ``local_rank`` of ``devices``, so that scripts find it as
    under torchrun: ``torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))``.
    """

    seat: Seat
    local_rank: int
    devices: tuple[str, ...]

    @property
    def own_device(self) -> str | None:
        """Torch's name, in the worker, of the accelerator that is its own; None without one."""
        return None if self.seat.is_host else f"{self.seat.kind}:{self.local_rank}"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The worker's environment variables for its devices."""
        backend = DEVICES.get(self.seat.kind)
        return backend.visibility(self.devices) | backend.worker_environment(inherited)


def views(seats: Sequence[Seat]) -> list[View]:
    """The view of each worker, for workers that start together on one host.

    Workers with accelerators are numbered first, in order of ranks: each sees those of all of them.
    Where a host has accelerators of two kinds, each kind is numbered by itself.
    """
    by_rank = sorted(seats, key=lambda seat: seat.slot.rank)
    on_host = [seat for seat in by_rank if seat.is_host]
    found = []
    for seat in seats:
        if seat.is_host:
            number = len(seats) - len(on_host) + on_host.index(seat)
            found.append(View(seat, number, (seat.device,)))
            continue
        alike = [other for other in by_rank if other.kind == seat.kind]
        found.append(View(seat, alike.index(seat), tuple(other.device for other in alike)))
    return found


def view_alone(seat: Seat) -> View:
    """The view of a worker that is started while others train: its own accelerator alone."""
    return View(seat, seat.slot.rank if seat.is_host else 0, (seat.device,))


def seat_workers(
    slots: Sequence[WorkerSlot], config: LaunchConfig, taken: Collection[str] = ()
) -> list[Seat]:
    """Give each slot a device of this machine.

    Each accelerator is one worker's; so is each part of a host, such as a core, but emulated types
    share the cores (see ``crowding``).

    Raises:
        HetflowError: The machine has fewer devices of a type than the slots need.
    """
    bases = {slot.device_type: base_type(slot.device_type, config) for slot in slots}
    local = devices_of_types(set(bases.values()))
    hosts_own = {name: device for name, device in local.items() if device.is_host}
    for name, device in hosts_own.items():
        number = sum(slot.device_type == name for slot in (config.workers if taken else slots))
        if number > device.num_devices:
            raise _too_few(name, number, device.num_devices)
    needed = Counter(slot.device_type for slot in slots)
    held = set(taken)
    seats = []
    for slot in slots:
        base = bases[slot.device_type]
        if base in hosts_own:
            part = hosts_own[base]
            seats.append(Seat(slot, part.kind, part.torch_devices[0]))
            continue
        found = local.get(base)
        names = found.torch_devices if found is not None else ()
        own = next((name for name in names if name not in held), None)
        if found is None or own is None:
            raise _too_few(base, needed[slot.device_type], len(names))
        held.add(own)
        seats.append(Seat(slot, found.kind, own))
    return seats


def check_memory(slots: Sequence[WorkerSlot], config: LaunchConfig) -> None:
    """Refuse devices with less memory than a plan fills on their type: other cards share its name.

    Where shares are kept twice, a neighbour's copy counts too.

    Raises:
        TargetError: A device of this machine holds less.
    """
    needed: dict[str, int] = {}
    ratio = config.copied_ratio or 0.0 if config.redundancy else 0.0
    for slot in config.workers:
        kept = sum(config.workers[rank].state_share_bytes or 0 for rank in config.kept(slot.rank))
        copies = kept - (slot.state_share_bytes or 0)
        most = max(needed.get(slot.device_type, 0), (slot.memory_bytes or 0) + ceil(ratio * copies))
        needed[slot.device_type] = most
    bases = {slot.device_type: base_type(slot.device_type, config) for slot in slots}
    local = devices_of_types(set(bases.values()))
    for name, base in bases.items():
        found = local.get(base)
        has = None if found is None or found.is_host else found.memory_bytes
        if found is not None and has is not None and has < needed.get(name, 0):
            twice = f" with {option('redundancy', config.redundancy)}" if ratio else ""
            own = found.name_with_memory or "TYPE-16GB"
            hint = (
                "it was made for another card of this name: profile this one as the type "
                f"{own}, and solve for both types"
            )
            if name == own:
                hint = f"no {name} holds it: profile this one again, and solve with that profile"
            if ratio:
                hint = f"leave {option('redundancy')} out, or solve for more devices"
            raise TargetError(
                f"the plan fills {needed[name]:,} bytes on each {name}{twice}, and this machine's "
                f"({found.name}) has {has:,}",
                hint=hint,
            )


def imagined_seats(slots: Sequence[WorkerSlot], config: LaunchConfig) -> list[Seat]:
    """The seats on a host that has exactly the devices of these slots, in their order."""
    number = count()
    seats = []
    for slot in slots:
        base = base_type(slot.device_type, config)
        kind = CPU if base == CPU else IMAGINED
        seats.append(Seat(slot, kind, base if base == CPU else f"{kind}:{next(number)}"))
    return seats


def _too_few(device_type: str, needed: int, present: int) -> HetflowError:
    alike = [] if present else [one for one in accelerators() if may_be(device_type, one)]
    if len(alike) > 1:
        # Of a type of several hosts none is guessed: it was measured on one of them at most.
        names = ", ".join(f"{device.num_devices} x {device.device_type}" for device in alike)
        return TargetError(
            f"the plan needs {needed} x {device_type}, and this machine has several types of that "
            f"name: {names}",
            hint="profile each, and solve for the one that is meant, or for both",
        )
    return TargetError(
        f"the plan needs {needed} x {device_type}, this machine has {present}",
        hint="solve again for the devices at hand (`hetflow devices`), or launch over several "
        f"hosts with {option('nnodes')}",
    )


def remarks(
    slots: Sequence[WorkerSlot], config: LaunchConfig, environment: Mapping[str, str]
) -> list[str]:
    """Warnings about the devices that these slots get here."""
    local = devices_of_types({base_type(slot.device_type, config) for slot in slots})
    found = [
        f"the plan's {name} is taken to be this machine's {device.device_type} ({device.name})"
        for name, device in local.items()
        if device.device_type != name
    ]
    capabilities = {name: device.compute_capability for name, device in local.items()}
    said = (
        crowding(slots, config),
        emulated_bfloat16(capabilities),
        mixed_tf32(capabilities, environment),
    )
    return found + [text for text in said if text is not None]


def crowding(slots: Sequence[WorkerSlot], config: LaunchConfig) -> str | None:
    """Warn where emulated devices ask for more arithmetic than the cores can give."""
    speeds = {device.device_type: device.speed for device in config.emulated}
    asked = sum(speeds.get(slot.device_type, 0.0) for slot in slots)
    asked += sum(slot.device_type == CPU for slot in slots)
    cores = os.cpu_count() or 1
    if not speeds or asked <= cores:
        return None
    return (
        f"emulated devices ask for {asked:g} cores' worth of arithmetic, this machine has "
        f"{cores}; their passes may overrun their times"
    )


def inventory(config: LaunchConfig) -> dict[str, int]:
    """Accelerators of this host, by the names that a launch gives them: what it contributes."""
    names = {slot.device_type for slot in config.workers}
    names |= {base_type(name, config) for name in names}
    found = Counter[str]()
    for device in accelerators():
        found[known_as(device, names)] += device.num_devices
    return dict(found)


Entry = Literal["join", "follow", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """What would be typed to start one worker. ``environment`` is what is added to ours."""

    rank: int
    name: str
    device_type: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def shell(self) -> str:
        """The command for a POSIX shell, quoted."""
        settings = [f"{key}={value}" for key, value in self.environment.items()]
        return shlex.join(["env", *settings, *self.arguments])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where this host's workers find the store, and over which interface they talk."""

    address: str
    port: int
    interface: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """What workers join that are started later: its number, its config, each rank's name.

    ``entry`` is how they come in: they ``join`` others that train already, ``follow`` the workers
    of another pipeline plan, which hand over to them, or ``restart`` from a checkpoint.
    ``restarted_at`` is the generation that last started from nothing or from a checkpoint.
    """

    number: int
    config: Path
    names: dict[int, str]
    entry: Entry
    restarted_at: int


def commands_of(
    request: LaunchRequest,
    seats: Sequence[Seat],
    meeting: MeetingPoint,
    generation: NewGeneration | None = None,
) -> list[WorkerCommand]:
    """The commands of some workers of a launch; ``generation`` is None for those of the first."""
    inherited, config, handover = os.environ, request.config, request.handover_folder
    folder, checkpoint = request.folder.resolve(), request.checkpoint
    commands = []
    plan = generation.config if generation is not None else folder / "launch.json"
    joins = generation is not None and generation.entry == "join"
    for view in map(view_alone, seats) if joins else views(seats):
        seat = view.seat
        rank = seat.slot.rank
        name = generation.names[rank] if generation is not None else str(rank)
        settings = {
            "RANK": str(rank),
            "WORLD_SIZE": str(config.world_size),
            "LOCAL_RANK": str(view.local_rank),
            "LOCAL_WORLD_SIZE": str(config.world_size if joins else len(seats)),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            # The controller holds the store, also for scripts that call init_process_group.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            names.PLAN: str(plan),
            names.SLOT: str(rank),
            names.DEVICE_TYPE: seat.slot.device_type,
            names.WORKER: name,
            names.FAILURE: str(failure_path(folder, name)),
            names.TIMEOUT: str(int(request.timeout_seconds)),
            "PYTHONUNBUFFERED": "1",
        }
        settings |= view.environment(inherited)
        if view.own_device is not None:
            settings[names.DEVICE] = view.own_device
        for interface in INTERFACE_VARIABLES:
            if meeting.interface and interface not in inherited:
                settings[interface] = meeting.interface
        settings |= pins(config.determinism)
        if handover is not None:
            settings[names.HANDOVER] = str(handover.resolve())
        if generation is not None:
            settings["TORCHELASTIC_RESTART_COUNT"] = str(generation.restarted_at)
            if generation.entry == "follow":
                settings[names.FOLLOWS] = "1"
            elif generation.entry == "join":
                settings[names.JOINS] = str(generation.number)
        if config.determinism != "none":
            settings |= {names.DETERMINISM: config.determinism, names.SEED: str(config.seed)}
        if request.compare_every is not None:
            settings[names.COMPARE_EVERY] = str(request.compare_every)
        if checkpoint is not None:
            settings[names.CHECKPOINT] = str(checkpoint.resolve())
            settings[names.CHECKPOINT_EVERY] = str(request.checkpoint_every)
            settings |= {names.FROM_SCRATCH: "1"} if request.from_scratch else {}
        commands.append(
            WorkerCommand(
                rank=rank,
                name=name,
                device_type=seat.slot.device_type,
                # -P keeps the working directory off the path: no file there can pose as a module.
                arguments=(sys.executable, "-P", "-m", "hetflow.runtime.worker", *request.command),
                environment=settings,
            )
        )
    return commands


def failure_path(folder: Path, name: str) -> Path:
    """Where a worker writes its error before anyone can notice that it is gone."""
    return folder / "logs" / f"rank{name}.failed.json"


Process = subprocess.Popen[bytes] | Forked
"""A worker's process."""


def signal_group(process: Process, number: int) -> None:
    """Signal a worker and everything it started."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
