"""The all-reduce of every stage that there might be, as tables over its first and last layer."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ...schema.parallel import LinkCurve, ParallelPool, ParallelProblem, is_inside
from ..effort import DEFAULT, Effort
from .space import Option, Space


def reduce_seconds(
    problem: ParallelProblem,
    space: Space,
    num_replicas: int,
    mix: tuple[int, ...],
    start: int,
    end: int,
) -> float:
    """Seconds of the all-reduce of one stage, an element of the first of ``reduce_tables``."""
    options = [space.options[o] for o in mix]
    degree = min(option.tensor_parallel_size for option in options)
    shard = _gradients(problem, degree, [start, end])[:1, 1:]
    return max(
        float(_ring_seconds(shard, num_replicas, link, problem.bucket_bytes)[0, 0])
        for link in _links(problem, options, num_replicas)
    )


def ring_link(pool: ParallelPool, tensor_parallel_size: int, num_replicas: int) -> LinkCurve:
    """The slowest link of the ring of a stage on devices of one type."""
    size = tensor_parallel_size * num_replicas
    if pool.inside is not None and is_inside(size, pool.devices_per_server):
        return pool.inside
    return pool.link(1)


def _links(
    problem: ParallelProblem, options: Sequence[Option], num_replicas: int
) -> list[LinkCurve]:
    """The links of a ring: inside a server, or each type's own and those between types."""
    pools = [problem.pools[option.pool] for option in options]
    if len(options) == 1:
        return [ring_link(pools[0], options[0].tensor_parallel_size, num_replicas)]
    pairs = (problem.link_between(a.device_type, b.device_type) for a, b in combinations(pools, 2))
    return [*(pool.link(1) for pool in pools), *(link for link in pairs if link is not None)]


def reduce_tables(
    problem: ParallelProblem, space: Space, num_replicas: int, effort: Effort = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each stage's all-reduce, by mix and at least by option.

    A mix reduces the shard of its least degree, over the slowest of its links. So an option
    of a mix takes at least what the shards of any degree up to its own take over its own link.

    Args:
        problem: Whose weights and links.
        space: The options, and the mixes of them.
        num_replicas: d, of every stage.
        effort: Says when to stop.

    Returns:
        By mix [mixes, layers + 1, layers + 1] and by option [options, layers + 1, layers + 1];
        the first layer, then the one behind the last.

    Raises:
        OutOfTimeError: The effort's limit came first.
    """
    known: dict[tuple[LinkCurve, int], np.ndarray] = {}

    def seconds(link: LinkCurve, degree: int) -> np.ndarray:
        if (link, degree) not in known:
            effort.check()
            known[link, degree] = _ring_seconds(
                _gradients(problem, degree), num_replicas, link, problem.bucket_bytes
            )
        return known[link, degree]

    options = space.options
    degrees = {option.tensor_parallel_size for option in options}
    by_mix = [
        np.max(
            [
                seconds(link, min(options[i].tensor_parallel_size for i in mix))
                for link in _links(problem, [options[o] for o in mix], num_replicas)
            ],
            axis=0,
        )
        for mix in space.mixes
    ]
    by_option = [
        np.min(
            [
                seconds(
                    ring_link(problem.pools[o.pool], o.tensor_parallel_size, num_replicas), degree
                )
                for degree in degrees
                if degree <= o.tensor_parallel_size
            ],
            axis=0,
        )
        for o in options
    ]
    return np.array(by_mix), np.array(by_option)


def _gradients(
    problem: ParallelProblem, degree: int, places: "list[int] | slice" = slice(None)
) -> np.ndarray:
    """Bytes that a device of a group of that degree reduces [starts, ends], at some places."""
    sizes = problem.sizes_of(1 if problem.cost_rule == "sailor" else degree)
    assert sizes is not None  # a problem has those of degree 1, an option those of its own
    shards = min(degree, 4) if problem.cost_rule == "sailor" else 1
    held = np.concatenate([[0.0], np.cumsum(np.array(sizes.weight_bytes, dtype=float))])
    held = held[places]
    whole: np.ndarray = np.maximum(held[None, :] - held[:, None], 0.0) / shards
    return whole


def _ring_seconds(
    gradient_bytes: np.ndarray, num_replicas: int, curve: LinkCurve, bucket_bytes: int | None
) -> np.ndarray:
    """``bucketed_ring_seconds`` of every element."""
    if num_replicas < 2:
        return np.zeros_like(gradient_bytes)
    whole, rest, full = np.zeros_like(gradient_bytes), gradient_bytes, 0.0
    if bucket_bytes is not None:
        whole, rest = np.divmod(gradient_bytes, bucket_bytes)
        full = curve.seconds(bucket_bytes / num_replicas) if whole.any() else 0.0
    sizes, places = np.unique(rest, return_inverse=True)
    last = np.array([curve.seconds(float(size) / num_replicas) for size in sizes])
    seconds: np.ndarray = 2 * (num_replicas - 1) * (whole * full + last[places].reshape(rest.shape))
    return seconds
