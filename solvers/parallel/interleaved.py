"""Interleaved 1F1B on one device type and tensor-parallel degree (thesis 4.2.2).

Each of p positions holds v chunks of contiguous layers, chunk j on position j mod p. A step takes
(v m + p - 1) passes of the slowest chunk, and the messages of one microbatch. For every p, v,
degree and number of replicas, a dynamic program finds the cut whose slowest chunk is the fastest.
What the update and the all-reduce of a position take at least is a mean over positions, and
messages are at least the shortest ones; so a small gap may be left where chunks are unlike. Where
cuts are few, as in small models, all that may be faster are timed, so the plan is the fastest.

    4 layers of 1 s, p = 2, m = 4: v = 2 makes chunks of 1 s, (8 + 1) x 1 = 9 s
    v = 1 makes chunks of 2 s, (4 + 1) x 2 = 10 s

O(layers^2 x chunks) for each p, v, degree and number of replicas, and O(chunks) for each cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb, inf

import numpy as np

from ...planning.costs.parallel_stage import (
    SharedUnits,
    bucketed_ring_seconds,
    gather_ratio,
    interleaved_step_seconds,
    ring_rounds,
)
from ...planning.schedules.closed_forms import interleaved_in_flight
from ...schema.errors import InfeasibleError
from ...schema.parallel import LinkCurve, ParallelProblem
from ..effort import Effort, OutOfTimeError
from .bound import stage_seconds
from .gradients import ring_link, transfers_of, waits_over
from .space import ROOM, Spaces, StageOption, kept_in_a_solve, parts_of

_MOST_NODES = 50_000
"""Nodes of all searches for cuts that fit: about a second."""
_MOST_CUTS = 4_000
"""Cuts that are timed one by one, of all shapes: about a second."""


@dataclass(frozen=True, slots=True)
class InterleavedShape:
    """The degrees of an interleaved plan: p, v, d and m, and the option of every stage."""

    option: StageOption
    link: LinkCurve
    """The slowest that replicas cross."""
    microbatch_size: int
    num_positions: int
    num_model_chunks: int
    num_replicas: int
    num_microbatches: int

    @property
    def passes(self) -> int:
        """Passes of a chunk that a step takes."""
        return self.num_model_chunks * self.num_microbatches + self.num_positions - 1

    @property
    def num_chunks(self) -> int:
        """Chunks of all positions."""
        return self.num_model_chunks * self.num_positions


@dataclass(frozen=True, slots=True)
class Interleaved:
    """A whole interleaved plan: chunk j holds layers ``cuts[j]`` to ``cuts[j + 1] - 1``.

    ``memory_bytes`` [positions], ``updates`` and ``reduces`` [chunks], all of one device.
    """

    step_seconds: float
    shape: InterleavedShape
    cuts: tuple[int, ...]
    memory_bytes: tuple[float, ...]
    updates: tuple[float, ...]
    reduces: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TriedShape:
    """A shape that was tried, and seconds that no cut of it is faster than."""

    shape: InterleavedShape
    least_seconds: float


def search(
    problem: ParallelProblem, spaces: Spaces, effort: Effort, least_replicas: int = 1
) -> tuple[Interleaved | None, list[TriedShape], float]:
    """The best interleaved plan found, and the shapes that were tried.

    No other shape is faster than that plan, unless ``effort`` ended the search. O(N^2 p v) vector
    operations for N layers and each degree.

    Returns:
        The plan, the shapes, and seconds that no shape left untried is faster than.
    """
    by_bound = sorted(
        (
            (_least_seconds(problem, shape, None), shape)
            for shape in _shapes(problem, spaces)
            if shape.num_replicas >= least_replicas
        ),
        key=lambda each: each[0],
    )
    best: Interleaved | None = None
    limit, tried = inf, list[TriedShape]()
    work = _Work(_MOST_NODES, _MOST_CUTS, effort)
    for seconds, shape in by_bound:
        if seconds >= limit:
            break
        try:
            slowest = _slowest_chunks(shape, effort)
            least = _least_seconds(problem, shape, slowest)
            found = _planned(problem, shape, slowest, limit, work) if least < limit else None
        except OutOfTimeError:
            return best, tried, seconds
        tried.append(TriedShape(shape, least))
        if found is not None and found.step_seconds < limit:
            best, limit = found, found.step_seconds
    return best, tried, inf


def refusal(problem: ParallelProblem, spaces: Spaces) -> InfeasibleError:
    """Why only interleaved pipelines were asked for and none was found, and the nearest that go."""
    chunks, size = min(v for v in problem.num_model_chunks if v > 1), len(problem.layers)
    asked = " or ".join(map(str, problem.num_model_chunks))
    said = f"no interleaved pipeline with {asked} chunks a device is possible: "
    if 2 * chunks > size:
        most = size // 2
        return InfeasibleError(
            f"{said}{size} layers cannot fill {chunks} chunks on each of 2 devices",
            hint=f"ask for at most {most}" if most > 1 else "ask for 1, which is 1F1B",
        )
    groups = max(
        problem.pools[option.pool].num_groups(option.tensor_parallel_size)
        for space in spaces.alone
        for option in space.options
    )
    if groups < 2:
        return InfeasibleError(
            f"{said}it needs 2 devices of one type", hint="ask for 1, which is 1F1B"
        )
    units = [-(-problem.global_batch_size // b) for b in spaces.microbatch_sizes]
    if not any(each % p == 0 for each in units for p in range(2, groups + 1)):
        b, each = spaces.microbatch_sizes[0], units[0]
        batches = [b * number for number in (each - 1, each + 1) if number > 1]
        return InfeasibleError(
            f"{said}{each} microbatch(es) of {b} do not divide over 2 to {groups} positions",
            hint=f"the nearest batches that do: {' and '.join(map(str, batches))}",
        )
    return InfeasibleError(
        f"no interleaved pipeline with {asked} chunks a device was found that fits the memory",
        hint="leave the number of chunks out to try 1F1B too, or add devices",
    )


def least_seconds(problem: ParallelProblem, tried: list[TriedShape], below: float) -> float:
    """Seconds that no interleaved plan is faster than; at most ``below``."""
    least = below
    for one in tried:
        if one.least_seconds < least and not _is_too_full(problem, one.shape, below):
            least = one.least_seconds
    return least


def _is_too_full(problem: ParallelProblem, shape: InterleavedShape, below: float) -> bool:
    """Whether a plan under ``below`` seconds overfills a device, however layers are cut."""
    option, p, v = shape.option, shape.num_positions, shape.num_model_chunks
    if option.memory_bytes is None:
        return False
    # No chunk may take longer than ``cap``, so few positions cannot hold little: what the first q
    # of them hold at least, on average, must fit.
    others = _least_seconds(problem, shape, 0.0)
    cap, whole = (below - others) / shape.passes, option.seconds[-1]
    # A chunk of x seconds holds at least x times the least bytes of any layer by second.
    weights = _least_ratio(option.weights, option.seconds)
    stashed = _least_ratio(option.stashed, option.seconds) if option.recompute != "full" else 0.0
    inputs = min(option.inputs[1:-1]) if option.recompute == "full" else 0.0
    held, bytes_per_second = 0.0, list[float]()
    for q in range(1, p + 1):
        in_flight = max(
            interleaved_in_flight(p, shape.num_microbatches, v, q - 1),
            key=lambda one: sum(one),
        )
        bytes_per_second += [weights + number * stashed for number in in_flight]
        held += inputs * (sum(in_flight) - (in_flight[0] if q == 1 else 0))
        # The other positions take at most their chunks at the cap; the rest lies on the first q.
        left, total = whole - (p - q) * v * cap, held
        # In the chunks that hold the fewest bytes by second first: less is not possible.
        for each in sorted(bytes_per_second):
            total += each * min(max(left, 0.0), cap)
            left -= cap
        if option.reserved_bytes + total / q > option.memory_bytes * (1 + 1e-9):
            return True
    return False


def _least_ratio(held: tuple[float, ...], seconds: tuple[float, ...]) -> float:
    """The least of any layer's bytes over its seconds, from prefix sums."""
    bytes_of = (b - a for a, b in pairwise(held))
    seconds_of = (b - a for a, b in pairwise(seconds))
    return min((b / s for b, s in zip(bytes_of, seconds_of, strict=True) if s > 0), default=0.0)


def _shapes(problem: ParallelProblem, spaces: Spaces) -> Iterator[InterleavedShape]:
    """Every shape whose microbatches divide over replicas and, on each, over positions."""
    size = len(problem.layers)
    chunks = [v for v in problem.num_model_chunks if v > 1]
    if not problem.hides_messages:
        return
    for microbatch_size in spaces.microbatch_sizes:
        units = -(-problem.global_batch_size // microbatch_size)
        for number, option in enumerate(spaces.of(microbatch_size).options):
            groups = problem.pools[option.pool].num_groups(option.tensor_parallel_size)
            # A pipeline has two positions at least.
            for replicas in range(1, min(groups // 2, units) + 1):
                if units % replicas:
                    continue
                each = units // replicas
                shared = spaces.of(microbatch_size, replicas).options[number]
                pool, degree = problem.pools[option.pool], option.tensor_parallel_size
                link = ring_link(pool, degree, replicas)
                for v in chunks:
                    most = min(groups // replicas, each, (problem.most_stages or size) // v)
                    for positions in range(2, most + 1):
                        shape = InterleavedShape(
                            shared, link, microbatch_size, positions, v, replicas, each
                        )
                        if each % positions == 0 and _may_fit(shape):
                            yield shape


def _may_fit(shape: InterleavedShape) -> bool:
    """Whether there are layers for every chunk, and room for weights and one microbatch."""
    option = shape.option
    if shape.num_chunks >= len(option.seconds):
        return False
    # What is computed again is one chunk's at a time.
    stashed = option.stashed[-1] / (shape.num_model_chunks if option.recompute == "full" else 1)
    held = (option.weights[-1] + stashed) / shape.num_positions
    return option.memory_bytes is None or option.reserved_bytes + held <= option.memory_bytes * ROOM


def _least_seconds(
    problem: ParallelProblem, shape: InterleavedShape, slowest: float | None
) -> float:
    """Seconds that no cut of a shape is faster than; ``slowest`` is its slowest chunk if known."""
    option, chunks = shape.option, shape.num_chunks
    if slowest is None:
        # The slowest chunk holds a whole layer, and has at least the mean.
        layers = (b - a for a, b in pairwise(option.seconds))
        slowest = max(option.seconds[-1] / chunks, *layers)
    # Each cut sends an output there and a gradient back; at least over the cheapest cuts.
    messages = 2 * sum(sorted(option.output_seconds[1:-1])[: chunks - 1])
    update = option.updates[-1] / shape.num_positions
    reduce = _least_reduce(problem, shape)
    update += gather_ratio(problem) * reduce
    return shape.passes * slowest + messages + update + reduce


def _least_reduce(problem: ParallelProblem, shape: InterleavedShape) -> float:
    """What the fullest position's all-reduce takes at least: the mean's bytes, without latency."""
    coefficients, replicas = shape.link.coefficients, shape.num_replicas
    if len(coefficients) > 1:
        return 0.0  # a curve's rate may have any maximum
    if (units := shape.option.units) is not None:  # what is in no repeated layer, there and back
        return 2 * float(units.rest_bytes[0, -1]) / shape.num_positions / coefficients[0]
    mean = float(_gradients(problem, shape)[-1]) / shape.num_positions
    return ring_rounds(problem) * (replicas - 1) * mean / replicas / coefficients[0]


def _gradients(problem: ParallelProblem, shape: InterleavedShape) -> np.ndarray:
    """Prefix sums over layers of the bytes of gradients on one device."""
    sizes = problem.sizes_of(shape.option.tensor_parallel_size)
    assert sizes is not None  # an option has sizes of its degree
    return np.concatenate([[0.0], np.cumsum(np.array(sizes.weight_bytes, dtype=float))])


def _slowest_chunks(shape: InterleavedShape, effort: Effort) -> float:
    """The least time of the slowest chunk over all cuts into so many chunks."""
    # Ascending: each call finds the one below in the cache, so recursion is one deep.
    for fewer in range(1, shape.num_chunks):
        effort.check()
        _least_maxima(shape.option, shape.link, fewer)
    return float(_least_maxima(shape.option, shape.link, shape.num_chunks)[-1])


@kept_in_a_solve(128)
def _chunk_seconds(option: StageOption, link: LinkCurve) -> np.ndarray:
    """[starts, ends] a chunk's passes, and what of a message is longer than a third of them.

    Where replicas share weights, passes last as long as the transfers over ``link`` beside them.
    """
    passes = stage_seconds(option, hides_messages=True)
    passes = passes if option.units is None else passes + waits_over(option, (link,))
    sent = np.array([*option.output_seconds[:-1], 0.0])
    back = np.array([0.0, *option.gradient_seconds[1:], 0.0])
    # Messages of up to a forward pass, a third of the passes, are hidden: by the timer of
    # schedules to the last digit for equal chunks. Longer ones are counted up to 13 % of a step
    # too long.
    more = np.maximum(sent[None, :], back[:, None]) - passes / 3
    found: np.ndarray = passes + np.maximum(more, 0.0)
    return found


@kept_in_a_solve(4096)
def _least_maxima(option: StageOption, link: LinkCurve, num_chunks: int) -> np.ndarray:
    """[ends] likewise for layers 0 to ``end - 1``."""
    seconds = _chunk_seconds(option, link)
    if num_chunks == 1:
        # A chunk has a layer at least.
        first: np.ndarray = np.where(np.arange(len(seconds)) == 0, inf, seconds[0])
        return first
    before = _least_maxima(option, link, num_chunks - 1)
    least: np.ndarray = np.maximum(before[:, None], seconds).min(axis=0)
    return least


def _planned(
    problem: ParallelProblem, shape: InterleavedShape, slowest: float, limit: float, work: "_Work"
) -> Interleaved | None:
    """The fastest plan of few cuts, under ``limit`` seconds; of many one of chunks most alike.

    None where no cut found fits, or none is as fast.
    """
    option = shape.option
    if comb(len(option.seconds) - 2, shape.num_chunks - 1) <= work.cuts:
        return _fastest_cut(problem, shape, limit, work)
    cuts: tuple[int, ...] | None = _even_cuts(shape, slowest, work.effort)
    assert cuts is not None
    memory = _memories(shape, cuts)
    if option.memory_bytes is not None and max(memory) > option.memory_bytes * ROOM:
        # The even cut does not fit, so the slowest chunk is as fast as a search for cuts that fit
        # finds.
        cuts = _fastest_that_fits(shape, work)
        if cuts is None:
            return None
        memory = _memories(shape, cuts)
    return _timed(problem, shape, cuts, memory)


def _fastest_cut(
    problem: ParallelProblem, shape: InterleavedShape, limit: float, work: "_Work"
) -> Interleaved | None:
    """The fastest cut that fits under ``limit`` seconds, of all."""
    option, chunks, best = shape.option, shape.num_chunks, None
    last, seconds = len(option.seconds) - 1, _chunk_seconds(option, shape.link)
    inner = np.array([*combinations(range(1, last), chunks - 1)], dtype=int)
    ends = np.ones((len(inner), 1), dtype=int)
    cuts = np.hstack([0 * ends, inner, last * ends])  # [cuts, chunks + 1]
    passes = shape.passes * seconds[cuts[:, :-1], cuts[:, 1:]].max(axis=1)
    least = passes + 2 * np.array(option.output_seconds)[inner].sum(axis=1)
    room = inf if option.memory_bytes is None else option.memory_bytes * ROOM
    # What updates and reductions take is counted for cuts whose passes leave them room.
    for place in np.argsort(least, kind="stable"):
        if least[place] >= limit:
            break
        work.cuts -= 1
        work.effort.check()
        found = _timed(problem, shape, tuple(cuts[place].tolist()), ())
        if found.step_seconds < limit and max(memory := _memories(shape, found.cuts)) <= room:
            best, limit = replace(found, memory_bytes=memory), found.step_seconds
    return best


def _timed(
    problem: ParallelProblem,
    shape: InterleavedShape,
    cuts: tuple[int, ...],
    memory: tuple[float, ...],
) -> Interleaved:
    """The plan of a cut, whose positions hold so many bytes."""
    option, positions = shape.option, shape.num_positions
    seconds = _chunk_seconds(option, shape.link)
    slowest = max(float(seconds[start, end]) for start, end in pairwise(cuts))
    # The weights of chunks of a device are updated and reduced together.
    updates = tuple(option.updates[end] - option.updates[start] for start, end in pairwise(cuts))
    reduces = tuple(_reduces(problem, shape, cuts))
    ratio = gather_ratio(problem)
    updates = tuple(u + ratio * r for u, r in zip(updates, reduces, strict=True))
    step = interleaved_step_seconds(
        shape.num_microbatches,
        positions,
        shape.num_model_chunks,
        slowest,
        [sum(updates[position::positions]) for position in range(positions)],
        [sum(reduces[position::positions]) for position in range(positions)],
        2 * sum(option.output_seconds[cut] for cut in cuts[1:-1]),
    )
    return Interleaved(step, shape, cuts, memory, updates, reduces)


def _reduces(
    problem: ParallelProblem, shape: InterleavedShape, cuts: tuple[int, ...]
) -> Iterator[float]:
    """[chunks] the seconds in which replicas exchange gradients, and shared weights once a step."""
    units, replicas, gradients = shape.option.units, shape.num_replicas, _gradients(problem, shape)
    for number, chunk in enumerate(pairwise(cuts)):
        if units is None:
            own = float(gradients[chunk[1]] - gradients[chunk[0]])
            ring = bucketed_ring_seconds(own, replicas, shape.link, problem.bucket_bytes)
            yield ring_rounds(problem) / 2 * ring
            continue
        _, largest, once = transfers_of(shape.option, (shape.link,))
        # A step ends with the backward pass of a position's first chunk. The last reduction of the
        # others hides behind it.
        hidden = largest[chunk] if number >= shape.num_positions else 0.0
        yield float(once[chunk] - hidden)


def _even_cuts(shape: InterleavedShape, slowest: float, effort: Effort) -> tuple[int, ...]:
    """The cuts with the least sum of squared times, no chunk slower than the cap."""
    seconds = _chunk_seconds(shape.option, shape.link)
    # [starts, ends] the sum of squares is least where chunks are alike.
    squares = np.where(seconds <= slowest * (1 + 1e-12), np.square(seconds), inf)
    least = np.where(np.arange(len(seconds)) == 0, 0.0, inf)
    parents = []
    for _ in range(shape.num_chunks):
        effort.check()
        reached = least[:, None] + squares
        parents.append(reached.argmin(axis=0))
        least = reached.min(axis=0)
    cuts = [len(seconds) - 1]
    for parent in reversed(parents):
        cuts.append(int(parent[cuts[-1]]))
    return tuple(reversed(cuts))


@dataclass(slots=True)
class _Work:
    """What may still be done over all shapes.

    ``nodes`` that searches for cuts that fit may visit, and ``cuts`` that may be timed; when to
    stop.
    """

    nodes: int
    cuts: int
    effort: Effort


def _fastest_that_fits(shape: InterleavedShape, work: _Work) -> tuple[int, ...] | None:
    """The cuts that fit whose slowest chunk is the fastest, by bisection over chunks' times."""
    # A larger cap allows all cuts of a smaller one, so bisection over chunks' times is right.
    # Where the work is spent, a cut that fits may be missed.
    caps = np.unique(_chunk_seconds(shape.option, shape.link))
    caps = caps[np.isfinite(caps)]
    # Without a cap first: if nothing fits then, nothing does.
    found = _that_fit(shape, inf, work)
    low, high = 0, len(caps) - 1
    while found is not None and low < high:
        middle = (low + high) // 2
        faster = _that_fit(shape, float(caps[middle]), work)
        if faster is None:
            low = middle + 1
        else:
            found, high = faster, middle
    return found


def _that_fit(shape: InterleavedShape, cap: float, work: _Work) -> tuple[int, ...] | None:
    """Cuts that fit, no chunk slower than the cap: depth first, chunk by chunk."""
    option, chunks = shape.option, shape.num_chunks
    seconds, size = _chunk_seconds(option, shape.link), len(option.seconds) - 1
    room = (option.memory_bytes or inf) * ROOM

    def next_ends(cuts: list[int]) -> Iterator[int]:
        """Ends of the next chunk, those nearest to an equal share of the layers first."""
        start, left = cuts[-1], chunks - len(cuts) + 1
        ends = range(start + 1, size - left + 2) if left > 1 else (size,)
        aim = start + (size - start) / left
        return iter(sorted(ends, key=lambda each: abs(each - aim)))

    cuts = [0]
    open_ends = [next_ends(cuts)]
    while open_ends and work.nodes > 0:
        # Depth first, chunk by chunk: the iterator of each open chunk tells its next end.
        end = next(open_ends[-1], None)
        if end is None:
            open_ends.pop()
            cuts.pop()
            continue
        if seconds[cuts[-1], end] > cap * (1 + 1e-12):
            continue
        work.nodes -= 1
        work.effort.check()
        position = (len(cuts) - 1) % shape.num_positions
        cuts.append(end)
        # What a position holds only grows with more chunks, so the branch ends here.
        if _memory(shape, tuple(cuts), position) > room:
            cuts.pop()
        elif len(cuts) > chunks:
            return tuple(cuts)
        else:
            open_ends.append(next_ends(cuts))
    return None


def _memories(shape: InterleavedShape, cuts: tuple[int, ...]) -> tuple[float, ...]:
    """[positions] bytes on each device of a position."""
    return tuple(_memory(shape, cuts, position) for position in range(shape.num_positions))


def _gathered_bytes(units: SharedUnits, chunks: list[tuple[int, int]]) -> float:
    """Bytes that are whole at a time: what is in no repeated layer, and the two largest of all."""
    rest = sum(units.rest_bytes[chunk] for chunk in chunks)
    first = [units.largest_bytes[chunk] for chunk in chunks]
    second = [
        units.gathered_bytes[chunk] - units.rest_bytes[chunk] - largest
        for chunk, largest in zip(chunks, first, strict=True)
    ]
    return float(rest + sum(sorted(first + second)[-2:]))


def _memory(shape: InterleavedShape, cuts: tuple[int, ...], position: int) -> float:
    """Bytes on each device of a position: all its chunks, at the schedule's fullest moment."""
    option, p, v = shape.option, shape.num_positions, shape.num_model_chunks
    # ``cuts`` may still be growing: chunks that are not cut yet hold nothing.
    own = [(cuts[place], cuts[place + 1]) for place in range(position, len(cuts) - 1, p)]
    parts, uneven = parts_of(option), max(option.uneven_bytes(*chunk) for chunk in own)
    in_flight = interleaved_in_flight(p, shape.num_microbatches, v, position)
    each = [parts.each[chunk] for chunk in own]
    held = max(sum(n * kept for n, kept in zip(one, each, strict=False)) for one in in_flight)
    passing = sum(parts.standing[chunk] for chunk in own) + uneven + held
    passing += max(parts.alone[chunk] for chunk in own)
    if option.units is not None:  # weights, and gradients
        passing += 2 * _gathered_bytes(option.units, own)
    updating = sum(parts.updating[chunk] for chunk in own)
    updating += option.updated_bytes / (option.state_bytes or 1.0) * uneven
    return float(option.reserved_bytes + max(passing, updating))
