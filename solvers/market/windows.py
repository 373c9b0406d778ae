"""Windows of availability of one zone, joined by their times into one trace.

Windows that were cut from one trace overlap. Joined, each tick counts once, and zones can be
compared at the same time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, floor
from typing import Any, TypeVar

from ...schema.errors import ProblemError
from ...schema.market import Availability, Capacity, utc_seconds, utc_text
from ...schema.options import option

_MOST_TICKS = 5_000_000
_MOST_PARTS = 60  # of a tick

_Key = tuple[str, str | None, float]


def joined(windows: Iterable[Availability]) -> tuple[Availability, ...]:
    """Join the windows of each zone and instance type that say when they begin.

    What lies between two windows is unknown. Windows without a time stay as they are.

    Raises:
        ProblemError: Two windows disagree about a tick, their ticks are not at the same times, or
            they are too far apart.
    """
    groups: dict[_Key, list[Availability]] = {}
    rest: list[Availability] = []
    for window in windows:
        if window.start is None:
            rest.append(window)
        else:
            key = window.zone, window.instance_type, window.tick_seconds
            groups.setdefault(key, []).append(window)
    return (*(_trace(each) for each in groups.values()), *rest)


def parts_of(window: Availability, num_ticks: int) -> tuple[Availability, ...]:
    """All successive stretches of so many ticks that are known throughout.

    A window with one such stretch or none is its own; what is left at its end is not used.
    """
    stretches = [
        (first, window.available[first : first + num_ticks])
        for first in range(0, len(window.available) - num_ticks + 1, num_ticks)
    ]
    if len(stretches) < 2:
        return (window,)
    known = [(first, ticks) for first, ticks in stretches if None not in ticks]
    return tuple(
        replace(
            window,
            zone=f"{window.zone} +{first * window.tick_seconds / 3600:g} h",
            start=None,
            available=ticks,
        )
        for first, ticks in known
    ) or (window,)


def longer_ticks(available: Sequence[int | None], ticks: int) -> tuple[int | None, ...]:
    """Ticks joined: as many machines are there as are there throughout."""
    joined = [available[first : first + ticks] for first in range(0, len(available), ticks)]
    return tuple(_least(each) for each in joined)


def _least(ticks: Sequence[int | None]) -> int | None:
    known = [tick for tick in ticks if tick is not None]
    return min(known) if len(known) == len(ticks) or 0 in known else None


_Told = TypeVar("_Told", Availability, Capacity)


def shorter_ticks(windows: Iterable[_Told], parts: int) -> list[_Told]:
    """Each tick cut into so many: when one looked is not when one may decide or pays."""
    cut = []
    for window in windows:
        key = "available" if isinstance(window, Availability) else "num_machines"
        told: dict[str, Any] = {
            key: tuple(one for one in getattr(window, key) for _ in range(parts))
        }
        cut.append(replace(window, tick_seconds=window.tick_seconds / parts, **told))
    return cut


def fewest_parts(tick_seconds: float, needed_seconds: float, deadline_seconds: float) -> int:
    """Into how many parts to cut ticks, so that a job which ends in time does in whole ticks too.

    1 where it does without, or where no number up to 60 helps.
    """
    for parts in range(1, _MOST_PARTS + 1):
        length = tick_seconds / parts
        if ceil(needed_seconds / length - 1e-9) <= floor(deadline_seconds / length + 1e-9):
            return parts
    return 1


def start_seconds(window: Availability) -> float:
    """When a window begins, in seconds since 1970-01-01T00:00:00Z.

    Raises:
        ProblemError: It does not say.
    """
    if window.start is None:
        raise ProblemError(
            f"zone {window.zone!r}: a window does not say when it begins",
            hint=f"import it with {option('trace_start')}, or give the market's "
            "availability a start",
        )
    return utc_seconds(window.start, f"zone {window.zone!r}", "start")


def whole_ticks(seconds: float, tick_seconds: float, zone: str) -> int:
    """A difference of times in ticks.

    Raises:
        ProblemError: It is no whole number of ticks, or too many.
    """
    if not abs(seconds) / tick_seconds <= _MOST_TICKS:
        raise ProblemError(
            f"zone {zone!r}: its windows span more than {_MOST_TICKS} ticks",
            hint="give windows that are nearer to each other, or longer ticks",
        )
    ticks = round(seconds / tick_seconds)
    if abs(seconds - ticks * tick_seconds) > 1e-3:
        raise ProblemError(
            f"zone {zone!r}: ticks of {tick_seconds:g} s do not begin at the same times as others, "
            f"but {seconds % tick_seconds:g} s later",
            hint="give windows whose starts are whole ticks apart",
        )
    return ticks


def _trace(windows: Sequence[Availability]) -> Availability:
    first = min(windows, key=start_seconds)
    base, tick_seconds, zone = start_seconds(first), first.tick_seconds, first.zone
    offsets = [whole_ticks(start_seconds(one) - base, tick_seconds, zone) for one in windows]
    length = max(offset + len(one.available) for offset, one in zip(offsets, windows, strict=True))
    ticks: list[int | None] = [None] * length
    for offset, window in zip(offsets, windows, strict=True):
        for place, told in enumerate(window.available, start=offset):
            known = ticks[place]
            if known is not None and told is not None and told != known:
                when = utc_text(base + place * tick_seconds)
                raise ProblemError(
                    f"zone {zone!r}: two windows disagree about {when}",
                    hint="give windows of one trace",
                )
            if told is not None:
                ticks[place] = told
    return Availability(
        zone=zone,
        instance_type=first.instance_type,
        start=first.start,
        tick_seconds=tick_seconds,
        available=tuple(ticks),  # type: ignore[arg-type]  # each is 0, 1 or None
    )
