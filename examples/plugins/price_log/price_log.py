"""Spot prices that your own script has recorded: one price per line.

``zone,machine,time,dollars_per_hour``; times are in UTC, such as 2026-03-01T06:00:00Z, and increase
for each zone and machine. A price holds until the next line of the same zone and machine. An empty
price means that the price is unknown from then on.
"""

from pathlib import Path

from hetflow import FileError
from hetflow.plugins import PriceHistory, price_importer


@price_importer("price-log")
def read(path: Path) -> tuple[PriceHistory, ...]:
    """Read one history for each zone and machine."""
    found: dict[tuple[str, str], list[tuple[str, float | None]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            zone, machine, time, price = (cell.strip() for cell in line.split(","))
            dollars = float(price) if price else None
        except ValueError as error:
            raise FileError(f"{path}: line {number}: {error}") from None
        found.setdefault((zone, machine), []).append((time, dollars))
    return tuple(
        PriceHistory(
            cloud="own",
            zone=zone,
            instance_type=machine,
            times=tuple(time for time, _ in prices),
            dollars_per_hour=tuple(dollars for _, dollars in prices),
            known_until=prices[-1][0],
        )
        for (zone, machine), prices in found.items()
    )
