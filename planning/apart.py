"""Servers told apart, a few at a time, so that stages are placed on the servers that suit them.

Planners count devices by type, and all links of a kind at the rate of the slowest one. Where
servers are unlike, that hides the fast ones. Here each type of each server is a type of its own,
with the links of that server. The same search then chooses how many devices of each server a stage
takes. A plan states these devices, and is judged on the servers that hold them. Of a larger pool
the largest parts are planned so. Each part of a pool is one of a larger pool, too: so more servers
never make a plan slower, as they would if only small pools were planned so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from math import inf
from typing import TypeVar

from ..schema.cluster import Cluster, Link
from ..schema.plan import Alternative, Plan, ReplicaGroup
from ..schema.problem import Problem
from .pool_parts import Chosen, Parts, part_with, subsets

_Staged = TypeVar("_Staged", Plan, Alternative)
MOST_KINDS = 6
"""Types of servers, each type of each server counted, that a search tells apart."""
MOST_SELECTIONS = 300
"""Parts of a pool whose servers may be told apart, at most."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A problem whose servers are told apart.

    Attributes:
        problem: Its pool and profiles name a type of a server.
        devices: That name -> the type, and its devices by their index among those of the type.
    """

    problem: Problem
    devices: dict[str, tuple[str, range]]

    def by_device(self, plan: Plan) -> Plan:
        """The plan of ``problem`` for the pool as it is: its groups state their devices."""
        gains = {
            (name, gain.num_devices): replace(gain, device_type=name)
            for gain in sorted(plan.with_more_devices, key=lambda gain: -gain.step_seconds)
            for name in [self.devices[gain.device_type][0]]
        }
        space = f"{plan.proof.space}; devices of a type in two servers count as two types"
        return replace(
            self._placed(plan),
            alternatives=tuple(map(self._placed, plan.alternatives)),
            with_more_devices=tuple(gains.values()),
            proof=replace(plan.proof, space=space),
        )

    def by_server(self, plan: Plan) -> Plan:
        """The plan of ``problem`` that a plan which states its devices is."""
        return replace(self._named(plan), alternatives=tuple(map(self._named, plan.alternatives)))

    def _placed(self, one: _Staged) -> _Staged:
        free = {name: held.start for name, (_, held) in self.devices.items()}
        firsts: list[int] = []
        for group in (g for stage in one.stages[: one.num_positions] for g in stage.replicas):
            firsts.append(free[group.device_type])
            free[group.device_type] += group.num_devices
        each = cycle(firsts)  # chunks of a position are on its devices

        def placed(group: ReplicaGroup) -> ReplicaGroup:
            name, _ = self.devices[group.device_type]
            return replace(group, device_type=name, first_device=next(each))

        return _with_groups(one, placed)

    def _named(self, one: _Staged) -> _Staged:
        def named(group: ReplicaGroup) -> ReplicaGroup:
            unknown = f"{group.device_type} whose devices are in one server"
            name = next(
                (
                    own
                    for own, (of_type, devices) in self.devices.items()
                    if of_type == group.device_type and all(one in devices for one in group.held)
                ),
                unknown,
            )
            return replace(group, device_type=name, first_device=None, devices=())

        return _with_groups(one, named)


def _with_groups(one: _Staged, change: Callable[[ReplicaGroup], ReplicaGroup]) -> _Staged:
    return replace(
        one,
        stages=tuple(
            replace(stage, replicas=tuple(map(change, stage.replicas))) for stage in one.stages
        ),
    )


def states_devices(plan: Plan) -> bool:
    """Whether a plan of three dimensions says on which devices its groups are."""
    each = [group for stage in plan.stages for group in stage.replicas]
    return plan.kind == "parallel" and any(group.first_device is not None for group in each)


def parts_to_tell_apart(pool: Cluster) -> Parts:
    """The largest parts whose servers a search can tell apart, where that may help."""
    # A small pool is the only one, and is equal to the part but not the same object.
    free = {place: group.count for place, group in enumerate(pool.servers)}
    items = [
        (place, tuple((name, group.devices[name]) for name in names))
        for place, group in enumerate(pool.servers)
        for names in subsets(list(group.devices))
    ]
    if _num_kinds(pool) <= MOST_KINDS:
        found = iter([replace(pool)])
    else:
        found = (part_with(pool, chosen) for chosen in _selections(items, MOST_KINDS, free))
    parts = [
        part
        for part in islice(found, MOST_SELECTIONS)
        if len(part.num_devices) < _num_kinds(part) and not _are_alike(part)
    ]
    return Parts([pool], next(found, None) is None, parts)


def _num_kinds(pool: Cluster) -> int:
    return sum(group.count * len(group.devices) for group in pool.servers)


def _selections(
    items: Sequence[tuple[int, tuple[tuple[str, int], ...]]], kinds: int, free: Mapping[int, int]
) -> Iterator[Chosen]:
    """All ways to take so many types of servers; of a server all types or some."""
    if not kinds:
        yield ()
    if not kinds or not items:
        return
    (place, devices), *others = items
    for count in range(min(free[place], kinds // len(devices)), -1, -1):
        left = {**free, place: free[place] - count}
        taken: Chosen = ((place, count, devices),) if count else ()
        for rest in _selections(others, kinds - count * len(devices), left):
            yield (*taken, *rest)


def told_apart(problem: Problem) -> Apart | None:
    """The problem with its servers told apart; None where no two have a type in common."""
    servers = [group for group in problem.pool.servers for _ in range(group.count)]
    if len(problem.pool.num_devices) == _num_kinds(problem.pool):
        return None
    devices: dict[str, tuple[str, range]] = {}
    names: dict[str, list[str]] = {name: [] for name in problem.pool.device_types}
    used = dict.fromkeys(names, 0)
    for number, server in enumerate(servers):
        for name, more in server.devices.items():
            own = _name(name, number)
            names[name].append(own)
            devices[own] = name, range(used[name], used[name] + more)
            used[name] += more

    def links() -> Iterator[Link]:
        for link in problem.pool.links:
            one, other = link.between or ("", "")
            both = product(names.get(one, ()), names.get(other, ()))
            pairs = {(min(pair), max(pair)) for pair in both}
            if link.between is None:
                yield link
            yield from (replace(link, between=pair) for pair in sorted(pairs))

    pool = replace(
        problem.pool,
        device_types={own: problem.pool.device_types[name] for own, (name, _) in devices.items()},
        servers=tuple(
            replace(server, count=1, devices={_name(t, n): k for t, k in server.devices.items()})
            for n, server in enumerate(servers)
        ),
        links=tuple(links()),
    )
    profiles = tuple(
        replace(
            profile,
            device_type=own,
            links_to=tuple(
                replace(link, device_type=beside)
                for link in profile.links_to
                for beside in names.get(link.device_type, ())
            ),
        )
        for profile in problem.profiles
        for own in names.get(profile.device_type, ())
    )
    return Apart(replace(problem, pool=pool, profiles=profiles), devices)


def _are_alike(pool: Cluster) -> bool:
    """Whether any of a type's devices will do: runs of them then fill servers of one kind."""
    first, *others = pool.servers
    outside, inside = pool.inter_bytes_per_second or 0.0, first.intra_bytes_per_second or inf
    return (
        not pool.links
        and len(first.devices) == 1
        and inside >= outside
        and all(
            (one.devices, one.intra_bytes_per_second, one.host_memory_bytes)
            == (first.devices, first.intra_bytes_per_second, first.host_memory_bytes)
            for one in others
        )
    )


def _name(device_type: str, server: int) -> str:
    return f"{device_type} of server {server}"
