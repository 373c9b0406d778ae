"""The all-reduce of every stage that there might be, and numbers of replicas worth trying."""

from collections.abc import Iterator
from itertools import combinations
from math import inf

import numpy as np

from ...planning.costs.parallel_stage import (
    ring_rounds,
    shared_pass_seconds,
    shared_seconds,
    shared_units,
)
from ...schema.parallel import LinkCurve, ParallelPool, ParallelProblem, is_inside
from ..effort import DEFAULT, Effort
from .space import OptionSpace, StageOption, kept_in_a_solve


def ring_link(pool: ParallelPool, tensor_parallel_size: int, num_replicas: int) -> LinkCurve:
    """The slowest link of the ring of a stage on devices of one type."""
    size = tensor_parallel_size * num_replicas
    if pool.inside is not None and is_inside(size, pool.devices_per_server):
        return pool.inside
    return pool.link(1)


@kept_in_a_solve(512)
def transfers_of(
    option: StageOption, links: tuple[LinkCurve, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``shared_seconds`` of an option's stages [starts, ends]."""
    assert option.units is not None
    return shared_seconds(option.units, option.num_replicas, links)


@kept_in_a_solve(512)
def waits_over(option: StageOption, links: tuple[LinkCurve, ...]) -> np.ndarray:
    """What transfers of shared weights add to passes of stages [starts, ends]."""
    forward, passes = (
        sums[None, :] - sums[:, None]
        for sums in (np.array(option.forward), np.array(option.seconds))
    )
    *transfers, _ = transfers_of(option, links)
    found: np.ndarray = shared_pass_seconds(
        forward, passes - forward, *transfers, recompute=option.recompute
    )
    return found


class Rings:
    """Rings of one number of replicas, by device type and degree.

    A stage of two types uses the slowest of each type's link and that between both; a stage of one
    type may be inside a server. Replicas of one degree reduce a shard in a ring of one device
    each. Those of unlike degrees reduce whole gradients in one ring of all devices, as many as if
    all had the greater degree.

    Tables raise OutOfTimeError where ``effort`` says so.
    """

    def __init__(
        self, problem: ParallelProblem, num_replicas: int, effort: Effort = DEFAULT
    ) -> None:
        self._problem, self._d, self._effort = problem, num_replicas, effort
        self._tables: dict[tuple[tuple[LinkCurve, ...], int, int], np.ndarray] = {}

    def table(self, pools: tuple[int, ...], degrees: tuple[int, ...]) -> np.ndarray:
        """Seconds of the all-reduce of stages on groups of these pools [starts, ends]."""
        return self._table(self._links(pools, degrees), *self._ring(degrees))

    def least(self, pool: int, degree: int) -> np.ndarray:
        """What stages with such a replica, alone or beside others, take at least [starts, ends]."""
        tables = [self.table((pool,), (degree,))]
        if len(self._problem.pools) > 1:
            # Whoever the other type is, its own link only makes the ring slower.
            degrees = {t.tensor_parallel_size for p in self._problem.pools for t in p.times}
            known = [t for t in sorted(degrees) if self._problem.sizes_of(t)]
            link = (self._problem.pools[pool].link(1),)
            tables += [self._table(link, *self._ring((degree, t))) for t in known]
        least: np.ndarray = np.min(tables, axis=0)
        return least

    def of_mix(self, space: OptionSpace, mix: tuple[int, ...], start: int, end: int) -> float:
        """Seconds of the all-reduce of one stage."""
        options = [space.options[o] for o in mix]
        degrees = tuple(option.tensor_parallel_size for option in options)
        links = self._links(tuple(option.pool for option in options), degrees)
        if self._problem.shard == "all":
            # With shared weights one entry takes the whole table.
            return float(self._table(links, *self._ring(degrees))[start, end])
        return float(self._seconds(links, *self._ring(degrees), [start, end])[0, 1])

    def _ring(self, degrees: tuple[int, ...]) -> tuple[int, int]:
        """The degree whose shards a ring reduces, and its members."""
        if self._problem.cost_rule == "sailor" or min(degrees) == max(degrees):
            return min(degrees), self._d
        return 1, self._d * max(degrees)

    def waits(self, option: StageOption, pools: tuple[int, ...]) -> np.ndarray:
        """What transfers of shared weights add to passes of stages [starts, ends]."""
        self._effort.check()
        return waits_over(option, self._links(pools, (option.tensor_parallel_size,)))

    def least_waits(self, option: StageOption) -> np.ndarray:
        """``waits`` at least, whatever other type has replicas of the stage."""
        pool = self._problem.pools[option.pool]
        alone = self.waits(option, (option.pool,))
        least: np.ndarray = np.minimum(alone, waits_over(option, (pool.link(1),)))
        return least

    def _links(self, pools: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[LinkCurve, ...]:
        """The links of a ring: inside a server, or each type's own and those between types."""
        each = [self._problem.pools[pool] for pool in pools]
        if len(each) == 1:
            return (ring_link(each[0], min(degrees), self._d),)
        pairs = combinations([pool.device_type for pool in each], 2)
        between = (self._problem.link_between(*pair) for pair in pairs)
        return (*(pool.link(1) for pool in each), *(link for link in between if link is not None))

    def _table(self, links: tuple[LinkCurve, ...], degree: int, members: int) -> np.ndarray:
        key = links, degree, members
        if key not in self._tables:
            self._effort.check()
            self._tables[key] = self._seconds(*key, slice(None))
        return self._tables[key]

    def _seconds(
        self,
        links: tuple[LinkCurve, ...],
        degree: int,
        members: int,
        places: "list[int] | slice",
    ) -> np.ndarray:
        if self._problem.shard == "all" and self._d > 1:
            sizes = self._problem.sizes_of(degree)
            assert sizes is not None  # an option has them
            units = shared_units(self._problem.layers, sizes.weight_bytes)
            return shared_seconds(units, self._d, links)[2]
        shard, bucket = _gradients(self._problem, degree, places), self._problem.bucket_bytes
        if self._d == 1:
            return np.zeros_like(shard)
        slowest: np.ndarray = np.max(
            [_ring_seconds(shard, members, link, bucket) for link in links], axis=0
        )
        # Ring tables count two rounds; sharding may take three.
        return ring_rounds(self._problem) / 2 * slowest


def _gradients(problem: ParallelProblem, degree: int, places: "list[int] | slice") -> np.ndarray:
    """Bytes that a device of a group of that degree reduces [starts, ends], at some places."""
    sizes = problem.sizes_of(1 if problem.cost_rule == "sailor" else degree)
    assert sizes is not None  # a problem has those of degree 1, an option those of its own
    # Sailor counts the shards of degree 4 at most.
    shards = min(degree, 4) if problem.cost_rule == "sailor" else 1
    held = np.concatenate([[0.0], np.cumsum(np.array(sizes.weight_bytes, dtype=float))])
    held = held[places]
    whole: np.ndarray = np.maximum(held[None, :] - held[:, None], 0.0) / shards
    return whole


def _ring_seconds(
    gradient_bytes: np.ndarray, num_replicas: int, curve: LinkCurve, bucket_bytes: int | None
) -> np.ndarray:
    """``bucketed_ring_seconds`` of every element, of at least two replicas."""
    whole, rest, full = np.zeros_like(gradient_bytes), gradient_bytes, 0.0
    if bucket_bytes is not None:
        # Whole buckets all take as long; only the rest differs from stage to stage.
        whole, rest = np.divmod(gradient_bytes, bucket_bytes)
        full = curve.seconds(bucket_bytes / num_replicas) if whole.any() else 0.0
    sizes, places = np.unique(rest, return_inverse=True)
    last = np.array([curve.seconds(float(size) / num_replicas) for size in sizes])
    seconds: np.ndarray = 2 * (num_replicas - 1) * (whole * full + last[places].reshape(rest.shape))
    return seconds


def replica_counts(
    problem: ParallelProblem, microbatch_size: int, most: int, *, is_timed: bool = True
) -> Iterator[int]:
    """Numbers of replicas worth trying: for each number of microbatches the fewest, and few more.

    Others that run as many microbatches take more devices, and their all-reduce is no shorter:
    any plan of theirs is still one without some replicas. Not so where they share the optimizer's
    state, or where the all-reduce of more replicas may be shorter (``_may_reduce_faster``). Where
    they share weights, they meet in every pass, so all run equally many.
    """
    units = -(-problem.global_batch_size // microbatch_size)
    fewest: dict[int, int] = {}
    for replicas in range(1, min(most, units) + 1):
        if problem.shard == "all" and units % replicas:
            continue
        # The fewest replicas that run as many microbatches come first.
        fewer = fewest.setdefault(-(-units // replicas), replicas)
        if (
            fewer == replicas
            or problem.shard
            or (is_timed and _may_reduce_faster(problem, fewer, replicas))
        ):
            yield replicas


def _may_reduce_faster(problem: ParallelProblem, fewer: int, more: int) -> bool:
    """Whether a stage of more replicas may take less for its all-reduce than one of fewer."""
    for pool in problem.pools:
        for times in pool.times if pool.inside is not None else ():
            degree, width = times.tensor_parallel_size, pool.devices_per_server
            # Either is inside a server and the other is not: 3 replicas do not fill a server of 4.
            if is_inside(fewer * degree, width) != is_inside(more * degree, width):
                return True
    links = [*(pool.link(1) for pool in problem.pools), *(pool.inside for pool in problem.pools)]
    links += [link.curve for link in problem.between]
    curves = {link for link in links if link is not None and len(link.coefficients) > 1}
    if not curves:
        return False
    # A link's bandwidth may fall with the size of messages, which more replicas make smaller.
    sizes = _reduced_bytes(problem)
    return any(
        ((more * scale - 1) * _message_seconds(curve, sizes / (more * scale)) < (1 - 1e-12)
         * (fewer * scale - 1) * _message_seconds(curve, sizes / (fewer * scale))).any()
        for curve in curves
        for scale in {t.tensor_parallel_size for pool in problem.pools for t in pool.times} | {1}
    )  # fmt: skip


@kept_in_a_solve(8)
def _reduced_bytes(problem: ParallelProblem) -> np.ndarray:
    """Bytes of each bucket that a stage may reduce: whole ones and rests, on one device."""
    degrees = {t.tensor_parallel_size for pool in problem.pools for t in pool.times}
    known = [degree for degree in degrees if problem.sizes_of(degree) is not None]
    every = np.array([_gradients(problem, degree, slice(None)) for degree in known]).ravel()
    if problem.bucket_bytes is not None:
        every = np.append(every % problem.bucket_bytes, problem.bucket_bytes)
    return np.unique(every[every > 0])


def _message_seconds(curve: LinkCurve, sizes: np.ndarray) -> np.ndarray:
    """``LinkCurve.seconds`` of each size above 0; infinite where the curve gives no bandwidth."""
    bandwidth = np.polyval(curve.coefficients, np.log2(sizes / 1e6))
    taken: np.ndarray = np.where(bandwidth > 0, curve.latency_seconds + sizes / bandwidth, inf)
    return taken
