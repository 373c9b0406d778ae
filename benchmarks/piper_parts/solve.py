"""Plan pipelines that are always full: Piper's problem (NeurIPS'21), by a search on the bottleneck.

Piper's dynamic program is over (downset of layers, devices, replicas of later stages). Here the
slowest stage is capped instead. Under a cap, a stage's number of replicas is the least that will
do: more take devices and put more microbatches in flight before them, and help nothing else. So for
each downset only those pairs (devices, replicas) are kept that no other is at most in both.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
from piper_parts.problem import SteadyPlan, SteadyProblem, SteadyStage

from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.plan import Proof

_MOST_DOWNSETS = 5_000
_CLOSE = 1e-3  # relative; from there on every better plan is looked for
_NEAR = 1e-9
_FIRST_TRY = 1.2  # times the bound
_SHORTFALLS = (_NEAR, 3e-3, 1e-2, 3e-2, 0.1, 0.3)  # below the best plan, tried for a bound
_METHOD = "search on the slowest stage; under a cap, devices and replicas by downset"

_ORDERED = f"layers in the order of their numbers, as there are more than {_MOST_DOWNSETS} downsets"


def solve(problem: SteadyProblem) -> SteadyPlan:
    """The plan whose slowest stage takes least.

    Stages are differences of downsets, so all orders of the layers' graph count. Which layers of a
    stage take their slower and smaller choice (recomputation) is a knapsack problem. It is solved
    greedily and bounded by its linear program, and exactly where the cap lies between the two. A
    gap is left only where that takes too many partial choices, or where a graph has too many
    downsets. Its layers are then cut in one order, that of their numbers where edges allow it. The
    bound holds for every order: it is what all devices can compute. Deterministic.

    Args:
        problem: Layers, links and devices.

    Returns:
        A plan that ``checks.steady.check`` accepts for ``problem``.

    Raises:
        InfeasibleError: No plan fits the memory and the devices, or none of the one order does.
        ProblemError: The layers are no acyclic graph.
    """
    search = _Search(problem)
    low = search.least_seconds
    best = search.under(_FIRST_TRY * low) or search.under(search.most_seconds)
    if best is None:
        raise InfeasibleError(
            f"no plan fits {problem.num_devices} devices of {problem.memory_bytes / 2**30:.3g} GiB"
            + (f" ({_ORDERED})" if search.is_in_order else ""),
            hint="add devices or memory, or allow recomputation",
        )
    while low < best.seconds * (1 - _CLOSE):
        middle = max(sqrt(low * best.seconds), 1e-3 * best.seconds)
        found = search.under(middle)
        if found is None:
            low = middle
        else:
            best = found
    while best.seconds > 0 and (found := search.under(best.seconds * (1 - _NEAR))) is not None:
        best = found
    is_open = search.is_inexact or search.is_in_order
    bound = search.least_seconds if is_open else best.seconds
    for shortfall in _SHORTFALLS if is_open and not search.is_in_order else ():
        cap = best.seconds * (1 - shortfall)
        if search.under(cap, is_bound=True) is None:
            bound = max(bound, cap)
            break
    return _plan(problem, search, best, bound)


class Packed(NamedTuple):
    """Layers that take their second choice.

    ``more_seconds`` is what they take more than with the first, ``least_more_seconds`` what every
    choice takes more at least. ``is_exact`` says whether no choice takes less than
    ``more_seconds``; None until ``exact`` has looked, False where it had too many to look at.
    """

    more_seconds: float
    least_more_seconds: float
    slower: tuple[int, ...]
    is_exact: bool | None = None


class _Stage(NamedTuple):
    """Layers between two downsets, by number, on replicas.

    ``slower`` are the places, among its layers in rising order, of those that take their second
    choice.
    """

    inner: int
    outer: int
    degree: int
    num_replicas: int
    slower: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Stages from the first to the last, and the slowest one's seconds a sample."""

    seconds: float
    stages: tuple[_Stage, ...]


class _Label(NamedTuple):
    """Later stages that end where a downset ends: devices and replicas, and how they came about."""

    num_devices: int
    num_replicas: int
    stage: _Stage | None = None
    later: "_Label | None" = None


@dataclass(frozen=True, slots=True)
class _Degree:
    """What layers take at one degree: [choices, layers] each; the first choice is the faster."""

    degree: int
    seconds: np.ndarray
    in_flight: np.ndarray
    fixed: np.ndarray
    weights: np.ndarray
    sent_out: np.ndarray  # [edges], where the source is in the stage
    sent_in: np.ndarray  # [edges], where the target is


class _Search:
    """Plans under a cap on the slowest stage.

    Args:
        problem: Whose plans.
    """

    def __init__(self, problem: SteadyProblem) -> None:
        self.problem = problem
        self.downsets, self.is_in_order = _downsets(problem)
        self.degrees = [_degree(problem, degree) for degree in problem.degrees]
        batch = problem.num_microbatches
        most = min(batch, problem.num_devices)
        self.replicas = np.array([d for d in range(1, most + 1) if batch % d == 0])
        self._ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=int)
        self._stages: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._memories: dict[tuple[int, int], np.ndarray] = {}
        self._knapsacks: dict[tuple[int, int, int, int], Packed | None] = {}
        self.is_inexact = False
        """Whether a knapsack that decided was too large to be solved exactly."""

    @cached_property
    def least_seconds(self) -> float:
        """Seconds that no plan is faster than: all layers' device seconds over all devices."""
        return float(self._work[-1]) / self.problem.num_devices

    @cached_property
    def most_seconds(self) -> float:
        """Seconds that no stage takes more than."""
        rate, most = self.problem.bytes_per_second, 0.0
        for each in self.degrees:
            sent = 2 * (each.sent_out + each.sent_in).sum() + 4 * each.weights.sum()
            most = max(most, float(each.seconds[1].sum() + sent / rate))
        return most

    @cached_property
    def _work(self) -> np.ndarray:
        """Device seconds that the layers of each downset take at least [downsets]."""
        work = [each.degree * each.seconds[0] for each in self.degrees]
        least: np.ndarray = self.downsets @ np.min(work, axis=0)
        return least

    @cached_property
    def _inner(self) -> list[np.ndarray]:
        """For each downset the downsets strictly within it, by number."""
        sets = self.downsets
        return [
            np.flatnonzero(~(sets[:number] & ~outer).any(axis=1))
            for number, outer in enumerate(sets)
        ]

    def under(self, cap_seconds: float, *, is_bound: bool = False) -> _Found | None:
        """A plan whose stages all take at most so long.

        None proves that there is no such plan, unless ``is_inexact``.

        Args:
            cap_seconds: Of a sample in any stage.
            is_bound: Whether a fraction of a layer may take its second choice. None then proves
                that no plan is as fast even if ``is_inexact``.
        """
        last = len(self.downsets) - 1
        labels: list[list[_Label]] = [[] for _ in range(last + 1)]
        labels[last] = [_Label(0, 0)]
        for outer in range(last, 0, -1):
            for label in labels[outer]:
                for number in range(len(self.degrees)):
                    self._extend(labels, outer, label, number, cap_seconds, is_bound)
        if not labels[0]:
            return None
        stages, label = [], labels[0][0]
        while label.stage is not None and label.later is not None:
            stages.append(label.stage)
            label = label.later
        return _Found(max(stage.seconds for stage in stages), tuple(stages))

    def _extend(
        self,
        labels: list[list[_Label]],
        outer: int,
        label: _Label,
        number: int,
        cap_seconds: float,
        is_bound: bool,
    ) -> None:
        """Put one more stage before those of a label, with the least replicas that will do."""
        problem, degree = self.problem, self.degrees[number].degree
        seconds, fast_in_flight, fast_fixed = self._stage_tables(outer, number)
        most = min(
            problem.num_microbatches - label.num_replicas,
            (problem.num_devices - label.num_devices) // degree,
        )
        count = int(np.searchsorted(self.replicas, most, side="right"))
        if count == 0:
            return
        replicas = self.replicas[:count]
        in_flight = 1 - (-label.num_replicas // replicas)
        is_fast = seconds[:, :count] <= cap_seconds
        # The layers before need devices too: as many as do their work within the cap.
        left = problem.num_devices - label.num_devices - replicas * degree
        is_fast &= left * cap_seconds >= self._work[self._inner[outer], None] * (1 - 1e-12)
        places = np.flatnonzero(is_fast.any(axis=1))
        if not len(places):
            return
        is_fast, inner = is_fast[places], self._inner[outer][places]
        room = problem.memory_bytes * (1 + 1e-12)
        held = fast_in_flight[places, None] * in_flight + fast_fixed[places, None]
        fits = is_fast & (held <= room)
        could = is_fast & ~fits
        if could.any():
            squeezed = np.stack([self._least_memory(number, y) for y in in_flight.tolist()], axis=1)
            could &= squeezed[outer] - squeezed[inner] <= room
        usable = fits | could
        rows, firsts = np.flatnonzero(usable.any(axis=1)).tolist(), usable.argmax(axis=1).tolist()
        numbers, targets, rest = replicas.tolist(), inner.tolist(), in_flight.tolist()
        for row in rows:
            known = labels[targets[row]]
            for column in range(firsts[row], count):
                d = numbers[column]
                devices, total = label.num_devices + d * degree, label.num_replicas + d
                if _is_dominated(known, devices, total):
                    break  # more replicas are, too
                if not usable[row, column]:
                    continue
                more = 0.0
                slower: tuple[int, ...] = ()
                if not fits[row, column]:
                    at_most = (cap_seconds - float(seconds[places[row], column])) * d
                    key = targets[row], outer, number, rest[column]
                    packed = self._packed(key, at_most, is_bound)
                    if packed is None:
                        continue
                    more = (packed.least_more_seconds if is_bound else packed.more_seconds) / d
                    slower = packed.slower
                stage_seconds = float(seconds[places[row], column]) + more
                if stage_seconds <= cap_seconds:
                    stage = _Stage(targets[row], outer, number, d, slower, stage_seconds)
                    new = _Label(devices, total, stage, label)
                    known[:] = [
                        own
                        for own in known
                        if own.num_devices < new.num_devices or own.num_replicas < new.num_replicas
                    ]
                    known.append(new)
                    break

    def _stage_tables(self, outer: int, number: int) -> tuple[np.ndarray, ...]:
        """By downset within: seconds [inner, replicas] and both kinds of memory, all fast."""
        key = outer, number
        if key not in self._stages:
            each, problem = self.degrees[number], self.problem
            inside = self.downsets[outer] & ~self.downsets[self._inner[outer]]
            sent = np.zeros(len(inside))
            if len(self._ends):
                source, target = inside[:, self._ends[:, 0]], inside[:, self._ends[:, 1]]
                sent = (source & ~target) @ each.sent_out + (target & ~source) @ each.sent_in
            rate, d = problem.bytes_per_second, self.replicas
            once = 2 * sent / rate + inside @ each.seconds[0]
            reduced = 4 * (inside @ each.weights) / problem.num_microbatches / rate
            seconds = (once[:, None] + reduced[:, None] * (d - 1)) / d
            self._stages[key] = (seconds, inside @ each.in_flight[0], inside @ each.fixed[0])
        return self._stages[key]

    def _least_memory(self, number: int, in_flight: int) -> np.ndarray:
        """What all layers of each downset hold on their smaller choices [downsets]."""
        key = number, in_flight
        if key not in self._memories:
            each = self.degrees[number]
            least = (each.in_flight * in_flight + each.fixed).min(axis=0)
            self._memories[key] = self.downsets @ least
        return self._memories[key]

    def _packed(
        self, key: tuple[int, int, int, int], at_most_seconds: float, is_bound: bool
    ) -> Packed | None:
        """Which layers take their second choice so that the stage fits; None where it can't.

        Args:
            key: Inner downset, outer downset, number of the degree, microbatches in flight.
            at_most_seconds: What they may take more. Where it decides, the knapsack is exact.
            is_bound: Whether the linear program is enough.
        """
        if key not in self._knapsacks:
            self._knapsacks[key] = greedy(*self._knapsack(key))
        found = self._knapsacks[key]
        if found is None or found.is_exact is not None or is_bound:
            return found
        if found.least_more_seconds <= at_most_seconds < found.more_seconds:
            found = self._knapsacks[key] = exact(*self._knapsack(key), found)
            self.is_inexact |= not found.is_exact
        return found

    def _knapsack(self, key: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray, float]:
        """Bytes saved, and seconds spent, by a stage's second choices; bytes missing."""
        inner, outer, number, in_flight = key
        each = self.degrees[number]
        layers = np.flatnonzero(self.downsets[outer] & ~self.downsets[inner])
        held = each.in_flight[:, layers] * in_flight + each.fixed[:, layers]
        spent = each.seconds[1, layers] - each.seconds[0, layers]
        missing = float(held[0].sum() - self.problem.memory_bytes)
        return held[0] - held[1], spent, missing


def _is_dominated(labels: list[_Label], devices: int, replicas: int) -> bool:
    for own in labels:  # a loop: this is asked most of all
        if own.num_devices <= devices and own.num_replicas <= replicas:
            return True
    return False


def _downsets(problem: SteadyProblem) -> tuple[np.ndarray, bool]:
    """Sets of layers that hold what their layers need [downsets, layers], the smallest first.

    Also whether they are only those of one order, because there are too many.
    """
    size = len(problem.layers)
    needs = [0] * size
    for edge in problem.edges:
        needs[edge.target] |= 1 << edge.source
    known = [0]
    for _ in range(size):
        ready = (i for i in range(size) if not known[-1] >> i & 1 and not needs[i] & ~known[-1])
        layer = next(ready, None)
        if layer is None:
            raise ProblemError("the layers' graph has a circle; a pipeline cannot order it")
        known.append(known[-1] | 1 << layer)
    in_order, known, newest = known, [0], [0]
    while newest and len(known) <= _MOST_DOWNSETS:
        more = {
            downset | 1 << layer
            for downset in newest
            for layer in range(size)
            if not downset >> layer & 1 and needs[layer] & ~downset == 0
        }
        newest = sorted(more)
        known += newest
    is_in_order = len(known) > _MOST_DOWNSETS
    chosen = in_order if is_in_order else known
    return np.array([[bool(one >> i & 1) for i in range(size)] for one in chosen]), is_in_order


def _degree(problem: SteadyProblem, degree: int) -> _Degree:
    place = problem.degrees.index(degree)
    choices = [layer.degrees[place].choices for layer in problem.layers]
    both = [sorted(each, key=lambda choice: choice.seconds) for each in choices]
    rows = [[each[0] for each in both], [each[-1] for each in both]]
    sync = [
        next((s for s in edge.sync if s.tensor_parallel_size == degree), None)
        for edge in problem.edges
    ]
    sent = np.array([edge.sent_bytes for edge in problem.edges])
    return _Degree(
        degree=degree,
        seconds=np.array([[choice.seconds for choice in row] for row in rows]),
        in_flight=np.array([[choice.in_flight_bytes for choice in row] for row in rows]),
        fixed=np.array([[choice.fixed_bytes for choice in row] for row in rows]),
        weights=np.array([choice.weight_bytes for choice in rows[0]]),
        sent_out=sent + np.array([s.source_bytes if s else 0.0 for s in sync]),
        sent_in=sent + np.array([s.target_bytes if s else 0.0 for s in sync]),
    )


def _plan(problem: SteadyProblem, search: _Search, found: _Found, bound: float) -> SteadyPlan:
    stages, later = [], 0
    for stage in reversed(found.stages):
        later += stage.num_replicas
        stages.append(_stage(problem, search, stage, ceil(later / stage.num_replicas)))
    slowest = max(stage.sample_seconds for stage in stages)
    is_optimal = bound >= slowest * (1 - 2 * _NEAR)
    bound = slowest if is_optimal else bound
    return SteadyPlan(
        model=problem.model,
        stages=tuple(reversed(stages)),
        sample_seconds=slowest,
        proof=Proof(
            termination="optimal" if is_optimal else "feasible",
            objective=slowest,
            lower_bound=bound,
            gap=(slowest - bound) / slowest if slowest else 0.0,
            method=f"{_METHOD}; {_ORDERED}" if search.is_in_order else _METHOD,
        ),
    )


def _stage(problem: SteadyProblem, search: _Search, stage: _Stage, in_flight: int) -> SteadyStage:
    inside = search.downsets[stage.outer] & ~search.downsets[stage.inner]
    layers, degree = np.flatnonzero(inside).tolist(), search.degrees[stage.degree]
    names, held = [], 0.0
    for place, layer in enumerate(layers):
        own = problem.layers[layer].degrees[stage.degree].choices
        both = sorted(own, key=lambda choice: choice.seconds)
        choice = both[-1] if place in stage.slower else both[0]
        names.append(choice.name)
        held += choice.in_flight_bytes * in_flight + choice.fixed_bytes
    return SteadyStage(
        layers=tuple(layers),
        choices=tuple(names),
        tensor_parallel_size=degree.degree,
        num_replicas=stage.num_replicas,
        sample_seconds=stage.seconds,
        memory_bytes=round(held),
    )


# Which layers of a stage take their slower and smaller choice, so that the stage fits its memory.
#
# A knapsack problem: each layer frees some bytes for some seconds, and enough bytes must be free.


_MOST_PARTIAL = 2_000
"""Partial choices to compare at a time. Stages of Piper's models need at most a few dozen."""
_ROUNDING = 1 - 1e-12  # of sums of bytes


def greedy(saved: np.ndarray, spent: np.ndarray, missing: float) -> Packed | None:
    """Layers in the order of seconds for each byte saved, until the rest fits.

    Args:
        saved: [layers] bytes that the second choice of each saves; below 0 where it takes more.
        spent: [layers] seconds that it takes more, at least 0.
        missing: Bytes that have to be saved.

    Returns:
        With the linear program's value as ``least_more_seconds``, where a fraction of a layer may
        take its second choice; None where all choices together save too little.
    """
    order = _by_ratio(saved, spent)
    reached = np.cumsum(saved[order])
    needed = int(np.searchsorted(reached, missing * _ROUNDING))
    if needed >= len(order):
        return None
    whole = float(spent[order[:needed]].sum())
    before = float(reached[needed - 1]) if needed else 0.0
    last = order[needed]
    least = whole + float(spent[last] * (missing - before) / saved[last])
    taken, spare = order[: needed + 1].tolist(), float(reached[needed]) - missing
    for layer in sorted(taken, key=lambda i: -spent[i]):  # the last one may make others needless
        if saved[layer] <= spare:
            taken.remove(layer)
            spare -= float(saved[layer])
    more = float(spent[taken].sum())
    return Packed(more, min(least, more), tuple(sorted(taken)))


def exact(saved: np.ndarray, spent: np.ndarray, missing: float, known: Packed) -> Packed:
    """The layers that take the fewest seconds more.

    A dynamic program over layers, in the order of seconds for each byte saved. A partial choice is
    kept if no other is as good in both bytes and seconds. By the linear program of the layers left
    it must also have a chance to beat the best known.

    Args:
        saved: As for ``greedy``.
        spent: As for ``greedy``.
        missing: As for ``greedy``.
        known: What ``greedy`` returned.

    Returns:
        ``known``, not ``is_exact``, if more partial choices are left than are compared.
    """
    order = _by_ratio(saved, spent).tolist()
    bytes_of: list[float] = saved[order].tolist()
    seconds_of: list[float] = spent[order].tolist()
    all_bytes = list(accumulate(bytes_of, initial=0.0))
    all_seconds = list(accumulate(seconds_of, initial=0.0))
    needed = missing * _ROUNDING

    def least_more(first: int, freed: float) -> float:
        """Seconds that layers from ``first`` on take at least to save what is missing."""
        goal = all_bytes[first] + needed - freed
        place = bisect_left(all_bytes, goal, lo=first)
        if place >= len(all_bytes):
            return float("inf")
        if place == first:
            return 0.0
        rest = (goal - all_bytes[place - 1]) / bytes_of[place - 1]
        return all_seconds[place - 1] - all_seconds[first] + rest * seconds_of[place - 1]

    best, taken = known.more_seconds, sum(1 << order.index(layer) for layer in known.slower)
    partial = [(0.0, 0.0, 0)]  # seconds, bytes saved, layers as bits; both rise
    for place, (freed, more) in enumerate(zip(bytes_of, seconds_of, strict=True)):
        longer = [(s + more, b + freed, layers | 1 << place) for s, b, layers in partial]
        done = min((each for each in longer if each[1] >= needed), default=None)
        if done is not None and done[0] < best:
            best, taken = done[0], done[2]
        left: list[tuple[float, float, int]] = []
        for each in sorted([*partial, *longer], key=lambda one: (one[0], -one[1])):
            if each[1] < needed and (not left or each[1] > left[-1][1]):
                if each[0] + least_more(place + 1, each[1]) < best:
                    left.append(each)
        if len(left) > _MOST_PARTIAL:
            return known._replace(is_exact=False)
        partial = left
    slower = tuple(sorted(layer for place, layer in enumerate(order) if taken >> place & 1))
    return Packed(best, best, slower, True)


def _by_ratio(saved: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The layers whose second choice saves anything, those of the fewest seconds a byte first."""
    order = np.argsort(spent / np.where(saved > 0, saved, np.nan), kind="stable")
    ordered: np.ndarray = order[saved[order] > 0]
    return ordered
