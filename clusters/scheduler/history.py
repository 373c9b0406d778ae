"""What a live cluster did, in the form that a simulator takes: jobs as they came, and what was got.

Devices that went down, were drained or rested are not in it, nor what held jobs up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schema.cluster import Cluster
from ...schema.errors import ProblemError
from ...schema.files import from_json
from ...schema.jobs import Entity, Job, Throughputs
from .plans import as_job, rates_from, together
from .store import STARTS, Store
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
class History:
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


def history(store: Store) -> History:
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
    return History(
        jobs=tuple(jobs),
        throughputs=together(rates.values()),
        num_devices=dict(pool.num_devices),
        policy=known["policy"],
        round_seconds=known["round_seconds"],
        entities=entities_of(known),
        dollars_per_hour=pool.dollars_per_hour,
    )
