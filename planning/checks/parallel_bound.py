"""Show that no plan with pipeline, tensor and data parallelism takes less than a bound.

Plans are told apart by their microbatch size b and replicas d, and then by two times. T is that of
the slowest stage's passes, X that of its update and all-reduce, each alone and over its own
devices' links. With m microbatches, T and X above the lower ends of a cell, a step takes at least

    (m - 1) T + X + sum over stages of (seconds + price of their devices) - price of the pool / d,

whatever the prices of devices, as no plan has more devices than the pool. The last two terms are
at least a shortest path over cuts with stages below the cell's upper ends. Prices come from the
certificate; any that are not negative prove something true. A cell is split until its bound
suffices; a narrow one is searched stage by stage, from the last one on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import nlargest
from itertools import combinations, pairwise, product
from math import ceil, inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.layers import unit_of
from ...schema.options import Shard
from ...schema.parallel import (
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    Recompute,
    ShardSizes,
    ShardTimes,
)
from ...schema.plan import PricedPlans
from . import definitions

Table = NDArray[np.float64]
LEAST_WORK, WORK_OF_A_NODE, MOST_WORK = 5e8, 2e6, 2e9
"""Entries of tables, half a second to two: a judge takes no more, however many nodes there are."""
_CALL = 3e4  # entries that take as long as a few calls
_MOST_LABELS = 2_000  # of the search of one cell, which is split if these are too few
# A cell is searched where T and X can lift a step by no more of the bound; it is split until then.
_NARROW, _NARROWEST = 0.01, 1e-6
_NEAR = 1e-9
_MOST_WAYS = 500  # to deal the replicas of stages on two types


class _Undecided(Exception):
    """What is left takes more work than a judge does."""


@lru_cache(maxsize=8)  # who solves, checks: each asks for the same proof
def is_proved(problem: ParallelProblem, bound: float, nodes: tuple[PricedPlans, ...]) -> bool:
    """Whether the judge can show that no plan's step takes less than a bound.

    The bound is in seconds, to 1e-9, of a problem under hetflow's own rule of costs, where passes
    hide messages. The certificate's nodes say how to divide the work; the smallest need none.
    """
    # The solver's sums are rounded in another order: a billionth is left to them.
    below = bound * (1 - _NEAR)
    left = _Left(min(LEAST_WORK + WORK_OF_A_NODE * len(nodes), MOST_WORK))
    if not problem.hides_messages:
        return False
    each = [replace(problem, shards=(shard,)) for shard in problem.shards]
    of_search: dict[tuple[Shard | None, int, int], list[PricedPlans]] = {}
    for node in nodes:
        shard = node.shard if len(each) > 1 else problem.shard
        key = shard, node.microbatch_size, node.num_replicas
        of_search.setdefault(key, []).append(node)
    try:
        return all(
            _has_no_chunks(own, below, left)
            and all(
                search.is_refuted(
                    below, of_search.get((own.shard, search.size, search.replicas), []), left
                )
                for search in (_searches(own, fewest) if 1 in problem.num_model_chunks else ())
            )
            # One replica shares nothing: of the ways to share, the first stands for it.
            for own, fewest in zip(each, (1, *(2 for _ in each)), strict=False)
        )
    except _Undecided:
        return False


@dataclass(slots=True)
class _Left:
    """What work is left."""

    entries: float

    def take(self, entries: float) -> None:
        self.entries -= entries
        if self.entries < 0:
            raise _Undecided


@dataclass(frozen=True, slots=True, eq=False)
class _Option:
    """One type at one degree with one recomputation.

    Tables are [start, end] over the layers of stages, and infinite where there is none.

    Attributes:
        compute: Seconds of a microbatch's passes.
        output: [places] seconds of a message over its own link.
        forward: Seconds of the forward pass alone.
        update: Seconds of the update, with what a sharded optimizer exchanges left out.
        most_in_flight: Microbatches that fit beside all else, where replicas share states equally.
        held: Bytes beside microbatches and shared states.
        each: Bytes of a microbatch.
        states: Bytes of the states that replicas share; ``largest`` is what a layer has of them.
        ending: Bytes in an update beside what a share takes, which is ``per_byte`` of its weights.
    """

    pool: int
    degree: int
    recompute: Recompute
    compute: Table
    forward: Table
    output: Table
    update: Table
    most_in_flight: Table
    held: Table
    each: Table
    states: Table
    largest: Table
    ending: Table
    per_byte: Table


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Plans by T and X: above the lows, up to the highs [cells], and prices [cells, pools]."""

    low: Table
    high: Table
    free: Table
    full: Table
    prices: Table

    def __getitem__(self, chosen: Any) -> "_Cells":
        return _Cells(*(getattr(self, name)[chosen] for name in self.__slots__))


def _searches(problem: ParallelProblem, least: int) -> "Iterator[_Search]":
    """Each microbatch size with each number of replicas, but for those that others stand for."""
    devices = sum(pool.num_devices for pool in problem.pools)
    curves = [link.curve for pool in problem.pools for link in pool.links]
    curves += [link.curve for link in problem.between]
    is_plain = problem.shard is None and all(len(c.coefficients) == 1 for c in curves)
    for size in _sizes(problem):
        tables = list[_Option]()
        units, fewest = ceil(problem.global_batch_size / size), dict[tuple[Any, ...], int]()
        for replicas in range(least, min(devices, units) + 1):
            if problem.shard == "all" and units % replicas:
                continue  # who shares weights meets in every pass
            inside = tuple(
                pool.devices_per_server % (t.tensor_parallel_size * replicas) == 0
                for pool in problem.pools
                if pool.inside is not None
                for t in pool.times
            )
            key = (ceil(units / replicas), inside)
            # A plan stays one without some of its replicas, if as many microbatches are left to
            # each. Its all-reduce then takes no longer, unless it leaves a server or a link's rate
            # falls with size.
            if is_plain and fewest.setdefault(key, replicas) < replicas:
                continue
            if not tables or problem.shard is not None:
                tables = list(_options(problem, size, replicas))
            yield _Search(problem, tables, size, replicas)


def _sizes(problem: ParallelProblem) -> list[int]:
    """Microbatch sizes that were timed, and that the batch is large enough for."""
    timed = {t.microbatch_size for pool in problem.pools for t in pool.times}
    return sorted(size for size in timed if size <= problem.global_batch_size)


def _options(problem: ParallelProblem, size: int, replicas: int) -> Iterator[_Option]:
    outputs = [0.0, *(size * float(each) for each in problem.output_bytes)]
    outputs[-1] = 0.0  # behind the last layer nothing is sent
    for number, pool in enumerate(problem.pools):
        for times in pool.times:
            degree = times.tensor_parallel_size
            held = [s for s in problem.sizes if s.tensor_parallel_size == degree]
            fits_server = degree <= min(pool.devices_per_server, pool.num_devices)
            if times.microbatch_size != size or not held or not fits_server:
                continue
            curve = next(x.curve for x in pool.links if x.tensor_parallel_size == degree)
            output = np.array([_message(problem, curve, each, degree) for each in outputs])
            for recompute in problem.recompute:
                again: Sequence[float] = {
                    "full": times.forward_seconds,
                    "selective": times.core_seconds,
                }.get(recompute, (0.0,) * len(problem.layers))
                passes = np.array([times.forward_seconds, times.backward_seconds, again])
                yield _Option(
                    number, degree, recompute, _between(passes.sum(axis=0)),
                    _between(times.forward_seconds), output,
                    _between(times.update_seconds),
                    *_memory(problem, pool, times, held[0], size, replicas, recompute),
                )  # fmt: skip


def _message(problem: ParallelProblem, curve: LinkCurve, size: float, copies: int) -> float:
    seconds = definitions.curve_seconds(
        curve, size if problem.boundary_rule != "whole" else size * copies
    )
    return 2 * seconds if problem.boundary_rule == "blocking" else seconds


def _between(values: Sequence[float] | Table) -> Table:
    """[start, end] sums over the layers of stages; infinite where there is none."""
    ends = np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])
    places = np.arange(len(ends))
    return np.where(places[:, None] < places[None, :], ends[None, :] - ends[:, None], inf)


def _largest(values: Sequence[float]) -> Table:
    """[start, end] the greatest value among the layers of stages."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for start in range(len(values)):
        table[start, start + 1 :] = np.maximum.accumulate(np.array(values[start:], np.float64))
    return table


def _memory(
    problem: ParallelProblem,
    pool: ParallelPool,
    times: ShardTimes,
    sizes: ShardSizes,
    size: int,
    replicas: int,
    recompute: Recompute,
) -> tuple[Table, ...]:
    """``_Option``'s tables from ``most_in_flight`` on."""
    weights = _between(sizes.weight_bytes)
    state, d = problem.state_bytes_per_weight_byte, replicas
    is_stage, whole = np.isfinite(weights), np.where(np.isfinite(weights), weights, 0.0)
    (copies, tied), aside = _tied_of(problem, sizes), times.workspace_bytes
    held = (problem.bytes_per_weight_byte - state) * whole + problem.reserved_bytes
    held = held + problem.bytes_per_weight_byte * copies
    # In an update gradients that others keep are gone, and nothing is gathered.
    given = float(problem.shard == "gradients")
    ending = held - given * whole + problem.update_ratio * copies
    held, states = np.where(is_stage, held, inf), state * whole
    most = _largest(sizes.weight_bytes)
    if problem.shard == "all":  # which cuts layers
        most = np.zeros_like(most)
        held = held + (2 * _units_of(problem, sizes)[4] if d > 1 else 0.0)
    kept = sizes.selective_bytes if recompute == "selective" else sizes.stashed_bytes
    each, edges = size * _between(kept), size * np.array([0.0, *problem.output_bytes])
    each = np.where(is_stage, each, 0.0)
    summed = sizes.weight_bytes if d > 1 and problem.shard != "all" else ()
    if aside:
        passing, passed = np.zeros_like(each), [size * own for own in kept]
        for first in range(len(kept)):
            passing[first, first + 1 :] = definitions.most_at_a_layer(
                passed[first:], aside[first:], summed[first:], problem.waiting_bytes
            )
        held = held + np.minimum(tied, problem.waiting_bytes)
    else:
        passing = each
    if recompute == "selective":
        held = held + size * _largest(sizes.core_bytes)
    held = held + (passing if recompute == "full" else passing - each)
    each = edges[:, None] if recompute == "full" else each
    if aside:  # messages
        sent = np.array([*edges[:-1], 0.0]) / times.tensor_parallel_size
        received = 0.0 if recompute == "full" else edges[:, None]
        each = each + (received + sent[:, None] + sent[None, :])
        held = held + (sent[:, None] + sent[None, :])
    each = np.where(is_stage, each, inf)
    per_byte = state + given + problem.update_ratio
    if pool.memory_bytes is None:
        in_flight = np.where(np.isfinite(each), inf, 0.0)
    else:
        # An equal share of all layers but the largest, and the largest.
        share = (whole - most) / d + most if problem.shard is not None else whole
        memory = pool.memory_bytes * (1 + _NEAR)
        in_flight = _times_in(memory - held - state * share, each)
        in_flight[ending + per_byte * share > memory] = 0.0
    return in_flight, held, each, states, state * most, ending, np.array(per_byte)


def _tied_of(problem: ParallelProblem, sizes: ShardSizes) -> tuple[Table, Table]:
    return _tied(problem.tied_to or ((),) * len(problem.layers), sizes.tied_bytes)


@lru_cache(maxsize=64)
def _tied(holders: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[Table, Table]:
    """[start, end] ``tied_bytes`` of stages: of copies, and all."""
    places = len(holders) + 1
    copies, tied = np.zeros((places, places)), np.zeros((places, places))
    for start, end in combinations(range(places), 2):
        copies[start, end], tied[start, end] = tied_bytes(holders, sizes, start, end)
    return copies, tied


def tied_bytes(
    holders: Sequence[Sequence[int]], sizes: Sequence[int], start: int, end: int
) -> tuple[int, int]:
    """Bytes of weights that layers of a stage and of others use.

    Args:
        holders: [layers] the layers that hold a weight which the layer uses too; may be empty.
        sizes: [layers] bytes of such weights.
        start: The stage's first layer.
        end: The layer behind its last.

    Returns:
        Of weights that only other stages' layers hold, which the stage copies; and of all.
    """
    users: dict[frozenset[int], list[int]] = {}
    for layer, held_by in enumerate(holders):
        if held_by:
            users.setdefault(frozenset(held_by), []).append(layer)
    copied = split = 0
    for those, using in users.items():
        inside = [layer for layer in using if start <= layer < end]
        has_all = all(start <= layer < end for layer in those)
        if inside and not has_all:
            copied += max(sizes[layer] for layer in inside)
        number = sum(start <= layer < end for layer in (*those, *using))
        if 0 < number < len(those) + len(using):
            split += max(sizes[layer] for layer in using)
    return copied, split


def _units_of(problem: ParallelProblem, sizes: Any) -> tuple[Table, ...]:
    """[start, end] what stages have of layers that share weights.

    Bytes and number of repeated layers, bytes of the largest, and of the rest; and bytes that are
    whole at a time.
    """
    places = len(problem.layers) + 1
    tables = tuple(np.zeros((places, places)) for _ in range(5))
    for start in range(places):
        units: dict[str, float] = {}
        rest = 0.0
        for end in range(start + 1, places):
            size, unit = float(sizes.weight_bytes[end - 1]), unit_of(problem.layers[end - 1])
            rest += 0.0 if unit else size
            if unit and size:
                units[unit] = units.get(unit, 0.0) + size
            # While one unit is used the next one comes: the two largest are whole at a time.
            first, second = nlargest(2, [0.0, 0.0, *units.values()])
            row = sum(units.values()), len(units), first, rest, rest + first + second
            for table, value in zip(tables, row, strict=True):
                table[start, end] = value
    return tables


def _times_in(room: Table, each: Table) -> Table:
    """How many of ``each`` fit; none where ``room`` is negative or no number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(
            np.where(each > 0, room / each, np.where(room >= 0, inf, 0.0)) * (1 + 1e-12)
        )
    found: Table = np.where(np.isfinite(each) & (room >= 0), most, 0.0)
    return found


class _Search:
    """All plans of one microbatch size and number of replicas."""

    def __init__(
        self, problem: ParallelProblem, options: list[_Option], size: int, replicas: int
    ) -> None:
        self.problem, self.options, self.size, self.replicas = problem, options, size, replicas
        self.m = ceil(ceil(problem.global_batch_size / size) / replicas)
        self.places = len(problem.layers) + 1
        self.devices = np.array([pool.num_devices for pool in problem.pools])
        most = min(self.places - 1, int(self.devices.sum()) // replicas)
        self.most_stages = min(most, problem.most_stages or most)
        # [pools] devices a replica, if they were dealt evenly; prices are of one replica's
        # devices.
        self.budget = self.devices / replicas
        self.pools = np.array([option.pool for option in options], dtype=int)
        self.degrees = np.array([option.degree for option in options], dtype=float)
        self._rings: dict[tuple[tuple[LinkCurve, ...], int, int], Table] = {}
        self._units: dict[int, tuple[Table, ...]] = {}
        self._crossings: dict[tuple[int, int], Table] = {}
        self._held: dict[tuple[Any, ...], bool] = {}
        self.shares_weights = problem.shard == "all" and replicas > 1
        self.unlike = tuple(self._pairs_of_unlike_memory())
        # Of each option with any other.
        self.in_flight = np.array([option.most_in_flight for option in options])
        for pair in self.unlike:
            with np.errstate(invalid="ignore"):
                with_it = self._most_with_unlike(*(options[o] for o in pair))
            for o in pair:
                self.in_flight[o] = np.maximum(self.in_flight[o], with_it)

    def _pairs_of_unlike_memory(self) -> Iterator[tuple[int, int]]:
        """Options that may share states unlike: with less memory, with more."""
        problem = self.problem
        if self.replicas == 1 or not problem.state_bytes_per_weight_byte:
            return
        rooms = [problem.pools[o.pool].memory_bytes or inf for o in self.options]
        for one, other in product(range(len(self.options)), repeat=2):
            first, second = self.options[one], self.options[other]
            alike = (first.degree, first.recompute) == (second.degree, second.recompute)
            if alike and rooms[one] < rooms[other]:
                yield one, other

    def _most_with_unlike(self, small: _Option, large: _Option) -> Table:
        """Microbatches that fit where all but one replica are of the larger type, at most."""
        d, rooms = self.replicas, list[Table]()
        for option in (small, large):
            memory = self.problem.pools[option.pool].memory_bytes
            rooms.append((inf if memory is None else memory * (1 + _NEAR)) - option.held)
        alone = _times_in(rooms[0], small.each)
        if self.problem.pools[large.pool].memory_bytes is None:
            return alone
        # One replica of the smaller type at least, and all others of the larger one: no dealing
        # has more room.
        together = (d - 1) * rooms[1] + rooms[0] - small.states
        with_all = _times_in(rooms[1] - small.states, small.each)
        return np.minimum(alone, np.maximum(_times_in(together, d * small.each), with_all))

    def unlike_shares(
        self, pair: tuple[int, int], count: int, in_flight: int
    ) -> tuple[NDArray[np.bool_], Table]:
        """[start, end] whether ``count`` replicas of the larger type and others hold a stage.

        Only where equal shares do not fit; and then the longer of both types' updates. The type
        with less memory has as many whole bytes of weights as fit, and the other type the rest.
        """
        small, large = (self.options[o] for o in pair)
        d, state = self.replicas, self.problem.state_bytes_per_weight_byte
        with np.errstate(invalid="ignore", divide="ignore"):
            whole = small.states / state
            more, most = small.largest / state * (1 - 1 / d), list[Table]()
            for option in (small, large):
                memory = self.problem.pools[option.pool].memory_bytes
                room = inf if memory is None else memory * (1 + _NEAR)
                free = np.minimum(
                    (room - option.held - in_flight * option.each) / state,
                    (room - option.ending) / option.per_byte,
                )
                part = np.clip(np.floor(free - more), 0.0, whole)
                most.append(np.where(free >= whole, whole, np.where(free >= 0, part, -1.0)))
            less = most[0]
            rest = np.maximum(np.ceil((whole - (d - count) * less) / count - _NEAR), 0.0)
            fits = (less >= 0) & (rest <= most[1]) & (small.most_in_flight < in_flight)
            fits &= whole > 0
            longest = np.maximum(small.update * less, large.update * rest)
            update = longest / np.maximum(whole, 1.0)
        return fits, np.where(fits, update, inf)

    @cached_property
    def seconds(self) -> Table:
        """[options, start, end] of stages with their messages, over links as fast as their own."""
        passes = zip(self.options, self.compute, strict=True)
        return np.array([own + o.output[None, :] + o.output[:, None] for o, own in passes])

    @cached_property
    def compute(self) -> Table:
        """[options, start, end] of the passes of stages, which T is one of."""
        found = []
        for option in self.options:
            own = self.curves((option,))
            # The ring of one type, or one that leaves the server because of another type: the
            # faster of both.
            rings = [own, [_link_of_one(self.problem.pools[option.pool])]]
            found.append(np.min([self.with_gathers(option, ring) for ring in rings], axis=0))
        return np.array(found)

    def with_gathers(self, option: _Option, curves: Sequence[LinkCurve]) -> Table:
        """[start, end] passes over links that the replicas cross, and what they wait for."""
        if not self.shares_weights:
            return option.compute
        layers, number, largest, _, _ = self.units(option.degree)
        whole = self._over(curves, layers, number)
        first = self._over(curves, largest, np.array(largest > 0, np.float64))
        # Full recomputation gathers once more, before the backward pass.
        again = 3 if option.recompute == "full" else 2
        with np.errstate(invalid="ignore"):
            back = option.compute - option.forward
        # A pass hides the gathers of later units, or they hide it; the first unit's is waited for.
        found = np.maximum(option.forward, whole) + np.maximum(back, again * whole) + first
        return np.where(np.isfinite(option.compute), found, inf)

    def units(self, degree: int) -> tuple[Table, ...]:
        """``_units_of`` at a degree."""
        if degree not in self._units:
            sizes = next(s for s in self.problem.sizes if s.tensor_parallel_size == degree)
            self._units[degree] = _units_of(self.problem, sizes)
        return self._units[degree]

    def _over(self, curves: Sequence[LinkCurve], size: Table, number: Table) -> Table:
        """[start, end] seconds of so many units, of so many bytes in all, on the slowest link."""
        each = [
            self.replicas * number * c.latency_seconds + size / c.coefficients[0] for c in curves
        ]
        found: Table = np.max(each, axis=0)
        return found

    @cached_property
    def exchange(self) -> Table:
        """[options, start, end] update and all-reduce at least, whatever else holds the stage."""
        found = []
        for option in self.options:
            pool = self.problem.pools[option.pool]
            rings = [self.ring((option,))]
            if len(self.problem.pools) > 1 and self.replicas > 1:
                # Whatever the other type, its links and larger degree only make the ring slower.
                curve = _link_of_one(pool)
                degrees = [s.tensor_parallel_size for s in self.problem.sizes]
                alike = [t for t in degrees if t <= option.degree]
                rings += [self._ring_over([curve], t, self.replicas) for t in alike]
            ring: Table = np.min(rings, axis=0)
            # Some replica of a stage has at least an equal share, but it may be of another type.
            others = [o for o in self.options if self.unlike and o.degree == option.degree]
            updates = [self.update(each, ring) for each in (option, *others)]
            found.append(np.min(updates, axis=0) + ring)
        return np.array(found)

    def update(self, option: _Option, ring: Table) -> Table:
        """[start, end] the update; a sharded optimizer's with what its replicas send."""
        if self.problem.shard is None:
            return option.update
        found: Table = option.update / self.replicas + self.gathers(ring)
        return found

    def gathers(self, ring: Table) -> Table:
        """Seconds of sending what was updated, from those of the sums: one more round of a ring."""
        if self.problem.shard == "all":
            return 0.0 * np.where(np.isfinite(ring), ring, 0.0)
        return ring if self.problem.shard == "gradients" else ring / 2

    def ring(self, options: tuple[_Option, ...]) -> Table:
        """[start, end] seconds of the all-reduce of a stage's replicas."""
        degrees = [option.degree for option in options]
        degree, members = min(degrees), self.replicas
        if self.problem.cost_rule == "hetflow" and degree < max(degrees):
            degree, members = 1, members * max(degrees)  # whole gradients, by all devices
        return self._ring_over(self.curves(options), degree, members)

    def curves(self, options: tuple[_Option, ...]) -> list[LinkCurve]:
        """The links that replicas of some options cross."""
        degree = min(option.degree for option in options)
        pools = [self.problem.pools[option.pool] for option in options]
        curves = [_link_of_one(pool) for pool in pools]
        near = pools[0].inside
        if len(pools) == 1 and near is not None:
            together = degree * self.replicas
            curves = [near] if pools[0].devices_per_server % together == 0 else curves
        names = {pool.device_type for pool in pools}
        both = [x.curve for x in self.problem.between if {*x.device_types} <= names]
        return curves + (both if len(pools) > 1 else [])

    def _ring_over(self, curves: Sequence[LinkCurve], degree: int, members: int) -> Table:
        sizes = next(s for s in self.problem.sizes if s.tensor_parallel_size == degree)
        whole = _between(sizes.weight_bytes)
        key = (tuple(curves), degree, members)
        if self.shares_weights:
            _, _, largest, rest, _ = self.units(degree)
            once = self._over(
                curves, 2 * rest + largest, np.array(2.0 * (rest > 0) + (largest > 0), np.float64)
            )
            return np.where(np.isfinite(whole), once, inf)
        if key not in self._rings:
            known, where = np.unique(whole, return_inverse=True)
            taken = [self._ring_seconds(curves, float(each), members) for each in known]
            self._rings[key] = np.array(taken)[where].reshape(whole.shape)
        return self._rings[key]

    def _ring_seconds(self, curves: Sequence[LinkCurve], left: float, members: int) -> float:
        if self.replicas == 1 or left == inf:
            return 0.0 if left < inf else inf
        bucket = self.problem.bucket_bytes
        # The last bucket is the rest, and never empty.
        full = 0 if bucket is None or left <= bucket else ceil(left / bucket) - 1
        buckets = [(1, left - full * (bucket or 0)), (full, float(bucket or 0))]
        slowest = max(
            sum(n * definitions.curve_seconds(c, each / members) for n, each in buckets if n)
            for c in curves
        )
        rounds = 1 if self.problem.shard == "gradients" else 2
        return rounds * (members - 1) * slowest

    @property
    def _room(self) -> float:
        return sum(
            inf if pool.memory_bytes is None else pool.num_devices * pool.memory_bytes * (1 + _NEAR)
            for pool in self.problem.pools
        )

    def least_bytes(self) -> float:
        """What all replicas hold at least, on all their devices together."""
        problem, least = self.problem, np.full(self.places - 1, inf)
        shared = problem.state_bytes_per_weight_byte * (1 - 1 / self.replicas)
        for option in self.options:
            sizes = next(s for s in problem.sizes if s.tensor_parallel_size == option.degree)
            held = (problem.bytes_per_weight_byte - shared) * np.array(sizes.weight_bytes)
            kept = sizes.selective_bytes if option.recompute == "selective" else sizes.stashed_bytes
            held = held + self.size * np.array(kept) * (option.recompute != "full")
            least = np.minimum(least, option.degree * held)
        return self.replicas * float(least.sum())

    @cached_property
    def by_capacity(self) -> tuple[float, float]:
        """Seconds of a step and of T at least, by what all devices together can compute."""
        if not self.options or self.most_stages < 1 or self.least_bytes() > self._room:
            return inf, inf
        layers = np.arange(self.places - 1)
        fits = self.in_flight[:, layers, layers + 1] >= 1
        each = np.array([o.compute[layers, layers + 1] for o in self.options])
        each = np.where(fits, each, inf)
        if not np.isfinite(each).any(axis=0).all():
            return inf, inf
        # A second of a type's device is worth 1 over the seconds of all layers on it. The slowest
        # stage takes at least the worth of all layers over that of the pool.
        work, worth = self.degrees[:, None] * each, 0.0
        costs = np.full(each.shape, inf)
        for pool, number in enumerate(self.devices):
            own = self.pools == pool
            least = work[own].min(axis=0, initial=inf)
            whole = float(least[np.isfinite(least)].sum())
            if own.any() and whole > 0:
                worth += number / whole
                costs[own] = work[own] / whole
        if not worth:
            return 0.0, 0.0
        rate = self.replicas / worth
        with np.errstate(invalid="ignore"):
            # Each further microbatch takes the pool at least so long, by these prices: the best
            # option of each layer.
            through = float(np.nanmin(each + (self.m - 1) * rate * costs, axis=0).sum())
        slowest = rate * float(costs.min(axis=0).sum())
        return max(through, self.m * slowest), slowest

    @cached_property
    def kinds(self) -> "list[_Kind]":
        """What may hold a stage."""
        return list(_kinds_of(self))

    def crossing(self, after: int, end: int) -> Table:
        """[kinds] seconds of a message over the links between unlike types, to the stage behind."""
        if (after, end) not in self._crossings:
            found = [self._crossing_of(kind, self.kinds[after], end) for kind in self.kinds]
            self._crossings[after, end] = np.array(found)
        return self._crossings[after, end]

    def _crossing_of(self, kind: "_Kind", after: "_Kind", end: int) -> float:
        problem, longest = self.problem, 0.0
        if not problem.between:
            return longest
        size = float(self.size * problem.output_bytes[end - 1])
        for one, other in product(kind.options, after.options):
            pair = [self.options[one], self.options[other]]
            names = {problem.pools[option.pool].device_type for option in pair}
            for link in problem.between:
                if len(names) == 2 and set(link.device_types) == names:
                    copies = max(option.degree for option in pair)
                    longest = max(longest, _message(problem, link.curve, size, copies))
        return longest

    def may_hold(self, kinds: "Sequence[_Kind]") -> bool:
        """Whether the pool, and its servers, might hold stages; taken for granted if unsure."""
        # In whatever order they stand.
        key = tuple(sorted((kind.options, kind.first) for kind in kinds))
        if key not in self._held:
            self._held[key] = self._may_hold(kinds)
        return self._held[key]

    def _may_hold(self, kinds: "Sequence[_Kind]") -> bool:
        d, stages = self.replicas, [kind.options for kind in kinds]
        dealt = [
            [(d,)] if len(kind.options) == 1
            else [(k, d - k) for k in ([kind.first] if kind.first else range(1, d))]
            for kind in kinds
        ]  # fmt: skip
        ways = prod(map(len, dealt))
        if ways > _MOST_WAYS:
            return True
        return any(self._holds(stages, way) for way in product(*dealt))

    def _holds(self, stages: Sequence[tuple[int, ...]], dealt: Sequence[tuple[int, ...]]) -> bool:
        for number, pool in enumerate(self.problem.pools):
            sizes: list[int] = []
            for kind, replicas in zip(stages, dealt, strict=True):
                for o, count in zip(kind, replicas, strict=True):
                    if self.options[o].pool == number:
                        degree = self.options[o].degree
                        is_near = pool.inside is not None and len(kind) == 1
                        is_one = is_near and pool.devices_per_server % (degree * count) == 0
                        sizes += [degree * count] if is_one else [degree] * count
            if sum(sizes) > pool.num_devices:
                return False
            if not has_places(sizes, pool):
                return False
        return True

    def is_refuted(self, below: float, nodes: Sequence[PricedPlans], left: _Left) -> bool:
        """Whether no plan takes less than ``below`` seconds.

        Raises:
            _Undecided: That takes too much work.
        """
        # What a call costs before it looks at any table.
        left.take(10 * _CALL)
        if self.by_capacity[0] >= below:
            return True
        cells = self._first(below, nodes)
        while len(cells.low):
            # All cells by one table each, which take the stages behind for granted; what is left
            # by tables that count them.
            left.take(len(cells.low) * self.seconds.size + self.places * _CALL)
            cells = self._open(cells, self._paths(cells), below)
            counted = []
            for number in range(len(cells.low)):
                left.take(self.most_stages * (self.seconds.size + _CALL))
                table = self._tables(cells[[number]])
                cell = self._open(cells[[number]], table[0][None], below)
                # By how much of the bound T and X may still lift a step: only a narrow cell is
                # searched stage by stage.
                width = float(self._width(cell).max(initial=0.0)) / below
                if len(cell.low) and width <= _NARROW:
                    found = _Stages(self, cell[0], table, below).find(left)
                    if found:
                        return False
                    # It cannot be split any further, so nothing else will decide.
                    if found is None and width <= _NARROWEST:
                        raise _Undecided
                    cell = cell if found is None else cell[:0]
                counted += [cell] if len(cell.low) else []
            cells = self._split(_joined(counted)) if counted else cells[:0]
        return True

    def _open(self, cells: _Cells, rest: Table, below: float) -> _Cells:
        """The cells that may hold a plan below the seconds, without what takes too long in them."""
        least = np.maximum(rest[:, -1] - cells.prices @ self.budget, cells.low)
        missing = below - (least + (self.m - 1) * cells.low + cells.free)
        # A plan whose T or X is larger by what is missing takes long enough: the cell shrinks to
        # what may not.
        room = missing / (self.m - 1) if self.m > 1 else inf
        kept = replace(
            cells,
            high=np.minimum(cells.high, cells.low + room),
            full=np.minimum(cells.full, cells.free + missing),
        )
        return kept[missing > 0]

    def _width(self, cells: _Cells) -> Table:
        """By how much T or X can lift a step within cells."""
        found: Table = np.maximum((self.m - 1) * (cells.high - cells.low), cells.full - cells.free)
        return found

    def _first(self, below: float, nodes: Sequence[PricedPlans]) -> _Cells:
        """The certificate's nodes as cells, up to the longest T that matters."""
        layers = np.arange(self.places - 1)
        compute = np.array([o.compute[layers, layers + 1] for o in self.options])
        most = max(below - float(compute.min(axis=0).sum()), 0.0)  # beside a microbatch's passes
        longest = min(below / self.m, most / (self.m - 1) if self.m > 1 else below)
        shortest = self.by_capacity[1] * (1 - _NEAR)
        ends = sorted({n.most_stage_seconds for n in nodes})
        ends = [end for end in ends if shortest < end < longest]
        rows: list[tuple[float, ...]] = []
        # Whatever the nodes are, the cells between their ends hold every plan: nodes only say
        # where to cut, and at what prices.
        for low, high in pairwise([shortest, *ends, longest]):
            free, prices = 0.0, (0.0,) * len(self.devices)
            over = [n for n in nodes if n.least_stage_seconds <= high <= n.most_stage_seconds]
            for node in sorted(over, key=lambda n: n.most_exchange_seconds):
                prices = node.device_prices
                if free < node.most_exchange_seconds < most:
                    rows.append((low, high, free, node.most_exchange_seconds, *prices))
                    free = node.most_exchange_seconds
            rows.append((low, high, free, most, *prices))
        table = np.array(rows)
        low, high, free, full = table[:, :4].T
        return self._snapped(_Cells(low, high, free, full, table[:, 4:]))

    @cached_property
    def levels(self) -> Table:
        """All times that stages may take, which T is one of."""
        passes = np.where(self.in_flight >= 1, self.compute, inf)
        # Where weights are shared, stages of two types have times of their own.
        if self.shares_weights:
            each = {tuple(self.options[o] for o in kind.options) for kind in _kinds_of(self)}
            passes = np.array([self.passes(options) for options in each])
        found: Table = np.unique(passes[np.isfinite(passes)])
        return found

    def passes(self, options: tuple[_Option, ...]) -> Table:
        """[start, end] passes of stages of some options, with what they wait for."""
        each = [self.with_gathers(option, self.curves(options)) for option in options]
        found: Table = np.max(each, axis=0)
        return found

    def _snapped(self, cells: _Cells) -> _Cells:
        """The cells with ends at times that there are, without those that have none."""
        # Behind ``low``: a cell holds T above its lower end only.
        first = np.searchsorted(self.levels, cells.low * (1 + 1e-12), side="right")
        last = np.searchsorted(self.levels, cells.high * (1 + 1e-12), side="right") - 1
        there = first <= last
        kept = cells[there]
        if not len(kept.low):
            return kept
        return replace(kept, low=self.levels[first[there]], high=self.levels[last[there]])

    def _split(self, cells: _Cells) -> _Cells:
        """Each cell in two, by the middle of T or of X."""
        by_seconds = (self.m - 1) * (cells.high - cells.low) >= cells.full - cells.free
        one, other = cells[by_seconds], cells[~by_seconds]
        middle, half = (one.low + one.high) / 2, (other.free + other.full) / 2
        # T lies above the end of the cell before, so the second half begins behind the middle.
        lower = self._snapped(replace(one, high=np.minimum(middle, one.high), low=_before(one.low)))
        upper = self._snapped(replace(one, low=middle))
        parts = [lower, upper, replace(other, full=half), replace(other, free=half)]
        return _joined(parts)

    def _paths(self, cells: _Cells) -> Table:
        """[cells, ends] least seconds and prices of the layers before an end, in single stages."""
        count, options = len(cells.low), len(self.options)
        # At least so many stages lie behind an end: as many microbatches are in flight.
        behind = np.full((count, self.places), self.most_stages)
        behind[:, -1] = 0
        high, full = cells.high[:, None, None], cells.full[:, None, None]
        allowed: list[Any] = [None] * self.places
        in_flight = self.in_flight
        # From the last end back: what lies behind decides how much memory is left.
        for end in range(self.places - 1, 0, -1):
            placed = behind[:, end]
            fits = in_flight[None, :, :end, end] >= np.minimum(placed + 1, self.m)[:, None, None]
            fits &= (placed < self.most_stages)[:, None, None]
            fits &= self.compute[None, :, :end, end] <= high * (1 + 1e-12)
            fits &= self.exchange[None, :, :end, end] <= full * (1 + 1e-12)
            allowed[end] = fits
            fewer = np.where(fits.any(axis=1), placed[:, None] + 1, self.most_stages)
            behind[:, :end] = np.minimum(behind[:, :end], fewer)
        # [cells, ends] the shortest path up to an end, over stages that were allowed.
        rest = np.full((count, self.places), inf)
        rest[:, 0] = 0.0
        priced = (cells.prices[:, self.pools] * self.degrees).reshape(count, options, 1)
        for end in range(1, self.places):
            costs = rest[:, None, :end] + self.seconds[None, :, :end, end] + priced
            rest[:, end] = np.where(allowed[end], costs, inf).min(axis=(1, 2))
        return rest

    def _tables(self, cell: _Cells) -> Table:
        """[stages behind, ends] of one cell, as ``_paths``, with the stages behind counted."""
        is_short = self.compute <= cell.high[0] * (1 + 1e-12)
        is_short &= self.exchange <= cell.full[0] * (1 + 1e-12)
        priced = (cell.prices[0, self.pools] * self.degrees)[:, None, None]
        costs = np.where(is_short, self.seconds + priced, inf)
        in_flight = self.in_flight
        found = np.full((self.most_stages + 1, self.places), inf)
        found[:, 0] = 0.0
        fitting = costs[0]
        for placed in range(self.most_stages - 1, -1, -1):
            if placed < self.m:  # from m stages behind on, as many are in flight
                fitting = np.where(in_flight >= placed + 1, costs, inf).min(axis=0)
            elif placed == self.most_stages - 1:
                fitting = np.where(in_flight >= self.m, costs, inf).min(axis=0)
            found[placed, 1:] = (fitting + found[placed + 1][:, None]).min(axis=0)[1:]
        return found


def _joined(parts: Sequence[_Cells]) -> _Cells:
    return _Cells(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in _Cells.__slots__)
    )


def _before(low: Table) -> Table:
    """A little less, so that the cell's own least time is in it."""
    found: Table = low * (1 - 1e-9)
    return found


def has_places(sizes: Sequence[int], pool: ParallelPool) -> bool:
    """Whether sets of devices find servers, the largest first, each in the first with room."""
    full, rest = divmod(pool.num_devices, pool.devices_per_server)
    room = [pool.devices_per_server] * full + [rest]
    for size in sorted(sizes, reverse=True):
        place = next((n for n, left in enumerate(room) if left >= size), None)
        if place is None:
            return False
        room[place] -= size
    return True


def _link_of_one(pool: ParallelPool) -> LinkCurve:
    return next(x.curve for x in pool.links if x.tensor_parallel_size == 1)


@dataclass(frozen=True, slots=True)
class _Label:
    """Stages from ``end`` on: what a step of them takes, and what they use.

    ``trip`` is one microbatch's way there and back. Besides that, ``more`` is what the others take,
    and ``slowest`` the longest stage or link. ``own`` is the first stage, ``kinds`` are all.
    """

    end: int
    kinds: tuple[int, ...] = ()
    trip: float = 0.0
    more: float = 0.0
    slowest: float = 0.0
    own: float = 0.0
    update: float = 0.0
    ring: float = 0.0
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """What holds a stage: one option, or two of unlike types.

    ``first`` is the number of replicas of the first one where they share states unlike, and that
    with more memory; else 0.
    """

    options: tuple[int, ...]
    first: int = 0


class _Stages:
    """The plans of one narrow cell, stage by stage from the last on."""

    def __init__(self, search: _Search, cell: _Cells, rest: Table, below: float) -> None:
        self._search, self._below = search, below
        self._rest, self._low, self._free = rest, float(cell.low), float(cell.free)
        self._worth = float(cell.prices @ search.budget)
        self._kinds = search.kinds
        options, d = search.options, search.replicas

        def most(table: Table) -> Table:
            return np.array([table[list(kind.options)].max(axis=0) for kind in self._kinds])

        self._compute = np.array(
            [search.passes(tuple(options[o] for o in kind.options)) for kind in self._kinds]
        )
        self._output = most(np.array([o.output for o in options]))
        fits = np.array([o.most_in_flight for o in options])
        self._fits = np.array([fits[list(kind.options)].min(axis=0) for kind in self._kinds])
        self._is_in = self._compute <= cell.high * (1 + 1e-12)
        self._is_in &= most(search.exchange) <= cell.full * (1 + 1e-12)
        self._fits[~self._is_in] = 0.0
        self._unlike = [number for number, kind in enumerate(self._kinds) if kind.first]
        self._fits[self._unlike] = 0.0  # as long as it is not known how many are in flight
        self._known: dict[int, tuple[Table, Table]] = {}
        self._ring = np.array(
            [search.ring(tuple(options[o] for o in kind.options)) for kind in self._kinds]
        )
        own = most(np.array([search.update(o, np.zeros_like(o.update)) for o in options]))
        shared = search.problem.shard is not None
        self._update = own + (search.gathers(self._ring) if shared else 0.0)
        one = cell.prices[search.pools] * search.degrees
        # Of a pair's replicas one is of the dearer type at least.
        self._price = np.array(
            [_least_price(one[list(kind.options)], kind.first, d) for kind in self._kinds]
        )
        self._used = np.zeros((len(self._kinds), len(search.devices)))
        for number, kind in enumerate(self._kinds):
            dealt = (kind.first, d - kind.first) if kind.first else (1, 1)
            for o, replicas in zip(kind.options, dealt, strict=False):
                self._used[number, options[o].pool] += options[o].degree * (
                    d if len(kind.options) == 1 else replicas
                )

    def _with_unlike(self, in_flight: int) -> tuple[Table, Table]:
        """[kinds, start, end] microbatches that fit, and updates, where so many are in flight."""
        if not self._unlike:
            return self._fits, self._update
        if in_flight not in self._known:
            fits, update = self._fits.copy(), self._update.copy()
            for number in self._unlike:
                larger, smaller = self._kinds[number].options
                found = self._search.unlike_shares(
                    (smaller, larger), self._kinds[number].first, in_flight
                )
                fits[number] = np.where(found[0] & self._is_in[number], in_flight, 0.0)
                update[number] = found[1] + self._search.gathers(self._ring[number])
            self._known[in_flight] = fits, update
        return self._known[in_flight]

    def find(self, left: "_Left") -> bool | None:
        """Whether there is a plan below the seconds; None if that takes too many labels.

        Raises:
            _Undecided: No work is left.
        """
        left.take(20 * self._fits.size)
        open_, known = [_Label(self._search.places - 1)], dict[Any, list[Any]]()
        for _ in range(_MOST_LABELS if self._kinds else 0):
            if not open_:
                return False
            # Depth first: few labels are open at a time.
            label = open_.pop()
            left.take(2 * self._fits.size / self._search.places + 5 * _CALL)
            for following in self._before(label):
                left.take(_CALL)
                if following.end == 0:
                    if self._search.may_hold([self._kinds[k] for k in following.kinds]):
                        return True
                elif _is_new(following, known):
                    open_.append(following)
        return None if self._kinds else False

    def _before(self, label: _Label) -> Iterator[_Label]:
        """A label for each stage that may stand before, where a plan may be below the seconds."""
        search, end, placed = self._search, label.end, len(label.kinds)
        m, is_last = search.m, placed == 0
        used = self._used[list(label.kinds)].sum(axis=0)
        has_room = (used + self._used <= search.devices).all(axis=1)
        message = np.zeros(len(self._kinds))
        if not is_last:
            after = label.kinds[0]
            message = np.maximum(self._output[:, end], self._output[after, end])
            message = np.maximum(message, search.crossing(after, end))
        own, sent = self._compute[:, :end, end], message[:, None]
        # One microbatch there and back, with this stage; k are in flight.
        trip, k = label.trip + own + 2 * sent, min(placed + 1, m)
        slowest = np.maximum(np.maximum(own, sent), label.slowest)
        left = (m - 1) % k  # of the others, when each k have made a round trip
        more = np.maximum((m - 1 - left) / k * trip + left * slowest, label.more)
        more = np.maximum(more, (m - 1) * slowest)
        if m > k:  # the last k take one more, the others by two to the next stage and back
            others = (m - 1 - k) // 2 * (label.own + own + 2 * sent) + (m - 1 - k) % 2 * own
            more = np.maximum(more, trip + others)
        most_fit, updates = self._with_unlike(k)
        update = np.maximum(label.update, updates[:, :end, end])
        ring = np.maximum(label.ring, self._ring[:, :end, end])
        # The least that any stages before can make of it, T and X of the cell included.
        least = np.maximum(more, (m - 1) * self._low) + trip + self._output[:, :end]
        least += np.maximum(update + ring, self._free)
        priced = label.price + self._price
        worth = self._rest[placed + 1, :end] + priced[:, None] - self._worth
        worth[:, 0] = np.maximum(worth[:, 0], 0.0)  # nothing is left to be priced
        fits = most_fit[:, :end, end] >= k
        fits &= has_room[:, None] & (least + worth < self._below)
        if placed + 1 >= search.most_stages:
            fits[:, 1:] = False
        for kind, start in np.argwhere(fits).tolist():
            yield _Label(
                start, (kind, *label.kinds), float(trip[kind, start]), float(more[kind, start]),
                float(slowest[kind, start]), float(own[kind, start]), float(update[kind, start]),
                float(ring[kind, start]), float(priced[kind]),
            )  # fmt: skip


def _least_price(prices: Table, first: int, d: int) -> float:
    """What a replica of a stage costs in the mean, at least; of two types it has one of each."""
    if first:
        return float(first * prices[0] + (d - first) * prices[1]) / d
    return float((d - 1) * prices.min() + prices.max()) / d


def _kinds_of(search: _Search) -> Iterator[_Kind]:
    """What may hold a stage: one option, or two of unlike types that recompute alike."""
    options, d = search.options, search.replicas
    for smaller, larger in search.unlike:
        yield from (_Kind((larger, smaller), count) for count in range(1, d))
    for number, option in enumerate(options):
        if d * option.degree <= search.devices[option.pool]:
            yield _Kind((number,))
    for one, other in combinations(range(len(options)), 2 if d > 1 else len(options) + 1):
        first, second = options[one], options[other]
        alike = first.recompute == second.recompute
        if search.problem.shard is not None:
            alike &= first.degree == second.degree
        if alike and first.pool != second.pool:
            yield _Kind((one, other))


def _is_new(label: _Label, known: dict[Any, list[Any]]) -> bool:
    """Whether no label with the same left to decide is as good; notes this one."""
    # Labels with the same stages, but for their cuts, leave the same to decide where they end at
    # the same layer.
    key = (label.end, label.kinds[0], tuple(sorted(label.kinds)))
    mine = (label.trip, label.more, label.slowest, label.own, label.update, label.ring)
    others = known.setdefault(key, [])
    if any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in others):
        return False
    others.append(mine)
    return True


def _has_no_chunks(problem: ParallelProblem, below: float, left: _Left) -> bool:
    """Whether no interleaved plan takes less: (v m + p - 1) passes of its slowest chunk (4.2.2)."""
    chunks = [v for v in problem.num_model_chunks if v > 1]
    for size in _sizes(problem) if chunks else ():
        units, devices = (
            ceil(problem.global_batch_size / size),
            max(pool.num_devices for pool in problem.pools),
        )
        for d in (d for d in range(1, min(devices, units) + 1) if units % d == 0):
            search = _Search(problem, list(_options(problem, size, d)), size, d)
            for number, option in enumerate(search.options):
                groups = problem.pools[option.pool].num_devices // option.degree // d
                slowest = _Slowest(search, number)
                for v, p in product(chunks, range(2, min(groups, search.m) + 1)):
                    if search.m % p or p * v > min(search.places - 1, problem.most_stages or inf):
                        continue
                    left.take(_CALL)
                    # The messages of one microbatch are at least the shortest as many, and the
                    # fullest position's exchange at least the mean one.
                    others = slowest.mean_exchange(p) + slowest.least_messages(p * v)
                    passes = v * search.m + p - 1
                    # The cheap bound of the slowest chunk first; the exact one takes a table.
                    if passes * slowest.least(p * v) + others < below and (
                        passes * slowest.exact(p * v, left) + others < below
                    ):
                        return False
    return True


class _Slowest:
    """The slowest chunk of one option, by the number of chunks."""

    def __init__(self, search: _Search, option: int) -> None:
        self._search, self._option = search, search.options[option]
        fits = self._option.most_in_flight >= 1
        self._seconds = np.where(fits, search.compute[option], inf)
        self._tables = [np.where(np.arange(search.places) == 0, 0.0, inf)]

    def least(self, chunks: int) -> float:
        """At least, by all layers together and the longest one."""
        layers = np.arange(self._search.places - 1)
        each = self._option.compute[layers, layers + 1]
        return max(float(each.max()), float(each.sum()) / chunks)

    def least_messages(self, chunks: int) -> float:
        """Of one microbatch there and back, over the boundaries of least seconds."""
        return 2 * float(np.sort(self._option.output[1:-1])[: chunks - 1].sum())

    def exact(self, chunks: int, left: _Left) -> float:
        """The least of any cut into so many chunks, each of which fits alone."""
        while len(self._tables) <= chunks:
            left.take(self._seconds.size + _CALL)
            before = self._tables[-1]
            self._tables.append(np.maximum(before[:, None], self._seconds).min(axis=0))
        return float(self._tables[chunks][-1])

    def mean_exchange(self, positions: int) -> float:
        """Update and all-reduce of a position in the mean, without latencies."""
        search, d = self._search, self._search.replicas
        update = float(self._option.update[0, -1]) / positions
        pool = search.problem.pools[self._option.pool]
        inside = pool.inside is not None and not pool.devices_per_server % (d * self._option.degree)
        curve = pool.inside if inside and pool.inside is not None else _link_of_one(pool)
        if search.shares_weights:  # what is in no repeated layer comes and goes once a step
            rest = float(search.units(self._option.degree)[3][0, -1])
            return update / d + 2 * rest / positions / curve.coefficients[0]
        if len(curve.coefficients) > 1:
            return update / (1 if search.problem.shard is None else d)
        weights = next(
            sum(s.weight_bytes)
            for s in search.problem.sizes
            if s.tensor_parallel_size == self._option.degree
        )
        once = (d - 1) * weights / positions / d / curve.coefficients[0]
        if search.problem.shard is None:
            return update + 2 * once
        return update / d + (2 if search.problem.shard == "gradients" else 3) * once
