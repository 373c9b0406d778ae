"""Map EasyScale threads (ESTs) to unlike devices: EasyScale 3.4, equations 1a-1d.

A configuration takes N_i devices of type i, each running at most A_i of the maxP ESTs; C_i is
the mini-batches per second of one device. The text's sum in (1c), as printed, lacks the factor
N_i that (1d) has. With it, ``throughput == maxP / f_overload`` holds exactly, so we use it:

    (1a) nEST = sum N_i A_i >= maxP            (1b) f = max A_i / C_i
    (1c) waste = sum N_i (C_i - A_i / f) + (nEST - maxP) / f
    (1d) throughput = sum N_i C_i - waste
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...planning.costs.split import predict, with_exposed
from ...schema.errors import InfeasibleError, ProblemError
from ...schema.options import option
from ...schema.plan import (
    Alternative,
    EstEstimate,
    Plan,
    Proof,
    ReplicaGroup,
    Stage,
    device_group,
    passes_of,
    split_plan,
)
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from ...solvers.methods import METHODS

METHOD = "EasyScale 3.4: ascending f_overload, exact k-best covers"
Floats = npt.NDArray[np.float64]
_Choice = tuple[tuple[ReplicaGroup, ...], EstEstimate]


@dataclass(frozen=True, slots=True)
class _Type:
    """A usable device type: its place in the problem, pool size, and t = 1 / C.

    ``costs`` are what ``seconds`` was measured with: on a busy host, or alone.
    """

    option: DeviceOption
    costs: DeviceCosts
    count: int
    seconds: float
    memory_bytes: int

    def ests_within(self, overload: float) -> int:
        """The most ESTs (A) of which one device takes at most ``overload`` seconds."""
        ests = int(overload / self.seconds)
        ests += (ests + 1) * self.seconds <= overload  # division may round across a whole number
        return ests - (ests * self.seconds > overload)


def solve(problem: SplitProblem, top: int = 1) -> Plan:
    """Choose the configuration with the highest estimated throughput.

    Every subset of the pool is a configuration, if no device of it could be dropped at the same
    throughput. They are ranked by throughput, then by least waste, then by fewest devices, then
    by fewest devices of the earlier types. Exact: throughput is maxP / f_overload, and the
    finitely many f_overload = A_i / C_i are tried in ascending order; at each, the configurations
    of least waste are the cheapest covers of maxP, found in order by a search with exact bounds.

    C_i of a configuration of one device is that of a device alone, where that was measured apart.

    Where nEST exceeds maxP, some devices of the type that would finish last run fewer ESTs, so
    the groups hold exactly maxP. ``proof.objective`` is f_overload: seconds per mini-batch
    without synchronisation and update, which ``predicted`` includes.

    Args:
        problem: Profiles and pool; ``virtual_nodes`` is maxP.
        top: How many configurations to return: the best as the plan, the rest as alternatives.

    Raises:
        ProblemError: ``virtual_nodes`` is missing, or ``top`` is below 1.
        InfeasibleError: No device type was profiled at B / maxP samples.
    """
    if problem.virtual_nodes is None:
        raise ProblemError(
            "the waste objective needs a number of ESTs", hint=f"add {option('virtual_nodes')}"
        )
    if top < 1:
        raise ProblemError(f"top must be at least 1, got {top}")
    ranked = []
    for configuration in _ranked(problem, problem.virtual_nodes):
        ranked.append(_alternative(problem, configuration))
        if len(ranked) == top:
            break
    return _plan(problem, ranked)


@dataclass(frozen=True, slots=True)
class _Configuration:
    """N_i devices of each type, and the f_overload at which they hold maxP ESTs."""

    overload: float
    types: list[_Type]
    numbers: tuple[int, ...]


def _types(problem: SplitProblem, max_p: int, num_devices: int) -> list[_Type]:
    """The types profiled at B / maxP samples, as they are in plans on so many devices."""
    size = problem.global_batch_size // max_p
    return [
        _Type(option, costs, option.num_devices, point.step_seconds, point.peak_memory_bytes)
        for option in problem.devices
        for costs in (option.measured_with(num_devices),)
        for point in costs.batch_curve
        if point.batch_size == size
    ]


def _ranked(problem: SplitProblem, max_p: int) -> Iterator[_Configuration]:
    """Every configuration, best first: those of a device measured alone between the others."""
    several, alone = _types(problem, max_p, 2), _types(problem, max_p, 1)
    if not several and not alone:
        size, sizes = problem.global_batch_size // max_p, problem.batch_sizes
        raise InfeasibleError(
            f"{max_p} ESTs of a global batch of {problem.global_batch_size} hold {size} samples "
            "each, a size that was not profiled or does not fit",
            hint=f"choose {option('virtual_nodes')} so that each holds one of "
            f"{', '.join(map(str, sizes))}",
        )
    apart = [
        _Configuration(max_p * one.seconds, [one], (1,))
        for one in alone
        if one.option.alone is not None
    ]
    shared = (
        _Configuration(overload, several, numbers)
        for overload, numbers in (_configurations(several, max_p) if several else ())
        if sum(numbers) > 1 or several[numbers.index(1)].option.alone is None
    )
    yield from heapq.merge(
        sorted(apart, key=lambda one: one.overload), shared, key=lambda one: one.overload
    )


def _configurations(types: list[_Type], max_p: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(f_overload, N) of every configuration, best first."""
    overload = _least_overload(types, max_p)
    listed: set[tuple[int, ...]] = set()
    slowest = max_p * max(one.seconds for one in types)
    while True:
        ests = [one.ests_within(overload) for one in types]
        for numbers in _covers(types, ests, max_p):
            if numbers not in listed:
                listed.add(numbers)
                yield overload, numbers
        if overload >= slowest:
            return
        overload = min((a + 1) * one.seconds for a, one in zip(ests, types, strict=True))


def _least_overload(types: list[_Type], max_p: int) -> float:
    """The least f at which the whole pool holds maxP ESTs: a walk over A_i / C_i from below."""
    rate = sum(one.count / one.seconds for one in types)
    overload = max_p / rate * (1 - 1e-12)  # nothing below this can hold them
    while True:
        ests = [one.ests_within(overload) for one in types]
        if sum(a * one.count for a, one in zip(ests, types, strict=True)) >= max_p:
            return max(a * one.seconds for a, one in zip(ests, types, strict=True))
        overload = min((a + 1) * one.seconds for a, one in zip(ests, types, strict=True))


def _covers(types: list[_Type], ests: list[int], max_p: int) -> Iterator[tuple[int, ...]]:
    """All N with sum N_i A_i >= maxP where every device is needed, by (sum N_i C_i, devices).

    At one f, least waste means least total capability. Types go in descending A, and a search
    that stops once maxP is covered leaves no device to spare. ``rest[i][need]`` bounds from
    below, exactly, what types i and later must add; so the search never strays.
    """
    order = sorted((i for i, a in enumerate(ests) if a), key=lambda i: (-ests[i], i))
    rest = _cover_costs([types[i] for i in order], [ests[i] for i in order], max_p)
    start: tuple[int, ...] = (0,) * len(types)
    heap = [(float(rest[0][max_p]), 0, start, 0, 0.0, max_p)]
    while heap:
        bound, devices, numbers, place, cost, need = heapq.heappop(heap)
        if need <= 0:
            yield numbers
            continue
        if place == len(order) or not np.isfinite(bound):
            continue
        kind = order[place]
        for number in range(min(types[kind].count, -(-need // ests[kind])) + 1):
            paid = cost + number / types[kind].seconds
            left = need - number * ests[kind]
            after = paid + float(rest[place + 1][max(0, left)])
            if np.isfinite(after):
                chosen = (*numbers[:kind], number, *numbers[kind + 1 :])
                entry = (_rounded(after), devices + number, chosen, place + 1, paid, left)
                heapq.heappush(heap, entry)


def _rounded(cost: float) -> float:
    """A cost without its last digits: sums in another order, which differ there, compare equal."""
    return float(f"{cost:.12e}")


def _cover_costs(types: list[_Type], ests: list[int], max_p: int) -> list[Floats]:
    """[types + 1][need] the least total capability of types i and later that covers need."""
    last = np.full(max_p + 1, np.inf)
    last[0] = 0.0
    costs = [last]
    for one, a in zip(reversed(types), reversed(ests), strict=True):
        best, left, chunk = costs[-1].copy(), one.count, 1
        while left:  # binary splitting of a bounded number of devices
            take = min(chunk, left)
            gain = min(take * a, max_p)
            covered = np.concatenate([np.repeat(best[:1], gain), best[: max_p + 1 - gain]])
            best = np.minimum(best, covered + take / one.seconds)
            left, chunk = left - take, chunk * 2
        costs.append(best)
    return costs[::-1]


def _alternative(problem: SplitProblem, configuration: _Configuration) -> _Choice:
    max_p = problem.virtual_nodes or 0
    used = [
        (one, n, one.ests_within(configuration.overload))
        for one, n in zip(configuration.types, configuration.numbers, strict=True)
        if n
    ]
    spare = sum(n * a for _, n, a in used) - max_p
    last = max(range(len(used)), key=lambda i: used[i][2] * used[i][0].seconds)
    groups: list[ReplicaGroup] = []
    for index, (one, number, ests) in enumerate(used):
        total = number * ests - (spare if index == last else 0)
        groups += _groups(problem, one, number, total, sum(configuration.numbers))
    return with_exposed(problem, groups), estimate(problem, tuple(groups))


def _groups(
    problem: SplitProblem, one: _Type, number: int, total: int, num_devices: int
) -> list[ReplicaGroup]:
    """``total`` ESTs on ``number`` devices, as even as whole numbers allow."""
    size = problem.global_batch_size // (problem.virtual_nodes or 1)
    few, more = divmod(total, number)
    shares = [(more, few + 1), (number - more, few)]
    return [
        device_group(
            device_type=one.option.device_type,
            num_devices=devices,
            virtual_nodes=ests,
            virtual_node_batch_size=size,
            memory_bytes=one.memory_bytes,
            pass_seconds=one.seconds,
            interpolated=size in one.costs.interpolated_sizes,
            measured_busy=num_devices > 1 and one.option.alone is not None,
        )
        for devices, ests in shares
        if devices and ests
    ]


def estimate(problem: SplitProblem, groups: tuple[ReplicaGroup, ...]) -> EstEstimate:
    """Equations 1a-1d for a plan whose groups hold maxP ESTs."""
    max_p = problem.virtual_nodes or 1
    in_use = sum(group.num_devices for group in groups)
    types = {one.option.device_type: one for one in _types(problem, max_p, in_use)}
    capability = {name: 1 / one.seconds for name, one in types.items()}  # C_i
    numbers: dict[str, int] = {}  # N_i
    ests: dict[str, int] = {}  # A_i
    for group in groups:
        name = group.device_type
        numbers[name] = numbers.get(name, 0) + group.num_devices
        ests[name] = max(ests.get(name, 0), group.virtual_nodes)
    num_ests = sum(numbers[name] * ests[name] for name in numbers)
    overload = max(ests[name] * types[name].seconds for name in numbers)
    waste = sum(numbers[name] * (capability[name] - ests[name] / overload) for name in numbers)
    waste += (num_ests - max_p) / overload
    peak = sum(numbers[name] * capability[name] for name in numbers)
    return EstEstimate(
        max_p=max_p,
        num_ests=num_ests,
        overload_factor=overload,
        waste=max(0.0, waste),
        throughput=peak - waste,
        capability=capability,
    )


def _plan(problem: SplitProblem, ranked: list[_Choice]) -> Plan:
    (best, est), *others = ranked
    return split_plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        groups=best,
        uniform_virtual_nodes=problem.virtual_nodes,
        optimizer=problem.optimizer,
        predicted=predict(problem, best),
        proof=Proof(
            termination="optimal",
            objective=est.overload_factor,
            lower_bound=est.overload_factor,
            gap=0.0,
            method=METHOD,
        ),
        objective="waste",
        est=est,
        alternatives=tuple(
            Alternative(stages=(Stage(replicas=groups),), **passes_of(groups), est=est)
            for groups, est in others
        ),
    )


METHODS.add("easyscale-waste", solve, __name__)
