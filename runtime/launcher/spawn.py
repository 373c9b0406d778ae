"""Start workers: exact commands and environments, each in a session of its own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

from ...devices.collectives import INTERFACE_VARIABLES
from ...schema.launch import Determinism
from ...schema.options import speaks_flags
from ..preload import Preload
from ..preload.process import dying_with
from ..protocol import environment as names
from ..protocol.pins import pins
from .devices import Seat, View, view_alone, views

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
class Meeting:
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


def worker_commands(
    seats: Sequence[Seat],
    script: Sequence[str],
    *,
    folder: Path,
    meeting: Meeting,
    world_size: int,
    timeout_seconds: float,
    inherited: Mapping[str, str],
    determinism: Determinism = "none",
    seed: int = 0,
    checkpoint: Path | None = None,
    checkpoint_every: int = 0,
    from_scratch: bool = False,
    compare_every: int | None = None,
    handover: Path | None = None,
    generation: "NewGeneration | None" = None,
) -> list[WorkerCommand]:
    """The command of each worker of this host. Pure.

    Args:
        seats: Slots with their devices, in order of ranks.
        script: The script and its arguments, passed on untouched.
        folder: The run's folder, which holds ``launch.json``.
        meeting: Where the store listens.
        world_size: Workers over all hosts.
        timeout_seconds: Limit of any collective.
        inherited: The environment workers inherit; what it sets for threads and interfaces stays.
        determinism: The level, which fixes threads and kernels before torch is imported.
        seed: Seed of the script's own streams, where a level fixes them.
        checkpoint: Folder of checkpoints, if any.
        checkpoint_every: Steps between checkpoints; 0 for those that are asked for only.
        from_scratch: Whether to set the checkpoints aside that are there, and start at step 0.
        compare_every: Steps between comparisons of all parameters; None for the default.
        handover: Where a pipeline writes its parts when its plan changes, if it can.
        generation: The generation that these workers join, where others train already.
    """
    commands = []
    plan = generation.config if generation is not None else folder / "launch.json"
    joins = generation is not None and generation.entry == "join"
    for view in map(view_alone, seats) if joins else views(seats):
        seat = view.seat
        rank = seat.slot.rank
        name = generation.names[rank] if generation is not None else str(rank)
        settings = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(view.local_rank),
            "LOCAL_WORLD_SIZE": str(world_size if joins else len(seats)),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            # The controller holds the store, also for scripts that call init_process_group.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            names.PLAN: str(plan),
            names.SLOT: str(rank),
            names.DEVICE_TYPE: seat.slot.device_type,
            names.WORKER: name,
            names.FAILURE: str(failure_path(folder, name)),
            names.TIMEOUT: str(int(timeout_seconds)),
            "PYTHONUNBUFFERED": "1",
        }
        settings |= _device_settings(view, meeting, inherited) | pins(determinism)
        if handover is not None:
            settings[names.HANDOVER] = str(handover)
        if generation is not None:
            settings["TORCHELASTIC_RESTART_COUNT"] = str(generation.restarted_at)
            if generation.entry == "follow":
                settings[names.FOLLOWS] = "1"
            elif generation.entry == "join":
                settings[names.JOINS] = str(generation.number)
        if determinism != "none":
            settings |= {names.DETERMINISM: determinism, names.SEED: str(seed)}
        if compare_every is not None:
            settings[names.COMPARE_EVERY] = str(compare_every)
        if checkpoint is not None:
            settings[names.CHECKPOINT] = str(checkpoint)
            settings[names.CHECKPOINT_EVERY] = str(checkpoint_every)
            settings |= {names.FROM_SCRATCH: "1"} if from_scratch else {}
        commands.append(
            WorkerCommand(
                rank=rank,
                name=name,
                device_type=seat.slot.device_type,
                # -P keeps the working directory off the path: no file there can pose as a module.
                arguments=(sys.executable, "-P", "-m", "hetflow.runtime.worker", *script),
                environment=settings,
            )
        )
    return commands


def _device_settings(view: View, meeting: Meeting, inherited: Mapping[str, str]) -> dict[str, str]:
    settings = view.environment(inherited)
    if view.own_device is not None:
        settings[names.DEVICE] = view.own_device
    for name in INTERFACE_VARIABLES:
        if meeting.interface and name not in inherited:
            settings[name] = meeting.interface
    return settings


def failure_path(folder: Path, name: str) -> Path:
    """Where a worker writes its error before anyone can notice that it is gone."""
    return folder / "logs" / f"rank{name}.failed.json"


class Process(Protocol):
    """A worker's process: a ``subprocess.Popen``, or one that was forked."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and give its exit code."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, unless it has ended."""


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

    It is forked where a preloaded process is ready for its environment, and fresh elsewhere.

    Args:
        command: What to run.
        stdout: Where its output goes.
        stderr: Where its errors go.
        inherited: The environment that it adds its own to.
        preload: The launch's preloaded processes.
        line: Its end of the line to the controller and what that is for, if it has one.
        fence: A descriptor that it holds until its end.
        token: The launch's; by the environment, which only this user and root can read, and no
            part of the command, which is shown.
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
