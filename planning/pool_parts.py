"""Parts of a pool that may train faster than the whole pool.

Planners count all links of a kind (``Keys``) at the rate of the slowest one. So a pool with a slow
link would be planned too slow even where no plan needs that link: 8 GPUs of one server, with 8 more
behind a slow network. The parts without slow links are pools of their own. For every set of the
pool's devices one of ``parts_of`` holds them all with links that are no slower. So the best plan of
the parts is the best over all sets of devices, and more devices never make it slower.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, product
from math import inf, lcm
from operator import itemgetter
from typing import NamedTuple, TypeVar

from ..schema.cluster import Cluster, Link
from ..schema.errors import InfeasibleError, ProblemError, TooLittleTimeError
from ..schema.plan import Plan
from .costs.pipeline import slowest_links
from .limits import TimeShares
from .links import Levels, Pair, pairs_of

_log = logging.getLogger("hetflow")
_Item = TypeVar("_Item")
Key = tuple[str, ...]
Keys = Callable[[Pair], Mapping[Key, float]]
"""What a plan counts for a pair of devices, at the worst of all pairs; more is better."""
Chosen = tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...]
"""Servers of a part: their group's place, how many, and of each the devices (type, number)."""

OF_ALL_DEVICES = ("rate", "latency", "alone")
"""Kinds of keys that count for all devices of a plan, so that a part without such pairs is better;
other kinds are of types."""
MOST_SUBSETS = 4
"""Device types of a server of which all subsets are tried; of more, all and single ones are."""
MOST_DEALS = 16
"""Ways to deal equal servers to two selections of their devices, at most."""
MOST_UNEVEN = 4
"""Devices of a server of which every number is tried for stages inside one."""
MOST_CANDIDATES = 150
"""Candidates for parts that are looked at; those that leave out the fewest links come first."""
MOST_PARTS = 16
"""Parts of each kind that are planned (``_unlike_first``); bounds of others are in the proof."""


class Parts(NamedTuple):
    """The pool and its parts; whether these are all that may have faster plans.

    ``apart`` are parts whose servers are told apart.
    """

    pools: list[Cluster]
    are_all: bool
    apart: Sequence[Cluster] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pool, and what its plans count: more of anything never makes them slower."""

    pool: Cluster
    devices: Mapping[str, int]
    rates: Mapping[Key, float]
    degrees: Mapping[str, frozenset[int]]
    levels: Mapping[str, Levels]

    def is_at_least(self, other: "_Part") -> bool:
        """Whether every plan on the other part is one on this part, and no slower."""
        return (
            all(
                self.devices.get(name, 0) >= number and self.degrees[name] >= other.degrees[name]
                for name, number in other.devices.items()
            )
            and all(self.rates.get(key, inf) >= rate for key, rate in other.rates.items())
            and all(_embeds(self.levels[name], levels) for name, levels in other.levels.items())
        )


def _embeds(whole: Levels, part: Levels) -> bool:
    """Whether some devices of a type have links as fast as those of a part."""
    # Where all links of the whole are as fast as the part's fastest, any of its devices will do.
    rates, wanted = slowest_links(whole), slowest_links(part)
    if rates[-1] >= wanted[0] or part[0].num_components == 1:
        return True
    return len(part) <= len(whole) and all(
        own.num_components >= each.num_components and rate >= least
        for own, each, rate, least in zip(whole, part, rates, wanted, strict=False)
    )


def parts_of(
    pool: Cluster,
    keys_of: Callable[[Cluster], Keys],
    *,
    degrees: Mapping[str, Collection[int]] | None = None,
    levels_of: Callable[[Cluster], Mapping[str, Levels]] | None = None,
) -> Parts:
    """The pool, and its parts on which plans may be faster than on it.

    Args:
        pool: The whole pool, which comes first.
        keys_of: What plans on a part count for pairs of its devices. A part for which it raises
            ProblemError is left out.
        degrees: Device type -> tensor-parallel degrees that were timed; None if only 1 is planned.
        levels_of: The levels of a part's types, where plans tell them apart.
    """
    of_whole = worst_of(pool, keys_of(pool))
    known = _with_sizes_inside(pool, keys_of(pool), degrees or {})

    def part_of(part: Cluster) -> _Part:
        devices = part.num_devices
        rates = worst_of(part, keys_of(part))
        # A part that lacks the slowest pair is not bound by it: what it does not count is
        # infinitely fast.
        if sum(devices.values()) > 1:
            for kind, *names in of_whole:
                if kind in OF_ALL_DEVICES and set(names) <= set(devices):
                    rates.setdefault((kind, *names), inf)
        return _Part(
            pool=part,
            devices=devices,
            rates=rates,
            degrees={
                name: frozenset(
                    size for size in known.get(name) or (1,) if part.common_width(name) % size == 0
                )
                for name in devices
            },
            levels=levels_of(part) if levels_of is not None else {},
        )

    found = [part_of(pool)]
    candidates = _candidates(pool, keys_of(pool), known, in_levels=levels_of is not None)
    # Parts are many where thresholds are; those that leave out least come first, so the limit cuts
    # the least likely.
    for candidate in islice(candidates, MOST_CANDIDATES):
        try:
            part = part_of(candidate)
        except ProblemError:
            continue
        # No plan of it is faster than on a part that is known, so it is not searched.
        if any(other.is_at_least(part) for other in found):
            continue
        # It may stand for parts that were found before; the whole pool stays in any case.
        found = [found[0], *(other for other in found[1:] if not part.is_at_least(other)), part]
    # Whether more candidates were left says whether the bound is of all parts.
    return Parts([part.pool for part in found], next(candidates, None) is None)


def worst_of(part: Cluster, keys: Keys) -> dict[Key, float]:
    """The worst of all pairs by key. A lone device's own link counts as its fastest to others."""
    rates: dict[Key, float] = {}
    for pair in pairs_of(part):
        for key, value in keys(pair).items():
            rates[key] = min(rates.get(key, inf), value)
    # No pair of its own: it is as fast as its best way to others.
    for name, number in part.num_devices.items():
        outwards = [rate for key, rate in rates.items() if key[0] == "between" and name in key[1:]]
        if number == 1 and outwards:
            rates["own", name] = max(outwards)
    return rates


def _with_sizes_inside(
    pool: Cluster, keys: Keys, degrees: Mapping[str, Collection[int]]
) -> dict[str, set[int]]:
    """The degrees, and numbers of devices of a stage that is faster inside a server."""
    # Beyond ``MOST_UNEVEN`` devices only powers of two.
    found = {name: set(each) for name, each in degrees.items()}
    rates = [entry for pair in pairs_of(pool) for entry in keys(pair).items()]
    for name in pool.num_devices:
        own = min((rate for key, rate in rates if key == ("own", name)), default=inf)
        if max((rate for key, rate in rates if key == ("inside", name)), default=0.0) > own:
            widest = max(group.devices.get(name, 0) for group in pool.servers)
            sizes = {2**power for power in range(widest.bit_length())}
            found[name] = found.get(name, {1}) | sizes | {*range(1, min(widest, MOST_UNEVEN) + 1)}
    return found


def _candidates(
    pool: Cluster, keys: Keys, degrees: Mapping[str, Collection[int]], *, in_levels: bool
) -> Iterator[Cluster]:
    """The largest parts without pairs below thresholds, for all thresholds that differ."""
    pairs = {pair: keys(pair) for pair in pairs_of(pool)}
    values: dict[Key, set[float]] = {}
    for each in pairs.values():
        for key, value in each.items():
            values.setdefault(key, set()).add(value)
            # A part of one device type has no pair between types, so any threshold on these is
            # met.
            if key[0] != "between":  # with no such pair: parts of one type have none of those
                values[key].add(inf)
    seen = set()
    ranked = [sorted(each) for each in values.values()]
    # A raised threshold cuts pairs, so the fewest raised first leave the largest parts.
    for places in _fewest_first([len(each) for each in ranked]):
        thresholds = [each[place] for each, place in zip(ranked, places, strict=True)]
        least = dict(zip(values, thresholds, strict=True))
        allowed = {
            pair for pair, each in pairs.items() if all(v >= least[key] for key, v in each.items())
        }
        for largest in _largest(pool, allowed):
            for kept in _trimmed(largest, degrees, in_levels=in_levels):
                if kept not in seen:
                    seen.add(kept)
                    yield part_with(pool, kept)


def _fewest_first(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All combinations of places below these sizes, those of the least sum first."""
    for total in range(sum(sizes) - len(sizes) + 1):
        yield from _of_sum(tuple(sizes), total)


def _of_sum(sizes: tuple[int, ...], total: int) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield from [()] * (total == 0)
    for first in range(min(sizes[0] - 1, total) + 1 if sizes else 0):
        # Only as much as the other places can make up for.
        if total - first <= sum(sizes[1:]) - len(sizes[1:]):
            yield from ((first, *rest) for rest in _of_sum(sizes[1:], total - first))


def _largest(pool: Cluster, allowed: Collection[Pair]) -> Iterator[Chosen]:
    """The largest selections of devices whose pairs are all allowed."""
    choices = [list(_choices(pool, number, allowed)) for number in range(len(pool.servers))]

    def goes_with(one: Chosen, other: Chosen) -> bool:
        return all(
            Pair(pool.level(pool.servers[a], pool.servers[b]), (kind, beside), (a, b)) in allowed
            for (a, _, here), (b, _, there) in product(one, other)
            for (kind, _), (beside, _) in product(here, there)
        )

    def extended(chosen: Chosen, left: list[list[Chosen]]) -> Iterator[Chosen]:
        if not left:
            if chosen:
                yield chosen
            return
        # One choice of each group of servers, compatible with all before.
        fitting = [each for each in left[0] if goes_with(chosen, each)]
        for each in fitting:
            yield from extended(chosen + each, left[1:])
        later = [each for group in left[1:] for each in group]
        # Leaving a group out gives a part of one with it, unless whatever it adds stands against a
        # later group.
        if not any(all(goes_with(each, other) for other in later) for each in fitting):
            yield from extended(chosen, left[1:])

    yield from extended((), choices)


def _choices(pool: Cluster, place: int, allowed: Collection[Pair]) -> Iterator[Chosen]:
    """What the servers of a group may keep: all of them the same, one alone, or two dealt ways."""
    group, own = pool.servers[place], (place, place)
    order, level = list(group.devices), pool.level(group, group)

    def across(names: Iterable[str], others: Iterable[str]) -> bool:
        return all(
            Pair(level, (min(a, b, key=order.index), max(a, b, key=order.index)), own) in allowed
            for a, b in product(names, others)
        )

    def held(names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        alike = {name for name in names if Pair("server", (name, name), own) in allowed}
        return tuple((name, group.devices[name] if name in alike else 1) for name in names)

    found: list[tuple[str, ...]] = []
    # The largest sets of types first: a smaller set is new only where the larger one cannot stay
    # as a whole.
    for names in subsets(order):
        if all(Pair("server", pair, own) in allowed for pair in combinations(names, 2)):
            is_all = group.count == 1 or across(names, names)
            bigger = [more for more in found if set(names) < set(more)]
            if not any(group.count == 1 or across(more, more) for more in bigger):
                found.append(names)
                yield ((place, group.count if is_all else 1, held(names)),)
    # Some servers keep one set of types, the others another; either alone would leave devices
    # idle.
    for one, other in combinations(found, 2):
        if set(one) < set(other) or set(other) < set(one) or not across(one, other):
            continue
        for count in range(1, min(group.count, MOST_DEALS + 1)):
            rest = group.count - count
            if (count == 1 or across(one, one)) and (rest == 1 or across(other, other)):
                yield ((place, count, held(one)), (place, rest, held(other)))


def _trimmed(
    chosen: Chosen, degrees: Mapping[str, Collection[int]], *, in_levels: bool
) -> Iterator[Chosen]:
    """The servers, with a few devices left idle where that makes them alike or fill degrees."""
    numbers: dict[str, set[int]] = {}
    for _, _, devices in chosen:
        for name, number in devices:
            numbers.setdefault(name, set()).add(number)
    ways: list[list[Callable[[int], int]]] = []
    for name, each in numbers.items():
        # Degrees that do not divide what a server has are filled by leaving a few devices idle.
        multiples = {lcm(*some) for some in subsets(sorted(degrees.get(name, (1,))))}
        uneven = {m for m in multiples if any(number % m for number in each)}
        own: list[Callable[[int], int]] = [int, *(partial(_multiple, m) for m in sorted(uneven))]
        if in_levels and len(each) > 1:
            own += [partial(_capped, width) for width in sorted(each)]
        ways.append(own)
    for way in product(*ways):
        keep = dict(zip(numbers, way, strict=True))
        kept = tuple(
            (place, count, tuple((name, n) for name, had in devices if (n := keep[name](had))))
            for place, count, devices in chosen
        )
        # A way that leaves nothing is no part.
        if any(devices for *_, devices in kept):
            yield tuple(each for each in kept if each[2])


def _multiple(of: int, number: int) -> int:
    return number - number % of


def _capped(width: int, number: int) -> int:
    return width if number >= width else 0


def part_with(pool: Cluster, chosen: Chosen) -> Cluster:
    """The part of a pool that has the chosen servers and devices."""
    names = {name for *_, devices in chosen for name, _ in devices}
    return replace(
        pool,
        servers=tuple(
            replace(pool.servers[place], count=count, devices=dict(devices))
            for place, count, devices in chosen
        ),
        device_types={name: kind for name, kind in pool.device_types.items() if name in names},
        links=links_among(pool, names),
    )


def links_among(pool: Cluster, names: Collection[str]) -> tuple[Link, ...]:
    """The stated links of a pool without those of types that a part lacks."""
    return tuple(link for link in pool.links if set(link.between or ()) <= set(names))


def subsets(items: Sequence[_Item]) -> Iterator[tuple[_Item, ...]]:
    """All subsets that are not empty, the largest first; of many items, all and single ones."""
    few = len(items) <= MOST_SUBSETS
    for size in range(len(items), 0, -1) if few else (len(items), 1):
        yield from combinations(items, size)


def is_part_of(part: Cluster, pool: Cluster) -> bool:
    """Whether a pool holds all servers of another, each with its devices and its links."""
    if any(pool.device_types.get(name) != kind for name, kind in part.device_types.items()):
        return False
    # [groups] servers that no group of the part has taken yet.
    left = [group.count for group in pool.servers]
    for group in part.servers:
        wanted = group.count
        for number, whole in enumerate(pool.servers):
            holds = all(whole.devices.get(name, 0) >= n for name, n in group.devices.items())
            if holds and replace(group, count=1, devices=whole.devices) == replace(whole, count=1):
                taken = min(wanted, left[number])
                left[number] -= taken
                wanted -= taken
        if wanted:
            return False
    is_joined = part.num_servers == 1 or part.inter_bytes_per_second == pool.inter_bytes_per_second
    return is_joined and part.links == links_among(pool, part.device_types)


def best_of_parts(
    parts: Parts,
    clock: TimeShares,
    solve: Callable[[Cluster, TimeShares], Plan],
    least_seconds: Callable[[Cluster], float] | None = None,
) -> tuple[Cluster, Plan]:
    """The best plan of several parts, with the bound of all: (its part, the plan).

    Args:
        parts: Of equally good plans the first one's is taken.
        clock: What all searches may take.
        solve: Finds the best plan of a part.
        least_seconds: What no plan of a part is better than, in the unit of proofs; None plans all.

    Raises:
        InfeasibleError: No part has a plan; says what the first one lacks.
        TooLittleTimeError: The limit of time came before there was a plan.
    """
    # The whole pool first, then parts by their bounds: the first good plan refutes most of the
    # others unseen.
    best: tuple[Cluster, Plan] | None = None
    bounds: list[float | None] = []
    refused: InfeasibleError | TooLittleTimeError | None = None
    whole_seconds, whole = inf, parts.pools[0]
    every = [*parts.pools, *parts.apart]
    leasts = [0.0] * len(every)
    if least_seconds is not None and len(every) > 1:
        leasts = [least_seconds(pool) for pool in every]
    ranked = _unlike_first(zip(leasts[1:], every[1:], strict=True))
    most = len(every) if least_seconds is None else MOST_PARTS
    left = {False: min(len(parts.pools), most), True: min(len(parts.apart), most)}
    for least, pool in ((leasts[0], whole), *ranked):
        # No plan of the part can be better than the best one.
        if best is not None and least >= best[1].proof.objective:
            continue
        # By identity: a part told apart may equal another one.
        is_apart = any(pool is each for each in parts.apart)
        if not left[is_apart]:
            # Not searched, so its own bound stands for it.
            bounds.append(least)
            continue
        # The whole pool gets half of the time, as its plan is the most likely.
        share = clock.part(min(sum(left.values()), 2) if pool is whole else sum(left.values()))
        left[is_apart] -= 1
        try:
            if best is not None and share.effort().should_stop():
                raise TooLittleTimeError("no time is left for this part")
            plan = solve(pool, share)
        except InfeasibleError as error:
            refused = refused or error
            continue
        except TooLittleTimeError as error:
            bounds.append(least)
            refused = refused or error
            continue
        bounds.append(plan.proof.lower_bound)
        if pool is whole:
            whole_seconds = plan.predicted.step_seconds
        if best is None or plan.proof.objective < best[1].proof.objective:
            best = pool, plan
    if best is None:
        assert refused is not None
        raise refused
    # Parts that were not even listed are bounded by the whole pool.
    if not parts.are_all:
        bounds.append(leasts[0])
    pool, plan = best
    if pool is not whole:
        step = plan.predicted.step_seconds
        over_all = "no plan fits" if whole_seconds == inf else f"a step takes {whole_seconds:.4g} s"
        if pool != whole:
            _log.info(
                f"the plan is for {pool.title} of the pool, with a step of {step:.4g} s: over all "
                f"its devices and links {over_all}"
            )
        plan = replace(plan, cluster=pool)
    return pool, _among_parts(plan, bounds)


def _unlike_first(parts: Iterable[tuple[float, Cluster]]) -> list[tuple[float, Cluster]]:
    """The parts by their bounds; last those that only leave idle other devices of servers."""
    # Else such parts would be all that are planned: they have nearly the bound of the whole pool.
    known: Counter[tuple[tuple[int, frozenset[str]], ...]] = Counter()
    ranked = []
    for least, part in sorted(parts, key=itemgetter(0)):
        servers = tuple((group.count, frozenset(group.devices)) for group in part.servers)
        ranked.append((known[servers], least, part))
        known[servers] += 1
    return [(least, part) for _, least, part in sorted(ranked, key=itemgetter(0))]


def _among_parts(plan: Plan, bounds: Collection[float | None]) -> Plan:
    """The best plan of several pools, with the least of their bounds in its proof."""
    if len(bounds) < 2 or None in bounds:
        return plan
    bound = min(each for each in bounds if each is not None)
    proof = plan.proof
    if proof.space is not None:
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
