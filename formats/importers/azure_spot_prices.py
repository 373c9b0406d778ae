"""Read Azure spot prices: one table per region, with one line per day and one column per machine.

The first column is ``Date`` (month/day/year); cells are dollars per hour such as ``$0.12276``. The
tables do not say in which time zone a day begins; we assume UTC. An empty cell means unknown, and
so does a day without a line.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from ...schema.errors import FileError, ProblemError
from ...schema.market import PriceHistory, utc_text
from .csv_tables import csv_lines, row_of
from .price_cells import dollars_of, files_of
from .registry import price_importer

_DAY = timedelta(days=1)


@price_importer("azure-spot-prices")
def read_azure_spot_prices(path: Path) -> tuple[PriceHistory, ...]:
    """Read a region's table, or all ``.csv`` files under a folder; the file's name is the region.

    Machines without any known price are left out.

    Raises:
        FileError: A file is of another form, its days are out of order, or a price is invalid.
    """
    found = tuple(history for one in files_of(path, ".csv") for history in _region(one))
    if not found:
        raise FileError(f"{path}: holds no prices")
    return found


def _region(path: Path) -> list[PriceHistory]:
    names, lines = csv_lines(path)
    if names[:1] != ["Date"] or len(names) < 2 or len(set(names)) < len(names):
        raise FileError(f"{path}: line 1: must be Date, then the name of each machine once")
    columns: dict[str, dict[datetime, float | None]] = {}
    days: list[datetime] = []
    for number, cells in lines:
        try:
            prices = row_of(names, cells)
            day = _day(prices.pop("Date"))
            if days and day <= days[-1]:
                raise ProblemError(
                    f"{cells[0]} does not come after the day before it; sort the lines"
                )
            if days and day > days[-1] + _DAY:
                for name in prices:
                    columns[name][days[-1] + _DAY] = None
            days.append(day)
            for name, cell in prices.items():
                columns.setdefault(name, {})[day] = dollars_of(cell) if cell else None
        except ProblemError as error:
            raise FileError(f"{path}: line {number}: {error.message}") from None
    return [
        _history(path.stem, name, told, days[-1] + _DAY)
        for name, told in columns.items()
        if any(price is not None for price in told.values())
    ]


def _history(
    region: str, name: str, told: dict[datetime, float | None], end: datetime
) -> PriceHistory:
    return PriceHistory(
        cloud="azure",
        region=region,
        instance_type=name,
        times=tuple(utc_text(day.timestamp()) for day in told),
        dollars_per_hour=tuple(told.values()),
        known_until=utc_text(end.timestamp()),
    )


def _day(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%m/%d/%Y").replace(tzinfo=UTC)
    except ValueError:
        raise ProblemError(f"Date must be such as 2/24/2020, got {text[:60]!r}") from None
