"""The all-reduce of every stage that there might be, as tables over its first and last layer."""

from itertools import combinations

import numpy as np

from ...schema.parallel import LinkCurve, ParallelProblem
from ..effort import DEFAULT, Effort
from .space import Space


class Rings:
    """Rings of one number of replicas, by device type and by the degree whose shards they reduce.

    A mix reduces the shard of its least degree, over the slowest of its links. So an option
    of a mix takes at least what the shards of any degree up to its own take over its own link.

    Args:
        problem: Whose weights and links.
        num_replicas: d, of every stage.
        effort: Says when to stop; tables then raise OutOfTimeError.
    """

    def __init__(
        self, problem: ParallelProblem, num_replicas: int, effort: Effort = DEFAULT
    ) -> None:
        self._problem, self._d, self._effort = problem, num_replicas, effort
        self._tables: dict[tuple[tuple[int, ...], int], np.ndarray] = {}

    def table(self, pools: tuple[int, ...], degree: int) -> np.ndarray:
        """Seconds of the all-reduce of stages on devices of these pools [starts, ends]."""
        if (pools, degree) not in self._tables:
            self._effort.check()
            self._tables[pools, degree] = self._seconds(pools, degree, slice(None))
        return self._tables[pools, degree]

    def of_mix(self, space: Space, mix: tuple[int, ...], start: int, end: int) -> float:
        """Seconds of the all-reduce of one stage."""
        options = [space.options[o] for o in mix]
        degree = min(option.tensor_parallel_size for option in options)
        pools = tuple(option.pool for option in options)
        return float(self._seconds(pools, degree, [start, end])[0, 1])

    def _seconds(
        self, pools: tuple[int, ...], degree: int, places: "list[int] | slice"
    ) -> np.ndarray:
        """Over each type's own link, and that between two types."""
        problem = self._problem
        each = [problem.pools[pool] for pool in pools]
        links = [pool.link(1) for pool in each]
        for one, other in combinations(each, 2):
            between = problem.link_between(one.device_type, other.device_type)
            links += [] if between is None else [between]
        shard, bucket = _gradients(problem, degree, places), problem.bucket_bytes
        slowest: np.ndarray = np.max(
            [_ring_seconds(shard, self._d, link, bucket) for link in links], axis=0
        )
        return slowest


def _gradients(problem: ParallelProblem, degree: int, places: "list[int] | slice") -> np.ndarray:
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
