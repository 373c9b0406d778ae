"""Read a worker's rank, device and plan from the environment that its launcher set.

The launcher is hetflow's own, torchrun, srun or a Kubernetes job. ``HETFLOW_PLAN`` is the path of
the plan or launch config. hetflow's launcher assigns each worker its position in the plan
(``HETFLOW_SLOT``). Under any other launcher, a rank does not determine the device type (torchrun
sorts hosts). So each process states its type, and positions are assigned by type. Nothing here
imports torch or uses the network.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from ...devices.backend import DEVICES
from ...schema import files
from ...schema.errors import FileError, TargetError
from ...schema.launch import Determinism, LaunchConfig
from ...schema.plan import Plan
from .lower import check_level, lower

PLAN = "HETFLOW_PLAN"
SLOT = "HETFLOW_SLOT"
SEED = "HETFLOW_SEED"
RUN = "HETFLOW_RUN"
DEVICE_TYPE = "HETFLOW_DEVICE_TYPE"
DEVICE = "HETFLOW_DEVICE"  # torch's name, in this process, of its own accelerator
FAILURE = "HETFLOW_FAILURE"
TIMEOUT = "HETFLOW_TIMEOUT"
TOKEN = "HETFLOW_TOKEN"  # the prefix of keys in the store is derived from it
DETERMINISM = "HETFLOW_DETERMINISM"
CHECKPOINT = "HETFLOW_CHECKPOINT"
CHECKPOINT_EVERY = "HETFLOW_CHECKPOINT_EVERY"
FROM_SCRATCH = "HETFLOW_RESTART_FROM_SCRATCH"  # "1": set checkpoints aside and start at step 0
FLAGS = "HETFLOW_FLAGS"  # "1": errors name options as flags, because a command launches
COMPARE_EVERY = "HETFLOW_COMPARE_EVERY"  # steps between comparisons of all parameters
CONTROL = "HETFLOW_CONTROL"  # file descriptor of the control channel
WORKER = "HETFLOW_WORKER"  # this worker's name on the control channel
CHANNEL = "HETFLOW_CHANNEL"  # what the control channel is for: a `Channel`
JOINS = "HETFLOW_JOINS"  # the generation that a joining worker will join
HANDOVER = "HETFLOW_HANDOVER"  # folder in which a pipeline saves its parts for a new plan
FOLLOWS = "HETFLOW_FOLLOWS"  # whether others train until this worker is ready
FIRST_STEP = "HETFLOW_FIRST_STEP"  # file that a worker makes when it has completed its first step
# What the control channel carries; each value includes those before it: heartbeats; changes of
# workers while the job trains; continuing after workers die; the same over the devices' library,
# for which the host waits for the device at the end of each step.
Channel = Literal["heartbeats", "changes", "losses", "device-losses"]
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_COMPARE_EVERY = 50


@dataclass(frozen=True, slots=True)
class Start:
    """The settings that a process was started with.

    ``rank`` is the launcher's rank; it is the worker's index in the config only if ``is_slot``.
    ``config`` is None in a plain ``python`` run. ``plan`` is None if only a launch config was
    given. ``from_scratch`` means to set existing checkpoints aside and to start at step 0.
    ``joins`` is the generation that a worker joins if it was started while others train.
    ``follows`` means that it takes over a pipeline from running workers; ``handover_folder`` is
    where these save their parts if there is no checkpoint folder.
    """

    config: LaunchConfig | None = None
    plan: Plan | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    is_slot: bool = True
    stated_type: str | None = None
    address: str | None = None
    port: int | None = None
    seed: int = 0
    run_folder: Path | None = None
    determinism: Determinism = "none"
    checkpoint_folder: Path | None = None
    checkpoint_every: int = 0
    from_scratch: bool = False
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    joins: int | None = None
    compare_every: int = DEFAULT_COMPARE_EVERY
    handover_folder: Path | None = None
    follows: bool = False


def read_environment(environment: Mapping[str, str] | None = None) -> Start:
    """Read the settings of this process from its environment.

    Raises:
        TargetError: There are several processes but no plan, the plan is for another number of
            processes, or a value is not a number.
        FileError: The plan cannot be read.
    """
    env = os.environ if environment is None else environment
    has_plan = bool(env.get(PLAN))
    if not has_plan and "RANK" in env and _integer(env, "WORLD_SIZE", 1) > 1:
        raise TargetError(
            f"{env['WORLD_SIZE']} workers started without a plan",
            hint=f"set {PLAN} to a plan file, or use `hetflow launch PLAN SCRIPT`",
        )
    start = Start(
        seed=_integer(env, SEED, 0),
        determinism=check_level(env.get(DETERMINISM) or "none"),
        checkpoint_folder=Path(env[CHECKPOINT]) if env.get(CHECKPOINT) else None,
        checkpoint_every=_integer(env, CHECKPOINT_EVERY, 0),
        # A restart within a launch uses the launch's checkpoints.
        from_scratch=env.get(FROM_SCRATCH) == "1"
        and not _integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    if not has_plan:
        return start
    config, plan = read_plan(Path(env[PLAN]), start.seed, start.determinism)
    rank, world_size, local_rank = _ranks(env)
    if world_size != config.world_size:
        raise TargetError(
            f"{env[PLAN]} needs {config.world_size} worker(s), but {world_size} started",
            hint=f"start it with `hetflow launch`, or as {config.world_size} processes",
        )
    # The only task of srun or Kubernetes needs no rendezvous.
    has_store = SLOT in env or env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = _endpoint(env) if world_size > 1 or has_store else (None, None)
    return replace(
        start,
        config=config,
        plan=plan,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        is_slot=SLOT in env or world_size == 1,
        stated_type=_stated_type(env, config),
        address=address,
        port=port,
        seed=config.seed,
        determinism=config.determinism,
        run_folder=Path(env[RUN]) if env.get(RUN) else None,
        timeout_seconds=float(_integer(env, TIMEOUT, int(DEFAULT_TIMEOUT_SECONDS))),
        joins=_integer(env, JOINS, 0) or None,
        compare_every=_count(env, COMPARE_EVERY, DEFAULT_COMPARE_EVERY),
        handover_folder=Path(env[HANDOVER]) if env.get(HANDOVER) else None,
        follows=env.get(FOLLOWS) == "1",
    )


def tell_first_step() -> None:
    """Make the file that whoever runs this launch waits for, if one does; later calls do nothing.

    The variable goes, so that no launch that the script starts makes the file.
    """
    path = os.environ.pop(FIRST_STEP, None)
    if path is not None:
        with suppress(OSError):
            Path(path).touch()


def read_plan(
    path: Path, seed: int, determinism: Determinism = "none"
) -> tuple[LaunchConfig, Plan | None]:
    """Read a plan and lower it, or read a launch config.

    Returns:
        The config, and the plan (None for a launch config).
    """
    found = files.read_any(path)
    if isinstance(found, Plan):
        return lower(found, seed, determinism), found
    if isinstance(found, LaunchConfig):
        return found, None
    raise FileError(f"{path}: must be hetflow.plan/2 or hetflow.launch/1, got {found.schema}")


def assign_slots(config: LaunchConfig, types: Sequence[str | None]) -> list[int]:
    """Assign the config's workers to processes by device type, in order of the planned devices.

    Launchers give the processes of a host consecutive ranks. So stages that the plan puts on one
    server are on one host, if each host starts as many processes as the plan uses there.

    Args:
        config: Gives the workers.
        types: Device type of each process, by the launcher's rank; None fits any worker.

    Returns:
        For each process, the index of its worker in the config.

    Raises:
        TargetError: The device types of the processes are not those of the plan.
    """
    free = list(range(len(types)))
    slot_of: dict[int, int] = {}
    waiting = []
    for slot in config.workers_by_device:
        match = next((rank for rank in free if types[rank] == slot.device_type), None)
        if match is None:
            waiting.append(slot)
        else:
            free.remove(match)
            slot_of[match] = slot.rank
    for slot in waiting:
        match = next((rank for rank in free if types[rank] is None), None)
        if match is None:
            raise TargetError(
                f"the plan needs a {slot.device_type} for rank {slot.rank}; the processes are "
                f"{', '.join(str(name) for name in types)}",
                hint=f"set {DEVICE_TYPE} in each process, or start the types the plan names",
            )
        free.remove(match)
        slot_of[match] = slot.rank
    return [slot_of[rank] for rank in range(len(types))]


def _ranks(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's names, else from Slurm's."""
    if "RANK" in env and "WORLD_SIZE" in env:
        local = _integer(env, "LOCAL_RANK", 0)
        return _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1), local
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        local = _integer(env, "SLURM_LOCALID", 0)
        return _integer(env, "SLURM_PROCID", 0), _integer(env, "SLURM_NTASKS", 1), local
    return 0, 1, 0


def _endpoint(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the store's host and port: MASTER_ADDR and MASTER_PORT, else from the Slurm job."""
    if "RANK" not in env and "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        address = env.get("MASTER_ADDR") or _first_host(nodes) or "127.0.0.1"
        # By the job's number: all its tasks know it, and two jobs on a node get two ports.
        return address, _integer(
            env, "MASTER_PORT", 20000 + _integer(env, "SLURM_JOB_ID", 0) % 9000
        )
    if "MASTER_ADDR" not in env:
        return None, None
    return env["MASTER_ADDR"], _integer(env, "MASTER_PORT", 29500)


def _first_host(nodes: str) -> str | None:
    """Return the first host of a Slurm node list such as ``gpu[03-07,9],cpu1``."""
    match = re.match(r"^([^\[,]+)(?:\[(\d+))?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else None


def _stated_type(env: Mapping[str, str], config: LaunchConfig) -> str | None:
    """Return the type that this process states: HETFLOW_DEVICE_TYPE, else torchrun's role."""
    if env.get(DEVICE_TYPE):
        return env[DEVICE_TYPE]
    known = {slot.device_type for slot in config.workers}
    role = env.get("ROLE_NAME")
    return role if role in known else None


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    found = _integer(env, name, default)
    if found < 0:
        raise TargetError(f"{name} must be 0 or more, got {env[name]!r}")
    return found


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name) or default)
    except ValueError:
        raise TargetError(f"{name} must be a whole number, got {env[name]!r}") from None


def pins(level: Determinism) -> dict[str, str]:
    """The variables that a worker at this level needs before torch is imported."""
    if level == "none":
        return {}
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for backend in DEVICES.registered:
        fixed |= backend.pins(level)
    return fixed


class _Held:
    token: ClassVar[str | None] = None


def take_token() -> str:
    """Remove the launch's token from the environment and return it; empty if there is none.

    So the script's child processes and logs do not contain it.
    """
    found = os.environ.pop(TOKEN, None)
    if found is not None:
        _Held.token = found
    return _Held.token or ""


def prefix_of(token: str) -> str:
    """Derive the prefix of all keys; it does not reveal the token, since keys can be listed."""
    return hashlib.sha256(f"hetflow store {token}".encode()).hexdigest()[:32] if token else "open"


def fingerprint_of(token: str) -> str:
    """Derive the fingerprint by which hosts check that they were given the same token."""
    return hashlib.sha256(f"hetflow fingerprint {token}".encode()).hexdigest()[:32]
