"""Read AWS spot prices: the JSON that ``aws ec2 describe-spot-price-history`` prints.

A price holds until the next one is reported, so the newest record of a zone is its price until told
otherwise: a file gives the prices of an instance type in a zone from the zone's first record to the
newest record of the file. Between files that do not overlap, prices are unknown.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schema import files
from ...schema.errors import FileError, ProblemError
from ...schema.market import PriceHistory, utc_text
from .price_cells import dollars_of, files_of, seconds_of
from .registry import price_importer

_KEYS = ("AvailabilityZone", "InstanceType", "SpotPrice", "Timestamp")
_SYSTEM = "Linux/UNIX"


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
        _add(zones, one)
    if not zones:
        raise FileError(f"{path}: holds no prices of {_SYSTEM}")
    return tuple(_history(place, name, zones[name, place]) for name, place in sorted(zones))


def _add(zones: dict[tuple[str, str], _Zone], path: Path) -> None:
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
            seconds = seconds_of(record["Timestamp"], "Timestamp")
        except ProblemError as error:
            message = error.message.removeprefix(f"{where}: ")
            raise FileError(f"{where}: {message}") from None
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
    try:
        data = json.loads(files.read_text(path))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    records = data.get("SpotPriceHistory") if isinstance(data, dict) else None
    if not isinstance(records, list):
        raise FileError(
            f"{path}: has no SpotPriceHistory",
            hint="give what `aws ec2 describe-spot-price-history` printed",
        )
    return records


def _history(place: str, name: str, zone: _Zone) -> PriceHistory:
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
