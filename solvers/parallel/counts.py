"""Deal replicas: how many replicas of each stage are of which device type, within the pool."""

from collections.abc import Sequence

Group = tuple[int, int]
"""A pool's number, and the devices that one replica takes of it."""


def deal(
    stages: Sequence[Sequence[Group]], num_replicas: int, num_devices: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """How many replicas each stage has of each of its groups, each group at least one.

    Exact: of the ways to deal the stages so far, those are kept that use no more of any type than
    another (Pareto). O(stages x replicas x ways kept).

    Args:
        stages: For each, its one or two groups.
        num_replicas: d, of every stage.
        num_devices: Of each pool.

    Returns:
        Replicas by stage and group; None where no dealing stays within the pool.
    """
    ways: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
        ((0,) * len(num_devices), ())
    ]
    for groups in stages:
        more = []
        for used, dealt in ways:
            for counts in _counts(len(groups), num_replicas):
                now = list(used)
                for (pool, devices), count in zip(groups, counts, strict=True):
                    now[pool] += devices * count
                if all(n <= most for n, most in zip(now, num_devices, strict=True)):
                    more.append((tuple(now), (*dealt, counts)))
        ways = _undominated(more)
    return ways[0][1] if ways else None


def _counts(num_groups: int, num_replicas: int) -> list[tuple[int, ...]]:
    if num_groups == 1:
        return [(num_replicas,)]
    return [(first, num_replicas - first) for first in range(num_replicas - 1, 0, -1)]


def _undominated(
    ways: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]],
) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    kept: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
    for used, dealt in sorted(ways, key=lambda way: way[0]):
        if not any(all(a <= b for a, b in zip(k, used, strict=True)) for k, _ in kept):
            kept.append((used, dealt))
    return kept
