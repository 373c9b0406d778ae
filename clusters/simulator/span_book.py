"""Spans: which job held which devices, from when to when. Adjacent stretches become one span."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...schema.simulation import Span
from ..mechanisms.cluster.seats import (
    Device,
    DeviceLayout,
    Placement,
    Seat,
    Sizes,
    device_name,
    devices_down,
    seat,
)


@dataclass(slots=True)
class _Open:
    """A span that the next stretch may lengthen."""

    job: str
    kind: int
    devices: Seat
    shared_with: str | None
    start_seconds: float
    end_seconds: float
    stretch: int  # number of the last one


class SpanBook:
    """Collects the spans of a run, stretch by stretch (a round, or the time between events)."""

    def __init__(
        self, types: Sequence[str], num_devices: Sequence[int], layout: DeviceLayout | None
    ):
        """Start with no spans.

        Args:
            types: Names of the device types.
            num_devices: Of each type.
            layout: The servers they are on; None for a flat pool.
        """
        self._types, self._layout = types, layout
        self._sizes: Sizes = [[n] for n in num_devices] if layout is None else layout.sizes
        self._held: dict[str, Seat] = {}
        self._down: list[Device] = []
        self._struck: set[str] = set()
        self._all: list[_Open] = []
        self._last: dict[tuple[str, int], _Open] = {}
        self._names: dict[Seat, tuple[str, ...]] = {}
        self._stretch = 0

    def hold(
        self,
        placements: Sequence[Placement],
        start_seconds: float,
        ends: Sequence[Sequence[float]],
        standing: Sizes | None = None,
    ) -> None:
        """Note a stretch of time.

        Args:
            placements: Who holds how much.
            start_seconds: Of the stretch.
            ends: When each job of each placement lets go [placements][jobs], in seconds.
            standing: Devices that work, by type and server [types][servers]; None: all.
        """
        self._stretch += 1
        if standing is not None:
            self._see(standing, placements)
        seats = seat(self._sizes, placements, self._held, frozenset(self._down))
        self._held = {}
        for placement, devices, until in zip(placements, seats, ends, strict=True):
            for place, (job, end) in enumerate(zip(placement.jobs, until, strict=True)):
                self._held[job] = devices
                others = placement.jobs[:place] + placement.jobs[place + 1 :]
                partner = others[0] if others else None
                for kind, _ in placement.counts:
                    own = tuple(device for device in devices if device[0] == kind)
                    self._note(job, kind, own, partner, start_seconds, end)

    def strike(self, jobs: Iterable[str]) -> None:
        """A failure hit these in, or at the end of, the last stretch."""
        self._struck.update(jobs)

    def spans(self) -> tuple[Span, ...]:
        """All of them, by their start."""
        return tuple(
            Span(
                job=one.job,
                device_type=self._types[one.kind],
                num_devices=len(one.devices),
                start_seconds=one.start_seconds,
                end_seconds=one.end_seconds,
                shared_with=one.shared_with,
                devices=self._named(one.devices),
            )
            for one in self._all
        )

    def _see(self, standing: Sizes, placements: Sequence[Placement]) -> None:
        stay = {job for one in placements for job in one.jobs} - self._struck
        struck = [d for job in sorted(self._struck) for d in self._held.get(job, ())]
        held = {device for job in stay for device in self._held.get(job, ())}
        self._down = devices_down(self._sizes, standing, self._down, struck, held)
        self._struck.clear()

    def _note(
        self, job: str, kind: int, devices: Seat, partner: str | None, start: float, end: float
    ) -> None:
        last = self._last.get((job, kind))
        if (
            last is not None
            and last.stretch == self._stretch - 1
            and (last.devices, last.shared_with) == (devices, partner)
        ):
            last.end_seconds, last.stretch = end, self._stretch
            return
        new = _Open(job, kind, devices, partner, start, end, self._stretch)
        self._last[job, kind] = new
        self._all.append(new)

    def _named(self, devices: Seat) -> tuple[str, ...]:
        if devices not in self._names:
            self._names[devices] = tuple(
                device_name(self._types, self._layout, device) for device in devices
            )
        return self._names[devices]
