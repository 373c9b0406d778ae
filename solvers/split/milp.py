"""The batch split as a mixed-integer program: the readable reference.

VirtualFlow 5.1.2 written down device by device. solve.py answers the same question much faster, and
tests hold that both agree. The answer is the plan of the shortest predicted step; the uncertainty
of the measurements is not considered.

    12 samples on an A (passes of 2: 1 s) and a B (passes of 2: 2 s), with v_A, v_B whole numbers
    minimise T + sync, so that v_A <= T, 2 v_B <= T, 2 v_A + 2 v_B = 12: v_A = 4, v_B = 2, T = 4

T holds what a device takes once, too: its update, and what is exposed of its sums.

Each device that takes part has one binary variable for each of its measured sizes, so the program
grows with devices, not with types; equal devices make it symmetric, and slow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ...planning.costs.comm import (
    Wire,
    exposed_seconds,
    hides,
    ring_wire,
    slowest,
    slowest_wire,
    sync_seconds,
    unhidden_seconds,
)
from ...planning.costs.split import closing_seconds, exposed_on, predict, with_exposed
from ...schema.errors import BackendError, InfeasibleError, TooLittleTimeError
from ...schema.plan import Plan, Proof, ReplicaGroup, split_plan
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from ...schema.profile import BatchPoint
from ..lp import Backend, Program, Solved
from .feasible import group_on
from .levels import OnOneDevice, single_devices

Terms = list[tuple[float, Any]]


@dataclass(slots=True)
class _Device:
    """One device's variables: ``passes[s]`` = v when it runs size s, and ``runs[s]`` in {0, 1}.

    ``most[s]`` bounds v.
    """

    option: DeviceOption
    points: list[BatchPoint]
    most: list[int] = field(default_factory=list)
    passes: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Single:
    """A plan on one device, and whether it is taken."""

    plan: OnOneDevice
    takes: Any


def solve(
    problem: SplitProblem, backend: Backend = "cbc", time_limit_seconds: float | None = None
) -> Plan:
    """Minimise the predicted step time with PuLP.

    Where a device was also measured alone, or sizes differ in what synchronisation adds, plans on
    one device are choices of their own. There is one for each device type and size, and the others
    use at least two devices.

    Args:
        problem: Profiles, pool and batch, in either regime.
        backend: CBC, or HiGHS through its Python interface.
        time_limit_seconds: Stop the search then; a plan found by then is ``feasible``, with the
            better of the backend's bound, where it tells one, and the continuous bound.

    Raises:
        InfeasibleError: No plan adds up to the batch.
        BackendError: The library failed, or ran out of time without a plan.
    """
    unit = _unit_seconds(problem)
    program = Program("batch_split")
    devices = _devices(program, problem)
    # Every plan on one device, where those are choices of their own.
    singles = [
        _Single(one, program.variable(f"z_{number}", high=1, integer=True))
        for number, one in enumerate(single_devices(problem) if _is_apart(problem) else ())
    ]
    if not devices and not singles:
        raise InfeasibleError(f"no usable batch size for a global batch of {_batch(problem)}")
    step = _build(program, problem, devices, singles, unit)
    solved = program.solve(step, backend, time_limit_seconds)
    if solved.termination == "infeasible":
        raise InfeasibleError(
            f"no plan adds up to a global batch of exactly {_batch(problem)}",
            hint="the default solver names the nearest batches that have a plan",
        )
    if solved.termination == "unknown":
        raise TooLittleTimeError(f"{backend} ended without a plan", hint="give it more time")
    return _plan(problem, (devices, singles), solved, backend, unit)


def _batch(problem: SplitProblem) -> int:
    return problem.global_batch_size


def _unit_seconds(problem: SplitProblem) -> float:
    """A time near the answer, to scale times by: the backends' tolerances are absolute."""
    together = sum(option.num_devices * _best_rate(option) for option in problem.devices)
    alone = max(_best_rate(option.measured_with(1)) for option in problem.devices)
    return _batch(problem) / max(together, alone)


def _best_rate(costs: DeviceCosts) -> float:
    return max(p.batch_size / p.step_seconds for p in costs.batch_curve)


def _is_apart(problem: SplitProblem) -> bool:
    """Whether a plan on one device costs something else than the same among several."""
    return any(
        option.alone is not None or (option.sync is not None and option.sync.by_batch_size)
        for option in problem.devices
    )


def _known_seconds(problem: SplitProblem) -> float:
    """The best step time with equal work on equal devices: no better plan computes longer."""
    # Only even plans, which are quick to list: a limit for M.
    return min(
        (
            _batch(problem) // (number * point.batch_size) * point.step_seconds
            + sync_seconds(option, number)
            + (exposed_on(option, point, number, slowest_wire([option])) or 0.0)
            + closing_seconds(option.measured_with(number))
            for option in problem.devices
            for number in range(1, option.num_devices + 1)
            for point in problem.points(option.measured_with(number))
            if _batch(problem) % (number * point.batch_size) == 0
        ),
        default=float("inf"),
    )


def _devices(program: Program, problem: SplitProblem) -> list[_Device]:
    known = _known_seconds(problem)
    found = []
    for kind, option in enumerate(problem.devices):
        points = problem.points(option)
        for number in range(option.num_devices if points else 0):
            device = _Device(option=option, points=points)
            for point in points:
                # M of the big-M constraints: as small as is safe, as it decides the speed.
                # Among several devices another one does a sample at least.
                whole = (_batch(problem) - _is_apart(problem)) // point.batch_size
                most = int(min(whole, known / point.step_seconds * (1 + 1e-9)))
                device.most.append(most)
                name = f"{kind}_{number}_{point.batch_size}"
                device.passes.append(program.variable(f"v_{name}", high=most, integer=True))
                device.runs.append(program.variable(f"y_{name}", high=1, integer=True))
            found.append(device)
    return found


def _build(
    program: Program,
    problem: SplitProblem,
    devices: list[_Device],
    singles: list[_Single],
    unit: float,
) -> Any:
    device_seconds = program.variable("device")
    sync = program.variable("sync")
    total = program.total
    samples = [term for device in devices for term in _samples(device)]
    samples += [(_batch(problem), single.takes) for single in singles]
    program.require(total(samples) == _batch(problem))
    for device in devices:
        used = total([(1, run) for run in device.runs])
        # v <= M y and v >= y tie v > 0 to y = 1.
        program.require(used <= 1)  # one size a device
        for most, passes, run in zip(device.most, device.passes, device.runs, strict=True):
            program.require(passes <= most * run)
            program.require(passes >= run)
        times = [p.step_seconds / unit for p in device.points]
        closing = closing_seconds(device.option)
        rests = [(_exposed(device.option, p) + closing) / unit for p in device.points]
        own = [*zip(times, device.passes, strict=True), *zip(rests, device.runs, strict=True)]
        # What comes once a device counts with y.
        program.require(device_seconds >= total([(s, one) for s, one in own if s]))
    # Of the n! orders of equal devices one is left: the program is smaller by that.
    for first, second in zip(devices, devices[1:], strict=False):
        if first.option is second.option:  # of equal devices an earlier one does at least as much
            program.require(total(_samples(first)) >= total(_samples(second)))
    if devices:
        _require_sync(program, devices, sync, device_seconds, unit)
    alone = [(single.plan.step_seconds / unit, single.takes) for single in singles]
    return total([(1, device_seconds), (1, sync), *alone])


def _exposed(option: DeviceOption, point: BatchPoint) -> float:
    """What is exposed whatever other devices are in use."""
    return 0.0 if hides(option) else exposed_seconds(option.sync, point.batch_size) or 0.0


def _samples(device: _Device) -> Terms:
    return [(p.batch_size, v) for p, v in zip(device.points, device.passes, strict=True)]


def _require_sync(
    program: Program, devices: list[_Device], sync: Any, device_seconds: Any, unit: float
) -> None:
    """Each used type asks for its time at the number of devices in use.

    What a device's last pass does not hide depends on that number, and on the slowest link.
    """
    total, numbers = program.total, range(1, len(devices) + 1)
    options = {id(device.option): device.option for device in devices}
    times = {key: [sync_seconds(o, n) / unit for n in numbers] for key, o in options.items()}
    last = len(devices) - 1
    wires = _wires(options.values())
    # Synchronisation that does not depend on the number has two columns: alone, or together.
    constant = wires == [None] and all(t[min(1, last)] == t[last] for t in times.values())
    counts = sorted({0, last}) if constant else list(range(len(devices)))  # "at most so many"
    columns, linked = zip(*product(counts, wires), strict=True)
    select = [program.variable(f"n_{c}", high=1, integer=True) for c in range(len(columns))]
    used = total([(1.0, run) for device in devices for run in device.runs])
    program.require(total([(1, one) for one in select]) == 1)
    # The column's number may be larger than what is used, as synchronisation never falls with it.
    program.require(used <= total([(c + 1, one) for c, one in zip(columns, select, strict=True)]))
    for device in devices:
        own = [times[id(device.option)][c] for c in columns]
        if max(own) > 0:
            runs = total([(max(own), run) for run in device.runs])
            # big-M: ``sync`` is at least the type's time if the type runs, and free otherwise.
            program.require(sync >= total(list(zip(own, select, strict=True))) + runs - max(own))
        wire = ring_wire(device.option)
        if wires == [None] or wire is None:
            continue
        slower = [
            (1, one)
            for one, its in zip(select, linked, strict=True)
            if its is not None and slowest([wire, its]) == its
        ]
        program.require(total([(1, run) for run in device.runs]) <= total(slower))
        if not hides(device.option):
            continue
        closing = closing_seconds(device.option) / unit
        for point, passes, run in zip(device.points, device.passes, device.runs, strict=True):
            each = [
                float(unhidden_seconds(point, column + 1, its)) / unit
                for column, its in zip(columns, linked, strict=True)
                if its is not None
            ]
            most = max(each)
            own_terms = [(point.step_seconds / unit, passes), (closing + most, run)]
            program.require(
                device_seconds >= total([*own_terms, *zip(each, select, strict=True)]) - most
            )


def _wires(options: Iterable[DeviceOption]) -> list[Wire | None]:
    """All that may be the slowest link of a plan whose devices hide sums; else none."""
    options = list(options)
    if not any(map(hides, options)):
        return [None]
    wires = [wire for wire in map(ring_wire, options) if wire is not None]
    late, rates = {w.latency_seconds for w in wires}, {w.bytes_per_second for w in wires}
    return [Wire(*pair) for pair in product(sorted(late), sorted(rates))]


def _plan(
    problem: SplitProblem,
    choices: tuple[list[_Device], list[_Single]],
    solved: Solved,
    backend: Backend,
    unit: float,
) -> Plan:
    devices, singles = choices
    groups = _groups(devices, solved.values)
    groups += tuple(s.plan.group for s in singles if round(solved.values[s.takes.name]))
    groups = with_exposed(problem, groups)
    total = sum(group.num_devices * group.device_batch_size for group in groups)
    # Backends keep integers to 1e-9 only; what they round must still be the batch.
    if total != _batch(problem):
        raise BackendError(f"{backend} answered a split of {total} samples, not {_batch(problem)}")
    predicted = predict(problem, groups)
    optimal = solved.termination == "optimal"
    step = predicted.step_seconds
    bound = step
    if not optimal:  # CBC tells no bound; dividing the work at will is always one
        simple = unit + min(
            closing_seconds(costs)
            for option in problem.devices
            for costs in (option, option.measured_with(1))
        )
        bound = min(step, max(simple, (solved.lower_bound or 0.0) * unit))
    return split_plan(
        model=problem.model,
        global_batch_size=_batch(problem),
        groups=groups,
        uniform_virtual_nodes=problem.virtual_nodes,
        optimizer=problem.optimizer,
        predicted=predicted,
        proof=Proof(
            termination="optimal" if optimal else "feasible",
            objective=step,
            lower_bound=bound,
            gap=(step - bound) / step,
            method=f"MILP in PuLP, solved by {'CBC' if backend == 'cbc' else 'HiGHS'}",
        ),
    )


def _groups(devices: list[_Device], values: dict[str, float]) -> tuple[ReplicaGroup, ...]:
    alike: dict[tuple[str, int, int], int] = {}
    entries: dict[tuple[str, int, int], tuple[DeviceOption, BatchPoint]] = {}
    for device in devices:
        for point, passes in zip(device.points, device.passes, strict=True):
            count = round(values[passes.name])
            if count:
                key = (device.option.device_type, count, point.batch_size)
                alike[key] = alike.get(key, 0) + 1
                entries[key] = (device.option, point)
    return tuple(
        group_on(entries[name, count, size][0], number, count, entries[name, count, size][1])
        for (name, count, size), number in alike.items()
    )
