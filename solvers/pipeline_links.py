"""The bandwidths of a pipeline's links: stated by the pool or the user, or measured.

They are never inferred from gradient synchronisation: its costs beside the bytes, which for a tiny
model are all of it, would be counted as the link's (docs/decisions.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.pipeline import TopologyLevel
from ..schema.profile import Profile
from ..schema.step_costs import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLinks:
    """The links of every device type and between them.

    ``between_types`` is None for one type. ``measured`` and ``assumed`` say, a sentence a link,
    what the pool does not state: taken from where it was measured, or from somewhere else.
    """

    levels: dict[str, tuple[TopologyLevel, ...]]
    between_types: float | None
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def links_of(
    profiles: Sequence[Profile], cluster: Cluster, link_bytes_per_second: float | None
) -> PoolLinks:
    """The links between a pool's devices: the pool's, else the user's, else the profiles'.

    Inside a server of one type it is that type's measured link. Between types it is the slowest
    measured link of all pairs of types; a pair that was not measured counts as the slowest link of
    one type, and so does the network between servers. Where no profile measured any, the user is
    asked.

    Args:
        profiles: One for each type of the pool.
        cluster: The pool; its own bandwidths come first.
        link_bytes_per_second: What links that it does not state were said to do.

    Raises:
        ProblemError: A link was neither stated nor measured.
    """
    source = _Source(profiles, link_bytes_per_second)
    between = None
    if len(profiles) > 1:
        between = _between_types(cluster, source)
    levels = {
        profile.device_type: _levels(profile, cluster, source, between) for profile in profiles
    }
    return PoolLinks(
        levels=levels,
        between_types=between,
        measured=tuple(dict.fromkeys(source.measured)),
        assumed=tuple(dict.fromkeys(source.assumed)),
    )


class _Source:
    """Answers for links that the pool does not state, and keeps what it answered."""

    def __init__(self, profiles: Sequence[Profile], said: float | None) -> None:
        self._profiles, self._said = profiles, said
        self.measured: list[str] = []
        self.assumed: list[str] = []

    def inside(self, profile: Profile, stated: float | None) -> float:
        """The link between two devices of a type in one server."""
        where = f"inside {profile.device_type} servers"
        if stated is None and self._said is None and profile.links is not None:
            rate = profile.links.bytes_per_second
            self.measured.append(f"links {where}: {_megabytes(rate)}, as measured")
            return rate
        return self._given(stated, where)

    def between_types(self, stated: float | None) -> float:
        """The link between devices of unlike types in one server."""
        where = "between device types"
        found = self._slowest()
        if stated is None and self._said is None:
            pairs = self._between_pairs(found)
            if pairs is not None:
                return pairs
        if stated is None and self._said is None and found is not None:
            rate, of_type = found
            if len({_base(profile) for profile in self._profiles}) == 1:
                self.measured.append(f"links {where}: {_megabytes(rate)}, as measured")
            else:
                self.assumed.append(
                    f"links {where}: {_megabytes(rate)}, that between two {of_type}"
                )
            return rate
        return self._given(stated, where)

    def _between_pairs(self, slowest: tuple[float, str] | None) -> float | None:
        """The least rate of all pairs of types, where some pair was measured; else None.

        A pair that was not measured counts as the slowest link between two devices of one type, if
        there is one.
        """
        rates, missing = [], []
        for one, other in combinations(self._profiles, 2):
            measured = measured_between(one, other)
            pair = f"between {one.device_type} and {other.device_type}"
            if measured is None:
                missing.append(pair)
                continue
            rates.append(measured.bytes_per_second)
            self.measured.append(f"links {pair}: {_megabytes(rates[-1])}, as measured")
        if not rates:
            return None
        for pair in missing:
            if slowest is None:
                self.assumed.append(f"links {pair}: {_megabytes(min(rates))}, the slowest measured")
                continue
            rate, of_type = slowest
            rates.append(rate)
            self.assumed.append(f"links {pair}: {_megabytes(rate)}, that between two {of_type}")
        return min(rates)

    def between_servers(self, stated: float | None) -> float:
        """The network."""
        where, found = "between servers", self._slowest()
        if stated is None and self._said is None and found is not None:
            rate, of_type = found
            self.assumed.append(
                f"links {where}: {_megabytes(rate)}, that between two {of_type} of one host"
            )
            return rate
        return self._given(stated, where)

    def lone(self, profile: Profile, between: float | None) -> float:
        """Of the only device of its type: a link that no two of its replicas use."""
        own = None if profile.links is None else profile.links.bytes_per_second
        return self._said or between or own or 1.0

    def _slowest(self) -> tuple[float, str] | None:
        """The least rate of all types whose link was measured, and the type."""
        found = [
            (profile.links.bytes_per_second, profile.device_type)
            for profile in self._profiles
            if profile.links is not None
        ]
        return min(found, default=None)

    def _given(self, stated: float | None, where: str) -> float:
        if stated is not None:
            return stated
        if self._said is None:
            raise ProblemError(
                f"the bandwidth {where} is missing",
                hint="measure it (`hetflow profile --links`), state it in a cluster file, or give "
                "one for all links (--link-bytes-per-second)",
            )
        self.assumed.append(f"links {where}: {_megabytes(self._said)}, by --link-bytes-per-second")
        return self._said


def measured_between(one: Profile, other: Profile) -> Links | None:
    """The measured link between devices of two types, from either's profile; None if unknown.

    Profiles that were measured apart may both hold it; the slower one counts.
    """
    found = [
        link.links
        for here, there in ((one, other), (other, one))
        for link in here.links_to
        if link.device_type == there.device_type
    ]
    return min(found, key=lambda links: links.bytes_per_second, default=None)


def _base(profile: Profile) -> str:
    """The real device whose link a type has."""
    return profile.emulation.base_device_type if profile.emulation else profile.device_type


def _megabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.4g} MB/s"


def _levels(
    profile: Profile, cluster: Cluster, source: _Source, between_types: float | None
) -> tuple[TopologyLevel, ...]:
    name = profile.device_type
    groups = [group for group in cluster.servers if name in group.devices]
    servers = sum(group.count for group in groups)
    widths = {group.devices[name] for group in groups}
    if servers > 1:
        between = source.between_servers(cluster.inter_bytes_per_second)
        if widths == {1} or len(widths) > 1:
            within = [g.intra_bytes_per_second for g in groups if g.devices[name] > 1]
            rate = min([between, *(each for each in within if each is not None)])
            total = cluster.num_devices[name]
            return (TopologyLevel(num_components=total, bytes_per_second=rate),)
    width = widths.pop()
    stated = [group.intra_bytes_per_second for group in groups]
    if servers == 1 and width == 1:
        rate = stated[0] or source.lone(profile, between_types)
        return (TopologyLevel(num_components=1, bytes_per_second=rate),)
    slowest = None if None in stated else min(rate for rate in stated if rate is not None)
    inside = TopologyLevel(num_components=width, bytes_per_second=source.inside(profile, slowest))
    if servers == 1:
        return (inside,)
    return (inside, TopologyLevel(num_components=servers, bytes_per_second=between))


def _between_types(cluster: Cluster, source: _Source) -> float:
    if cluster.num_servers > 1:
        return source.between_servers(cluster.inter_bytes_per_second)
    return source.between_types(cluster.servers[0].intra_bytes_per_second)
