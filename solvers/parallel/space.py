"""The choices of a stage at one microbatch size, as tables over its first and last layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, product
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...planning.costs.parallel_stage import SharedUnits, shared_units
from ...schema.parallel import ParallelPool, ParallelProblem, Recompute

MOST_TYPES = 2  # device types in one stage; part of the space that solve() states
ROOM = 1.0 + 1e-12
"""Memory is compared up to rounding: a share of the optimizer's state may be no whole number."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
_KEPT: list[Any] = []


def kept_in_a_solve(maxsize: int) -> Callable[[_Function], _Function]:
    """Keep what a function has made of its arguments until ``forget_tables``.

    A table has an entry for every stage: 32 MB for 2,000 layers.
    """

    def keep(function: _Function) -> _Function:
        kept: Any = lru_cache(maxsize)(function)
        _KEPT.append(kept)
        return kept  # type: ignore[no-any-return]

    return keep


def forget_tables() -> None:
    """Drop all tables: options are known by identity, so no other solve finds any."""
    for kept in _KEPT:
        kept.cache_clear()


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tables are kept per option
class StageOption:
    """One device type at one degree and kind of recomputation: prefix sums over layers.

    A stage of layers ``start`` to ``end - 1`` takes ``seconds[end] - seconds[start]``; likewise
    ``weights`` (bytes that count in memory) and ``stashed`` (bytes of a microbatch). Of a sharded
    optimizer's state, ``weights`` holds 1/d, and a stage holds the most of its layers'
    ``uneven`` on top (``space_of``); each byte of ``shared`` (prefix sums of weights) has
    ``state_bytes``. With selective recomputation ``stashed`` is what is kept, and a backward pass
    holds the most of its layers' ``cores`` on top. Where weights are shared ``units`` says what is
    gathered and when, beside ``forward``, the prefix sums of forward passes. ``workspace`` is what
    each layer's passes take for a while, ``messages`` what each boundary keeps of a microbatch:
    what was received (``inputs``) and what is sent. While an update runs, a stage holds
    ``updating`` (prefix sums), where each byte of a share counts ``updated_bytes``. ``copies``
    [starts, ends] are weights of other stages' layers, of which each byte takes ``copied_bytes``,
    and ``update_ratio`` more in an update; of ``tied`` weights other stages have gradients too. At
    most ``waiting_bytes`` of first gradients wait to be summed: of all weights (prefix sums
    ``summed``) where there are other replicas, else of tied ones.

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
    updating: tuple[float, ...]
    updated_bytes: float
    messages: tuple[float, ...] = ()
    workspace: tuple[float, ...] = ()
    copies: np.ndarray | None = None
    tied: np.ndarray | None = None
    copied_bytes: float = 0.0
    update_ratio: float = 0.0
    waiting_bytes: int = 0
    summed: tuple[int, ...] = ()
    uneven: tuple[float, ...] = ()
    shared: tuple[int, ...] = ()
    cores: tuple[float, ...] = ()
    units: SharedUnits | None = None

    def stage_memory(self, start: int, end: int, num_in_flight: int) -> float:
        """Bytes on each device that holds the stage."""
        return float(held(self, num_in_flight, (start, end)))

    def memory_with(self, share: int, start: int, end: int, num_in_flight: int) -> float:
        """``stage_memory`` of a replica that keeps the state of ``share`` bytes of weights."""
        # Layers are dealt whole: a share may be up to (d - 1) / d of the largest layer too full.
        stage, whole = (start, end), float(_weights(self)[start, end])
        uneven = self.uneven_bytes(start, end) / self.state_bytes
        fewer = whole / self.num_replicas + uneven
        fewer -= min(share + uneven, whole) if share else 0.0
        passing = float(_passing(self, num_in_flight, stage)) - self.state_bytes * fewer
        return max(passing, float(_updating(self)[stage]) - self.updated_bytes * fewer)

    def share_rooms(self, stages: Any, num_in_flight: int) -> np.ndarray:
        """The most weights in bytes whose state a replica can keep: the ``share`` that fits."""
        whole: np.ndarray = _weights(self)[stages]
        # Negative where a stage does not even fit without a share.
        if self.memory_bytes is None:
            return whole
        uneven, most = most_uneven(self)[stages] / self.state_bytes, self.memory_bytes * ROOM
        passing = (_passing(self, num_in_flight, stages) - most) / self.state_bytes
        updating = (_updating(self)[stages] - most) / self.updated_bytes
        # [stages] bytes of weights whose state fits beside the rest; tables hold an equal share.
        free = whole / self.num_replicas + uneven - np.maximum(passing, updating)
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

    def fits(self, start: int, end: int, num_in_flight: int) -> bool:
        """Whether a device of the type can hold the stage."""
        return bool(fitting(self, num_in_flight)[start, end])

    def fits_before(self, end: int, num_in_flight: int) -> np.ndarray:
        """``fits`` of every stage before ``end`` [starts]."""
        found: np.ndarray = fitting(self, num_in_flight)[:end, end]
        return found


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
    assert smaller.memory_bytes is not None  # the other one has more
    # Where equal shares fit, unlike ones only make the largest share larger.
    is_full = held(smaller, num_in_flight, stages) > smaller.memory_bytes * ROOM
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


@kept_in_a_solve(512)
def _weights(option: StageOption) -> np.ndarray:
    """Bytes of weights whose state is shared [starts, ends]; negative where no stage is."""
    sums = np.array(option.shared)
    whole: np.ndarray = sums[None, :] - sums[:, None]
    return whole


@kept_in_a_solve(512)
def most_uneven(option: StageOption) -> np.ndarray:
    """``StageOption.uneven_bytes`` of every stage [starts, ends]; empty stages hold nothing."""
    return _largest(option.uneven, len(option.weights))


def _largest(bytes_of_layers: tuple[float, ...], size: int) -> np.ndarray:
    table = np.zeros((size, size))
    for start, _ in enumerate(bytes_of_layers):
        table[start, start + 1 :] = np.maximum.accumulate(bytes_of_layers[start:])
    return table


@kept_in_a_solve(1024)
def fitting(option: StageOption, num_in_flight: int) -> np.ndarray:
    """Whether a device holds stages, as ``StageOption.fits`` [starts, ends]; none if empty."""
    if option.memory_bytes is None:
        return _updatable(option)
    once, each = _terms(option)
    # Asked for each number in flight: as few passes over the table as can be.
    fits: np.ndarray = once + num_in_flight * each <= option.memory_bytes * ROOM
    fits &= _updatable(option)
    return fits


@kept_in_a_solve(512)
def _updatable(option: StageOption) -> np.ndarray:
    """Whether a device holds what stages [starts, ends] take in an update; none if empty."""
    places = np.arange(len(option.weights))
    is_stage: np.ndarray = places[None, :] > places[:, None]
    if option.memory_bytes is not None:
        is_stage &= _updating(option) <= option.memory_bytes * ROOM
    return is_stage


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


def held(option: StageOption, num_in_flight: int, stages: Any = np.s_[:, :]) -> np.ndarray:
    """Bytes in passes or in an update, whichever are more; of tables [starts, ends]."""
    passing = _passing(option, num_in_flight, stages)
    most: np.ndarray = np.maximum(passing, _updating(option)[stages])
    return most


def _passing(option: StageOption, num_in_flight: int, stages: Any) -> np.ndarray:
    once, each = _terms(option)
    most: np.ndarray = once[stages] + num_in_flight * each[stages]
    return most


@kept_in_a_solve(512)
def _terms(option: StageOption) -> tuple[np.ndarray, np.ndarray]:
    """Bytes in passes once, and for each microbatch in flight [starts, ends]."""
    parts = parts_of(option)
    once = option.reserved_bytes + parts.standing + parts.alone
    once = once + most_uneven(option) if option.uneven else once
    if option.units is not None:  # weights, and gradients
        once = once + 2 * option.units.gathered_bytes
    return once, parts.each


@kept_in_a_solve(512)
def _updating(option: StageOption) -> np.ndarray:
    """Bytes in an update [starts, ends], with equal shares."""
    most: np.ndarray = option.reserved_bytes + parts_of(option).updating
    if option.uneven:
        most = most + option.updated_bytes / option.state_bytes * most_uneven(option)
    return most


class StageBytes(NamedTuple):
    """Parts of what stages [starts, ends] hold beside what is reserved, uneven or gathered.

    ``standing`` for all microbatches, ``each`` for each in flight, ``alone`` for the one whose
    backward pass runs; and ``updating`` in an update.
    """

    standing: np.ndarray
    each: np.ndarray
    alone: np.ndarray
    updating: np.ndarray


@kept_in_a_solve(512)
def parts_of(option: StageOption) -> StageBytes:
    """The parts of an option's stages.

    A backward pass holds most at one of its layers: those behind it have freed what they kept, and
    it takes its workspace.

        layers that keep 3, 5, 4 and take 1, 1, 9 for a while: 12 + 9 at the last one
        layers that keep 3, 5, 4 and take 1, 6, 1: 8 + 6 at the second one
    """
    sums = (option.weights, option.updating, option.stashed)
    standing, updating, each = (np.array(x)[None, :] - np.array(x)[:, None] for x in sums)
    if option.copies is not None:
        standing = standing + option.copied_bytes * option.copies
        updating = updating + (option.copied_bytes + option.update_ratio) * option.copies
    passing = _most_at_a_layer(option) if option.workspace else each
    is_full = option.recompute == "full"
    # Recomputed whole for one microbatch at a time; the others keep their input.
    alone = passing if is_full else passing - each + _largest(option.cores, len(each))
    received = np.broadcast_to(np.array(option.inputs)[:, None], each.shape)
    each = received if is_full else each
    if option.messages:
        sent = np.array(option.messages)
        sent = sent[:, None] + sent[None, :]
        each = each + sent + (0.0 if is_full else received)
        # A gradient that was received, and one that is sent before the last one has arrived.
        alone = alone + sent
    if option.tied is not None:
        alone = alone + np.minimum(option.tied, option.waiting_bytes)
    return StageBytes(standing, each, alone, updating)


def _most_at_a_layer(option: StageOption) -> np.ndarray:
    """The most that one microbatch takes at a layer of its backward pass [starts, ends]."""
    stashed = np.array(option.stashed)
    found = np.zeros((len(stashed), len(stashed)))
    at_layer = stashed[1:] + np.array(option.workspace)
    for start, before in enumerate(stashed[:-1]):
        found[start, start + 1 :] = np.maximum.accumulate(at_layer[start:]) - before
    if not option.summed or not option.waiting_bytes:
        return found
    # Gradients of the layers behind wait, all or as many as may.
    sums, most = np.array(option.summed), option.waiting_bytes
    at_layer = at_layer - sums[1:]
    for start, before in enumerate(stashed[:-1]):
        waits = np.maximum.accumulate(at_layer[start:]) - before + sums[start + 1 :]
        found[start, start + 1 :] = np.minimum(found[start, start + 1 :] + most, waits)
    return found


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
        if not self._problem.shard:
            # First gradients wait to be summed where there are other replicas, however many.
            num_replicas = min(num_replicas, 2) if self._problem.waiting_bytes else 1
        key = microbatch_size, num_replicas
        if key not in self._known:
            self._known[key] = space_of(self._problem, *key)
        return self._known[key]

    @property
    def alone(self) -> list[OptionSpace]:
        """[microbatch sizes] the options of a single replica."""
        return [self.of(size) for size in self.microbatch_sizes]


def space_of(problem: ParallelProblem, microbatch_size: int, num_replicas: int = 1) -> OptionSpace:
    """The options of every type, and their mixes of at most ``MOST_TYPES`` types.

    ``num_replicas`` are those of every stage; they matter only where they share something.
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
                mixes += [
                    mix
                    for mix in product(*chosen)
                    # Unlike degrees share no state.
                    if problem.shard is None
                    or len({options[o].tensor_parallel_size for o in mix}) == 1
                ]
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
    # Gradients that others update are gone when an update begins.
    ratio, given = problem.update_ratio, float(problem.shard == "gradients")
    updating = held - given + (given + ratio) / updaters
    copied, tied = (
        tied_weights(problem.tied_to, sizes.tied_bytes) if problem.tied_to else (None, None)
    )
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
        updating=tuple(_prefix(updating * w for w in sizes.weight_bytes)),
        updated_bytes=state + given + ratio,
        messages=(*(each / degree for each in outputs[:-1]), 0.0) if times.workspace_bytes else (),
        workspace=tuple(map(float, times.workspace_bytes)),
        copies=copied,
        tied=tied,
        copied_bytes=problem.bytes_per_weight_byte,
        update_ratio=ratio,
        waiting_bytes=problem.waiting_bytes if times.workspace_bytes else 0,
        summed=tuple(accumulate(sizes.weight_bytes, initial=0)) if d > 1 and not is_cut else (),
        uneven=tuple(state * w * (d - 1) / d for w in sizes.weight_bytes)
        if state and not is_cut
        else (),
        shared=tuple(accumulate(sizes.weight_bytes, initial=0)) if state else (),
        cores=tuple(microbatch_size * c for c in sizes.core_bytes) if is_selective else (),
        units=shared_units(problem.layers, sizes.weight_bytes) if is_cut and d > 1 else None,
    )


@kept_in_a_solve(64)
def tied_weights(
    tied_to: tuple[tuple[int, ...], ...], tied_bytes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of weights of layers of several stages: copies, and all [starts, ends].

    A stage has a copy of weights that it uses and other stages' layers hold; those that it holds
    itself may be copied elsewhere. Weights of the same layers are one copy, of the layer that uses
    most of them.
    """
    size = len(tied_to) + 1
    starts, ends = np.arange(size)[:, None], np.arange(size)[None, :]
    copies, tied = np.zeros((size, size)), np.zeros((size, size))
    for holders in set(filter(None, tied_to)):
        users = [layer for layer, own in enumerate(tied_to) if own == holders]
        most = max(tied_bytes[layer] for layer in users)
        lacks = (min(holders) < starts) | (max(holders) >= ends)
        copy = np.zeros((size, size))
        for layer in users:
            uses = (starts <= layer) & (layer < ends)
            copy = np.maximum(copy, tied_bytes[layer] * (uses & lacks))
        everybody = [*holders, *users]
        has = np.any([(starts <= layer) & (layer < ends) for layer in everybody], axis=0)
        is_whole = (starts <= min(everybody)) & (max(everybody) < ends)
        copies, tied = copies + copy, tied + most * (has & ~is_whole)
    return copies, tied


def _prefix(values: "Iterator[float] | list[float] | tuple[float, ...]") -> Iterator[float]:
    return accumulate(values, initial=0.0)
