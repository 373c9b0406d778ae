"""The choices of a stage at one microbatch size, as tables over its first and last layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, product
from math import inf

from ...schema.parallel import ParallelPool, ParallelProblem, Recompute

MOST_TYPES = 2  # device types in one stage; part of the space that solve() states


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tables are kept per option
class Option:
    """One device type at one degree, with or without recomputation: prefix sums over layers.

    A stage of layers ``start`` to ``end - 1`` takes ``seconds[end] - seconds[start]``; likewise
    ``weights`` (bytes that count in memory) and ``stashed`` (bytes of a microbatch).
    ``output_seconds[end]`` is sending its output on, ``gradient_seconds[start]`` sending its
    input's gradient back, ``updates`` the prefix sums of the update and ``update_at`` each layer's.
    """

    pool: int
    tensor_parallel_size: int
    recompute: Recompute
    memory_bytes: int | None
    seconds: tuple[float, ...]
    weights: tuple[float, ...]
    stashed: tuple[float, ...]
    inputs: tuple[float, ...]
    output_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]
    updates: tuple[float, ...]
    update_at: tuple[float, ...]
    reserved_bytes: int

    def stage_memory(self, start: int, end: int, num_in_flight: int) -> float:
        """Bytes on each device that holds the stage."""
        stashed = self.stashed[end] - self.stashed[start]
        if self.recompute == "none":
            activations = num_in_flight * stashed
        else:
            activations = num_in_flight * self.inputs[start] + stashed
        return self.reserved_bytes + self.weights[end] - self.weights[start] + activations

    def fits(self, start: int, end: int, num_in_flight: int) -> bool:
        """Whether a device of the type can hold the stage."""
        if self.memory_bytes is None:
            return True
        return self.stage_memory(start, end, num_in_flight) <= self.memory_bytes


@dataclass(frozen=True, slots=True, eq=False)  # likewise
class Space:
    """All options at one microbatch size, and the sets of them that a stage may mix."""

    microbatch_size: int
    options: tuple[Option, ...]
    mixes: tuple[tuple[int, ...], ...]
    least_seconds: tuple[float, ...]
    """Prefix sums of each layer's time on the option that is fastest for it."""
    least_worth: float
    """What one microbatch through all layers takes at least, device seconds of each type priced at
    one over what all layers take on that type."""
    worth_per_second: float
    """What the whole pool offers, at the same prices."""


def microbatch_sizes(problem: ParallelProblem) -> list[int]:
    """Those that any type was timed at and that the batch is large enough for."""
    sizes = {t.microbatch_size for pool in problem.pools for t in pool.times}
    return sorted(size for size in sizes if size <= problem.global_batch_size)


def replica_counts(batch: int, microbatch_size: int, most: int) -> Iterator[int]:
    """Numbers of replicas worth trying: for each number of microbatches the fewest replicas.

    More replicas that run as many microbatches take more devices and a longer all-reduce.
    """
    units = -(-batch // microbatch_size)
    seen = set()
    for replicas in range(1, min(most, units) + 1):
        rounds = -(-units // replicas)
        if rounds not in seen:
            seen.add(rounds)
            yield replicas


def space_of(problem: ParallelProblem, microbatch_size: int) -> Space:
    """The options of every type, and their mixes of at most ``MOST_TYPES`` types.

    Args:
        problem: Whose tables.
        microbatch_size: b, samples.
    """
    options = tuple(_options(problem, microbatch_size))
    mixes: list[tuple[int, ...]] = []
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
                mixes += list(product(*chosen))
    layers = range(len(problem.layers))
    best = [min((o.seconds[i + 1] - o.seconds[i] for o in options), default=0.0) for i in layers]
    least_worth, worth_per_second = _worths(problem, options)
    return Space(
        microbatch_size=microbatch_size,
        options=options,
        mixes=tuple(mixes),
        least_seconds=tuple(_prefix(best)),
        least_worth=least_worth,
        worth_per_second=worth_per_second,
    )


def _worths(problem: ParallelProblem, options: tuple[Option, ...]) -> tuple[float, float]:
    """``least_worth`` and ``worth_per_second`` of a space."""
    layers, offered = range(len(problem.layers)), 0.0
    least = [inf] * len(problem.layers)
    for number, pool in enumerate(problem.pools):
        own = [o for o in options if o.pool == number]
        work = [
            min(
                ((o.seconds[i + 1] - o.seconds[i]) * o.tensor_parallel_size for o in own),
                default=inf,
            )
            for i in layers
        ]
        whole = sum(work)
        if 0.0 < whole < inf:
            offered += pool.num_devices / whole
            least = [min(old, new / whole) for old, new in zip(least, work, strict=True)]
    return (sum(least), offered) if offered else (0.0, 1.0)


def _options(problem: ParallelProblem, microbatch_size: int) -> Iterator[Option]:
    for number, pool in enumerate(problem.pools):
        for times in pool.times:
            degree = times.tensor_parallel_size
            known = problem.sizes_of(degree) is not None
            divides = pool.devices_per_server % degree == 0
            if times.microbatch_size != microbatch_size or not known or not divides:
                continue
            if degree > pool.num_devices:
                continue
            for recompute in problem.recompute:
                yield _option(problem, number, pool, degree, microbatch_size, recompute)


def _option(
    problem: ParallelProblem,
    number: int,
    pool: ParallelPool,
    degree: int,
    microbatch_size: int,
    recompute: Recompute,
) -> Option:
    times = next(
        t
        for t in pool.times
        if (t.tensor_parallel_size, t.microbatch_size) == (degree, microbatch_size)
    )
    sizes = problem.sizes_of(degree)
    assert sizes is not None  # _options asks
    again = 1.0 if recompute == "full" else 0.0
    passes = [
        (1.0 + again) * forward + backward
        for forward, backward in zip(times.forward_seconds, times.backward_seconds, strict=True)
    ]
    outputs = [0.0, *(float(bytes_) * microbatch_size for bytes_ in problem.output_bytes)]
    curve = pool.link(degree)
    copies = 1 if problem.boundary_rule == "scattered" else degree
    waits = 2 if problem.boundary_rule == "blocking" else 1
    sends = [waits * curve.seconds(copies * each) for each in outputs]
    # The gradient of a stage's input is as large as the output before it; Sailor takes the
    # stage's own first output.
    gradients = sends[1:] if problem.cost_rule == "sailor" else sends[:-1]
    return Option(
        pool=number,
        tensor_parallel_size=degree,
        recompute=recompute,
        memory_bytes=pool.memory_bytes,
        seconds=tuple(_prefix(passes)),
        weights=tuple(_prefix(problem.bytes_per_weight_byte * w for w in sizes.weight_bytes)),
        stashed=tuple(_prefix(microbatch_size * s for s in sizes.stashed_bytes)),
        inputs=tuple(outputs),
        output_seconds=tuple(sends),
        gradient_seconds=tuple(gradients),
        updates=tuple(_prefix(times.update_seconds)),
        update_at=times.update_seconds,
        reserved_bytes=problem.reserved_bytes,
    )


def _prefix(values: "Iterator[float] | list[float] | tuple[float, ...]") -> Iterator[float]:
    return accumulate(values, initial=0.0)
