"""Windows of availability, joined by their times into traces, and cut to the length of a job.

Windows that were cut from one trace overlap. Joined, each tick counts once, and zones can be
compared at the same time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isnan
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import Availability, Capacity, PriceHistory, utc_seconds, utc_text
from ...schema.options import option

_MOST_TICKS = 5_000_000
_MOST_PARTS = 60  # of a tick

Ticks = tuple[int | None, ...]
Prices = tuple[float | None, ...]
_Told = TypeVar("_Told", bound=Availability | Capacity)
_Key = tuple[str, str | None, float]


class Window(NamedTuple):
    """What a job may rent, until its deadline.

    ``available``: [zones][ticks] spot machines that can be had. ``spot_dollars_per_hour``:
    [zones][ticks] of one of them, at the start of the tick; None where prices do not move.
    """

    available: Sequence[Sequence[int]]
    spot_dollars_per_hour: Sequence[Sequence[float]] | None = None


def joined(windows: Iterable[_Told]) -> tuple[_Told, ...]:
    """Join the windows of each zone and instance type that say when they begin.

    What lies between two windows is unknown. Windows without a time stay as they are.

    Raises:
        ProblemError: Two windows disagree about a tick, their ticks are not at the same times, or
            they are too far apart.
    """
    groups: dict[_Key, list[_Told]] = {}
    rest: list[_Told] = []
    for window in windows:
        if window.start is None:
            rest.append(window)
        else:
            key = window.zone, window.instance_type, window.tick_seconds
            groups.setdefault(key, []).append(window)
    return (*(_trace(each) for each in groups.values()), *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Spot machines of some zones over the same time.

    ``ticks``: [zones][ticks]. ``spot_dollars_per_hour``: likewise, of one machine at the start of
    the tick, where prices move. The first tick begins at ``begin_seconds`` since 1970, None if
    nobody says when.
    """

    zones: tuple[str, ...]
    tick_seconds: float
    begin_seconds: float | None = None
    ticks: tuple[Ticks, ...]
    spot_dollars_per_hour: tuple[Prices, ...] | None = None

    @property
    def title(self) -> str:
        """The zones, for messages."""
        return ", ".join(self.zones)

    def split(self, seconds: float) -> tuple["Traces", "Traces"]:
        """The ticks that end by a time, and those that begin at it or later.

        Raises:
            ProblemError: Nobody says when the ticks are.
        """
        if self.begin_seconds is None:
            raise _without_start(self.title)
        ticks = (seconds - self.begin_seconds) / self.tick_seconds
        ticks = min(max(ticks, 0.0), float(len(self.ticks[0])))
        # A tick that the time cuts is in neither part.
        before, after = floor(ticks), ceil(ticks)
        begin = self.begin_seconds + after * self.tick_seconds
        return self._cut(0, before), self._with(lambda zone: zone[after:], begin_seconds=begin)

    def _with(self, change: Callable[[Any], Any], **known: Any) -> "Traces":
        """The traces after one change of each zone's ticks and prices [ticks]."""
        prices = self.spot_dollars_per_hour
        return replace(
            self,
            ticks=tuple(map(change, self.ticks)),
            spot_dollars_per_hour=prices and tuple(map(change, prices)),
            **known,
        )

    def _cut(self, first: int, last: int) -> "Traces":
        return self._with(lambda zone: zone[first:last])

    def window(self, first: int, num_ticks: int, most: int) -> Window | None:
        """So many ticks from the first on, with so many machines at most; None where unknown."""
        cut = self._cut(first, first + num_ticks)
        prices: Any = cut.spot_dollars_per_hour
        # One unknown tick makes all that follows a guess.
        if any(None in zone for zone in (*cut.ticks, *(prices or ()))):
            return None
        there = [tuple(min(tick, most) for tick in zone if tick is not None) for zone in cut.ticks]
        return Window(there, prices)

    def in_parts(self, parts: int) -> "Traces":
        """Each tick cut into so many: when one looked is not when one may decide or pays."""
        return self._with(
            lambda zone: tuple(one for one in zone for _ in range(parts)),
            tick_seconds=self.tick_seconds / parts,
        )

    def of_zones(self, zones: Sequence[str], most: int) -> "Traces":
        """The traces in the order of other traces' zones, with so many machines at most.

        Raises:
            ProblemError: There are several zones, and these say nothing of one.
        """
        missing = [name for name in zones if name not in self.zones]
        if missing and (len(zones) > 1 or len(self.zones) > 1):
            raise ProblemError(
                f"the history says nothing of {', '.join(missing)}; it has {self.title}",
                hint="give a history of the same zones",
            )
        places = [0] if missing else [self.zones.index(name) for name in zones]
        prices = self.spot_dollars_per_hour
        return replace(
            self,
            zones=tuple(zones),
            ticks=tuple(
                tuple(None if tick is None else min(tick, most) for tick in self.ticks[place])
                for place in places
            ),
            spot_dollars_per_hour=prices and tuple(prices[place] for place in places),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Windows as long as a job, by name; ``num_left_out`` more had unknown ticks.

    ``unused_seconds`` of the traces are in no window, where windows follow each other.
    """

    windows: tuple[tuple[str, Window], ...]
    num_left_out: int
    unused_seconds: float


def windows_of(
    traces: Sequence[Traces], num_ticks: int, every_seconds: float | None, *, most: int
) -> Cut:
    """Cut traces into windows of so many ticks, with so many machines at most.

    ``every_seconds`` lie between the starts of two windows; None: one follows the other.

    Raises:
        ProblemError: A trace is too short, or none of its windows is known throughout.
    """
    found: list[tuple[str, Window]] = []
    left_out, unused = 0, 0.0
    for trace in traces:
        tick_seconds, span = trace.tick_seconds, len(trace.ticks[0])
        # In ticks; None: without a gap.
        step = num_ticks if every_seconds is None else round(every_seconds / tick_seconds)
        if step < 1:
            raise ProblemError(
                f"every_seconds must be at least a tick of {tick_seconds:g} s, got {every_seconds}"
            )
        if span < num_ticks:
            raise ProblemError(
                f"{trace.title}: its {span} ticks end before the deadline",
                hint="give longer windows, or an earlier deadline",
            )
        starts, known = range(0, span - num_ticks + 1, step), 0
        for first in starts:
            window = trace.window(first, num_ticks, most)
            if window is None:
                continue
            known += 1
            found.append((_name(trace, first, is_only=len(starts) == 1), window))
        if not known:
            told = (*trace.ticks, *(trace.spot_dollars_per_hour or ()))
            unknown = min(zone.index(None) for zone in told if None in zone)
            what = "" if any(None in zone for zone in trace.ticks) else "the price in "
            raise ProblemError(
                f"{trace.title}: {what}tick {unknown} is unknown"
                + (f", and so is one in each of {len(starts)} windows" if len(starts) > 1 else ""),
                hint="give windows that are known until the deadline, or an earlier deadline",
            )
        left_out += len(starts) - known
        # Only where windows follow each other is what they leave out unused.
        unused += (span - known * num_ticks) * tick_seconds if step == num_ticks else 0.0
    return Cut(windows=tuple(found), num_left_out=left_out, unused_seconds=unused)


def _name(trace: Traces, first: int, *, is_only: bool) -> str:
    """When a window begins, as far as that is known."""
    seconds = first * trace.tick_seconds
    if len(trace.zones) > 1 and trace.begin_seconds is not None:
        return utc_text(trace.begin_seconds + seconds)
    return trace.title if is_only else f"{trace.title} +{seconds / 3600:g} h"


def apart(
    windows: Iterable[Availability | Capacity], prices: Sequence[PriceHistory] = ()
) -> list[Traces]:
    """Each window by itself, with its zone's prices over time if there are any at all.

    Raises:
        ProblemError: A window has no prices where there are some, or does not say when it begins.
    """
    return [
        Traces(
            zones=(one.zone,),
            tick_seconds=one.tick_seconds,
            begin_seconds=None if one.start is None else start_seconds(one),
            ticks=(_ticks(one),),
            spot_dollars_per_hour=(_prices(one, prices),) if prices else None,
        )
        for one in windows
    ]


def traces_of(windows: Sequence[_Told], prices: Sequence[PriceHistory] = ()) -> Traces:
    """Join windows by zone, and cut them to the time that all zones have in common.

    ``prices`` are of the zones' machines over time; there are none where they do not move.

    Raises:
        ProblemError: There are no windows; one does not say when it begins; ticks differ in length
            or do not begin together; the zones have no time in common; or one has no prices where
            others have.
    """
    if not windows:
        raise ProblemError("there is no window of availability to replay on")
    for window in windows:
        start_seconds(window)
        if window.tick_seconds != windows[0].tick_seconds:
            raise ProblemError(
                f"{window.zone}: ticks of {window.tick_seconds:g} s, others have "
                f"{windows[0].tick_seconds:g} s",
                hint="give windows of one tick length",
            )
    each = joined(windows)
    tick_seconds = each[0].tick_seconds
    # The zones' common time begins with the last of them.
    begin = max(map(start_seconds, each))
    firsts = [whole_ticks(begin - start_seconds(one), tick_seconds, one.zone) for one in each]
    cut = list(zip(each, firsts, strict=True))
    length = min(len(_ticks(one)) - first for one, first in cut)
    names = tuple(f"{one.zone} {one.instance_type or ''}".strip() for one in each)
    if length < 1:
        raise ProblemError(
            f"zones {', '.join(names)} have no time in common",
            hint="give windows of the same time",
        )
    return Traces(
        zones=names,
        tick_seconds=tick_seconds,
        begin_seconds=begin,
        ticks=tuple(_ticks(one)[first : first + length] for one, first in cut),
        spot_dollars_per_hour=tuple(
            _prices(one, prices)[first : first + length] for one, first in cut
        )
        if prices
        else None,
    )


def _prices(window: Availability | Capacity, histories: Sequence[PriceHistory]) -> Prices:
    """The price of a window's machine at the start of each tick; None where it is unknown."""
    machine, zone = window.instance_type, window.zone
    found = [one for one in histories if one.place == zone and machine in (None, one.instance_type)]
    if len(found) != 1:
        names = ", ".join(one.instance_type for one in found)
        places = ", ".join(dict.fromkeys(one.place for one in histories))
        raise ProblemError(
            f"zone {zone!r} has prices of several machines: {names}"
            if found
            else f"zone {zone!r} has no price history" + (f" of {machine}" if machine else ""),
            hint="name the machine in its availability (instance_type), or give one history"
            if found
            else f"there are prices of {places}; or give one price for all with "
            f"{option('spot_dollars_per_hour')}",
        )
    # A tick pays the price at its start.
    past = window.tick_seconds * np.arange(len(_ticks(window)), dtype=np.float64)
    told = prices_at(found[0], start_seconds(window) + past)
    return tuple(None if isnan(one) else one for one in told.tolist())


def prices_at(history: PriceHistory, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """[times] dollars per hour at times in seconds since 1970; NaN where unknown."""
    starts = np.array(history.start_seconds())
    told = np.array([np.nan if price is None else price for price in history.dollars_per_hour])
    row = np.searchsorted(starts, times, side="right") - 1
    known = (row >= 0) & (times < history.end_seconds())
    return np.where(known, told[np.maximum(row, 0)], np.nan)


def _ticks(window: Availability | Capacity) -> Ticks:
    return window.available if isinstance(window, Availability) else window.num_machines


def longer_ticks(available: Sequence[int | None], ticks: int) -> Ticks:
    """Ticks joined: as many machines are there as are there throughout."""
    joined = [available[first : first + ticks] for first in range(0, len(available), ticks)]
    return tuple(_least(each) for each in joined)


def _least(ticks: Sequence[int | None]) -> int | None:
    # A tick with none has none, whatever the unknown ones were.
    known = [tick for tick in ticks if tick is not None]
    return min(known) if len(known) == len(ticks) or 0 in known else None


def fewest_parts(tick_seconds: float, needed_seconds: float, deadline_seconds: float) -> int:
    """Into how many parts to cut ticks, so that a job which ends in time does in whole ticks too.

    1 where it does without, or where no number up to 60 helps.
    """
    for parts in range(1, _MOST_PARTS + 1):
        # Whole ticks of work must fit before the deadline in whole ticks too.
        length = tick_seconds / parts
        if ceil(needed_seconds / length - 1e-9) <= floor(deadline_seconds / length + 1e-9):
            return parts
    return 1


def start_seconds(window: Availability | Capacity) -> float:
    """When a window begins, in seconds since 1970-01-01T00:00:00Z.

    Raises:
        ProblemError: It does not say.
    """
    if window.start is None:
        raise _without_start(window.zone)
    return utc_seconds(window.start, f"zone {window.zone!r}", "start")


def _without_start(zone: str) -> ProblemError:
    return ProblemError(
        f"zone {zone!r}: a window does not say when it begins",
        hint=f"import it with {option('trace_start')}, or give the market's availability a start",
    )


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


def _trace(windows: Sequence[_Told]) -> _Told:
    first = min(windows, key=start_seconds)
    base, tick_seconds, zone = start_seconds(first), first.tick_seconds, first.zone
    offsets = [whole_ticks(start_seconds(one) - base, tick_seconds, zone) for one in windows]
    # From the first tick known to the last one; gaps stay unknown.
    length = max(offset + len(_ticks(one)) for offset, one in zip(offsets, windows, strict=True))
    ticks: list[int | None] = [None] * length
    for offset, window in zip(offsets, windows, strict=True):
        for place, told in enumerate(_ticks(window), start=offset):
            known = ticks[place]
            if known is not None and told is not None and told != known:
                when = utc_text(base + place * tick_seconds)
                raise ProblemError(
                    f"zone {zone!r}: two windows disagree about {when}",
                    hint="give windows of one trace",
                )
            if told is not None:
                ticks[place] = told
    key = "available" if isinstance(first, Availability) else "num_machines"
    return replace(first, **{key: tuple(ticks)})  # type: ignore[arg-type]  # as it was
