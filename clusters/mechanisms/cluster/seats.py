"""The named devices of each placement; a job that stays keeps its devices.

Mechanisms count devices (by type, or by type and server); spans need their names. No result depends
on the names chosen here. Where jobs are placed on servers, their devices are on those servers;
elsewhere jobs take the lowest free devices, on one server if one has enough.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Ints

Sizes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Devices on servers: ``sizes`` [types][servers], devices of a type on each server with any.

    ``servers`` [types][servers] numbers the server of each entry, so that one that holds several
    types fails as a whole.
    """

    sizes: tuple[tuple[int, ...], ...]
    servers: tuple[tuple[int, ...], ...]

    @classmethod
    def apart(cls, sizes: Sizes) -> "DeviceLayout":
        """A layout in which no two types share a server."""
        first = np.cumsum([0, *map(len, sizes)]).tolist()
        pairs = zip(first[:-1], first[1:], strict=True)
        return cls(tuple(tuple(row) for row in sizes), tuple(tuple(range(*ends)) for ends in pairs))

    @classmethod
    def flat(cls, capacity: Ints) -> "DeviceLayout":
        """A layout in which each type stands on one server."""
        return cls.apart([[number] for number in capacity.tolist()])


Device = tuple[int, int, int]  # type, server among those that have it, number there
Seat = tuple[Device, ...]  # in order


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices that one job holds, or the two of a pair.

    ``counts`` holds (device type, devices). ``servers`` says on which servers those of its only
    type are (server among those that have the type -> devices); None: on any.
    """

    jobs: tuple[str, ...]
    counts: tuple[tuple[int, int], ...]
    servers: Mapping[int, int] | None = None


def device_name(types: Sequence[str], layout: DeviceLayout | None, device: Device) -> str:
    """``server2/V100:1``; ``V100:5`` in a flat pool (no layout)."""
    kind, place, number = device
    if layout is None:
        return f"{types[kind]}:{number}"
    return f"server{layout.servers[kind][place]}/{types[kind]}:{number}"


def devices_down(
    sizes: Sizes,
    standing: Sizes,
    before: Sequence[Device],
    struck: Iterable[Device],
    held: Collection[Device],
) -> list[Device]:
    """Which devices are down, where only their number by server is known.

    Args:
        sizes: Devices of each type on each server [types][servers].
        standing: Those that work now [types][servers].
        before: What was down, the longest first: these come back in this order.
        struck: Devices of jobs that a failure has hit since; one of these fails first.
        held: Devices of the other jobs; these fail last.
    """
    down: list[Device] = []
    first = list(dict.fromkeys(struck))
    for kind, row in enumerate(sizes):
        for place, size in enumerate(row):
            number = size - standing[kind][place]
            if not number:
                continue
            here = [device for device in before if device[:2] == (kind, place)]
            here = here[max(0, len(here) - number) :]
            others = [(kind, place, i) for i in range(size) if (kind, place, i) not in here]
            others.sort(key=lambda d: (d not in first, d in held, d[2]))
            down += here + others[: number - len(here)]
    return down


def seat(
    sizes: Sizes,
    placements: Sequence[Placement],
    before: Mapping[str, Seat],
    down: Collection[Device] = (),
) -> list[Seat]:
    """Devices of each placement; no device is in two of them, or down.

    A job that held devices keeps them, as far as its number of devices (on each server, where
    given) allows. When a pair separates, its devices go to the first job. The rest is filled up in
    order.

    Args:
        sizes: Devices of each type on each server [types][servers].
        placements: Together they fit in what is up.
        before: What each job held last.
        down: Devices that do not work.
    """
    free = {
        (kind, place): [i for i in range(size) if (kind, place, i) not in down]
        for kind, row in enumerate(sizes)
        for place, size in enumerate(row)
    }
    needs = [_Need.of(placement) for placement in placements]
    for turn in range(2):  # the devices of the first job of each, then those of partners
        for need, placement in zip(needs, placements, strict=True):
            known = [before[job] for job in placement.jobs if job in before]
            if turn < len(known):
                need.keep(known[turn], free)
    for need in needs:
        need.fill(free)
    return [tuple(sorted(need.taken)) for need in needs]


_Free = dict[tuple[int, int], list[int]]


@dataclass(slots=True)
class _Need:
    """The devices that a placement still needs, by type (place None) or by type and server."""

    lacks: dict[tuple[int, int | None], int]
    taken: list[Device]

    @classmethod
    def of(cls, placement: Placement) -> "_Need":
        if placement.servers is None:
            return cls({(kind, None): number for kind, number in placement.counts}, [])
        [(kind, _)] = placement.counts
        return cls({(kind, place): n for place, n in placement.servers.items()}, [])

    def keep(self, had: Seat, free: _Free) -> None:
        """Take devices held before: first those of servers with most of them."""
        if len(had) > sum(self.lacks.values()):  # else all of them are kept, in any order
            most = Counter(device[:2] for device in had)
            had = tuple(sorted(had, key=lambda d: (d[0], -most[d[:2]], d)))
        for kind, place, number in had:
            key = (kind, place) if (kind, place) in self.lacks else (kind, None)
            if self.lacks.get(key) and number in free[kind, place]:
                free[kind, place].remove(number)
                self._take(key, [(kind, place, number)])

    def fill(self, free: _Free) -> None:
        """Take the lowest free devices for what is lacking."""
        for (kind, place), number in list(self.lacks.items()):
            while left := self.lacks[kind, place]:
                at = self._server(kind, left, free) if place is None else place
                lowest, free[kind, at] = free[kind, at][:left], free[kind, at][left:]
                if not lowest:
                    raise AssertionError(f"{number} devices of type {kind} are more than are free")
                self._take((kind, place), [(kind, at, i) for i in lowest])

    def _server(self, kind: int, number: int, free: _Free) -> int:
        """The server that it is on already, else the fullest that has enough, else the emptiest."""
        rows = [(place, len(row)) for (k, place), row in free.items() if k == kind and row]
        if len(rows) <= 1:
            return rows[0][0] if rows else 0
        own = Counter(place for k, place, _ in self.taken if k == kind)
        return min(
            rows,
            key=lambda row: (
                -own[row[0]],
                row[1] < number,
                row[1] if row[1] >= number else -row[1],
            ),
        )[0]

    def _take(self, key: tuple[int, int | None], devices: list[Device]) -> None:
        self.lacks[key] -= len(devices)
        self.taken += devices
