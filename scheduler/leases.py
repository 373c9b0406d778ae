"""Leases of a live cluster: planned, running and ended launches of jobs, and how they change.

Each transition is written to the state file before the engine is asked to act, and the engine acts
at most once for a lease. So a scheduler that was killed at any point continues from the state file.
"""

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..engines.protocol import OUTPUT, Engine, EngineDevice, Work
from ..schema import files
from ..schema.errors import FileError, HetflowError, ProblemError
from ..schema.run import RunRecord
from .plans import plan_on
from .store import Store
from .submission import Submission

PLAN = "plan.json"
RUN = "run"
CHECKPOINT = "checkpoint"
KILL_AFTER_SECONDS = 10.0
"""After the grace time of a launch has passed: then its workers have not obeyed it."""
FEWEST_STEPS = 10
"""Full steps after the warm-up by which a lease is measured; the first ones are slower."""
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Lease:
    """An open lease: a job on devices. ``state`` is that of the file.

    ``launch`` is the number of the lease that started its launch: its own, or an earlier one's that
    was resized. ``resizing_to`` are the devices that its launch was asked to go over to, at
    ``resize_asked``; empty where it was not.
    """

    job: int
    number: int
    devices: tuple[str, ...]
    state: str
    started: float | None
    stop_asked: float | None
    credited: float | None
    launch: int
    resizing_to: tuple[str, ...] = ()
    resize_asked: float | None = None
    predicted_steps_per_second: float | None = None

    @property
    def holds_devices(self) -> bool:
        """Whether its launch may be on its devices."""
        return self.state != "planned"

    @property
    def goes_on(self) -> bool:
        """Whether its launch starts or runs, and was not asked to stop."""
        return self.state in ("starting", "running")

    @property
    def after_resize(self) -> tuple[str, ...]:
        """Its devices once its launch has gone over to others, where it was asked to."""
        return self.resizing_to or self.devices

    @property
    def held(self) -> tuple[str, ...]:
        """The devices that its launch may be on; in a resize those before and those after."""
        if not self.holds_devices:
            return ()
        return (*self.devices, *(name for name in self.resizing_to if name not in self.devices))

    @property
    def may_be_asked(self) -> bool:
        """Whether its launch can be asked for other devices: it runs, and was not asked before."""
        return self.state == "running" and not self.resizing_to


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that is over, and with which exit code (None: nobody saw it).

    ``measured_steps_per_second`` is None where it was too short to measure. ``has_begun`` is False
    where its launch never ran.
    """

    lease: Lease
    exit_code: int | None
    reason: str | None
    digest: str | None
    measured_steps_per_second: float | None = None
    has_begun: bool = True


def open_leases(store: Store) -> list[Lease]:
    """All leases that are not over, in order of their jobs."""
    rows = store.rows("SELECT * FROM leases WHERE state != 'over' ORDER BY job, number")
    return [_lease(row) for row in rows]


def _lease(row: sqlite3.Row) -> Lease:
    return Lease(
        row["job"], row["number"], tuple(json.loads(row["devices"])), row["state"],
        row["started"], row["stop_asked"], row["credited"], row["launch"] or row["number"],
        tuple(json.loads(row["resizing_to"] or "[]")), row["resize_asked"],
        row["predicted_steps_per_second"],
    )  # fmt: skip


def folder_of(store: Store, lease: Lease) -> Path:
    """Where the plan, output and run record of a lease's launch are."""
    return store.lease_folder(lease.job, lease.launch)


def plan_lease(store: Store, job: int, devices: Sequence[str], now: float) -> None:
    """Plan a lease: it starts as soon as its devices and its job are free."""
    [row] = store.rows("SELECT leases FROM jobs WHERE number = ?", job)
    number = row["leases"] + 1
    store.run("UPDATE jobs SET leases = ? WHERE number = ?", number, job)
    store.run(
        "INSERT INTO leases (job, number, devices, state, planned) VALUES (?, ?, ?, 'planned', ?)",
        job, number, json.dumps(list(devices)), now,
    )  # fmt: skip


def planned_devices(store: Store, job: int) -> tuple[str, ...]:
    """The devices of a job's lease that is planned; empty where none is."""
    rows = store.rows("SELECT devices FROM leases WHERE job = ? AND state = 'planned'", job)
    return tuple(json.loads(rows[0]["devices"])) if rows else ()


def ask_to_resize(store: Store, lease: Lease, devices: Sequence[str], now: float) -> None:
    """Record that a lease's launch is asked for other devices: it may be on these, too, now."""
    store.run(
        "UPDATE leases SET resizing_to = ?, resize_asked = ? WHERE job = ? AND number = ? "
        "AND state = 'running'", json.dumps(list(devices)), now, lease.job, lease.number,
    )  # fmt: skip


def stay(store: Store, lease: Lease) -> None:
    """Record that a launch has not taken up the devices that it was asked for."""
    store.run(
        "UPDATE leases SET resizing_to = NULL, resize_asked = NULL WHERE job = ? AND number = ?",
        lease.job, lease.number,
    )  # fmt: skip


def move(store: Store, lease: Lease, now: float, steps_per_second: float | None) -> None:
    """Record that a launch has gone over: its lease ends, the next one begins on the new devices.

    Args:
        store: The state, in a transaction.
        lease: The one that was asked.
        now: Seconds since the epoch.
        steps_per_second: What is predicted on the new devices.
    """
    end(store, lease, now)
    if planned_devices(store, lease.job) != lease.resizing_to:  # it is to go on from there
        plan_lease(store, lease.job, lease.resizing_to, now)
    store.run(
        "UPDATE leases SET state = 'running', started = ?, launch = ?, "
        "predicted_steps_per_second = ? WHERE job = ? AND state = 'planned' AND devices = ?",
        now, lease.launch, steps_per_second, lease.job, json.dumps(list(lease.resizing_to)),
    )  # fmt: skip
    store.run("UPDATE jobs SET resizes = resizes + 1 WHERE number = ?", lease.job)


def drop_planned(store: Store, job: int, now: float) -> None:
    """Drop a job's lease that never started."""
    store.run(
        "UPDATE leases SET state = 'over', ended = ? WHERE job = ? AND state = 'planned'", now, job
    )


def ask_to_stop(store: Store, lease: Lease, now: float) -> None:
    """Record that a lease has to end; ``pursue`` then asks the engine."""
    store.run(
        "UPDATE leases SET state = 'stopping', stop_asked = ? WHERE job = ? AND number = ? "
        "AND state IN ('starting', 'running')", now, lease.job, lease.number,
    )  # fmt: skip


def credit(store: Store, lease: Lease, now: float) -> None:
    """Record until when a lease's time has been counted."""
    store.run(
        "UPDATE leases SET credited = ? WHERE job = ? AND number = ?", now, lease.job, lease.number
    )


def begin(store: Store, lease: Lease, now: float) -> None:
    """Mark a planned lease as starting: from here on its launch may be there."""
    with store.transaction():
        _set(store, lease, "starting", started=now)
        store.run(
            "UPDATE jobs SET state = 'running', reason = NULL, started = coalesce(started, ?) "
            "WHERE number = ?", now, lease.job,
        )  # fmt: skip


def start(
    store: Store,
    engine: Engine,
    devices: Mapping[str, EngineDevice],
    lease: Lease,
    asked: Submission,
    grace_seconds: int,
) -> None:
    """Start a lease's launch; what was started already is left as it is.

    Raises:
        FileError: Its folder cannot be written.
        HetflowError: There is no plan, or the engine cannot start it.
    """
    folder, job_folder = store.lease_folder(lease.job, lease.number), store.job_folder(lease.job)
    held = tuple(devices[name] for name in lease.devices)
    try:
        plan = plan_on(asked, Counter(device.device_type for device in held))
    except FileError as error:  # not that of the state: its profiles are gone
        raise ProblemError(error.message, hint=error.hint) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    files.write(folder / PLAN, plan, force=True)
    command = [
        sys.executable, "-m", "hetflow", "launch", "--output", str(folder / RUN), "--force",
        "--checkpoint", str(job_folder / CHECKPOINT),
        "--checkpoint-every", str(asked.checkpoint_every),
        "--determinism", asked.level, "--grace", str(grace_seconds),
        str(folder / PLAN), asked.script, *asked.arguments,
    ]  # fmt: skip
    before = _launches_before(store, lease)
    engine.start(
        Work(
            folder=folder, command=tuple(command), directory=Path(asked.directory), devices=held,
            after=tuple(before),
        )
    )  # fmt: skip
    with store.transaction():
        store.run(
            "UPDATE leases SET state = 'running', predicted_steps_per_second = ? "
            "WHERE job = ? AND number = ? AND state = 'starting'",
            1.0 / plan.predicted.step_seconds, lease.job, lease.number,
        )  # fmt: skip


def _launches_before(store: Store, lease: Lease) -> list[Path]:
    """The folder of the launch that the job had last, if it had one."""
    rows = store.rows(
        "SELECT coalesce(launch, number) AS launch FROM leases WHERE job = ? AND number != ? "
        "AND started IS NOT NULL ORDER BY started DESC, number DESC LIMIT 1",
        lease.job, lease.number,
    )  # fmt: skip
    return [store.lease_folder(lease.job, row["launch"]) for row in rows]


def pursue(store: Store, engine: Engine, lease: Lease, grace_seconds: float, now: float) -> None:
    """Ask a lease to stop, and kill it if it has not ended within its grace time."""
    folder = folder_of(store, lease)
    if lease.stop_asked is not None and (
        now - lease.stop_asked > grace_seconds + KILL_AFTER_SECONDS
    ):
        engine.kill(folder)
    else:
        engine.stop(folder)


def fate_of(store: Store, engine: Engine, lease: Lease) -> Ended | None:
    """How a lease that was started ended; None while it runs."""
    folder = folder_of(store, lease)
    fate = engine.fate(folder)
    if fate.state == "running":
        return None
    digest, step_seconds = None, None
    with suppress(HetflowError):
        record = files.read(folder / RUN / "run.json", RunRecord)
        digest, step_seconds = record.parameters_digest, record.measured_step_seconds
        terms = [device.terms for device in record.devices if device.terms is not None]
        if record.generations:  # of several sets of devices
            step_seconds = None
        if any(one.num_steps < FEWEST_STEPS for one in terms):
            step_seconds = None
    code = fate.exit_code
    reason = None if code == 0 else last_words(folder / OUTPUT, code)
    has_begun = fate.has_begun and fate.state != "absent"
    measured = 1.0 / step_seconds if step_seconds else None
    return Ended(lease, code, reason, digest, measured, has_begun)


def end(
    store: Store,
    lease: Lease,
    now: float,
    exit_code: int | None = None,
    measured_steps_per_second: float | None = None,
) -> None:
    """Mark a lease as ended, with what was measured, and count the time that it had."""
    seconds = 0.0 if lease.started is None else max(0.0, now - lease.started)
    store.run(
        "UPDATE leases SET state = 'over', ended = ?, exit_code = ?, "
        "measured_steps_per_second = ? WHERE job = ? AND number = ?",
        now, exit_code, measured_steps_per_second, lease.job, lease.number,
    )  # fmt: skip
    store.run(
        "UPDATE jobs SET device_seconds = device_seconds + ? WHERE number = ?",
        seconds * len(lease.devices), lease.job,
    )  # fmt: skip


def last_words(output: Path, exit_code: int | None) -> str:
    """The error that a launch wrote, else the last line of its output."""
    ended = "nobody saw how it ended" if exit_code is None else f"exit code {exit_code}"
    try:
        with output.open("rb") as stream:
            stream.seek(max(0, output.stat().st_size - 65536))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ended
    errors = [line for line in lines if line.startswith("hetflow: ") and "warning:" not in line]
    said = errors or [line for line in lines if line.strip()]
    return f"{ended}: {said[-1].strip()[:_LONGEST_REASON]}" if said else ended


def _set(store: Store, lease: Lease, state: str, *, started: float) -> None:
    store.run(
        "UPDATE leases SET state = ?, started = ? WHERE job = ? AND number = ?",
        state, started, lease.job, lease.number,
    )  # fmt: skip
