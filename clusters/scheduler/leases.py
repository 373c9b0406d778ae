"""Leases of a live cluster: planned, running and ended launches of jobs, and how they change.

Each transition is written to the state file before the engine is asked to act, and the engine acts
at most once for a lease. So a scheduler that was killed at any point continues from the state file.

To resize a running lease, its launch is asked for other devices, and nobody waits for the answer.
The request's name follows from the lease's record. So a scheduler that goes on after a crash asks
for the same thing once more, or finds the answer. The answer stays until the record tells of it.
"""

import json
import os
import sqlite3
import stat
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...runtime.protocol import control, environment
from ...runtime.protocol.ended import have_all_left
from ...runtime.protocol.lower import lower
from ...schema import files
from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.launch import LaunchConfig
from ...schema.options import option
from ...schema.plan import Plan
from ...schema.run import RunRecord
from ..engines.accounts import Account, account, give
from ..engines.protocol import FIRST_STEP, OUTPUT, Engine, EngineDevice, EngineForUsers, Work
from .plans import plan_on
from .store import RUN, ClusterStore
from .submission import Submission

PLAN = "plan.json"
ARRAY_INDEX = "HETFLOW_ARRAY_INDEX"
"""The variable that a job of an array knows its index by."""
CHECKPOINT = "checkpoint"
KILL_AFTER_SECONDS = 10.0
"""After the grace time of a launch has passed: then its workers have not obeyed it."""
FEWEST_STEPS = 10
"""Full steps after the warm-up by which a lease is measured; the first ones are slower."""
_LONGEST_REASON = 300
_MOST_OF_RECORD = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Lease:
    """An open lease: a job on devices. ``state`` is that of the file.

    ``launch`` is the number of the lease that started its launch: its own, or an earlier one's that
    was resized. ``resizing_to`` are the devices that its launch was asked to go over to, at
    ``resize_asked``; empty where it was not. It was given to the engine at ``started``, its launch
    began at ``began``, and completed its first step at ``trained``; None before.
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
    began: float | None = None
    trained: float | None = None

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
    def is_young(self) -> bool:
        """Whether it goes on, and has not made its first step: it is not moved before."""
        return self.goes_on and self.trained is None

    def trained_seconds(self, until: float) -> float:
        """For how long it has trained: what it is charged, and what counts of its turn."""
        return 0.0 if self.trained is None else max(0.0, until - self.trained)

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


def open_leases(store: ClusterStore) -> list[Lease]:
    """All leases that are not over, in order of their jobs."""
    rows = store.rows("SELECT * FROM leases WHERE state != 'over' ORDER BY job, number")
    return [_lease(row) for row in rows]


def _lease(row: sqlite3.Row) -> Lease:
    return Lease(
        row["job"], row["number"], tuple(json.loads(row["devices"])), row["state"],
        # Older rows have no launch: each lease had its own.
        row["started"], row["stop_asked"], row["credited"], row["launch"] or row["number"],
        tuple(json.loads(row["resizing_to"] or "[]")), row["resize_asked"],
        row["predicted_steps_per_second"], row["began"], row["trained"],
    )  # fmt: skip


def folder_of(store: ClusterStore, lease: Lease) -> Path:
    """Where the plan, output and run record of a lease's launch are."""
    return store.lease_folder(lease.job, lease.launch)


def plan_lease(store: ClusterStore, job: int, devices: Sequence[str], now: float) -> None:
    """Plan a lease: it starts as soon as its devices and its job are free."""
    [row] = store.rows("SELECT leases FROM jobs WHERE number = ?", job)
    number = row["leases"] + 1
    store.change_job(job, leases=number)
    store.run(
        "INSERT INTO leases (job, number, devices, state, planned) VALUES (?, ?, ?, 'planned', ?)",
        job, number, json.dumps(list(devices)), now,
    )  # fmt: skip


def planned_devices(store: ClusterStore, job: int) -> tuple[str, ...]:
    """The devices of a job's lease that is planned; empty where none is."""
    rows = store.rows("SELECT devices FROM leases WHERE job = ? AND state = 'planned'", job)
    return tuple(json.loads(rows[0]["devices"])) if rows else ()


def ask_to_resize(store: ClusterStore, lease: Lease, devices: Sequence[str], now: float) -> None:
    """Record that a lease's launch is asked for other devices: it may be on these, too, now."""
    store.run(
        "UPDATE leases SET resizing_to = ?, resize_asked = ? WHERE job = ? AND number = ? "
        "AND state = 'running'", json.dumps(list(devices)), now, lease.job, lease.number,
    )  # fmt: skip


def stay(store: ClusterStore, lease: Lease) -> None:
    """Record that a launch has not taken up the devices that it was asked for."""
    store.change_lease(lease.job, lease.number, resizing_to=None, resize_asked=None)


def move(store: ClusterStore, lease: Lease, now: float, steps_per_second: float | None) -> None:
    """Record that a launch has gone over: its lease ends, the next one begins on the new devices.

    ``steps_per_second`` are predicted on these.
    """
    # The next lease takes over the launch, so what ends here is only the accounting.
    end(store, lease, now)
    # Meanwhile another decision may have been planned; it goes on from there.
    if planned_devices(store, lease.job) != lease.resizing_to:
        plan_lease(store, lease.job, lease.resizing_to, now)
    store.run(
        "UPDATE leases SET state = 'running', started = ?, began = ?, trained = ?, launch = ?, "
        "predicted_steps_per_second = ? WHERE job = ? AND state = 'planned' AND devices = ?",
        now, now, now, lease.launch, steps_per_second, lease.job,
        json.dumps(list(lease.resizing_to)),
    )  # fmt: skip
    store.run("UPDATE jobs SET resizes = resizes + 1 WHERE number = ?", lease.job)


def drop_planned(store: ClusterStore, job: int, now: float) -> None:
    """Drop a job's lease that never started."""
    store.run(
        "UPDATE leases SET state = 'over', ended = ? WHERE job = ? AND state = 'planned'", now, job
    )


def ask_to_stop(store: ClusterStore, lease: Lease, now: float) -> None:
    """Record that a lease has to end; ``pursue`` then asks the engine."""
    store.run(
        # Only one that has not been asked: the grace time counts from the first time.
        "UPDATE leases SET state = 'stopping', stop_asked = ? WHERE job = ? AND number = ? "
        "AND state IN ('starting', 'running')", now, lease.job, lease.number,
    )  # fmt: skip


def credit(store: ClusterStore, lease: Lease, now: float) -> None:
    """Record until when a lease's time has been counted."""
    store.change_lease(lease.job, lease.number, credited=now)


def begin(store: ClusterStore, lease: Lease, now: float) -> None:
    """Mark a planned lease as starting: from here on its launch may be there."""
    # Before the engine is asked: should the scheduler be killed now, the launch may be there.
    with store.transaction():
        store.change_lease(lease.job, lease.number, state="starting", started=now)
        store.run(
            "UPDATE jobs SET state = 'running', reason = NULL, started = coalesce(started, ?) "
            "WHERE number = ?", now, lease.job,
        )  # fmt: skip


def forget_future(store: ClusterStore, now: float) -> None:
    """Take what open leases say of later times for now: a clock was set back."""
    # Not of resizes: the names of their requests are made of these times.
    columns = ("planned", "started", "began", "trained", "credited", "stop_asked")
    for column in columns:
        store.run(
            f"UPDATE leases SET {column} = ? WHERE state != 'over' AND {column} > ?",  # noqa: S608
            now, now,
        )  # fmt: skip


def note_progress(store: ClusterStore, engine: Engine, lease: Lease, now: float) -> Lease:
    """Record that a lease's launch has begun, or trains; the lease as it is then."""
    fate = engine.fate(folder_of(store, lease))
    seen = fate.state in ("running", "training")
    began = now if seen and lease.began is None else lease.began
    trained = now if fate.state == "training" else None
    # Written only when it changes: this is asked at every tick.
    if (began, trained) == (lease.began, lease.trained):
        return lease
    with store.transaction():
        store.change_lease(lease.job, lease.number, began=began, trained=trained)
    return replace(lease, began=began, trained=trained)


def start(
    store: ClusterStore,
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
    uid = user_of(store, lease.job)
    user = None if uid is None else _checked(engine, uid)
    try:
        plan = plan_on(asked, Counter(device.device_type for device in held))
    except FileError as error:  # not that of the state: its profiles are gone
        raise ProblemError(error.message, hint=error.hint) from None
    try:
        for made in (job_folder.parent, job_folder, folder.parent, folder):
            made.mkdir(mode=0o700, exist_ok=True)
            # Users pass through to their own folders, and cannot read others'.
            if user is not None:
                made.chmod(0o711)
        if user is not None:
            for used in (folder / RUN, job_folder / CHECKPOINT):
                used.mkdir(mode=0o700, exist_ok=True)
                give(used, user)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    files.write(folder / PLAN, plan, force=True)
    if user is not None:
        give(folder / PLAN, user)
    command = [
        sys.executable, "-m", "hetflow", "launch", "--output", str(folder / RUN), "--force",
        "--checkpoint", str(job_folder / CHECKPOINT),
        "--checkpoint-every", str(asked.checkpoint_every),
        "--determinism", asked.level, "--grace", str(grace_seconds),
        str(folder / PLAN), asked.script, *asked.arguments,
    ]  # fmt: skip
    # The launch before this one: the engine lets it end first, so that two never train at once.
    rows = store.rows(
        "SELECT coalesce(launch, number) AS launch FROM leases WHERE job = ? AND number != ? "
        "AND started IS NOT NULL ORDER BY started DESC, number DESC LIMIT 1",
        lease.job, lease.number,
    )  # fmt: skip
    before = [store.lease_folder(lease.job, row["launch"]) for row in rows]
    engine.start(
        Work(
            folder=folder, command=tuple(command), directory=Path(asked.directory), devices=held,
            environment=_environment(asked, folder), after=tuple(before), user=uid,
        )
    )  # fmt: skip
    # ``starting`` becomes ``running`` only if nobody asked it to stop meanwhile.
    with store.transaction():
        store.run(
            "UPDATE leases SET state = 'running', predicted_steps_per_second = ? "
            "WHERE job = ? AND number = ? AND state = 'starting'",
            1.0 / plan.predicted.step_seconds, lease.job, lease.number,
        )  # fmt: skip


def user_of(store: ClusterStore, job: int) -> int | None:
    """The number of the user whom a job runs as; None: the scheduler's."""
    [row] = store.rows("SELECT uid FROM jobs WHERE number = ?", job)
    return None if row["uid"] is None else int(row["uid"])


def _checked(engine: Engine, uid: int) -> Account:
    if not (isinstance(engine, EngineForUsers) and engine.may_run_as(uid)):
        raise ProblemError(
            f"it is the job of user {uid}, and this scheduler cannot run it as that user",
            hint=f"start the cluster as root with {option('engine', 'local')}, and release the job",
        )
    return account(uid)


def _environment(asked: Submission, folder: Path) -> dict[str, str]:
    own = {} if asked.array_index is None else {ARRAY_INDEX: str(asked.array_index)}
    return {**asked.environment, **own, environment.FIRST_STEP: str(folder / FIRST_STEP)}


def held_seconds(store: ClusterStore, job: int, now: float) -> float:
    """For how long a job's launches have held devices since it was released last."""
    [row] = store.rows(
        "SELECT total(coalesce(leases.ended, ?) - leases.began) AS seconds FROM leases JOIN jobs "
        "ON jobs.number = job WHERE job = ? AND began >= coalesce(released, began)", now, job,
    )  # fmt: skip
    return float(row["seconds"])


def pursue(
    store: ClusterStore, engine: Engine, lease: Lease, grace_seconds: float, now: float
) -> None:
    """Ask a lease to stop, and kill it if it has not ended within its grace time."""
    folder = folder_of(store, lease)
    # Its workers have had the grace time, and the launch a little more to end them.
    if lease.stop_asked is not None and (
        now - lease.stop_asked > grace_seconds + KILL_AFTER_SECONDS
    ):
        engine.kill(folder)
    else:
        engine.stop(folder)


def fate_of(store: ClusterStore, engine: Engine, lease: Lease) -> Ended | None:
    """How a lease that was started ended; None while it runs."""
    folder = folder_of(store, lease)
    fate = engine.fate(folder)
    if fate.is_open:
        return None
    digest, step_seconds, has_finished = None, None, have_all_left(folder / RUN / "logs")
    # The record is written last; a launch that was killed has none.
    with suppress(HetflowError, OSError):
        record = _record(folder / RUN / "run.json")
        has_finished |= record.status == "done"
        digest, step_seconds = record.parameters_digest, record.measured_step_seconds
        terms = [device.terms for device in record.devices if device.terms is not None]
        # Steps were timed on other devices too, so they measure none.
        if record.generations or any(one.num_steps < FEWEST_STEPS for one in terms):
            step_seconds = None
    # A script that has ended has ended, whatever became of its launch or its keeper after that.
    code = 0 if has_finished else fate.exit_code
    reason = None if code == 0 else last_words(folder / OUTPUT, code)
    has_begun = fate.has_begun and fate.state != "absent"
    measured = 1.0 / step_seconds if step_seconds else None
    return Ended(lease, code, reason, digest, measured, has_begun)


def _record(path: Path) -> RunRecord:
    """Read a run's record, which its user may have put anything in the place of."""
    # No link, no pipe that blocks, nothing of unlimited size: the folder is the user's.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as stream:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ProblemError(f"{path}: is no regular file")
        text = stream.read(_MOST_OF_RECORD + 1)
    if len(text) > _MOST_OF_RECORD:
        raise ProblemError(f"{path}: has more than {_MOST_OF_RECORD} bytes")
    return files.from_json(text.decode(errors="replace"), RunRecord, name=str(path))


def end(
    store: ClusterStore,
    lease: Lease,
    now: float,
    exit_code: int | None = None,
    measured_steps_per_second: float | None = None,
) -> None:
    """Mark a lease as ended, with what was measured, and count the time that it trained."""
    store.change_lease(
        lease.job, lease.number, state="over", ended=now, exit_code=exit_code,
        measured_steps_per_second=measured_steps_per_second,
    )  # fmt: skip
    store.run(
        "UPDATE jobs SET device_seconds = device_seconds + ? WHERE number = ?",
        lease.trained_seconds(now) * len(lease.devices), lease.job,
    )  # fmt: skip


def last_words(output: Path, exit_code: int | None) -> str:
    """The error that a launch wrote, else the last line of its output."""
    ended = "nobody saw how it ended" if exit_code is None else f"exit code {exit_code}"
    try:
        with output.open("rb") as stream:
            # Only the end of the output is read, whatever its length.
            stream.seek(max(0, output.stat().st_size - 65536))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ended
    errors = [line for line in lines if line.startswith("hetflow: ") and "warning:" not in line]
    said = errors or [line for line in lines if line.strip()]
    return f"{ended}: {said[-1].strip()[:_LONGEST_REASON]}" if said else ended


LONGEST_RESIZE_SECONDS = 600.0
"""A launch that has not answered for so long is asked to stop instead.

Joining workers first run the script up to its first batch, so a resize may take as long as a start.
"""


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """What became of a resize.

    ``moved``: the launch is on the new devices alone. ``stayed``: it holds those before alone.
    ``unknown``: it may hold both.
    """

    state: Literal["moved", "stayed", "unknown"]
    detail: str


def resized_config(store: ClusterStore, lease: Lease, plan: Plan) -> LaunchConfig:
    """What a lease's launch is asked for: a plan, at the seed and level that it runs with.

    Raises:
        HetflowError: The launch has not begun to train, is over, or takes no requests; or plans of
            this kind cannot be changed while they run, as for ``hetflow resize``.
    """
    if plan.kind == "parallel":
        raise ProblemError(f"a {plan.kind} plan is not changed while it runs")
    now = control.current(_run(store, lease))
    return lower(plan, now.seed, now.determinism)


def ask_launch(store: ClusterStore, lease: Lease, config: LaunchConfig) -> None:
    """Ask a lease's launch to go over, unless it was asked before.

    Raises:
        FileError: The request cannot be written.
    """
    control.ask(_run(store, lease), config, name=_name(lease))


def is_launch_asked(store: ClusterStore, lease: Lease) -> bool:
    """Whether the request is there: a scheduler may have been killed before it had written it."""
    return _request(store, lease).exists()


def resize_outcome(store: ClusterStore, lease: Lease, now: float) -> ResizeOutcome | None:
    """What became of a resize that was asked for; None while that is open."""
    try:
        answer = control.answered(_request(store, lease))
    except HetflowError as error:
        return ResizeOutcome("unknown", error.message)
    if answer is not None:
        return ResizeOutcome("moved" if answer.status == "done" else "stayed", answer.detail)
    # The record says when it was asked; a resize cannot be open without.
    assert lease.resize_asked is not None
    if now - lease.resize_asked <= LONGEST_RESIZE_SECONDS:
        return None
    return ResizeOutcome("unknown", f"its launch did not answer for {LONGEST_RESIZE_SECONDS:.0f} s")


def forget_resize(store: ClusterStore, lease: Lease) -> None:
    """Take the request and its answer away, once the record tells of it."""
    control.take_away(_run(store, lease), _request(store, lease))


def _run(store: ClusterStore, lease: Lease) -> Path:
    return folder_of(store, lease) / RUN


def _request(store: ClusterStore, lease: Lease) -> Path:
    return control.request_named(_run(store, lease), _name(lease))


def _name(lease: Lease) -> str:
    """Of the time that it was asked at; it sorts as the names of others do."""
    assert lease.resize_asked is not None
    return f"{int(lease.resize_asked * 1e9):020d}-lease-{lease.number}"


# What is due between two decisions: which leases begin, are resized, or have to stop instead.
#
# A pure function of the open leases. A job goes over to its next devices in one of three ways. One
# that holds none starts on them. One that is stopping leaves its devices first. One that runs, and
# may be resized, keeps its devices until its launch has taken the new ones up. Each needs the new
# devices to be free, but for its own. So jobs that are to exchange devices while they run may wait
# for each other in a circle: then one of them stops, which frees its devices.


@dataclass(frozen=True, slots=True)
class Due:
    """What can be done now, with no device given to two jobs.

    Attributes:
        begin: Planned leases whose devices and jobs are free.
        resize: Running leases, each with the planned lease whose devices it can take up now.
        stop: Running leases that would wait for each other for ever.
    """

    begin: tuple[Lease, ...]
    resize: tuple[tuple[Lease, Lease], ...]
    stop: tuple[Lease, ...]


def due(open_leases: Sequence[Lease]) -> Due:
    """What is due, by all leases that are not over.

    A job has at most one that holds devices, and one that is planned. A running one beside a
    planned one is to be resized.
    """
    holders = {lease.job: lease for lease in open_leases if lease.holds_devices}
    # In a resize a launch may be on both sets of devices.
    holder = {name: lease.job for lease in holders.values() for name in lease.held}
    begin, resize = [], []
    waiting: dict[int, set[int]] = {}
    for planned in open_leases:
        own = holders.get(planned.job)
        # A launch that cannot be asked now is looked at again in the next tick.
        if planned.holds_devices or (own is not None and not own.may_be_asked):
            continue
        # Its own devices do not stand in its way.
        blocking = {holder[name] for name in planned.devices if name in holder} - {planned.job}
        if blocking:
            if own is not None:
                waiting[planned.job] = blocking
            continue
        # Given away at once, so that no second lease of this call gets them.
        holder.update(dict.fromkeys(planned.devices, planned.job))
        if own is None:
            begin.append(planned)
        else:
            resize.append((own, planned))
    stop = tuple(holders[job] for job in _in_circles(waiting))
    return Due(tuple(begin), tuple(resize), stop)


def _in_circles(waiting: Mapping[int, set[int]]) -> list[int]:
    """One job of each circle of jobs that wait for each other: the last submitted."""
    left, found = dict(waiting), list[int]()
    while left:
        # Whoever waits only for jobs that do not wait comes to its turn.
        in_turn = [job for job, others in left.items() if not others & left.keys()]
        for job in in_turn:
            del left[job]
        if in_turn or not left:
            continue
        # All that are left wait for one that is left: following them ends in a circle.
        path = [min(left)]
        while (after := min(left[path[-1]] & left.keys())) not in path:
            path.append(after)
        # The last submitted of the circle has done least.
        found.append(max(path[path.index(after) :]))
        del left[found[-1]]
    return found
