"""Read price histories of spot machines: those of AWS and of Azure, and a plain table.

``aws-spot-prices``: the JSON that ``aws ec2 describe-spot-price-history`` prints. A price holds
until the next one is reported, so the newest record of a zone is its price until told otherwise: a
file gives the prices of an instance type in a zone from the zone's first record to the newest
record of the file. Between files that do not overlap, prices are unknown.

``azure-spot-prices``: one table per region, with one line per day and one column per machine. The
first column is ``Date`` (month/day/year); cells are dollars per hour such as ``$0.12276``. The
tables do not say in which time zone a day begins; we assume UTC. An empty cell means unknown, and
so does a day without a line.

``csv-spot-prices``: one change of a price per line. Columns, in any order: ``Time`` (such as
2026-03-01T06:00:00Z, or with another offset), ``Instance``, ``$/h``, and ``Zone`` or ``Region`` or
both, and ``Cloud`` if it is known. A price holds until the next line of the same machine and place,
the last ones until the last time in the file. An empty price means unknown from then on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from ...schema import files
from ...schema.errors import FileError, ProblemError
from ...schema.market import PriceHistory, utc_text
from .csv_tables import csv_lines, each_row
from .registry import json_of, price_importer

_KEYS = ("AvailabilityZone", "InstanceType", "SpotPrice", "Timestamp")
_SYSTEM = "Linux/UNIX"
_DAY = timedelta(days=1)
_NEEDED = ("Time", "Instance", "$/h")
_PLACES = ("Zone", "Region")
_COLUMNS = (*_NEEDED, *_PLACES, "Cloud")
_Offer = tuple[str, str, str, str]  # cloud, zone, region, machine


def dollars_of(text: str) -> float:
    """Read dollars from a cell such as ``0.9000`` or ``$0.9000``.

    Raises:
        ProblemError: The amount is negative, not finite, no number, or of another currency.
    """
    cell = text.strip().removesuffix("USD").strip()
    try:
        dollars = float(cell.removeprefix("$"))
    except ValueError:
        raise ProblemError(
            f"a price must be in US dollars such as $0.90, got {text[:60]!r}"
        ) from None
    if not isfinite(dollars) or dollars < 0:
        raise ProblemError(f"a price must be finite and >= 0, got {text[:60]!r}")
    return dollars


def _seconds_of(text: str, key: str) -> float:
    """Read a time, with its offset from UTC, as seconds since 1970-01-01T00:00:00Z."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ProblemError(
            f"{key} must be a time such as 2022-10-26T00:00:00Z, got {text[:60]!r}"
        ) from None
    if parsed.tzinfo is None:
        raise ProblemError(f"{key} {text[:60]!r} does not say its offset from UTC; end it with Z")
    return parsed.timestamp()


def files_of(path: Path, suffix: str) -> list[Path]:
    """The file itself, or all files with that ending under a folder, sorted by name.

    Raises:
        FileError: The folder holds none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob(f"*{suffix}"))
    if not found:
        raise FileError(f"{path}: holds no {suffix} file")
    return found


@dataclass(slots=True)
class _Zone:
    """The records of one instance type in one zone."""

    dollars: dict[float, float] = field(default_factory=dict)
    stretches: list[tuple[float, float]] = field(default_factory=list)


@price_importer("aws-spot-prices")
def read_aws_spot_prices(path: Path) -> tuple[PriceHistory, ...]:
    """Read a file, or all ``.json`` files under a folder: one history per zone and type.

    Prices are dollars per hour. Only those of Linux/UNIX are read; other systems cost more on the
    same machine.

    Raises:
        FileError: A file is of another form, or a price or time in it is invalid.
    """
    zones: dict[tuple[str, str], _Zone] = {}
    for one in files_of(path, ".json"):
        _add_records(zones, one)
    if not zones:
        raise FileError(f"{path}: holds no prices of {_SYSTEM}")
    return tuple(_of_zone(place, name, zones[name, place]) for name, place in sorted(zones))


def _add_records(zones: dict[tuple[str, str], _Zone], path: Path) -> None:
    first: dict[tuple[str, str], float] = {}
    newest = 0.0
    for index, record in enumerate(_records(path)):
        where = f"{path}: SpotPriceHistory[{index}]"
        if not isinstance(record, dict) or any(
            not isinstance(record.get(key), str) for key in _KEYS
        ):
            raise FileError(f"{where}: must have {', '.join(_KEYS)} as strings")
        if record.get("ProductDescription", _SYSTEM) != _SYSTEM:
            continue
        name, place = record["InstanceType"], record["AvailabilityZone"]
        try:
            dollars = dollars_of(record["SpotPrice"])
            seconds = _seconds_of(record["Timestamp"], "Timestamp")
        except ProblemError as error:
            raise FileError(f"{where}: {error.message}") from None
        known = zones.setdefault((name, place), _Zone()).dollars
        if known.setdefault(seconds, dollars) != dollars:
            raise FileError(
                f"{where}: {name} in {place} costs {known[seconds]:g} and {dollars:g} at once, "
                f"at {record['Timestamp']}"
            )
        first[name, place] = min(first.get((name, place), seconds), seconds)
        newest = max(newest, seconds)
    for (name, place), seconds in first.items():
        zones[name, place].stretches.append((seconds, newest))


def _records(path: Path) -> list[Any]:
    data = json_of(files.read_text(path), path)
    records = data.get("SpotPriceHistory") if isinstance(data, dict) else None
    if not isinstance(records, list):
        raise FileError(
            f"{path}: has no SpotPriceHistory",
            hint="give what `aws ec2 describe-spot-price-history` printed",
        )
    return records


def _of_zone(place: str, name: str, zone: _Zone) -> PriceHistory:
    dollars: dict[float, float | None] = dict(zone.dollars)
    stretches = _joined(zone.stretches)
    for _, end in stretches[:-1]:
        dollars[end] = None  # a price reported at the very end was never seen to hold
    times = sorted(dollars)
    return PriceHistory(
        cloud="aws",
        region=place.rstrip("abcdefghijklmnopqrstuvwxyz") or place,
        zone=place,
        instance_type=name,
        times=tuple(utc_text(seconds) for seconds in times),
        dollars_per_hour=tuple(dollars[seconds] for seconds in times),
        known_until=utc_text(stretches[-1][1]),
    )


def _joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time in order, with those that touch merged."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


@price_importer("azure-spot-prices")
def read_azure_spot_prices(path: Path) -> tuple[PriceHistory, ...]:
    """Read a region's table, or all ``.csv`` files under a folder; the file's name is the region.

    Machines without any known price are left out.

    Raises:
        FileError: A file is of another form, its days are out of order, or a price is invalid.
    """
    found = tuple(history for one in files_of(path, ".csv") for history in _of_region(one))
    if not found:
        raise FileError(f"{path}: holds no prices")
    return found


def _of_region(path: Path) -> list[PriceHistory]:
    names, lines = csv_lines(path)
    if names[:1] != ["Date"] or len(names) < 2 or len(set(names)) < len(names):
        raise FileError(f"{path}: line 1: must be Date, then the name of each machine once")
    columns: dict[str, dict[datetime, float | None]] = {}
    last: datetime | None = None

    def add(cells: dict[str, str]) -> None:
        nonlocal last
        date = cells.pop("Date")
        day = _day(date)
        if last is not None and day <= last:
            raise ProblemError(f"{date} does not come after the day before it; sort the lines")
        if last is not None and day > last + _DAY:
            for name in cells:
                columns[name][last + _DAY] = None
        last = day
        for name, cell in cells.items():
            columns.setdefault(name, {})[day] = dollars_of(cell) if cell else None

    each_row(path, names, lines, add)
    return [
        PriceHistory(
            cloud="azure",
            region=path.stem,
            instance_type=name,
            times=tuple(utc_text(day.timestamp()) for day in told),
            dollars_per_hour=tuple(told.values()),
            known_until=utc_text((last + _DAY).timestamp()),
        )
        for name, told in columns.items()
        if last is not None and any(price is not None for price in told.values())
    ]


def _day(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%m/%d/%Y").replace(tzinfo=UTC)
    except ValueError:
        raise ProblemError(f"Date must be such as 2/24/2020, got {text[:60]!r}") from None


@price_importer("csv-spot-prices")
def read_csv_spot_prices(path: Path) -> tuple[PriceHistory, ...]:
    """Read a file, or all ``.csv`` files under a folder; a machine and place is in one file only.

    Raises:
        FileError: A file is of another form, its times are out of order, or a price is invalid.
    """
    found: dict[_Offer, PriceHistory] = {}
    for one in files_of(path, ".csv"):
        told = _of_table(one)
        twice = next((offer for offer in told if offer in found), None)
        if twice is not None:
            raise FileError(
                f"{one}: another file has prices of {_title(twice)} too",
                hint="put all prices of a machine and place into one file",
            )
        found |= told
    if not found:
        raise FileError(f"{path}: holds no prices")
    return tuple(found.values())


def _of_table(path: Path) -> dict[_Offer, PriceHistory]:
    names, lines = csv_lines(path)
    missing = [name for name in _NEEDED if name not in names]
    if missing or not set(names) & set(_PLACES) or set(names) - set(_COLUMNS):
        raise FileError(
            f"{path}: line 1: must name the columns {', '.join(_NEEDED)} and Zone or Region",
            hint="for example: Time,Cloud,Zone,Instance,$/h",
        )
    changes: dict[_Offer, dict[float, float | None]] = {}
    each_row(path, names, lines, lambda cells: _add_change(changes, cells))
    until = max((max(told) for told in changes.values()), default=0.0)
    return {
        (cloud, zone, region, machine): PriceHistory(
            cloud=cloud,
            zone=zone or None,
            region=region or None,
            instance_type=machine,
            times=tuple(map(utc_text, told)),
            dollars_per_hour=tuple(told.values()),
            known_until=utc_text(until),
        )
        for (cloud, zone, region, machine), told in changes.items()
    }


def _add_change(changes: dict[_Offer, dict[float, float | None]], cells: dict[str, str]) -> None:
    cloud, zone, region = (cells.get(name, "") for name in ("Cloud", "Zone", "Region"))
    offer = cloud or "own", zone, region, cells["Instance"]
    if not cells["Instance"] or not (zone or region):
        raise ProblemError("must name an Instance, and a Zone or Region")
    seconds = _seconds_of(cells["Time"], "Time")
    price = dollars_of(cells["$/h"]) if cells["$/h"] else None
    told = changes.setdefault(offer, {})
    if told and seconds <= next(reversed(told)):
        raise ProblemError(
            f"{cells['Time']} does not come after the line of {_title(offer)} before; sort the "
            "lines by time"
        )
    told[seconds] = price


def _title(offer: _Offer) -> str:
    return " ".join(word for word in offer if word)
