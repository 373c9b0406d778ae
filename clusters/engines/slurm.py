"""Leases as Slurm jobs: one job a lease, on the nodes' GPUs, never requeued.

A lease's folder, which all nodes see, holds ``work.json`` (what to run), ``job.sh`` (the batch
script), ``submitted.json`` (Slurm's number of it), ``claim``, and what the keeper writes. Only
Slurm's own commands are run, as the user who started the scheduler, and no shell reads what is
given to them.
"""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...schema.cluster import Cluster
from ...schema.errors import FileError, HetflowError, ProblemError
from .keeper import ASK
from .protocol import (
    ASKED,
    CLAIM,
    ENDED,
    ENGINE,
    OUTPUT,
    SUBMITTED,
    WORK,
    EngineDevice,
    Fate,
    Work,
    claim,
    claimed_by,
    digest_of,
    document_of,
    engine,
    fate_of_lost,
    progress,
    read_json,
    revoke,
    write_atomically,
)

_log = logging.getLogger("hetflow")
_KEEPER = "hetflow.clusters.engines.keeper"
_SCRIPT = "job.sh"
_COMMAND_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.5
_AGAIN_AFTER_SECONDS = 5.0
"""Between two tries of what Slurm did not take, or did not do."""

NODE_FORMAT = "%N|%T|%c|%m|%f|%G"
QUEUE_FORMAT = "%i|%T|%j"
_UP = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
_REQUEUED = {
    "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip
"""States of a job that Slurm may begin later; of one that has run: an administrator requeued it."""
_UNREACHABLE = re.compile(
    "unable to contact|socket timed out|communication|connection|try again|timed out", re.IGNORECASE
)


class SlurmUnreachableError(ProblemError):
    """Slurm's controller did not answer; it may later, and may have done what it was asked."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """GPUs of one type on one node.

    Attributes:
        node: Its name.
        is_up: Whether Slurm may start jobs there, or runs some.
        gres: What Slurm calls them, without the number: ``gpu:v100``, or ``gpu``.
        types: The names that they answer to (``canonical``).
        count: How many there are.
        cpus_each: The node's processors, divided among its GPUs.
        memory_each_mb: The node's memory, divided among its GPUs.
    """

    node: str
    is_up: bool
    gres: str
    types: frozenset[str]
    count: int
    cpus_each: int
    memory_each_mb: int


def canonical(name: str) -> str:
    """A device type as GRES types and features may write it: ``cpu:fast`` is ``cpu_fast``."""
    return re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")


def parse_nodes(text: str) -> list[NodeGpus]:
    """Read what ``sinfo --Node`` says in ``NODE_FORMAT``; nodes without GPUs are left out.

    A GPU is of the type that its GRES names; where that names none, of all the node's features.
    """
    found: dict[tuple[str, str], NodeGpus] = {}
    for line in text.splitlines():
        name, state, cpus, memory, features, gres = line.split("|", 5)
        # A state may end in a sign: "*" does not answer, "~" is powered down, "$" in maintenance.
        rows = [one.split(":") for one in re.sub(r"\([^)]*\)", "", gres).split(",")]
        gpus = [(row[1] if len(row) == 3 else "", int(row[-1]))
                for row in rows if row[0] == "gpu" and row[-1].isdigit()]  # fmt: skip
        total = sum(count for _, count in gpus)
        for kind, count in gpus:
            called = [kind] if kind else features.split(",")
            # A node is listed once for each of its partitions.
            found[name, kind] = NodeGpus(
                node=name,
                is_up=state in _UP,
                gres=f"gpu:{kind}" if kind else "gpu",
                types=frozenset(canonical(one) for one in called),
                count=count,
                cpus_each=max(1, int(cpus) // total),
                memory_each_mb=int(memory.rstrip("+")) // total,
            )
    return list(found.values())


def parse_queue(text: str) -> dict[str, list[tuple[str, str]]]:
    """Read ``squeue --noheader --format`` of ``QUEUE_FORMAT``: numbers and states by job's name."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in text.splitlines():
        number, state, name = line.split("|", 2)
        found[name].append((number, state))
    return dict(found)


def job_name(folder: Path) -> str:
    """The Slurm name of a lease's job: unique, and computed from its folder alone."""
    return f"hetflow-{digest_of(folder)}"


def render_script(folder: Path) -> str:
    """The batch script: the keeper as a step, since that is what Slurm signals."""
    keeper = shlex.join([sys.executable, "-m", _KEEPER, str(folder)])
    output = shlex.quote(str(folder / OUTPUT))
    return f"#!/bin/sh\nexec srun --ntasks=1 {keeper} >>{output} 2>&1 </dev/null\n"


def submission(
    folder: Path, gpus: NodeGpus, count: int, after: Sequence[str], script: Path
) -> list[str]:
    """The ``sbatch`` command of a lease."""
    command = [
        "sbatch", "--parsable", "--no-requeue", "--job-name", job_name(folder), "--nodes=1",
        "--ntasks=1", "--nodelist", gpus.node, f"--gres={gpus.gres}:{count}",
        f"--cpus-per-task={gpus.cpus_each * count}", "--chdir=/", "--output=/dev/null",
        "--error=/dev/null", "--export=ALL",
    ]  # fmt: skip
    if gpus.memory_each_mb:
        command.append(f"--mem={gpus.memory_each_mb * count}M")
    if after:
        command.append("--dependency=afterany:" + ":".join(after))
    return [*command, str(script)]


class SlurmEngine:
    """Jobs of a Slurm cluster; they outlive the scheduler, which finds them by their names."""

    name = "slurm"

    def __init__(self, pool: Cluster) -> None:
        """Offer GPUs of Slurm's nodes.

        Args:
            pool: How many devices of each type to use, from the first nodes that have some.

        Raises:
            ProblemError: Slurm's commands are not here, do not answer, or know too few devices.
        """
        self._num_devices = dict(pool.num_devices)
        self._is_away = False
        self._looked = -1.0
        self._queue: dict[str, list[tuple[str, str]]] = {}
        self._tried: dict[Path, float] = {}
        self._killed: dict[Path, float] = {}
        self._asked: set[Path] = set()
        # Refuses at once where Slurm or its devices are missing.
        self.devices()

    def devices(self) -> tuple[EngineDevice, ...]:
        """The pool's devices as Slurm sees them now.

        Raises:
            ProblemError: Slurm does not answer, or knows too few devices.
        """
        nodes = self._nodes()
        found = []
        for device_type, wanted in self._num_devices.items():
            have = [
                EngineDevice(f"{one.node}/{device_type}:{number}", device_type, one.node, one.is_up)
                for one in nodes
                if canonical(device_type) in one.types
                for number in range(one.count)
            ]
            if len(have) < wanted:
                known = ", ".join(sorted({name for one in nodes for name in one.types}))
                raise ProblemError(
                    f"the pool has {wanted} x {device_type}, Slurm's nodes have {len(have)}",
                    hint=f"their GPUs are: {known or 'none'} (sinfo -N -o '%N %G %f')",
                )
            found += have[:wanted]
        return tuple(found)

    def _nodes(self) -> list[NodeGpus]:
        return parse_nodes(self._ask("sinfo", "--Node", "--noheader", "--format", NODE_FORMAT))

    def start(self, work: Work) -> None:
        """Submit a lease's job; where Slurm does not answer, ``fate`` goes on trying.

        Raises:
            UnsuitableDevicesError: The devices are on several nodes.
            ProblemError: Slurm refuses the job.
            FileError: The lease's folder cannot be written.
        """
        folder = work.folder
        # Slurm has it, or had: a lease is submitted once.
        if (folder / SUBMITTED).exists():
            return
        if not (folder / _SCRIPT).exists():
            self._write(work)
        # ``fate`` tries again, so an outage of the controller delays a start and loses none.
        with suppress(SlurmUnreachableError):
            self._submit(folder)

    def _write(self, work: Work) -> None:
        document = {
            **document_of(work),
            "device_type": work.devices[0].device_type,
            "node": work.server,
            "after": [str(folder) for folder in work.after],
        }
        try:
            write_atomically(work.folder / WORK, document)
            script = work.folder / _SCRIPT
            script.write_text(render_script(work.folder), encoding="utf-8")
        except OSError as error:
            raise FileError(f"{work.folder}: {error.strerror}") from None

    def _submit(self, folder: Path) -> None:
        """Submit a lease's job, unless Slurm has it, or had."""
        self._tried[folder] = time.monotonic()
        # It may have taken the job and not answered: its name tells, in a queue that is looked at
        # now.
        number = _number_of(self._look(fresh=True), folder)
        if number is None:
            # The job has begun, and left the queue already.
            if (folder / CLAIM).exists():
                return
            work = json.loads((folder / WORK).read_text(encoding="utf-8"))
            # Nodes may have changed since the decision, so they are asked again.
            [gpus] = [one for one in self._nodes() if one.node == work["node"]
                      and canonical(work["device_type"]) in one.types]  # fmt: skip
            earlier = (_number_of(self._queue, Path(one)) for one in work["after"])
            after = [one for one in earlier if one is not None]
            command = submission(folder, gpus, len(work["devices"]), after, folder / _SCRIPT)
            number = self._ask(*command).strip().partition(";")[0]
        write_atomically(folder / SUBMITTED, {"number": number})
        self._looked = -1.0  # what was seen is older than the job

    def stop(self, folder: Path) -> None:
        """Let the keeper send the launch SIGTERM, once; what has not begun leaves the queue."""
        # Once: a second signal would end the launch before it has saved.
        if folder in self._asked or (folder / ENDED).exists() or (folder / ASKED).exists():
            return
        # A job that has not begun loses its claim, so that it never will.
        revoke(folder)
        # Slurm sends a signal to all processes of a step: SIGTERM would reach the launch and its
        # workers, and once more from the keeper, and a second one ends it before it has saved.
        options = [] if (folder / ENDED).exists() else [f"--signal={ASK.name[3:]}"]
        if self._cancel(folder, *options):
            self._asked.add(folder)  # also where the disk is full
            write_atomically(folder / ASKED, {})

    def kill(self, folder: Path) -> None:
        """Cancel the job: Slurm kills all of it when its ``KillWait`` has passed."""
        # Slurm takes its time to kill; asked every tick it would only have more to do.
        if time.monotonic() - self._killed.get(folder, -1e9) > _AGAIN_AFTER_SECONDS:
            self._killed[folder] = time.monotonic()
            revoke(folder)
            self._cancel(folder)

    def _cancel(self, folder: Path, *options: str) -> bool:
        """Cancel or signal a lease's job, where it has one. False where Slurm is away."""
        try:
            number = _number_of(self._look(), folder)
            if number is not None:
                self._ask("scancel", "--quiet", *options, number)
        except SlurmUnreachableError:
            return False
        except HetflowError:
            pass  # it is over already
        return True

    def fate(self, folder: Path) -> Fate:
        """What became of a lease: by what its keeper wrote, or else by Slurm's queue."""
        # What the keeper wrote counts before all that Slurm says.
        ended = read_json(folder / ENDED)
        if ended is not None:
            self._forget(folder)
            return Fate("ended", int(ended["exit_code"]))
        if not (folder / _SCRIPT).exists():
            return Fate("absent")
        try:
            if (folder / SUBMITTED).exists() or (folder / CLAIM).exists():
                return self._fate_in_queue(folder)
            if time.monotonic() - self._tried.get(folder, -1e9) > _AGAIN_AFTER_SECONDS:
                self._submit(folder)
        except SlurmUnreachableError:
            pass  # whatever runs goes on without the controller
        except HetflowError as error:  # refused at a later try
            if claim(folder, ENGINE):
                with (folder / OUTPUT).open("a", encoding="utf-8") as output:
                    output.write(f"hetflow: {error.message}\n")
                write_atomically(folder / ENDED, {"exit_code": 1})
        return progress(folder)

    def _fate_in_queue(self, folder: Path) -> Fate:
        jobs = self._look().get(job_name(folder), [])
        live = {state for _, state in jobs} - _OVER
        # A job that has run and waits again was requeued: it would train a second time.
        if live and live <= _REQUEUED and _has_run(folder):
            # By a look after the claim: before, it may just have begun.
            jobs = self._look(fresh=True).get(job_name(folder), [])
            live = {state for _, state in jobs} - _OVER
            if live and live <= _REQUEUED:  # a lease runs once, so there is nothing to wait for
                self.kill(folder)
        if live:
            return progress(folder)
        # Written before the job left the queue, so by now it can be read.
        ended = read_json(folder / ENDED)
        if ended is not None:
            return Fate("ended", int(ended["exit_code"]))
        self._forget(folder)
        return fate_of_lost(folder)

    def _ask(self, *command: str) -> str:
        """Ask Slurm as ``_slurm`` does; say when the controller goes away, and when it is back."""
        try:
            answer = _slurm(*command)
        except SlurmUnreachableError as error:
            if not self._is_away:
                self._is_away = True
                _log.warning(
                    f"Slurm does not answer ({error.message}): what runs goes on, nothing begins "
                    "or is stopped until it does"
                )
            raise
        except HetflowError:
            self._note_answer()
            raise
        self._note_answer()
        return answer

    def _note_answer(self) -> None:
        if self._is_away:
            self._is_away = False
            _log.warning("Slurm answers again")

    def _forget(self, folder: Path) -> None:
        self._tried.pop(folder, None)
        self._killed.pop(folder, None)
        self._asked.discard(folder)

    def _look(self, *, fresh: bool = False) -> Mapping[str, list[tuple[str, str]]]:
        """This user's jobs, as they were at most half a second ago."""
        now = time.monotonic()
        # One look serves all leases of a tick.
        if fresh or self._looked < 0 or now - self._looked > _LOOK_EVERY_SECONDS:
            text = self._ask(
                "squeue", "--me", "--noheader", "--states=all", "--format", QUEUE_FORMAT
            )
            self._queue, self._looked = parse_queue(text), now
        return self._queue


def _has_run(folder: Path) -> bool:
    """Whether a step has claimed a lease."""
    return (folder / CLAIM).exists() and claimed_by(folder) != ENGINE


def _number_of(queue: Mapping[str, list[tuple[str, str]]], folder: Path) -> str | None:
    """Slurm's number of a lease's job; None where Slurm does not know it (any more)."""
    jobs = queue.get(job_name(folder), [])
    # Of several jobs of one name the live one.
    live = [number for number, state in jobs if state not in _OVER]
    return next(iter(live or [number for number, _ in jobs]), None)


def _slurm(*command: str) -> str:
    """Run a command of Slurm's; its output."""
    # These change what is printed, or for whom.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=_COMMAND_SECONDS, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        raise ProblemError(
            f"{command[0]}: no such command", hint="start the scheduler where Slurm's commands are"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{command[0]}: no answer from Slurm") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip().splitlines()
    message = f"{command[0]}: {said[-1] if said else f'exit code {done.returncode}'}"
    if _UNREACHABLE.search(done.stderr):
        raise SlurmUnreachableError(message)
    raise ProblemError(message, hint="`sinfo` and `squeue` show what Slurm has")


engine("slurm")(SlurmEngine)
