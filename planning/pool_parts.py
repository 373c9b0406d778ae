"""Parts of a pool that may train faster than the whole pool.

Planners count all links of a device type at one rate, that of the slowest link between its devices.
So a pool with a slow link would be planned too slow even where no plan needs to use that link: 8
GPUs of one server, with 8 more behind a slow network. The parts without the slow links are pools of
their own, with rates of their own; the best plan of any part is a plan of the pool. A degree of
tensor parallelism must divide the devices of a server, so leaving devices idle may allow one too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd, inf
from typing import TypeVar

from ..schema.cluster import Cluster, ServerGroup
from ..schema.errors import ProblemError
from ..schema.parallel import ParallelPlan, ParallelProof
from ..schema.plan import SplitPlan

_Item = TypeVar("_Item")
_Plan = TypeVar("_Plan", SplitPlan, ParallelPlan)

MOST_SUBSETS = 3
"""Kinds of servers, or device types, of which all subsets are parts; of more, single ones are."""

Rates = Callable[[Cluster], Mapping[str, float]]
"""Device type -> bytes per second of the slowest link that a plan on the pool may use."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pool: its devices, rates and possible degrees by device type."""

    pool: Cluster
    devices: Mapping[str, int]
    rates: Mapping[str, float]
    degrees: Mapping[str, frozenset[int]]

    def is_at_least(self, other: "_Part") -> bool:
        """Whether every plan on the other part is one on this part, and no slower."""
        return all(
            self.devices.get(name, 0) >= number
            and self.rates[name] >= other.rates[name]
            and self.degrees[name] >= other.degrees[name]
            for name, number in other.devices.items()
        )


def parts_of(
    pool: Cluster, rates_of: Rates, degrees: Mapping[str, Collection[int]] | None = None
) -> list[Cluster]:
    """The pool, and its parts on which plans may be faster than on it.

    Parts are kinds of servers, single servers, device types, and servers of which a few devices
    stay idle. A part is left out where another one has its devices, rates and degrees.

    Args:
        pool: The whole pool, which comes first.
        rates_of: The rates of any part. A part for which it raises ProblemError is left out.
        degrees: Device type -> tensor-parallel degrees that were timed; None if only 1 is planned.
    """
    known = degrees or {}
    found = [_part(pool, rates_of(pool), known)]
    for candidate in _candidates(pool, known):
        try:
            part = _part(candidate, rates_of(candidate), known)
        except ProblemError:
            continue
        if any(other.is_at_least(part) for other in found):
            continue
        found = [found[0], *(other for other in found[1:] if not part.is_at_least(other)), part]
    return [part.pool for part in found]


def network_rates(pool: Cluster) -> dict[str, float]:
    """The rates at which splits count: the network's, where a pool has several servers."""
    slow = pool.inter_bytes_per_second if pool.num_servers > 1 else None
    return dict.fromkeys(pool.num_devices, inf if slow is None else slow)


def among_parts(plan: _Plan, bounds: Collection[float | None]) -> _Plan:
    """The best plan of several pools, with the least of their bounds in its proof.

    Args:
        plan: The best one.
        bounds: Of each pool's search, in the unit of the plan's objective.
    """
    if len(bounds) < 2 or None in bounds:
        return plan
    bound = min(each for each in bounds if each is not None)
    proof = plan.proof
    if isinstance(proof, ParallelProof):
        said = f"{proof.space}; over the whole pool or a part with faster links"
        proof = replace(proof, space=said)
    own = proof.lower_bound
    if own is not None and bound < own * (1 - 1e-9) and bound < proof.objective * (1 - 1e-9):
        gap = (proof.objective - bound) / proof.objective
        is_within = proof.tolerance is not None and gap <= proof.tolerance
        proof = replace(
            proof,
            termination=proof.termination if is_within else "feasible",
            lower_bound=bound,
            gap=gap,
        )
    return replace(plan, proof=proof)


def is_part_of(part: Cluster, pool: Cluster) -> bool:
    """Whether a pool holds all servers of another, each with its devices and its links."""
    if any(pool.device_types.get(name) != kind for name, kind in part.device_types.items()):
        return False
    left = [group.count for group in pool.servers]
    for group in part.servers:
        wanted = group.count
        for number, whole in enumerate(pool.servers):
            holds = all(whole.devices.get(name, 0) >= n for name, n in group.devices.items())
            if holds and whole.intra_bytes_per_second == group.intra_bytes_per_second:
                taken = min(wanted, left[number])
                left[number] -= taken
                wanted -= taken
        if wanted:
            return False
    return part.num_servers == 1 or part.inter_bytes_per_second == pool.inter_bytes_per_second


def width_of(pool: Cluster, device_type: str) -> int:
    """Devices of a type per server that has it; the greatest common divisor if servers differ."""
    return gcd(*(g.devices[device_type] for g in pool.servers if device_type in g.devices))


def _part(
    pool: Cluster, rates: Mapping[str, float], degrees: Mapping[str, Collection[int]]
) -> _Part:
    return _Part(
        pool=pool,
        devices=pool.num_devices,
        rates=rates,
        degrees={
            name: frozenset(d for d in degrees.get(name, (1,)) if width_of(pool, name) % d == 0)
            for name in pool.num_devices
        },
    )


def _candidates(pool: Cluster, degrees: Mapping[str, Collection[int]]) -> Iterator[Cluster]:
    for groups in _subsets(pool.servers):
        alone = [(replace(groups[0], count=1),)] if len(groups) == 1 else []
        for servers in (groups, *alone):
            for types in _subsets([*dict.fromkeys(name for g in servers for name in g.devices)]):
                uneven = [_uneven(servers, name, degrees.get(name, ())) for name in types]
                for chosen in product(*uneven):
                    yield from _kept(pool, servers, dict(zip(types, chosen, strict=True)))


def _uneven(servers: Sequence[ServerGroup], name: str, degrees: Collection[int]) -> list[int]:
    """1, and the degrees whose groups do not fill every server's devices of the type."""
    numbers = [group.devices[name] for group in servers if name in group.devices]
    return [1, *(d for d in sorted(degrees) if any(number % d for number in numbers))]


def _kept(
    pool: Cluster, servers: Sequence[ServerGroup], degrees: Mapping[str, int]
) -> Iterator[Cluster]:
    """The devices of these types, on each server as many as groups of the type's degree take."""
    kept = []
    for group in servers:
        numbers = {
            name: n - n % degrees[name] for name, n in group.devices.items() if name in degrees
        }
        devices = {name: number for name, number in numbers.items() if number}
        if devices:
            kept.append(replace(group, devices=devices))
    if kept:
        names = {name for group in kept for name in group.devices}
        kinds = {name: kind for name, kind in pool.device_types.items() if name in names}
        yield replace(pool, servers=tuple(kept), device_types=kinds)


def _subsets(items: Sequence[_Item]) -> Iterator[tuple[_Item, ...]]:
    """All subsets that are not empty, the largest first; of many items, all and single ones."""
    few = len(items) <= MOST_SUBSETS
    for size in range(len(items), 0, -1) if few else (len(items), 1):
        yield from combinations(items, size)
