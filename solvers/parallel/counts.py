"""Deal replicas: how many replicas of each stage are of which device type, within the pool.

Stages of the same groups are dealt together, and what is certain is taken first.

    two stages of three replicas, each on an A alone or on two B's; the pool has 4 A and 4 B
    each stage has both kinds: 2 A and 4 B are certain; 2 A are free for the third replicas
    both go to A: (2, 1) and (2, 1)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...schema.parallel import ParallelPool, first_devices, is_inside

Group = tuple[int, int]
"""A pool's number, and the devices that one replica takes of it."""
Kind = tuple[Group, ...]
"""The one or two groups of a stage."""
_MOST_TRIES = 20_000


class UndecidedError(Exception):
    """Too many ways to deal replicas were left to try them all."""


Counts = tuple[tuple[int, ...], ...]
"""Replicas by stage and group."""


def deal_to_places(
    stages: Sequence[Sequence[Group]],
    fixed: Sequence[int],
    num_replicas: int,
    pools: Sequence[ParallelPool],
) -> Counts | None:
    """Deal as ``deal`` does; None also where servers do not hold what has to lie inside one.

    Args:
        stages: For each, its one or two groups.
        fixed: For each, the replicas of its first group; 0 where that is free.
        num_replicas: d, of every stage.
        pools: Whose devices.

    Raises:
        UndecidedError: As ``deal``; or this dealing has no places, and another one might.
    """
    counts = deal(stages, num_replicas, [pool.num_devices for pool in pools], fixed)
    if counts is None or _has_places(stages, counts, pools):
        return counts
    # Another dealing of the same stages might have places, but all are not tried.
    free = (len(stage) > 1 and not first for stage, first in zip(stages, fixed, strict=True))
    if num_replicas > 2 and any(free):
        raise UndecidedError
    return None


def _has_places(
    stages: Sequence[Sequence[Group]], counts: Counts, pools: Sequence[ParallelPool]
) -> bool:
    """Whether servers hold all groups, and whole the stages that are counted inside one."""
    for number, pool in enumerate(pools):
        sizes: list[int] = []
        for stage, dealt in zip(stages, counts, strict=True):
            for (of_pool, degree), replicas in zip(stage, dealt, strict=True):
                if of_pool == number:
                    width, whole = pool.devices_per_server, degree * replicas
                    is_near = pool.inside is not None and len(stage) == 1
                    as_one = is_near and is_inside(whole, width)
                    sizes += [whole] if as_one else [degree] * replicas
        different = sorted({pool.devices_per_server, *sizes}, reverse=True)
        # Sizes that divide each other pack without gaps.
        if all(large % small == 0 for large, small in pairwise(different)):
            continue  # each fills what larger ones leave
        if first_devices(sizes, pool.num_devices, pool.devices_per_server) is None:
            return False
    return True


def deal(
    stages: Sequence[Sequence[Group]],
    num_replicas: int,
    num_devices: Sequence[int],
    fixed: Sequence[int] = (),
) -> Counts | None:
    """How many replicas each stage has of each of its groups, each group at least one.

    Exact. Stages of the same groups are counted together: only how many of all their replicas are
    of the first group matters, which any of them can have. Kinds of stages are dealt one after
    another, and a way is left where the others need more than is free.

    ``fixed`` is as in ``deal_to_places``; empty where all are free.

    Returns:
        Replicas by stage and group; None where no dealing stays within the pool.

    Raises:
        UndecidedError: There are too many ways to try; only for three and more kinds of pairs.
    """
    known = list(fixed) or [0] * len(stages)
    kinds = Counter(tuple(g) for g, first in zip(stages, known, strict=True) if not first)
    pairs = [kind for kind in kinds if len(kind) > 1]
    free = list(num_devices)
    for kind, number in kinds.items():
        for pool, devices in kind:
            # What is certain: each replica of a single group, one of each group of a pair. Devices
            # left after this decide; no other dealing could use fewer.
            free[pool] -= devices * number * (num_replicas if len(kind) == 1 else 1)
    for groups, first in zip(stages, known, strict=True):
        for (pool, devices), replicas in zip(groups, (first, num_replicas - first), strict=False):
            free[pool] -= devices * replicas if first else 0
    if min(free) < 0:
        return None
    numbers = [kinds[kind] for kind in pairs]
    # d - 2 of a pair's replicas are free, as each group has one for certain.
    dealt = _dealt(pairs, numbers, num_replicas - 2, free, iter(range(_MOST_TRIES)))
    if dealt is None:
        return None
    left = dict(zip(pairs, dealt, strict=True))
    counts: list[tuple[int, ...]] = []
    for groups, first in zip(map(tuple, stages), known, strict=True):
        if first:
            counts.append((first, num_replicas - first))
        elif len(groups) == 1:
            counts.append((num_replicas,))
        else:
            # Whichever stage has them: as many as a stage takes, in order.
            more = min(left[groups], num_replicas - 2)
            left[groups] -= more
            counts.append((1 + more, num_replicas - 1 - more))
    return tuple(counts)


def _dealt(
    pairs: list[Kind], numbers: list[int], most: int, free: list[int], tries: Iterator[int]
) -> list[int] | None:
    """For each kind how many of its ``number x most`` replicas are of the first group."""
    if not pairs:
        return []
    (first, first_devices), (second, second_devices) = pairs[0]
    whole = numbers[0] * most
    if most < 0:
        return None
    # As many of the first group as there is room for, first; none where the second group has no
    # room for what is left.
    most_first = min(whole, free[first] // first_devices)
    least_first = max(0, whole - free[second] // second_devices)
    for chosen in range(most_first, least_first - 1, -1):
        if next(tries, None) is None:
            raise UndecidedError
        now = list(free)
        now[first] -= first_devices * chosen
        now[second] -= second_devices * (whole - chosen)
        # Left at once where the kinds behind need more than is free.
        if _may_do(pairs[1:], numbers[1:], most, now):
            others = _dealt(pairs[1:], numbers[1:], most, now, tries)
            if others is not None:
                return [chosen, *others]
    return None


def _may_do(pairs: list[Kind], numbers: list[int], most: int, free: list[int]) -> bool:
    """Whether each pair of pools has room for the pairs of stages between them, taken alone."""
    needed: Counter[tuple[int, int]] = Counter()
    for ((first, one), (second, other)), number in zip(pairs, numbers, strict=True):
        needed[first, second] += number * most * min(one, other)
    if any(room < 0 for room in free):
        return False
    # Necessary, not sufficient: each pair of pools, and all of them together.
    return all(sum(free[p] for p in set(both)) >= least for both, least in needed.items()) and (
        sum(free) >= sum(needed.values())
    )
