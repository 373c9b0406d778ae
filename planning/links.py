"""The links between a pool's devices: stated by the pool or the user, or measured.

They are never inferred from gradient synchronisation: its costs beside the bytes, which for a tiny
model are all of it, would be counted as the link's (docs/decisions.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, groupby, product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ..schema.cluster import Cluster, Level, Link
from ..schema.errors import ProblemError
from ..schema.options import command, option
from ..schema.pipeline import TopologyLevel
from ..schema.profile import Links, Profile

Levels = tuple[TopologyLevel, ...]


class Pair(NamedTuple):
    """Two devices of a pool: what joins them, their types, the places of their servers' groups."""

    level: Level
    types: tuple[str, str]
    groups: tuple[int, int]


def pairs_of(pool: Cluster) -> Iterator[Pair]:
    """All kinds of pairs of two devices of a pool."""
    for place, group in enumerate(pool.servers):
        own = [*combinations_with_replacement(group.devices, 2)]
        for one, other in own:
            if one != other or group.devices[one] > 1:
                yield Pair("server", (one, other), (place, place))
        if group.count > 1:
            yield from (Pair(pool.level(group, group), types, (place, place)) for types in own)
        for later, beside in enumerate(pool.servers[place + 1 :], place + 1):
            for types in product(group.devices, beside.devices):
                yield Pair(pool.level(group, beside), types, (place, later))


def stated_link(pool: Cluster, pair: Pair) -> Link | None:
    """What a pool states of the link between two devices."""
    server = pool.servers[pair.groups[0]] if pair.level == "server" else None
    return pool.link(pair.level, pair.types, server)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLinks:
    """The links of every device type and between types, the slowest of each kind.

    ``between`` holds a link for every two types [(type, type)], ``inside`` that between devices of
    a type in one server, if there is one. ``measured`` and ``assumed`` say, a
    sentence a link, what the pool does not state: taken from where it was measured, or from
    somewhere else.
    """

    levels: dict[str, Levels]
    between: dict[tuple[str, str], float]
    inside: dict[str, float]
    latency_seconds: float = 0.0
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def between_types(self) -> float | None:
        """The slowest link between two types; None for one type."""
        return min(self.between.values(), default=None)


def links_of(
    profiles: Sequence[Profile], cluster: Cluster, link_bytes_per_second: float | None
) -> PoolLinks:
    """The links between a pool's devices: the pool's, else the user's, else the profiles'.

    Inside a server of one type it is that type's measured link. Between types it is the measured
    link of the pair; a pair that was not measured counts as the slower link of its two types, and
    the network between servers as the slowest of all. Where no profile measured any, the user is
    asked.

    Raises:
        ProblemError: A link was neither stated nor measured.
    """
    source = LinkSource(profiles, cluster, link_bytes_per_second)
    between: dict[tuple[str, str], float] = {}
    names = [profile.device_type for profile in profiles]
    stated = [stated_link(cluster, pair) for pair in pairs_of(cluster)]
    for pair in pairs_of(cluster):
        one, other = sorted(pair.types, key=names.index)
        if one != other:
            rate = source.link(pair).bytes_per_second
            between[one, other] = min(between.get((one, other), inf), rate)
    levels = {
        profile.device_type: _levels(profile, cluster, source, min(between.values(), default=None))
        for profile in profiles
    }
    return PoolLinks(
        levels=levels,
        between=between,
        inside={
            name: source.stated_inside(name) or own[0].bytes_per_second
            for name, own in levels.items()
            if source.stated_inside(name) or len(own) > 1
        },
        latency_seconds=max((link.latency_seconds for link in stated if link), default=0.0),
        measured=tuple(dict.fromkeys(source.measured)),
        assumed=tuple(dict.fromkeys(source.assumed)),
    )


class LinkSource:
    """Answers for the links of a pool, and keeps what it answered for those not stated."""

    def __init__(self, profiles: Sequence[Profile], pool: Cluster, said: float | None) -> None:
        self._profiles, self._pool, self._said = profiles, pool, said
        self.measured: list[str] = []
        self.assumed: list[str] = []

    def link(self, pair: Pair) -> Link:
        """The link of a pair of devices.

        Beside other servers, what neither the pool nor a profile tells of a server counts as the
        network: two types, and one of which servers have unlike numbers.

        Raises:
            ProblemError: The link was neither stated nor measured.
        """
        found = stated_link(self._pool, pair)
        if found is not None:
            return found
        one, other = (self._profile(name) for name in pair.types)
        if pair.level != "server":
            rate = self._between_servers()
        elif one is other and (one.links or self._said or _shape_of(self._pool, one.device_type)):
            rate = self._inside(one)
        elif self._pool.num_servers > 1 and measured_between(one, other) is None:
            rate = self._pool.inter_bytes_per_second or self._between_servers()
        else:
            rate = self._between(one, other)
        return Link(level=pair.level, bytes_per_second=rate)

    def lone(self, profile: Profile, between: float | None) -> float:
        """Of the only device of its type: a link that no two of its replicas use."""
        own = None if profile.links is None else profile.links.bytes_per_second
        return self._said or between or own or 1.0

    def stated_inside(self, name: str) -> float | None:
        """The slowest link that the pool states between two devices of a type in a server."""
        own = [pair for pair in pairs_of(self._pool) if pair.types == (name, name)]
        found = [stated_link(self._pool, pair) for pair in own if pair.level == "server"]
        return min((link.bytes_per_second for link in found if link is not None), default=None)

    def _profile(self, name: str) -> Profile:
        return next(profile for profile in self._profiles if profile.device_type == name)

    def _inside(self, profile: Profile) -> float:
        """The link between two devices of a type in one server."""
        where = f"inside {profile.device_type} servers"
        if self._said is None and profile.links is not None:
            rate = profile.links.bytes_per_second
            self.measured.append(f"links {where}: {_megabytes(rate)}, as measured")
            return rate
        return self._given(where)

    def _between(self, one: Profile, other: Profile) -> float:
        """The link between devices of two types in one server."""
        where, own = "between device types", measured_between(one, other)
        found = _slowest((one, other)) or _slowest(self._profiles)
        pair = f"between {one.device_type} and {other.device_type}"
        if self._said is not None:
            return self._given(where)
        if own is not None:
            rate = own.bytes_per_second
            self.measured.append(f"links {pair}: {_megabytes(rate)}, as measured")
            return rate
        pairs = [measured_between(*each) for each in combinations(self._profiles, 2)]
        known = [links.bytes_per_second for links in pairs if links is not None]
        if found is None:
            if not known:
                return self._given(where)
            rate = min(known)
            self.assumed.append(f"links {pair}: {_megabytes(rate)}, the slowest measured")
            return rate
        rate, of_type = found
        real = {
            p.emulation.base_device_type if p.emulation else p.device_type for p in self._profiles
        }
        if len(real) == 1 and not known:
            self.measured.append(f"links {where}: {_megabytes(rate)}, as measured")
        else:
            told = pair if len(self._profiles) > 2 else where
            self.assumed.append(f"links {told}: {_megabytes(rate)}, that between two {of_type}")
        return rate

    def _between_servers(self) -> float:
        """The network."""
        where, found = "between servers", _slowest(self._profiles)
        if self._said is not None or found is None:
            return self._given(where)
        rate, of_type = found
        self.assumed.append(
            f"links {where}: {_megabytes(rate)}, that between two {of_type} of one host"
        )
        return rate

    def _given(self, where: str) -> float:
        if self._said is None:
            raise ProblemError(
                f"the bandwidth {where} is missing",
                hint=f"measure it ({command('profile', links=True)}), state it in a cluster file, "
                f"or give one for all links ({option('link_bytes_per_second')})",
            )
        self.assumed.append(f"links {where}: {_megabytes(self._said)}, by link_bytes_per_second")
        return self._said


def _slowest(profiles: Sequence[Profile]) -> tuple[float, str] | None:
    """The least rate of the types whose link was measured, and the type."""
    found = [
        (profile.links.bytes_per_second, profile.device_type)
        for profile in profiles
        if profile.links is not None
    ]
    return min(found, default=None)


def measured_between(one: Profile, other: Profile) -> Links | None:
    """The measured link between devices of two types, from either's profile; None if unknown."""
    # Profiles that were measured apart may both hold it; the slower one counts.
    found = [
        link.links
        for here, there in ((one, other), (other, one))
        for link in here.links_to
        if link.device_type == there.device_type
    ]
    return min(found, key=lambda links: links.bytes_per_second, default=None)


def _megabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.4g} MB/s"


def _levels(
    profile: Profile, cluster: Cluster, source: LinkSource, between_types: float | None
) -> Levels:
    """Devices of a type in servers, racks and zones; one level of all where these are unlike."""
    name = profile.device_type
    shape = _shape_of(cluster, name)
    rates: dict[str, float] = {}
    for pair in pairs_of(cluster):
        if pair.types == (name, name) and (shape or pair.level != "server"):
            rate = source.link(pair).bytes_per_second
            rates[pair.level] = min(rates.get(pair.level, inf), rate)
    if not shape:  # the network counts, and slower links inside servers as far as they are known
        rates["server"] = source.stated_inside(name) or inf
        total = cluster.num_devices[name]
        return (TopologyLevel(num_components=total, bytes_per_second=min(rates.values())),)
    if not rates:
        server = next(group for group in cluster.servers if name in group.devices)
        stated = cluster.link("server", (name, name), server)
        rate = source.lone(profile, between_types) if stated is None else stated.bytes_per_second
        return (TopologyLevel(num_components=1, bytes_per_second=rate),)
    return tuple(
        TopologyLevel(num_components=number, bytes_per_second=rates[level])
        for level, number in shape
        if number > 1
    )


def _shape_of(cluster: Cluster, name: str) -> list[tuple[Level, int]]:
    """How many parts of the level below each level has; empty where they are unlike."""
    paths: list[tuple[object, ...]] = []
    for group in cluster.servers:
        for _ in range(group.count if name in group.devices else 0):
            server = len(paths)
            rack = server if group.rack is None else (group.zone, group.rack)
            paths.append((server, rack, rack if group.zone is None else group.zone, "pool"))
    widths = {group.devices[name] for group in cluster.servers if name in group.devices}
    shape: list[tuple[Level, int]] = [("server", min(widths))]
    levels: tuple[Level, ...] = ("rack", "zone", "pool")
    for depth, level in enumerate(levels, 1):
        runs = [list(same) for _, same in groupby(paths, key=itemgetter(depth))]
        shape.append((level, len(runs[0])))
        if len({len(run) for run in runs}) > 1 or len({path[depth] for path in paths}) < len(runs):
            return []
        paths = [run[0] for run in runs]
    return shape if len(widths) == 1 else []
