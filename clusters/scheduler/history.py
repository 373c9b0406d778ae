"""What a live cluster did, in the form that a simulator takes: jobs as they came, and what was got.

Devices that went down, were drained or rested are not in it, nor what held jobs up.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ...schema.cluster import Cluster
from ...schema.errors import ProblemError
from ...schema.files import from_json
from ...schema.jobs import Entity, Job, Throughputs
from .plans import as_job, rates_from, together
from .store import STARTS, ClusterStore
from .submission import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """What a job got.

    Attributes:
        name: What its user calls it.
        job: As mechanisms saw it; it arrived so many seconds after the first one.
        completion_seconds: From submission to its end; None where it has not ended.
        device_seconds: What it held.
        target_seconds: The device-seconds that the policy's shares gave it while it was there;
            None where the cluster had none.
        num_leases: How often it was started.
        num_resizes: How often it changed devices while it ran; None where that is not known.
    """

    name: str
    job: Job
    completion_seconds: float | None
    device_seconds: float
    target_seconds: float | None
    num_leases: int
    num_resizes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """Jobs in order of submission, and what they shared."""

    jobs: tuple[LiveJob, ...]
    throughputs: Throughputs
    num_devices: dict[str, int]
    policy: str
    round_seconds: float
    entities: tuple[Entity, ...] = ()
    dollars_per_hour: dict[str, float] = field(default_factory=dict)


def entities_of(started_with: Mapping[str, Any]) -> tuple[Entity, ...]:
    """The tree of entities that a cluster was started with."""
    return tuple(Entity(**one) for one in started_with.get("entities", ()))


def history(store: ClusterStore) -> JobHistory:
    """All jobs that were ever let in, and were neither cancelled nor are held.

    Raises:
        ProblemError: There is none.
    """
    rows = store.rows(
        f"SELECT *, {STARTS} FROM jobs WHERE throughput IS NOT NULL "  # noqa: S608
        "AND state NOT IN ('cancelled', 'held') ORDER BY submitted, number"
    )
    if not rows:
        raise ProblemError(
            f"{store.folder}: no job has run there yet", hint="`hetflow submit` adds one"
        )
    rates_by_job = {row["number"]: rates_from(row["throughput"]) for row in rows}
    rates = {(one.model, one.scale_factor): one for own in rates_by_job.values() for one in own}
    known = store.get("started_with")
    pool = from_json(known["pool"], Cluster, name="the pool")
    first = rows[0]["submitted"]
    jobs = []
    for row in rows:
        asked = from_json(row["submission"], Submission, name=f"job {row['number']}")
        done = row["state"] == "done"
        jobs.append(
            LiveJob(
                name=asked.name,
                job=as_job(
                    row["number"], asked, row["submitted"] - first, rates_by_job[row["number"]]
                ),
                completion_seconds=row["ended"] - row["submitted"] if done else None,
                device_seconds=row["device_seconds"],
                target_seconds=row["target_seconds"],
                num_leases=row["starts"],
                num_resizes=row["resizes"],
            )
        )
    return JobHistory(
        jobs=tuple(jobs),
        throughputs=together(rates.values()),
        num_devices=dict(pool.num_devices),
        policy=known["policy"],
        round_seconds=known["round_seconds"],
        entities=entities_of(known),
        dollars_per_hour=pool.dollars_per_hour,
    )


Period = Literal["hour", "day", "month", "all"]


@dataclass(slots=True, kw_only=True)
class Usage:
    """What the jobs of a user and entity used of a device type within a period.

    Attributes:
        period: When it begins, in UTC; empty where all time is one period.
        user: Who submitted; empty where an older hetflow did not note it.
        entity: The jobs' entity; empty where they have none.
        device_type: The type.
        num_jobs: Jobs that trained on it in the period.
        device_seconds: Devices times seconds from the first step of each lease on.
    """

    period: str
    user: str
    entity: str
    device_type: str
    num_jobs: int = 0
    device_seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON and CSV."""
        return asdict(self)


def csv_of(rows: Iterable[Usage]) -> str:
    """The rows as CSV, with a line of names."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Usage)], lineterminator="\n")
    table.writeheader()
    table.writerows(row.to_plain() for row in rows)
    return text.getvalue()


def usage(store: ClusterStore, *, period: Period, now: float) -> list[Usage]:
    """What was used until now, sorted by period, user, entity and device type.

    Leases that are open count until ``now``; time is cut by the calendar in UTC.
    """
    kinds = {name: kind for name, kind, *_ in store.get("inventory") or ()}
    found: dict[tuple[str, str, str, str], Usage] = {}
    jobs: dict[tuple[str, str, str, str], set[int]] = {}
    for row in store.rows(
        "SELECT job, devices, trained, coalesce(leases.ended, ?) AS ended, user, "
        "json_extract(submission, '$.entity') AS entity "
        "FROM leases JOIN jobs ON jobs.number = job WHERE trained IS NOT NULL", now,
    ):  # fmt: skip
        for name in json.loads(row["devices"]):
            kind = kinds.get(name) or name.rpartition(":")[0]
            for begins, seconds in _cut(row["trained"], row["ended"], period):
                key = (begins, row["user"] or "", row["entity"] or "", kind)
                one = found.setdefault(
                    key, Usage(period=key[0], user=key[1], entity=key[2], device_type=key[3])
                )
                one.device_seconds += seconds
                jobs.setdefault(key, set()).add(row["job"])
    for key, one in found.items():
        one.num_jobs = len(jobs[key])
    return [found[key] for key in sorted(found)]


def _cut(began: float, ended: float, period: Period) -> Iterator[tuple[str, float]]:
    """The periods that a time is in, each with the seconds of it."""
    if period == "all":
        yield "", max(0.0, ended - began)
        return
    while began < ended:
        first = _begin(datetime.fromtimestamp(began, UTC), period)
        until = min(ended, _next(first, period).timestamp())
        yield first.isoformat(), until - began
        began = until


def _begin(moment: datetime, period: Period) -> datetime:
    hour = moment.replace(minute=0, second=0, microsecond=0)
    if period == "hour":
        return hour
    return hour.replace(hour=0, day=1 if period == "month" else hour.day)


def _next(begins: datetime, period: Period) -> datetime:
    if period == "month":
        return _begin(begins + timedelta(days=32), period)
    return begins + (timedelta(hours=1) if period == "hour" else timedelta(days=1))
