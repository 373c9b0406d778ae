"""Accounting: device-seconds by user, entity and device type, for each period of time."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from .store import Store

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
        """As JSON and CSV have it."""
        return asdict(self)


def csv_of(rows: Iterable[Usage]) -> str:
    """The rows as CSV, with a line of names."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Usage)], lineterminator="\n")
    table.writeheader()
    table.writerows(row.to_plain() for row in rows)
    return text.getvalue()


def usage(store: Store, *, period: Period, now: float) -> list[Usage]:
    """What was used until now, sorted by period, user, entity and device type.

    Args:
        store: The state.
        period: How time is cut, by the calendar in UTC.
        now: Seconds since the epoch; leases that are open count until then.
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
