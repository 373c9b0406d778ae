"""What the page shows of a cluster's state at one moment, as plain values.

Times are seconds since the epoch, and device-seconds are devices times seconds. The size of a
snapshot is bounded, whatever the cluster has done: what is left out is counted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from sqlite3 import Row
from typing import Any

from ..scheduler.store import ClusterStore
from ..scheduler.view import QueuedJob, queue

MOST_LEASES = 1500
MOST_OPEN_JOBS = 200
MOST_ENDED_JOBS = 20
NUM_BINS = 120
_SHORTEST_SECONDS = 10.0
_HOLDS = ("starting", "running", "stopping")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDevice:
    """A device, and the job that holds it now (None: it is free)."""

    name: str
    device_type: str
    server: str
    is_up: bool
    is_drained: bool
    job: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLease:
    """One bar of the Gantt chart: a job held devices from ``started`` to ``ended`` (None: now).

    ``devices`` are positions in the list of devices. ``is_resized`` is True where the job came from
    other devices without a stop.
    """

    job: int
    number: int
    devices: tuple[int, ...]
    state: str
    started: float
    ended: float | None
    is_resized: bool = False
    trained: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeUse:
    """How much of a device type was held.

    Attributes:
        device_type: The type.
        num_devices: All devices of the type.
        num_up: Those that work and are not drained.
        num_held: Those that jobs hold now.
        utilisation: Held device-seconds over those of all devices, in the time shown.
        bins: The same for each of ``NUM_BINS`` equal parts of that time.
    """

    device_type: str
    num_devices: int
    num_up: int
    num_held: int
    utilisation: float
    bins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownJob:
    """A row of the queue, with what it received until now against its target.

    Attributes:
        queued: As ``hetflow queue`` has it.
        share_devices: Devices that the policy gives it on average now; None if it is in no round.
        received_seconds: Device-seconds that it held.
        target_seconds: Device-seconds that the policy's shares gave it. Less ``received_seconds``
            this is the job's deficit (Narayanan's thesis, section 5.5).
    """

    queued: QueuedJob
    share_devices: float | None
    received_seconds: float
    target_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the page shows; ``since`` is where its time axis begins."""

    schema: str = "hetflow.dashboard/1"
    now: float
    since: float
    folder: str
    engine: str | None
    policy: str | None
    round_seconds: float | None
    round_ends: float | None
    counts: Mapping[str, int]
    devices: tuple[ShownDevice, ...]
    types: tuple[TypeUse, ...]
    leases: tuple[ShownLease, ...]
    num_leases_left_out: int
    jobs: tuple[ShownJob, ...]
    num_jobs_left_out: int
    names: Mapping[int, str]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def snapshot(store: ClusterStore, *, now: float, window_seconds: float | None) -> Snapshot:
    """Read what the page shows.

    ``window_seconds`` is how far the time axis goes back; None for as far as the cluster does.

    Raises:
        FileError: The state cannot be read.
    """
    first = store.rows("SELECT submitted FROM jobs ORDER BY number LIMIT 1")
    began = first[0]["submitted"] if first else now
    if window_seconds is not None:
        began = max(began, now - window_seconds)
    since = float(min(began, now - _SHORTEST_SECONDS))
    rows, left_out = _turns(store, since)
    if left_out:  # the time axis begins where all is shown
        since = min(max(since, rows.pop()["ended"]), now - _SHORTEST_SECONDS)
    devices, leases = _devices(store, rows), _leases(store, rows)
    by_state = store.rows("SELECT state, count(*) AS number FROM jobs GROUP BY state")
    counts = {row["state"]: row["number"] for row in by_state}
    jobs = _jobs(store, now, {one.job: one for one in leases if one.state in _HOLDS})
    num_open = sum(n for state, n in counts.items() if state not in ("done", "cancelled"))
    num_shown = sum(job.queued.ended is None for job in jobs)
    started_with = store.get("started_with") or {}
    return Snapshot(
        now=now,
        since=since,
        folder=str(store.folder),
        engine=started_with.get("engine"),
        policy=started_with.get("policy"),
        round_seconds=started_with.get("round_seconds"),
        round_ends=store.get("round_ends"),
        counts=counts,
        devices=devices,
        types=tuple(uses(devices, leases, since=since, now=now)),
        leases=leases,
        num_leases_left_out=left_out,
        jobs=jobs,
        num_jobs_left_out=num_open - num_shown,
        names=_names(store, {lease.job for lease in leases}),
    )


def _turns(store: ClusterStore, since: float) -> tuple[list[Row], int]:
    """Leases that held devices after a time, open ones first, then the last to end."""
    # If some are left out, one more is there, the first of these; and how many they are.
    what = "FROM leases WHERE started IS NOT NULL AND (ended IS NULL OR ended > ?)"
    rows = store.rows(
        f"SELECT job, number, devices, state, started, trained, ended, launch {what} "  # noqa: S608
        "ORDER BY ended IS NOT NULL, ended DESC LIMIT ?", since, MOST_LEASES + 1,
    )  # fmt: skip
    if len(rows) <= MOST_LEASES or rows[-1]["ended"] is None:
        return rows, 0
    [counted] = store.rows(f"SELECT count(*) AS number {what}", since)  # noqa: S608
    return rows, counted["number"] - MOST_LEASES


def _listed(store: ClusterStore) -> list[list[Any]]:
    """Name, type and server of each device, and whether it works."""
    known = store.get("inventory")
    if known is None:  # of a scheduler that did not note it
        names = store.get("devices") or []
        known = [[name, name.rpartition(":")[0] or name, "", True] for name in names]
    return list(known)


def _devices(store: ClusterStore, rows: Iterable[Row]) -> tuple[ShownDevice, ...]:
    holder = {
        name: row["job"]
        for row in rows
        if row["state"] in _HOLDS
        for name in json.loads(row["devices"])
    }
    drained = set(store.get("drained") or ())
    return tuple(
        ShownDevice(
            name=name,
            device_type=kind,
            server=server,
            is_up=is_up,
            is_drained=bool({kind, server} & drained),
            job=holder.get(name),
        )
        for name, kind, server, is_up in _listed(store)
    )


def _leases(store: ClusterStore, rows: Iterable[Row]) -> tuple[ShownLease, ...]:
    place = {name: index for index, (name, *_) in enumerate(_listed(store))}
    return tuple(
        ShownLease(
            job=row["job"],
            number=row["number"],
            state=row["state"],
            started=row["started"],
            ended=row["ended"],
            is_resized=row["launch"] is not None,
            trained=row["trained"],
            devices=tuple(
                sorted(place[name] for name in json.loads(row["devices"]) if name in place)
            ),
        )
        for row in rows
    )


def uses(
    devices: Sequence[ShownDevice], leases: Iterable[ShownLease], *, since: float, now: float
) -> list[TypeUse]:
    """How much of each device type the leases held between two times."""
    bin_seconds = (now - since) / NUM_BINS
    held: dict[str, list[float]] = {device.device_type: [0.0] * NUM_BINS for device in devices}
    for lease in leases:
        start = max(lease.started, since)
        end = now if lease.ended is None else min(lease.ended, now)
        by_type = Counter(devices[place].device_type for place in lease.devices)
        first = max(0, int((start - since) / bin_seconds))
        last = min(NUM_BINS - 1, int((end - since) / bin_seconds))
        for index in range(first, last + 1):
            left = since + index * bin_seconds
            seconds = min(end, left + bin_seconds) - max(start, left)
            for kind, number in by_type.items():
                held[kind][index] += max(0.0, seconds) * number
    numbers = Counter(device.device_type for device in devices)
    return [
        TypeUse(
            device_type=kind,
            num_devices=numbers[kind],
            num_up=sum(d.device_type == kind and d.is_up and not d.is_drained for d in devices),
            num_held=sum(d.device_type == kind and d.job is not None for d in devices),
            utilisation=sum(bins) / ((now - since) * numbers[kind]),
            bins=tuple(round(one / (bin_seconds * numbers[kind]), 4) for one in bins),
        )
        for kind, bins in held.items()
    ]


def _jobs(store: ClusterStore, now: float, held: Mapping[int, ShownLease]) -> tuple[ShownJob, ...]:
    """Open jobs, those that run first, then those that ended last."""
    since, shares = store.get("aimed"), _shares(store)
    found = []
    for queued in queue(store, finished=MOST_ENDED_JOBS, most_open=MOST_OPEN_JOBS):
        received, target = queued.device_seconds, queued.target_seconds
        lease, share = held.get(queued.number), shares.get(queued.number)
        if lease is not None and lease.trained is not None:  # it is charged from its first step on
            received += len(lease.devices) * max(0.0, now - lease.trained)
        if share is not None and since is not None:
            target += share * max(0.0, now - since)
        found.append(
            ShownJob(
                queued=queued, share_devices=share, received_seconds=received, target_seconds=target
            )
        )
    return tuple(found)


def _shares(store: ClusterStore) -> dict[int, float]:
    """Devices that the policy gives each job on average: its shares of time, times its devices."""
    document = store.get("rounds") or {"jobs": ()}
    return {
        int(row["job"]["id"]): sum(row["share"].values()) * row["job"]["scale_factor"]
        for row in document["jobs"]
    }


def _names(store: ClusterStore, jobs: Iterable[int]) -> dict[int, str]:
    wanted = sorted(jobs)
    rows = store.rows(
        "SELECT number, json_extract(submission, '$.name') AS name FROM jobs "  # noqa: S608
        f"WHERE number IN ({','.join('?' * len(wanted))})", *wanted
    )  # fmt: skip
    return {row["number"]: row["name"] for row in rows}
