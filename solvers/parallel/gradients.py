"""The all-reduce of every stage that there might be, as tables over its first and last layer."""

import numpy as np

from ...schema.parallel import LinkCurve, ParallelProblem
from ..effort import DEFAULT, Effort
from .space import Space


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
        float(
            _ring_seconds(
                shard, num_replicas, problem.pools[option.pool].link(1), problem.bucket_bytes
            )[0, 0]
        )
        for option in options
    )


def reduce_tables(
    problem: ParallelProblem, space: Space, num_replicas: int, effort: Effort = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each stage's all-reduce, by mix and at least by option.

    A mix reduces the shard of its least degree, over the slowest of its types' links. So an option
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
    known: dict[tuple[int, int], np.ndarray] = {}

    def seconds(pool: int, degree: int) -> np.ndarray:
        if (pool, degree) not in known:
            effort.check()
            known[pool, degree] = _ring_seconds(
                _gradients(problem, degree),
                num_replicas,
                problem.pools[pool].link(1),
                problem.bucket_bytes,
            )
        return known[pool, degree]

    options = space.options
    degrees = {option.tensor_parallel_size for option in options}
    by_mix = [
        np.max(
            [
                seconds(options[o].pool, min(options[i].tensor_parallel_size for i in mix))
                for o in mix
            ],
            axis=0,
        )
        for mix in space.mixes
    ]
    by_option = [
        np.min(
            [seconds(o.pool, degree) for degree in degrees if degree <= o.tensor_parallel_size],
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
