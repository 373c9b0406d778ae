"""A pool's links, counted from the pool and the profiles once more, for the judges.

What is counted of a link follows from the two devices that it joins. So the judge looks at pairs of
devices, one by one, for what the pool states or the profiles have measured. The rules are in
docs/decisions.md ("Where does a link's rate come from?").
"""

from collections import Counter
from collections.abc import Hashable
from itertools import combinations, pairwise
from math import inf
from typing import NamedTuple

from ...schema.cluster import Cluster, Level
from ...schema.pipeline import TopologyLevel
from ...schema.problem import Problem
from ...schema.profile import Links


class DevicePair(NamedTuple):
    """Two devices: the level that joins them, their types, the server's group if they share it."""

    level: Level
    types: tuple[str, str]
    place: int | None


def kinds_of(pool: Cluster) -> set[DevicePair]:
    """Every kind of pair of devices: two of each type in two servers of each group show it."""
    witnesses = [
        (place, server, name)
        for place, group in enumerate(pool.servers)
        for server in range(min(2, group.count))
        for name, number in group.devices.items()
        for _ in range(min(2, number))
    ]
    found = set()
    for (here, one, first), (there, other, second) in combinations(witnesses, 2):
        if (here, one) == (there, other):
            found.add(DevicePair("server", (first, second), here))
        else:
            level = pool.level(pool.servers[here], pool.servers[there])
            found.add(DevicePair(level, (first, second), None))
    return found


class JudgedLinks:
    """The links of a problem's pool."""

    def __init__(self, problem: Problem) -> None:
        self._pool, self._said = problem.pool, problem.link_bytes_per_second
        self._profiles = {profile.device_type: profile for profile in reversed(problem.profiles)}
        self._own = {
            name: self._profiles[name].links
            for name in problem.pool.num_devices
            if name in self._profiles
        }
        self.kinds = kinds_of(problem.pool)

    def slowest(self) -> tuple[float | None, float]:
        """Rate and latency of the slowest link that a split's ring may cross; None if unknown."""
        # Stated links count, and in a server those that were measured between two types.
        rates, latency = [], 0.0
        for kind in self.kinds:
            rate, late = self._stated(kind)
            if rate is None and kind.level == "server":
                between = self._between(*kind.types)
                rate = None if between is None else between.bytes_per_second
            latency = max(latency, late)
            rates += [] if rate is None else [rate]
        return min(rates, default=None), latency if rates else 0.0

    def between_types(self) -> float | None:
        """The slowest link between devices of two types; None where there is one type."""
        rates = [self._rate(kind) for kind in self.kinds if kind.types[0] != kind.types[1]]
        return min(rates, default=None)

    def latency_seconds(self) -> float:
        """The longest latency that the pool states of two of its devices."""
        return max((self._stated(kind)[1] for kind in self.kinds), default=0.0)

    def message_seconds(self) -> float:
        """Fixed seconds of a pipeline's message: the most of what was stated and measured."""
        used = [self._profiles[name] for name in self._own]
        found = [self.latency_seconds()]
        for profile in used:
            if profile.pipeline is not None:
                found.append(profile.pipeline.message_seconds)
            elif profile.links is not None:
                found.append(profile.links.latency_seconds)
        for one, other in combinations(self._own, 2):
            between = self._between(one, other)
            found += [] if between is None else [between.latency_seconds]
        return max(found)

    def levels(self, name: str) -> tuple[TopologyLevel, ...]:
        """The levels of a type's devices, the lowest first: how many of what is below, and links.

        Where servers, racks or zones are unlike it is one level, whose links are the slowest that
        are between servers, or stated inside one.
        """
        mine = [kind for kind in self.kinds if kind.types == (name, name)]
        widths = self._widths(name)
        if widths is None:
            rates = [self._rate(kind) for kind in mine if kind.level != "server"]
            inside = [self._stated(kind)[0] for kind in mine if kind.level == "server"]
            rates += [rate for rate in inside if rate is not None]
            total = self._pool.num_devices[name]
            return (TopologyLevel(num_components=total, bytes_per_second=min(rates)),)
        if not mine:
            return (TopologyLevel(num_components=1, bytes_per_second=self._lone(name)),)
        return tuple(
            TopologyLevel(
                num_components=number,
                bytes_per_second=min(self._rate(kind) for kind in mine if kind.level == level),
            )
            for level, number in widths
            if number > 1
        )

    def _lone(self, name: str) -> float:
        """A link that no two devices use: the server's, or what else is known."""
        place = next(n for n, group in enumerate(self._pool.servers) if name in group.devices)
        own = self._own[name]
        known = [
            self._stated(DevicePair("server", (name, name), place))[0],
            self._said,
            self.between_types(),
            own and own.bytes_per_second,
        ]
        return next((rate for rate in known if rate), 1.0)

    def _stated(self, kind: DevicePair) -> tuple[float | None, float]:
        """Rate and latency that the pool states; None and 0 where it does not."""
        server = None if kind.place is None else self._pool.servers[kind.place]
        link = self._pool.link(kind.level, kind.types, server)
        return (None, 0.0) if link is None else (link.bytes_per_second, link.latency_seconds)

    def _rate(self, kind: DevicePair) -> float:
        """Bytes per second of a link: stated, else given by the user, else measured."""
        # Infinity where nothing tells it, which no plan is made for.
        stated, _ = self._stated(kind)
        if stated is not None:
            return stated
        one, other = kind.types
        measured = self._own[one] if one == other else self._between(one, other)
        if kind.level != "server":
            measured = None
        elif measured is None and (one != other or not self._said):
            # What nobody tells of a server's inside is the network, where the pool states one.
            network = self._pool.inter_bytes_per_second
            if self._pool.num_servers > 1 and network is not None:
                return network
        if self._said is not None:
            return self._said
        if measured is not None:
            return measured.bytes_per_second
        ends = [self._own[name] for name in kind.types if kind.level == "server"]
        known = [links for links in ends if links] or [each for each in self._own.values() if each]
        own = [links.bytes_per_second for links in known]
        pairs = [self._between(*types) for types in combinations(self._own, 2)]
        between = [links.bytes_per_second for links in pairs if links is not None]
        return min(own or between, default=inf)

    def _between(self, one: str, other: str) -> Links | None:
        """The slower of what two types' profiles have measured of a link between them."""
        found = [
            link.links
            for here, there in ((one, other), (other, one))
            if here in self._profiles
            for link in self._profiles[here].links_to
            if link.device_type == there
        ]
        return min(found, key=lambda links: links.bytes_per_second, default=None)

    def _widths(self, name: str) -> list[tuple[Level, int]] | None:
        """By level, how many parts of the level below each of its parts has; None if unlike."""
        # Parts whose servers do not follow each other count as unlike: runs of devices cross them.
        paths: list[tuple[Hashable, Hashable, Hashable]] = []
        devices = []
        for group in self._pool.servers:
            for _ in range(group.count if name in group.devices else 0):
                server = ("server", len(paths))
                rack = server if group.rack is None else ("rack", group.zone, group.rack)
                paths.append((server, rack, rack if group.zone is None else ("zone", group.zone)))
                devices.append(group.devices[name])
        racks = dict.fromkeys((rack, zone) for _, rack, zone in paths)
        per_rack = [*Counter(rack for _, rack, _ in paths).values()]
        per_zone = [*Counter(zone for _, zone in racks).values()]
        for depth, parts in ((1, per_rack), (2, per_zone)):
            if sum(one[depth] != other[depth] for one, other in pairwise(paths)) >= len(parts):
                return None
        if any(len(set(numbers)) > 1 for numbers in (devices, per_rack, per_zone)):
            return None
        numbers = (devices[0], per_rack[0], per_zone[0], len(per_zone))
        levels: tuple[Level, ...] = ("server", "rack", "zone", "pool")
        return [*zip(levels, numbers, strict=True)]
