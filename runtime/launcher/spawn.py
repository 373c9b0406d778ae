"""Start workers: exact commands and environments, each in a session of its own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ...devices.collectives import INTERFACE_VARIABLES
from ...schema.options import speaks_flags
from ..preload import Forked, Preload
from ..preload.process import dying_with
from ..protocol import environment as names
from ..protocol.environment import pins
from .devices import Seat, view_alone, views
from .request import LaunchRequest

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
                arguments=(sys.executable, "-P", "-m", "hetflow.runtime.worker", *request.script),
                environment=settings,
            )
        )
    return commands


def failure_path(folder: Path, name: str) -> Path:
    """Where a worker writes its error before anyone can notice that it is gone."""
    return folder / "logs" / f"rank{name}.failed.json"


Process = subprocess.Popen[bytes] | Forked
"""A worker's process."""


def start(
    command: WorkerCommand,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    inherited: Mapping[str, str],
    *,
    preload: Preload,
    line: tuple[int, names.Channel] | None = None,
    fence: int | None = None,
    token: str = "",
) -> Process:
    """Start one worker in its own session; it dies with this process, however that dies.

    It is forked where a preloaded process is ready for its environment, and fresh elsewhere. It
    has its end of the ``line`` to the controller, and holds the descriptor ``fence`` till it ends.
    The token goes by the environment, which only this user and root can read, and is no part of
    the command, which is shown.
    """
    extra = {names.CONTROL: str(line[0]), names.CHANNEL: line[1]} if line is not None else {}
    extra |= {names.TOKEN: token} if token else {}
    extra |= {names.FLAGS: "1"} if speaks_flags() else {}
    environment = {**inherited, **command.environment, **extra}
    passed = tuple(fd for fd in (line[0] if line is not None else None, fence) if fd is not None)
    forked = preload.start(
        command.arguments,
        environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=passed,
    )
    if forked is not None:
        return forked
    is_linux = sys.platform.startswith("linux")
    return subprocess.Popen(
        command.arguments,
        env=environment,
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=dying_with(os.getpid()) if is_linux else None,
    )


def signal_group(process: Process, number: int) -> None:
    """Signal a worker and everything it started."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
