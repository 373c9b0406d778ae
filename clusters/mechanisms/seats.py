"""The servers and the named devices of each placement; a job that stays keeps its devices.

Mechanisms count devices (by type, or by type and server); spans need their names. No result depends
on the names chosen here. Where jobs are placed on servers, their devices are on those servers;
elsewhere jobs take the lowest free devices, on one server if one has enough.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .pool import Ints

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

    ``sizes`` and ``standing`` are [types][servers]. What was down ``before``, the longest first,
    comes back in this order; of the others those ``struck`` fail first, those ``held`` last.
    """
    down: list[Device] = []
    first = list(dict.fromkeys(struck))
    for kind, row in enumerate(sizes):
        for place, size in enumerate(row):
            number = size - standing[kind][place]
            if not number:
                continue
            # What was down longest comes back first, so the newest stay down.
            here = [device for device in before if device[:2] == (kind, place)]
            here = here[max(0, len(here) - number) :]
            others = [(kind, place, i) for i in range(size) if (kind, place, i) not in here]
            # Struck devices fail first, those of other jobs last.
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

    ``before`` is what each job held last; the placements fit together in what is up.
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


Held = tuple[int, dict[int, int]]  # device type, server -> devices


@dataclass(slots=True)
class Servers:
    """Servers by device type, and the placement of the last round (thesis 5.3.1, 5.5: placement).

    Jobs are placed in decreasing order of the devices they ask for; of equals those that hold a
    lease first, then the earlier job. A job keeps the devices it had if they are still free and no
    placement on fewer servers exists; otherwise it takes the server where fewest devices are
    reserved by leases of others, and of these the fullest that fits. Larger than any server, it
    takes the emptiest ones one after another. It is consolidated where it uses as few servers as
    its type allows.

    ``sizes`` holds the devices of a type on each server that has it [types][servers].
    """

    sizes: list[list[int]]
    held: dict[str, Held] = field(default_factory=dict)

    def fewest(self, kind: int, number: int) -> int:
        """The least number of servers on which so many devices of a type can be."""
        left, used = number, 0
        for size in sorted(self.sizes[kind], reverse=True):
            if left <= 0:
                break
            left, used = left - size, used + 1
        return used

    def place(
        self,
        ids: Sequence[tuple[str, ...]],
        kinds: list[int],
        needs: list[int],
        standing: Sequence[Sequence[int]],
        apart: Sequence[bool] = (),
    ) -> tuple[list[bool], list[bool]]:
        """Place the jobs of a round.

        ``standing`` [types][servers] are devices that work; placements that are ``apart`` may be
        spread, and come last.

        Returns:
            Whether each is consolidated, and whether it kept the devices of the last round.
        """
        free = [list(row) for row in standing]
        reserved = [[0] * len(sizes) for sizes in self.sizes]
        leases: dict[int, dict[int, int]] = {}
        claimed: set[int] = set()  # what a pair had that now parts goes to the first of them
        for i, (names, kind) in enumerate(zip(ids, kinds, strict=True)):
            before = next((self.held[name] for name in names if name in self.held), None)
            if before is not None and before[0] == kind and id(before) not in claimed:
                claimed.add(id(before))
                leases[i] = before[1]
                for server, number in before[1].items():
                    reserved[kind][server] += number
        later = list(apart) or [False] * len(ids)
        # The largest first, as they fit the fewest places; of equals who holds a lease.
        order = sorted(range(len(ids)), key=lambda i: (later[i], -needs[i], i not in leases, i))
        close, kept = [False] * len(ids), [False] * len(ids)
        now: dict[str, Held] = {}
        for i in order:
            kind, lease = kinds[i], leases.get(i)
            # Its own lease is not in its way.
            for server, number in (lease or {}).items():
                reserved[kind][server] -= number
            fewest = self.fewest(kind, needs[i])
            if (
                lease is not None
                and sum(lease.values()) == needs[i]
                and all(free[kind][server] >= number for server, number in lease.items())
            ):
                # Fewer servers are worth a move; as many are not.
                better = None if len(lease) <= fewest else _seats(needs[i], free[kind])
                seats = better if better is not None and len(better) < len(lease) else lease
            else:
                seats = _seats(needs[i], free[kind], reserved[kind])
            for server, number in seats.items():
                free[kind][server] -= number
            close[i], kept[i] = len(seats) <= fewest, seats == lease
            now.update(dict.fromkeys(ids[i], (kind, seats)))
        self.held = now
        return close, kept


def _seats(need: int, free: list[int], reserved: list[int] | None = None) -> dict[int, int]:
    held = reserved or [0] * len(free)
    fits = [s for s, number in enumerate(free) if number >= need]
    if fits:
        # How many devices that leases of others hold it would take there.
        taken = [max(0, need - (free[s] - held[s])) for s in range(len(free))]
        return {min(fits, key=lambda s: (taken[s], free[s], s)): need}
    seats: dict[int, int] = {}
    # Larger than any server: the emptiest ones, so as few as can be.
    for server in np.argsort(-np.array(free), kind="stable").tolist():
        if need <= 0 or free[server] <= 0:
            break
        seats[server] = min(need, free[server])
        need -= seats[server]
    return seats
