"""What users can see of a cluster's state, and the requests that they can make."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...schema.errors import ProblemError
from ...schema.options import option
from ...schema.spelling import whole_number
from ..engines.accounts import Account
from ..engines.protocol import OUTPUT
from .store import RUN, SHOWN_STATE, STARTS, ClusterStore

Wish = Literal["hold", "release", "cancel"]
_OVER = ("done", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """How fast a job trained in one lease, on which devices, and how fast by that lease's plan."""

    steps_per_second: float
    predicted_steps_per_second: float | None
    devices: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Measured over predicted, less 1."""
        predicted = self.predicted_steps_per_second
        return self.steps_per_second / predicted - 1.0 if predicted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One row of the queue; times are seconds since the epoch.

    ``state`` is that of the state file, but for jobs that have been given devices: ``waiting`` (a
    batch system has not begun the launch), ``starting`` (no step is done yet), then ``running``.
    ``leases`` counts its starts, and ``resizes`` how often it changed devices while it ran;
    ``resizing_to`` are the devices that it is about to change to.
    ``predicted_steps_per_second`` is of the lease that runs. ``measured`` is of the last lease that
    was long enough to measure; None if there is none. ``device_seconds`` are of leases that are
    over, from their first steps on.
    """

    number: int
    name: str
    state: str
    wanted: str | None
    devices: tuple[str, ...]
    num_devices: int
    priority_weight: float
    predicted_steps_per_second: float | None
    measured: MeasuredRate | None
    submitted: float
    started: float | None
    ended: float | None
    leases: int
    resizes: int
    resizing_to: tuple[str, ...]
    device_seconds: float
    target_seconds: float
    failures: int
    reason: str | None
    digest: str | None
    user: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def queue(
    store: ClusterStore,
    *,
    finished: int = 10,
    most_open: int | None = None,
    member: Account | None = None,
) -> list[QueuedJob]:
    """Jobs that are not over, in order of submission, then those that ended last.

    ``finished`` of those that are over, and ``most_open`` of the others (None: all), those that
    run first. To a ``member`` nothing is said of why another user's job waits or ended.
    """
    what = "FROM jobs LEFT JOIN leases ON leases.job = jobs.number AND leases.state IN " \
           "('starting', 'running', 'stopping')"  # fmt: skip
    columns = f"jobs.*, {STARTS}, {SHOWN_STATE}, leases.devices, leases.resizing_to, " \
              "leases.predicted_steps_per_second AS predicted"  # fmt: skip
    order = "jobs.number"
    if most_open is not None:
        order = "jobs.state != 'running', jobs.state = 'held', jobs.number"
    rows = store.rows(
        f"SELECT {columns} {what} WHERE jobs.state NOT IN ('done', 'cancelled') "  # noqa: S608
        f"ORDER BY {order} LIMIT ?", -1 if most_open is None else most_open
    ) + store.rows(
        f"SELECT {columns} {what} WHERE jobs.state IN ('done', 'cancelled') "  # noqa: S608
        "ORDER BY jobs.ended DESC LIMIT ?", finished
    )  # fmt: skip
    found = []
    for row in rows:
        asked = json.loads(row["submission"])
        is_shown = member is None or row["uid"] == member.uid
        found.append(
            QueuedJob(
                number=row["number"], name=asked["name"], state=row["shown_state"],
                wanted=row["wanted"],
                devices=tuple(json.loads(row["devices"])) if row["devices"] else (),
                num_devices=asked.get("devices", 1),
                priority_weight=asked.get("priority_weight", 1.0),
                predicted_steps_per_second=row["predicted"],
                measured=_measured(store, row["number"]) if row["leases"] else None,
                submitted=row["submitted"], started=row["started"], ended=row["ended"],
                leases=row["starts"], resizes=row["resizes"],
                resizing_to=tuple(json.loads(row["resizing_to"] or "[]")),
                device_seconds=row["device_seconds"],
                target_seconds=row["target_seconds"], failures=row["failures"],
                reason=row["reason"] if is_shown else None,
                digest=row["digest"] if is_shown else None, user=row["user"],
            )
        )  # fmt: skip
    return found


def rows_from(plain: Sequence[Mapping[str, Any]]) -> list[QueuedJob]:
    """Rows of the queue from what ``to_plain`` made of them, as another process has sent it."""
    return [_row(one) for one in plain]


def _row(plain: Mapping[str, Any]) -> QueuedJob:
    measured = plain["measured"]
    if measured is not None:
        measured = MeasuredRate(**{**measured, "devices": tuple(measured["devices"])})
    lists = {key: tuple(plain[key]) for key in ("devices", "resizing_to")}
    return QueuedJob(**{**plain, **lists, "measured": measured})


def _measured(store: ClusterStore, number: int) -> MeasuredRate | None:
    rows = store.rows(
        "SELECT devices, measured_steps_per_second, predicted_steps_per_second FROM leases "
        "WHERE job = ? AND measured_steps_per_second IS NOT NULL ORDER BY number DESC LIMIT 1",
        number,
    )
    if not rows:
        return None
    return MeasuredRate(
        steps_per_second=rows[0]["measured_steps_per_second"],
        predicted_steps_per_second=rows[0]["predicted_steps_per_second"],
        devices=tuple(json.loads(rows[0]["devices"])),
    )


def job_number(store: ClusterStore, named: str) -> int:
    """The job of a number, or of a name that only one job has.

    Raises:
        ProblemError: There is none, or several.
    """
    number = whole_number(named)
    if number is not None and store.rows("SELECT number FROM jobs WHERE number = ?", number):
        return number
    rows = store.rows(
        "SELECT number FROM jobs WHERE json_extract(submission, '$.name') = ?", named
    )  # fmt: skip
    if len(rows) == 1:
        return int(rows[0]["number"])
    if rows:
        numbers = ", ".join(str(row["number"]) for row in rows[:10])
        raise ProblemError(f"{len(rows)} jobs are called {named!r}", hint=f"give one of {numbers}")
    raise ProblemError(f"no job {named!r}", hint="`hetflow queue` lists them")


def ask(store: ClusterStore, number: int, wish: Wish) -> None:
    """Ask the scheduler to hold, release or cancel a job.

    Raises:
        ProblemError: The job is over, or not held.
    """
    with store.transaction():
        [row] = store.rows("SELECT state FROM jobs WHERE number = ?", number)
        if row["state"] in _OVER:
            raise ProblemError(f"job {number} is {row['state']} already")
        if wish == "release" and row["state"] != "held":
            raise ProblemError(f"job {number} is {row['state']}, not held")
        if wish == "hold" and row["state"] == "held":
            raise ProblemError(f"job {number} is held already")
        store.change_job(number, wanted=wish)


def drain(store: ClusterStore, named: str, *, undo: bool) -> None:
    """Keep jobs off a device type or a server from the next round on, or end that.

    Raises:
        ProblemError: The cluster has no such type or server.
    """
    with store.transaction():
        known = store.get("drainable") or []
        if named not in known:
            raise ProblemError(
                f"the cluster has no device type or server {named!r}",
                hint=f"it has {', '.join(known)[:200]}",
            )
        drained = set(store.get("drained") or ()) - {named}
        store.set("drained", sorted(drained if undo else drained | {named}))


def outputs(store: ClusterStore, number: int) -> list[tuple[str, Path]]:
    """What a job's launches wrote, oldest first: their devices, and the file, if it is there."""
    rows = store.rows(
        "SELECT coalesce(launch, number) AS launch, devices FROM leases WHERE job = ? "
        "ORDER BY coalesce(launch, number), number", number
    )  # fmt: skip
    devices: dict[int, list[str]] = {}
    for row in rows:
        devices.setdefault(row["launch"], []).append(", ".join(json.loads(row["devices"])))
    paths = [
        (", then ".join(each), store.lease_folder(number, launch) / OUTPUT)
        for launch, each in devices.items()
    ]
    return [(each, path) for each, path in paths if path.is_file()]


def finished_runs(store: ClusterStore, number: int) -> tuple[Path, str | None, list[Path]]:
    """A job's profiles and model, and the last 20 runs of jobs done with these, the last first.

    Those that changed devices while they ran are left out.

    Raises:
        ProblemError: There is no such run, or the job has throughputs instead of profiles.
    """
    [row] = store.rows("SELECT submission FROM jobs WHERE number = ?", number)
    asked = json.loads(row["submission"])
    if "profiles" not in asked:
        raise ProblemError(
            f"job {number} has throughputs, and no profiles to correct",
            hint=f"name a job that was submitted with {option('profiles')}",
        )
    rows = store.rows(
        "SELECT jobs.number, leases.number AS lease FROM jobs JOIN leases "
        "ON leases.job = jobs.number AND leases.exit_code = 0 AND leases.launch IS NULL "
        "WHERE jobs.state = 'done' AND uid IS NULL AND json_extract(submission, '$.profiles') = ? "
        "AND json_extract(submission, '$.model') IS ? ORDER BY leases.ended DESC LIMIT 20",
        asked["profiles"], asked.get("model"),
    )  # fmt: skip
    folders = [store.lease_folder(row["number"], row["lease"]) / RUN for row in rows]
    found = [folder for folder in folders if (folder / "run.json").is_file()]
    if not found:
        raise ProblemError(
            f"no job with the profiles of job {number} has trained to its end yet",
            hint="wait until `hetflow queue` shows one that is done",
        )
    return Path(asked["profiles"]), asked.get("model"), found


def is_open(store: ClusterStore, number: int) -> bool:
    """Whether a job may still write something."""
    [row] = store.rows("SELECT state FROM jobs WHERE number = ?", number)
    return row["state"] not in (*_OVER, "held")
