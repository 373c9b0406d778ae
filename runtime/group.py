"""Join the other workers: choose this process's rank, its device and the collectives' backend."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ..devices.backend import backend_of
from ..devices.collectives import HOST_COLLECTIVE, choose_collective, is_on_devices, wire_device
from ..devices.cpu import base_type
from ..devices.host import TORCH_DEVICE
from ..devices.local import device_of_type, own_type
from ..schema.errors import HetflowError, LaunchError, PeerLostError, TargetError
from ..schema.files import to_json
from ..schema.launch import Determinism, WorkerSlot
from ..schema.options import Activations, option
from ..schema.records import Name, adapter_of, record
from . import peers
from .elastic.control import Control
from .log import log
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
from .protocol.handover import FOREVER, GO, READY
from .protocol.messages import Recover, Resize

# Let workers wait for each other before they have a process group, through the store.
#
# Loading data or a model may take one worker minutes longer than another. So a worker that has not
# reached ``hf.prepare`` is waited for until the time limit; after ``LATE_SECONDS`` its rank is
# printed. A wait that cannot end well is given up early: for a worker that ended without reaching
# ``hf.prepare``, and for one that reached it ``LATE_SECONDS`` ago but has not written the value.


LATE_SECONDS = 40.0
LOOK_SECONDS = 0.5
_LAUNCHER_SECONDS = 10.0  # how long a launcher that is up may not answer
# The pause between two questions to the store: a fraction of the wait so far, within these limits.
_PAUSE_FRACTION = 0.05
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.001, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All workers that are to form one process group.

    Args:
        device_types: [ranks] the device type of each worker.
        limit_seconds: How long to wait for any worker.
        late_seconds: How long to wait for the value of a worker that has arrived; also after how
            long a worker that has not arrived is named.
    """

    store: SharedStore
    device_types: Sequence[str]
    limit_seconds: float
    late_seconds: float = LATE_SECONDS

    def arrive(self, rank: int) -> None:
        """Say that this worker has reached ``hf.prepare``."""
        self.store.set(f"arrived/{rank}", "1")

    def leave(self, rank: int) -> None:
        """Say that this worker has ended without reaching ``hf.prepare``."""
        self.store.set(f"left/{rank}", "1")

    def read(self, name: str) -> list[str]:
        """Read what every worker has written under a name, by rank; wait for all of them.

        Raises:
            LaunchError: A worker ended without arriving.
            PeerLostError: A worker did not arrive in time, or stopped after it arrived
                (``timed_out``); or the store is gone.
        """
        ranks = range(len(self.device_types))
        keys = [f"{name}/{rank}" for rank in ranks]
        began = looked_at = time.monotonic()
        on_the_way_since: dict[int, float] = {}
        has_told = False
        while not self.store.has(*keys):
            now = time.monotonic()
            waited = now - began
            if now - looked_at >= min(LOOK_SECONDS, self.late_seconds):
                looked_at = now
                missing = [rank for rank in ranks if not self.store.has(keys[rank])]
                absent = self._check_missing(missing, waited, now, on_the_way_since)
                if absent and waited > self.late_seconds and not has_told:
                    has_told = True
                    limit = f"{self.limit_seconds:g} s ({option('timeout_seconds')})"
                    log.warning(
                        f"still waiting for {self.names(absent)} to come to hf.prepare, where "
                        f"workers meet; up to {limit}"
                    )
            time.sleep(min(max(_PAUSE_FRACTION * waited, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS))
        return [self.store.get(key) for key in keys]

    def _check_missing(
        self, missing: list[int], waited: float, now: float, on_the_way_since: dict[int, float]
    ) -> list[int]:
        """Give up a wait that cannot end well; the workers that have not arrived."""
        left = [rank for rank in missing if self.store.has(f"left/{rank}")]
        if left:
            raise LaunchError(
                f"{self.names(left)} ended without coming to hf.prepare, where the others wait",
                hint="every worker of the plan must call hf.prepare",
                exit_code=1,
            )
        came = [rank for rank in missing if self.store.has(f"arrived/{rank}")]
        for rank in came:
            on_the_way_since.setdefault(rank, now)
        stuck = [rank for rank in came if now - on_the_way_since[rank] > self.late_seconds]
        who = ""
        if stuck:
            who = f"{self.names(stuck)}, which came to hf.prepare and got no further"
        elif missing and waited > self.limit_seconds:
            who = f"{self.names(missing)}, which did not come to meet the others"
        if who:
            raise PeerLostError(f"waited {waited:.0f} s in vain for {who}", timed_out=True)
        return [rank for rank in missing if rank not in came]

    def names(self, ranks: Sequence[int]) -> str:
        """Name these workers, for a sentence."""
        said = [f"{rank} ({self.device_types[rank]})" for rank in ranks]
        return f"rank{'s' if len(said) > 1 else ''} {', '.join(said)}"


# Compare the torch builds of the workers and refuse those that cannot work together.
#
# Hosts with different GPUs may need different builds of torch: no one build has kernels for both
# the oldest and the newest GPUs. Where NCCL versions differ, NCCL fails with an error that names no
# host. Kernels of different torch releases give different bits.


@record
class Build:
    """The torch build of one worker.

    Attributes:
        host: Name of the worker's host.
        torch: Torch's version, with that of the build.
        toolkit: Toolkit that torch was built with for the worker's device, such as a CUDA version.
        collective_version: Version of the collectives' library; None where its versions mix.
    """

    host: Name
    torch: Name
    toolkit: Name | None = None
    collective_version: Name | None = None

    @property
    def release(self) -> str:
        """Torch's version without the build's suffix: 2.9.1 for 2.9.1+cu128."""
        return self.torch.partition("+")[0]


def own_build(device: torch.device) -> Build:
    """The build of this process, for its device."""
    backend = backend_of(device)
    return Build(
        host=socket.gethostname() or "unknown",
        torch=torch.__version__,
        toolkit=backend.toolkit(),
        collective_version=backend.collective_version(),
    )


def check_builds(builds: Sequence[Build], collective: str, determinism: Determinism) -> None:
    """Refuse builds that cannot work together; warn of those that may give different bits.

    Raises:
        TargetError: The workers have different versions of the backend; or different releases of
            torch, under a level that promises equal bits.
    """
    unlike = None
    if collective != HOST_COLLECTIVE:
        unlike = _unlike(builds, lambda build: build.collective_version or "none")
    if unlike is not None:
        raise TargetError(
            f"{collective.upper()} of unlike versions cannot work together: {unlike}",
            hint="install builds of torch with one version of it on all hosts",
        )
    unlike = _unlike(builds, lambda build: build.release)
    if unlike is None:
        return
    if determinism != "none":
        raise TargetError(
            f"{option('determinism', determinism)} needs one release of torch on all "
            f"hosts: {unlike}",
            hint="install the same torch everywhere, or launch with "
            f"{option('determinism', 'none')}",
        )
    log.warning(f"workers run unlike releases of torch, which may fail together: {unlike}")


def _unlike(builds: Sequence[Build], version_of: Callable[[Build], str]) -> str | None:
    """Name two ranks whose versions differ; None where all are equal."""
    first = builds[0]
    for rank, build in enumerate(builds):
        if version_of(build) != version_of(first):
            return f"{_said(0, first, version_of)}, {_said(rank, build, version_of)}"
    return None


def _said(rank: int, build: Build, version_of: Callable[[Build], str]) -> str:
    toolkit = f", {build.toolkit}" if build.toolkit else ""
    return f"rank {rank} on {build.host} has {version_of(build)} (torch {build.torch}{toolkit})"


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

    @property
    def activations(self) -> Activations:
        """What becomes of the activations of this worker's repeated layers."""
        return (self.slot and self.slot.activations) or "kept"


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
    with control.connections.opening(start.world_size):
        return replace(_join(start, device, control), control=control)


def _join(start: Start, device: torch.device | None, control: Control | None = None) -> Place:
    assert start.config is not None
    store = _connect(start, _Jobs.opened) if start.address else None
    if start.follows and store is not None and not _Jobs.opened:
        # The former workers train on until all have counted themselves here. Then they save their
        # parts and leave. Before GO they hold the devices, so nothing may be put there.
        store.add(READY, 1)
        store.wait([GO], FOREVER)
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
    sent = numbers.to(wire_device(place.device), non_blocking=True).contiguous()
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
    # Before the meeting: an ``Abort`` of this generation that comes meanwhile must count.
    control.generation = message.generation
    with control.connections.opening(config.world_size):
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


def enter_handover(place: Place, message: Resize, control: Control) -> Place:
    """Join the workers of the next generation and its guests, until ``close_group``."""
    size, rank = len(message.together), message.together[control.worker]
    start = replace(place.start, config=message.config, world_size=size)
    with control.connections.opening(size):
        store = _connect(start).under(f"handover/{message.generation}")
        _init_group(rank, place.device, start, store, control)
    return replace(place, start=start, rank=rank, world_size=size, store=store)


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
    """Free objects whose destruction may block, and wait for it no longer than a limit."""
    # Destroying a gloo group joins its threads. A thread can be stuck in a send until the group's
    # own time limit, even after its sockets were closed. The others would wait for this worker that
    # long. So a separate thread frees the objects.
    waiter = threading.Thread(target=held.clear, name="hetflow-old-groups", daemon=True)
    waiter.start()
    waiter.join(patience_seconds)


def _connect(start: Start, number: int = 0) -> SharedStore:
    """Connect to the launcher's store; under srun or Kubernetes the first process holds it."""
    assert start.address is not None
    held_outside = start.is_slot or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = not held_outside and start.rank == 0
    if not holds:
        _find_store(start, is_up=held_outside)
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
    # Of the jobs of this process the launcher reads the keys of the first, number 0.
    job = f"/job{number}" if number else ""
    return SharedStore(store).under(prefix_of(take_token())).under(f"hetflow/{restarts}{job}")


def _find_store(start: Start, *, is_up: bool) -> None:
    """Wait until the store's port answers, which ``is_up`` where a launcher holds it."""
    # Torch waits too, but for minutes and without a word.
    place, began, has_told = f"{start.address}:{start.port}", time.monotonic(), False
    limit = _LAUNCHER_SECONDS if is_up else start.timeout_seconds
    holder = "launcher" if is_up else "rank 0"
    while True:
        try:
            socket.create_connection((start.address or "", start.port or 0), LATE_SECONDS).close()
            return
        except OSError as error:
            waited = time.monotonic() - began
            if waited > limit:
                raise TargetError(
                    f"no {holder} answers at {place} (MASTER_ADDR, MASTER_PORT), where the "
                    f"{start.world_size} workers of the plan meet: {error.strerror or error}",
                    hint="start the script with `hetflow launch PLAN SCRIPT`, torchrun or srun; "
                    "by hand, start all workers, and unset HETFLOW_SLOT",
                ) from error
        if waited > LATE_SECONDS and not has_told:
            has_told = True
            log.warning(f"still waiting for {holder} at {place}; up to {limit:g} s")
        time.sleep(_MAX_PAUSE_SECONDS)


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
    store.set(f"build/{rank}", to_json(own_build(device)))
    store.set(f"device/{rank}", json.dumps(_identity(device)))
    # All meet by the store first: then only workers that are there enter the group's own
    # rendezvous, which names nobody when it waits in vain. And one that is refused here has joined
    # nothing.
    meeting = _meeting(start, store)
    identities = [json.loads(word) for word in meeting.read("device")]
    collective = choose_collective(device, identities)
    builds = [adapter_of(Build).validate_json(text) for text in meeting.read("build")]
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
    types += ["leaving"] * (start.world_size - len(types))  # the guests of `enter_handover`
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
