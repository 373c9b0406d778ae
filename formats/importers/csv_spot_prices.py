"""Read spot prices from a plain table with one change of a price per line.

Columns, in any order: ``Time`` (such as 2026-03-01T06:00:00Z, or with another offset),
``Instance``, ``$/h``, and ``Zone`` or ``Region`` or both, and ``Cloud`` if it is known. A price
holds until the next line of the same machine and place, the last ones until the last time in the
file. An empty price means that the price is unknown from then on.
"""

from dataclasses import dataclass, field
from pathlib import Path

from ...schema.errors import FileError, ProblemError
from ...schema.market import PriceHistory, utc_text
from .csv_tables import csv_lines, row_of
from .price_cells import dollars_of, files_of, seconds_of
from .registry import price_importer

_NEEDED = ("Time", "Instance", "$/h")
_PLACES = ("Zone", "Region")
_COLUMNS = (*_NEEDED, *_PLACES, "Cloud")

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Changes:
    """The changes of one machine's price in one place, and the last time in its file."""

    seconds: list[float] = field(default_factory=list)
    dollars: list[float | None] = field(default_factory=list)
    until: float = 0.0


@price_importer("csv-spot-prices")
def read_csv_spot_prices(path: Path) -> tuple[PriceHistory, ...]:
    """Read a file, or all ``.csv`` files under a folder; a machine and place is in one file only.

    Raises:
        FileError: A file is of another form, its times are out of order, or a price is invalid.
    """
    found: dict[_Key, _Changes] = {}
    for one in files_of(path, ".csv"):
        told = _read(one)
        twice = next((key for key in told if key in found), None)
        if twice is not None:
            raise FileError(
                f"{one}: another file has prices of {_title(twice)} too",
                hint="put all prices of a machine and place into one file",
            )
        found |= told
    if not found:
        raise FileError(f"{path}: holds no prices")
    return tuple(_history(key, changes) for key, changes in found.items())


def _read(path: Path) -> dict[_Key, _Changes]:
    names, lines = csv_lines(path)
    missing = [name for name in _NEEDED if name not in names]
    if missing or not set(names) & set(_PLACES) or set(names) - set(_COLUMNS):
        raise FileError(
            f"{path}: line 1: must name the columns {', '.join(_NEEDED)} and Zone or Region",
            hint="for example: Time,Cloud,Zone,Instance,$/h",
        )
    found: dict[_Key, _Changes] = {}
    for number, cells in lines:
        try:
            _add(found, row_of(names, cells))
        except ProblemError as error:
            raise FileError(f"{path}: line {number}: {error.message}") from None
    until = max((changes.seconds[-1] for changes in found.values()), default=0.0)
    for changes in found.values():
        changes.until = until
    return found


def _add(found: dict[_Key, _Changes], cells: dict[str, str]) -> None:
    cloud, zone, region = (cells.get(name, "") for name in ("Cloud", "Zone", "Region"))
    key = cloud or "own", zone, region, cells["Instance"]
    if not cells["Instance"] or not (zone or region):
        raise ProblemError("must name an Instance, and a Zone or Region")
    seconds = seconds_of(cells["Time"], "Time")
    price = dollars_of(cells["$/h"]) if cells["$/h"] else None
    changes = found.setdefault(key, _Changes())
    if changes.seconds and seconds <= changes.seconds[-1]:
        raise ProblemError(
            f"{cells['Time']} does not come after the line of {_title(key)} before; sort the lines "
            "by time"
        )
    changes.seconds.append(seconds)
    changes.dollars.append(price)


def _history(key: _Key, changes: _Changes) -> PriceHistory:
    cloud, zone, region, instance = key
    return PriceHistory(
        cloud=cloud,
        zone=zone or None,
        region=region or None,
        instance_type=instance,
        times=tuple(map(utc_text, changes.seconds)),
        dollars_per_hour=tuple(changes.dollars),
        known_until=utc_text(changes.until),
    )


def _title(key: _Key) -> str:
    return " ".join(word for word in key if word)
