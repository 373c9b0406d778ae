"""Spot machines as your own script has asked for them: one answer per line, at any time.

``zone,time,answer``; times are in UTC, such as 2026-03-01T06:00:00Z, and increase for each zone;
the answer is ``yes`` or ``no``. Ticks are of ``--tick-seconds``. A tick in which a zone was asked
has its worst answer. A tick in which it was not asked is unknown.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from hetflow import FileError
from hetflow.plugins import Availability, Market, TraceOptions, trace_importer

ANSWERS = {"yes": 1, "no": 0}


@trace_importer("ping-log")
def read(path: Path, options: TraceOptions) -> Market:
    """Read one window of availability for each zone."""
    asked: dict[str, list[tuple[datetime, int]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            zone, time, answer = (cell.strip() for cell in line.split(","))
            moment = datetime.fromisoformat(time)
            if moment.utcoffset() != timedelta(0):
                raise ValueError(f"{time} is not in UTC; end it with Z")
            pings = asked.setdefault(zone, [])
            if pings and moment <= pings[-1][0]:
                raise ValueError(f"{time} does not come after the line of {zone} before it")
            pings.append((moment, ANSWERS[answer]))
        except (KeyError, ValueError) as error:
            raise FileError(f"{path}: line {number}: {error}") from None
    return Market(
        availability=tuple(
            Availability(
                zone=zone,
                start=pings[0][0].astimezone(UTC).isoformat().replace("+00:00", "Z"),
                tick_seconds=options.tick_seconds,
                available=ticks(pings, options.tick_seconds),
            )
            for zone, pings in asked.items()
        )
    )


def ticks(pings: list[tuple[datetime, int]], tick_seconds: float) -> tuple[int | None, ...]:
    """The worst answer of each tick from the first ping on; None where nobody asked."""
    first = pings[0][0]
    worst: dict[int, int] = {}
    for moment, answer in pings:
        tick = int((moment - first).total_seconds() // tick_seconds)
        worst[tick] = min(answer, worst.get(tick, 1))
    return tuple(worst.get(tick) for tick in range(max(worst) + 1))
