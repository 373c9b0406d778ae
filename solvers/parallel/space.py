"""The choices of a stage at one microbatch size, as tables over its first and last layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, product
from math import inf
from typing import Any

import numpy as np

from ...planning.costs.parallel_stage import SharedUnits, shared_units
from ...schema.parallel import ParallelPool, ParallelProblem, Recompute

MOST_TYPES = 2  # device types in one stage; part of the space that solve() states
ROOM = 1.0 + 1e-12
"""Memory is compared up to rounding: a share of the optimizer's state may be no whole number."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tables are kept per option
class StageOption:
    """One device type at one degree and kind of recomputation: prefix sums over layers.

    A stage of layers ``start`` to ``end - 1`` takes ``seconds[end] - seconds[start]``; likewise
    ``weights`` (bytes that count in memory) and ``stashed`` (bytes of a microbatch). Of a sharded
    optimizer's state, ``weights`` holds 1/d, and a stage holds the most of its layers'
    ``uneven`` on top (``space_of``); each byte of ``shared`` (prefix sums of weights) has
    ``state_bytes``. With selective recomputation ``stashed`` is what is kept, and a backward pass
    holds the most of its layers' ``cores`` on top. Where weights are shared ``units`` says what is
    gathered and when, beside ``forward``, the prefix sums of forward passes.

    ``output_seconds[end]`` is sending its output on, ``gradient_seconds[start]`` sending its
    input's gradient back, ``updates`` the prefix sums of the update and ``update_at`` each layer's.
    """

    pool: int
    tensor_parallel_size: int
    recompute: Recompute
    memory_bytes: int | None
    seconds: tuple[float, ...]
    forward: tuple[float, ...]
    weights: tuple[float, ...]
    stashed: tuple[float, ...]
    inputs: tuple[float, ...]
    output_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]
    updates: tuple[float, ...]
    update_at: tuple[float, ...]
    reserved_bytes: int
    num_replicas: int
    state_bytes: float
    uneven: tuple[float, ...] = ()
    shared: tuple[int, ...] = ()
    cores: tuple[float, ...] = ()
    units: SharedUnits | None = None

    def stage_memory(self, start: int, end: int, num_in_flight: int) -> float:
        """Bytes on each device that holds the stage."""
        once, each = _held(self)
        return float(once[start, end] + num_in_flight * each[start, end])

    def memory_with(self, share: int, start: int, end: int, num_in_flight: int) -> float:
        """``stage_memory`` of a replica that keeps the state of ``share`` bytes of weights."""
        whole, uneven = self.state_bytes * _weights(self)[start, end], self.uneven_bytes(start, end)
        # Layers are dealt whole: a share may be up to (d - 1) / d of the largest layer too full.
        kept = min(self.state_bytes * share + uneven, whole) if share else 0.0
        even = whole / self.num_replicas + uneven
        return float(self.stage_memory(start, end, num_in_flight) - even + kept)

    def share_rooms(self, stages: Any, num_in_flight: int) -> np.ndarray:
        """The most weights in bytes whose state a replica can keep: the ``share`` that fits."""
        whole: np.ndarray = _weights(self)[stages]
        # Negative where a stage does not even fit without a share.
        if self.memory_bytes is None:
            return whole
        once, each = _held(self)
        uneven = most_uneven(self)[stages] / self.state_bytes
        held = once[stages] + num_in_flight * each[stages] - self.memory_bytes * ROOM
        # [stages] bytes of weights whose state fits beside the rest; an equal share is counted in
        # ``once``.
        free = whole / self.num_replicas + uneven - held / self.state_bytes
        # Whole bytes, and without the slack: what is granted must fit whoever gets the largest
        # layer.
        part = np.floor(np.clip(free - uneven, 0.0, whole)).astype(int)
        rooms: np.ndarray = np.where(free >= whole, whole, np.where(free < 0, -1, part))
        return rooms

    def times_equal(self, share: "np.ndarray | int", stages: Any) -> np.ndarray:
        """A share of stages' weights over an equal one; of tables [starts, ends]."""
        found: np.ndarray = share * self.num_replicas / np.maximum(_weights(self)[stages], 1)
        return found

    def uneven_bytes(self, start: int, end: int) -> float:
        """What the fullest replica holds beyond an equal share of the optimizer's state."""
        return float(most_uneven(self)[start, end]) if self.uneven else 0.0

    def core_bytes(self, start: int, end: int) -> float:
        """What the largest attention core of a stage takes while it is recomputed."""
        return float(most_cores(self)[start, end]) if self.cores else 0.0

    def fits(self, start: int, end: int, num_in_flight: int) -> bool:
        """Whether a device of the type can hold the stage."""
        if self.memory_bytes is None:
            return True
        return self.stage_memory(start, end, num_in_flight) <= self.memory_bytes * ROOM

    def fits_before(self, end: int, num_in_flight: int) -> np.ndarray:
        """``fits`` of every stage before ``end`` [starts]."""
        if self.memory_bytes is None:
            return np.ones(end, dtype=bool)
        once, each = _held(self)
        held = once[:end, end] + num_in_flight * each[:end, end]
        fits: np.ndarray = held <= self.memory_bytes * ROOM
        return fits


def unlike_shares(
    smaller: StageOption, larger: StageOption, count: np.ndarray, stages: Any, num_in_flight: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares of the state on two types, as even as memory allows, where equal ones do not fit.

    Args:
        smaller: The type with less memory.
        larger: The other type, at the same degree and recomputation.
        count: [counts] replicas of the larger type, from 1 to d - 1.
        stages: What to take of tables [starts, ends].
        num_in_flight: Microbatches.

    Returns:
        [stages, counts] whether there are such shares, and each type's bytes of weights.
    """
    d, whole = smaller.num_replicas, _weights(smaller)[stages][..., None]
    low, high = (o.share_rooms(stages, num_in_flight)[..., None] for o in (smaller, larger))
    # Replicas with less memory are full; the others share the rest, rounded up.
    rest = -((whole - (d - count) * low) // -count)
    once, each = _held(smaller)
    assert smaller.memory_bytes is not None  # the other one has more
    # Where equal shares fit, unlike ones only make the largest share larger.
    is_full = once[stages] + num_in_flight * each[stages] > smaller.memory_bytes * ROOM
    fits = (low >= 0) & (rest <= high) & (whole > 0) & is_full[..., None]
    return fits, np.broadcast_to(low, rest.shape), rest


def unlike_of(
    space: "OptionSpace",
    mix: tuple[int, ...],
    first: int,
    stage: tuple[int, int],
    num_in_flight: int,
) -> tuple[int, ...]:
    """The shares of a stage of two options with so many replicas of the first, in bytes."""
    smaller, larger = next(pair for pair in space.unlike if set(pair) == set(mix))
    options, d = space.options, space.options[smaller].num_replicas
    count = np.array([first if mix[0] == larger else d - first])
    _, low, high = unlike_shares(options[smaller], options[larger], count, stage, num_in_flight)
    return tuple(int((low if o == smaller else high).item()) for o in mix)


@lru_cache(maxsize=512)
def _weights(option: StageOption) -> np.ndarray:
    """Bytes of weights whose state is shared [starts, ends]; negative where no stage is."""
    sums = np.array(option.shared)
    whole: np.ndarray = sums[None, :] - sums[:, None]
    return whole


@lru_cache(maxsize=512)
def most_uneven(option: StageOption) -> np.ndarray:
    """``StageOption.uneven_bytes`` of every stage [starts, ends]; empty stages hold nothing."""
    return _largest(option.uneven, len(option.weights))


@lru_cache(maxsize=512)
def most_cores(option: StageOption) -> np.ndarray:
    """``StageOption.core_bytes`` of every stage [starts, ends]; empty stages hold nothing."""
    return _largest(option.cores, len(option.weights))


def _largest(bytes_of_layers: tuple[float, ...], size: int) -> np.ndarray:
    table = np.zeros((size, size))
    for start, _ in enumerate(bytes_of_layers):
        table[start, start + 1 :] = np.maximum.accumulate(bytes_of_layers[start:])
    return table


def fitting(option: StageOption, num_in_flight: int) -> np.ndarray:
    """Whether a device holds stages, as ``StageOption.fits`` [starts, ends]; none if empty."""
    places = np.arange(len(option.weights))
    is_stage = places[None, :] > places[:, None]
    if option.memory_bytes is None:
        return is_stage
    once, each = _held(option)
    fits: np.ndarray = is_stage & (once + num_in_flight * each <= option.memory_bytes * ROOM)
    return fits


def fitting_with(
    options: tuple[StageOption, ...],
    unlike: tuple[tuple[int, int], ...],
    number: int,
    num_in_flight: int,
) -> np.ndarray:
    """Whether stages [starts, ends] may hold replicas of an option, alone or with another type."""
    fits, num_replicas = fitting(options[number], num_in_flight), options[number].num_replicas
    for smaller, larger in unlike:
        if number in (smaller, larger):
            # d - 1 of the larger type hold the most together: if these do not fit, no other number
            # does.
            both, most = (options[smaller], options[larger]), np.array([num_replicas - 1])
            fits = fits | unlike_shares(*both, most, np.s_[:, :], num_in_flight)[0][..., 0]
    return fits


@lru_cache(maxsize=512)
def _held(option: StageOption) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of stages once, and for each microbatch in flight [starts, ends]."""
    weights, stashed = np.array(option.weights), np.array(option.stashed)
    once = option.reserved_bytes + (weights[None, :] - weights[:, None])
    each = stashed[None, :] - stashed[:, None]
    if option.recompute == "full":
        # The stage is computed again whole, for one microbatch at a time; the others keep their
        # input.
        once = once + each
        each = np.broadcast_to(np.array(option.inputs)[:, None], once.shape)
    once = once + most_uneven(option) if option.uneven else once
    if option.units is not None:  # weights, and gradients
        once = once + 2 * option.units.gathered_bytes
    return once + most_cores(option) if option.cores else once, each


@dataclass(frozen=True, slots=True, eq=False)  # likewise
class OptionSpace:
    """All options at one microbatch size, and the sets of them that a stage may mix."""

    microbatch_size: int
    options: tuple[StageOption, ...]
    mixes: tuple[tuple[int, ...], ...]
    unlike: tuple[tuple[int, int], ...]
    """The mixes that may share the optimizer's state unlike: the type with less memory first."""
    least_seconds: tuple[float, ...]
    """Prefix sums of each layer's time on the option that is fastest for it."""
    least_worth: float
    """What one microbatch through all layers takes at least, device seconds of each type priced at
    one over what all layers take on that type."""
    worth_per_second: float
    """What the whole pool offers, at the same prices."""
    between: np.ndarray | None
    """[options, options, layers + 1] sending a microbatch over the link between two types; None
    where only the links of both types count."""
    layer_costs: np.ndarray
    """[types and degrees, 2, layers] each layer's seconds, and its worth."""
    least_bytes: float
    """What one replica of all layers holds at least, over all its devices."""

    def least_priced(self, seconds_per_worth: float) -> float:
        """The least sum over layers of seconds, with a price on what they are worth."""
        if not self.layer_costs.size:
            return 0.0
        seconds, worth = self.layer_costs[:, 0], self.layer_costs[:, 1]
        return float((seconds + seconds_per_worth * worth).min(axis=0).sum())


def microbatch_sizes(problem: ParallelProblem) -> list[int]:
    """The sizes that any type was timed at and that the batch is large enough for."""
    sizes = {t.microbatch_size for pool in problem.pools for t in pool.times}
    return sorted(size for size in sizes if size <= problem.global_batch_size)


class Spaces:
    """The options at each microbatch size, and for each number of replicas if these matter."""

    def __init__(self, problem: ParallelProblem) -> None:
        self._problem = problem
        self._known: dict[tuple[int, int], OptionSpace] = {}
        self.microbatch_sizes = tuple(microbatch_sizes(problem))

    def of(self, microbatch_size: int, num_replicas: int = 1) -> OptionSpace:
        """``space_of``, once for all that have the same options."""
        key = microbatch_size, num_replicas if self._problem.shard else 1
        if key not in self._known:
            self._known[key] = space_of(self._problem, *key)
        return self._known[key]

    @property
    def alone(self) -> list[OptionSpace]:
        """[microbatch sizes] the options of a single replica."""
        return [self.of(size) for size in self.microbatch_sizes]


def space_of(problem: ParallelProblem, microbatch_size: int, num_replicas: int = 1) -> OptionSpace:
    """The options of every type, and their mixes of at most ``MOST_TYPES`` types.

    Args:
        problem: Whose tables.
        microbatch_size: b, samples.
        num_replicas: d, of every stage; it matters only where they share something.
    """
    options = tuple(_options(problem, microbatch_size, num_replicas))
    mixes: list[tuple[int, ...]] = []
    # All replicas of a stage recompute alike.
    for recompute in problem.recompute:
        by_pool = [
            [
                number
                for number, option in enumerate(options)
                if option.pool == pool and option.recompute == recompute
            ]
            for pool in range(len(problem.pools))
        ]
        for size in range(1, MOST_TYPES + 1):
            for chosen in combinations(by_pool, size):
                mixes += [mix for mix in product(*chosen) if _may_mix(problem, options, mix)]
    layers = range(len(problem.layers))
    best = [min((o.seconds[i + 1] - o.seconds[i] for o in options), default=0.0) for i in layers]
    # [options][layers] bytes that one replica holds over all its devices; recomputed layers may
    # keep nothing.
    held = [
        o.tensor_parallel_size
        * (np.diff(o.weights) + (0.0 if o.recompute == "full" else np.diff(o.stashed)))
        for o in options
    ]
    rooms = [inf if o.memory_bytes is None else o.memory_bytes for o in options]
    both = [tuple(sorted(mix, key=rooms.__getitem__)) for mix in mixes if len(mix) == 2]
    is_shared = num_replicas > 1 and problem.state_bytes_per_weight_byte > 0
    unlike = tuple((a, b) for a, b in both if is_shared and rooms[a] < rooms[b])
    least_worth, worth_per_second, layer_costs = _worths(problem, options, unlike)
    return OptionSpace(
        microbatch_size=microbatch_size,
        options=options,
        mixes=tuple(mixes),
        unlike=unlike,
        least_seconds=tuple(_prefix(best)),
        least_worth=least_worth,
        worth_per_second=worth_per_second,
        between=_between(problem, options, microbatch_size),
        layer_costs=layer_costs,
        least_bytes=float(np.min(held, axis=0).sum()) if held else 0.0,
    )


def _between(
    problem: ParallelProblem, options: tuple[StageOption, ...], microbatch_size: int
) -> np.ndarray | None:
    """``OptionSpace.between``: as many copies as the side of more devices sends or receives."""
    if not problem.between:
        return None
    outputs = [0.0, *(float(each) * microbatch_size for each in problem.output_bytes)]
    found = np.zeros((len(options), len(options), len(outputs)))
    waits = 2 if problem.boundary_rule == "blocking" else 1
    for (i, one), (j, other) in product(enumerate(options), enumerate(options)):
        names = [problem.pools[option.pool].device_type for option in (one, other)]
        curve = problem.link_between(*names)
        if curve is not None:
            copies = max(one.tensor_parallel_size, other.tensor_parallel_size)
            copies = 1 if problem.boundary_rule != "whole" else copies
            found[i, j] = [waits * curve.seconds(copies * each) for each in outputs]
    return found


def _may_mix(
    problem: ParallelProblem, options: tuple[StageOption, ...], mix: tuple[int, ...]
) -> bool:
    """Whether replicas of these options may hold one stage: unlike degrees share no state."""
    degrees = {options[o].tensor_parallel_size for o in mix}
    return len(degrees) == 1 or problem.shard is None


def _worths(
    problem: ParallelProblem, options: tuple[StageOption, ...], unlike: tuple[tuple[int, int], ...]
) -> tuple[float, float, np.ndarray]:
    """``least_worth``, ``worth_per_second`` and ``layer_costs`` of a space."""
    kinds: dict[tuple[int, int], np.ndarray] = {}
    layers = np.arange(len(problem.layers))
    for number, option in enumerate(options):
        # A layer that does not even fit alone costs infinitely much.
        held = fitting_with(options, unlike, number, 1)[layers, layers + 1]
        seconds = np.where(held, np.diff(option.seconds), inf)
        key = option.pool, option.tensor_parallel_size
        kinds[key] = np.minimum(kinds.get(key, inf), seconds)
    offered, costs = 0.0, []
    for number, pool in enumerate(problem.pools):
        own = {degree: each for (of, degree), each in kinds.items() if of == number}
        if not own:
            continue
        # [layers] device seconds at each layer's best degree. A type's seconds are priced so that
        # all layers cost 1 on it.
        work = np.min([degree * each for degree, each in own.items()], axis=0)
        whole = float(work[np.isfinite(work)].sum())
        offered += pool.num_devices / whole if whole else 0.0
        costs += [(each, degree * each / (whole or 1.0)) for degree, each in own.items()]
    if not offered:
        return 0.0, 1.0, np.zeros((0, 2, len(problem.layers)))
    layer_costs = np.array(costs)
    least_worth = float(layer_costs[:, 1].min(axis=0).sum())
    layer_costs[:, 1][np.isinf(layer_costs[:, 1])] = 0.0  # its seconds are infinite too
    return least_worth, offered, layer_costs


def _options(
    problem: ParallelProblem, microbatch_size: int, num_replicas: int
) -> Iterator[StageOption]:
    for number, pool in enumerate(problem.pools):
        for times in pool.times:
            degree = times.tensor_parallel_size
            known = problem.sizes_of(degree) is not None
            if times.microbatch_size != microbatch_size or not known:
                continue
            if not pool.num_groups(degree):
                continue
            for recompute in problem.recompute:
                yield _option(
                    problem, number, pool, degree, microbatch_size, recompute, num_replicas
                )


def _option(
    problem: ParallelProblem,
    number: int,
    pool: ParallelPool,
    degree: int,
    microbatch_size: int,
    recompute: Recompute,
    num_replicas: int,
) -> StageOption:
    times = next(
        t
        for t in pool.times
        if (t.tensor_parallel_size, t.microbatch_size) == (degree, microbatch_size)
    )
    sizes = problem.sizes_of(degree)
    assert sizes is not None  # _options asks
    again = {"full": times.forward_seconds, "selective": times.core_seconds}.get(recompute, ())
    passes = [
        forward + backward + more
        for forward, backward, more in zip(
            times.forward_seconds,
            times.backward_seconds,
            again or [0.0] * len(problem.layers),
            strict=True,
        )
    ]
    is_selective = recompute == "selective"
    stashed = sizes.selective_bytes if is_selective else sizes.stashed_bytes
    outputs = [0.0, *(float(bytes_) * microbatch_size for bytes_ in problem.output_bytes)]
    curve = pool.link(degree)
    copies = 1 if problem.boundary_rule != "whole" else degree
    waits = 2 if problem.boundary_rule == "blocking" else 1
    sends = [waits * curve.seconds(copies * each) for each in outputs]
    # The gradient of a stage's input is as large as the output before it; Sailor takes the
    # stage's own first output.
    gradients = sends[1:] if problem.cost_rule == "sailor" else sends[:-1]
    state, d = problem.state_bytes_per_weight_byte, num_replicas
    # Replicas of one degree share the state, and each parameter is kept by one of them. Of a
    # stage's s bytes let m be its largest layer's. The fullest of d holds at most (s + (d - 1) m)
    # / d of them (Graham, 1969), and with a share f in place of 1/d at most f s + (d - 1) m / d:
    # who is furthest below its share gets the next parameter. So ``weights`` count s / d, and
    # ``uneven`` the rest. Cut parameters are shared exactly.
    held = problem.bytes_per_weight_byte - state + state / d
    updaters = d if problem.shard else 1
    is_cut = problem.shard == "all"
    updates = tuple(seconds / updaters for seconds in times.update_seconds)
    return StageOption(
        pool=number,
        tensor_parallel_size=degree,
        recompute=recompute,
        memory_bytes=pool.memory_bytes,
        seconds=tuple(_prefix(passes)),
        forward=tuple(_prefix(times.forward_seconds)),
        weights=tuple(_prefix(held * w for w in sizes.weight_bytes)),
        stashed=tuple(_prefix(microbatch_size * s for s in stashed)),
        inputs=tuple(outputs),
        output_seconds=tuple(sends),
        gradient_seconds=tuple(gradients),
        updates=tuple(_prefix(updates)),
        update_at=updates,
        reserved_bytes=problem.reserved_bytes,
        num_replicas=d,
        state_bytes=state,
        uneven=tuple(state * w * (d - 1) / d for w in sizes.weight_bytes)
        if state and not is_cut
        else (),
        shared=tuple(accumulate(sizes.weight_bytes, initial=0)) if state else (),
        cores=tuple(microbatch_size * c for c in sizes.core_bytes) if is_selective else (),
        units=shared_units(problem.layers, sizes.weight_bytes) if is_cut and d > 1 else None,
    )


def _prefix(values: "Iterator[float] | list[float] | tuple[float, ...]") -> Iterator[float]:
    return accumulate(values, initial=0.0)
