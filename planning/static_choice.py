"""Choose machines to rent for a whole training, comparing dollars and hours.

A choice is a number of devices of one or two types. It takes the cheapest machines that have them,
at one time, either with spot machines or on demand only. The batch split solver predicts the step
on these devices, or a table of throughputs gives it. So choices are compared by their price per
sample, not per hour.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf, isfinite

from ..schema.cluster import Cluster, DeviceType, ServerGroup
from ..schema.errors import BackendError, InfeasibleError, ProblemError
from ..schema.jobs import ModelThroughput, Throughputs
from ..schema.market import Market
from ..schema.options import option
from ..schema.plan import Plan, dollars_per_million_samples
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..solvers.split.solve import solve
from .checks.batch_split import check
from .inputs import model_of
from .market_prices import DevicePrice, all_prices
from .split_problem import split_problem

_MOST_DEVICES = 1024  # of a type


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticChoice:
    """Machines to rent for the whole training.

    Attributes:
        devices: Device type -> number; all are used.
        machines: Name of what to rent -> number.
        is_spot: Whether some of the machines are spot machines, which may be preempted.
        step_seconds: Predicted time of one step.
        hours: Hours of the whole training.
        dollars: Dollars of the whole training.
        dollars_per_million_samples: Price that does not depend on the length of the training;
            None if the batch is not known.
        is_pareto: Whether no other choice is both as fast and as cheap.
    """

    devices: Mapping[str, int]
    machines: Mapping[str, int]
    is_spot: bool
    step_seconds: float
    hours: float
    dollars: float
    dollars_per_million_samples: float | None
    is_pareto: bool = False


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds of a step on devices of given numbers.

    ``apart_seconds`` is the time with the devices on several machines: infinite if they cannot be,
    None if that is not known to matter.
    """

    devices: Mapping[str, int]
    step_seconds: float
    apart_seconds: float | None = None

    def on(self, num_machines: int) -> float:
        """Return the seconds of a step on so many machines."""
        if num_machines == 1 or self.apart_seconds is None:
            return self.step_seconds
        return self.apart_seconds


def static_choices(
    profiles: Sequence[Profile],
    markets: Sequence[Market],
    *,
    batch_size: int,
    steps: int,
    most_devices: int = 8,
    at: str | None = None,
) -> tuple[StaticChoice, ...]:
    """List every choice of up to so many devices a type, cheapest first, at the prices of a time.

    Profiles are of one model; types without one are not rented. ``at`` is in UTC; None takes the
    last time that each market knows.

    Raises:
        ProblemError: No machine has a profiled device, or a number is not >= 1.
        InfeasibleError: No choice has a plan for the batch.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    _check_numbers(steps, most_devices)
    known = list(dict.fromkeys(profile.device_type for profile in profiles))
    prices = _known_prices(markets, at, known)
    names = [name for name in known if name in prices]
    speeds = (
        _Speed(devices, plan.predicted.step_seconds)
        for devices in _pools(names, most_devices)
        if (plan := _plan_of_all(profiles, devices, batch_size)) is not None
    )
    found = _priced(speeds, prices, steps=steps, batch_size=batch_size, most_devices=most_devices)
    if not found:
        raise InfeasibleError(
            f"no choice of up to {most_devices} devices a type has a plan for batch {batch_size}",
            hint="allow more devices, or another batch",
        )
    return found


def measured_choices(
    throughputs: Throughputs,
    markets: Sequence[Market],
    *,
    steps: int,
    batch_size: int | None = None,
    most_devices: int | None = None,
    model: str | None = None,
    at: str | None = None,
) -> tuple[StaticChoice, ...]:
    """List the choices that a table of throughputs allows, cheapest first.

    These are the table's numbers of devices of one type, and its mixes. A step is the same work on
    any of them. Devices on several machines have the unconsolidated rate, if the table has any for
    their number. Without ``batch_size`` there is no price per sample, without ``most_devices`` all
    numbers of the table count, and without ``model`` it has one.

    Raises:
        ProblemError: The table does not have the model, no machine has a device that runs it, or a
            number is not >= 1.
        InfeasibleError: No machines have just the devices of a throughput.
    """
    speeds = list(_speeds(throughputs, model_of(throughputs, model)))
    largest = max((number for one in speeds for number in one.devices.values()), default=1)
    most = largest if most_devices is None else most_devices
    _check_numbers(steps, most)
    if batch_size is not None and batch_size < 1:
        raise ProblemError(f"{option('batch_size')} must be >= 1, got {batch_size}")
    known = list(dict.fromkeys(name for one in speeds for name in one.devices))
    prices = _known_prices(markets, at, known)
    found = _priced(speeds, prices, steps=steps, batch_size=batch_size, most_devices=most)
    if not found:
        listed = ", ".join(
            "+".join(f"{number}x{name}" for name, number in one.devices.items()) for one in speeds
        )
        raise InfeasibleError(
            f"no machines have just the devices of a throughput ({listed}), with at most {most} "
            "of a type",
            hint="allow more devices, or give throughputs for the machines' numbers of devices",
        )
    return found


def _check_numbers(steps: int, most_devices: int) -> None:
    if steps < 1 or most_devices < 1:
        raise ProblemError(f"steps and devices must be >= 1, got {steps} and {most_devices}")
    if most_devices > _MOST_DEVICES:
        raise ProblemError(
            f"{most_devices} devices of a type: at most {_MOST_DEVICES} are priced",
            hint=f"give {option('most_devices', _MOST_DEVICES)} or fewer",
        )


def _speeds(throughputs: Throughputs, model: str) -> Iterator[_Speed]:
    """Yield each number of devices, and each mix, on which the model runs."""
    for entry in throughputs.models:
        if entry.model == model:
            for name, rate in entry.steps_per_second.items():
                if rate > 0:
                    yield _Speed({name: entry.scale_factor}, 1 / rate, _apart(entry, name))
    for mix in throughputs.mixes:
        if mix.model == model:
            yield _Speed(mix.devices, 1 / mix.steps_per_second)


def _apart(entry: ModelThroughput, name: str) -> float | None:
    if entry.unconsolidated_steps_per_second is None:
        return None
    rate = entry.unconsolidated_steps_per_second.get(name, 0.0)
    return 1 / rate if rate > 0 else inf


def _known_prices(
    markets: Sequence[Market], at: str | None, known: Collection[str]
) -> dict[str, list[DevicePrice]]:
    """List the prices of known device types, spelled as these are; case does not matter."""
    spelling = {name.lower(): name for name in known}
    all_of_them = all_prices(markets, at)
    found: dict[str, list[DevicePrice]] = {}
    for name, each in all_of_them.items():
        own = name if name in known else spelling.get(name.lower())
        if own is not None:
            found.setdefault(own, []).extend(each)
    if not found:
        raise ProblemError(
            f"no machine with a price has one of {', '.join(known)}",
            hint=f"the market has {', '.join(sorted(all_of_them)) or 'nothing'} then",
        )
    return found


def _priced(
    speeds: Iterable[_Speed],
    prices: Mapping[str, Sequence[DevicePrice]],
    *,
    steps: int,
    batch_size: int | None,
    most_devices: int,
) -> tuple[StaticChoice, ...]:
    """Give each pool of devices its cheapest machines, with spot machines and on demand."""
    held = {
        (name, spot): _cheapest([one for one in each if spot or not one.is_spot], most_devices)
        for name, each in prices.items()
        for spot in (True, False)
    }
    found: list[StaticChoice] = []
    for speed in speeds:
        if max(speed.devices.values()) > most_devices:
            continue
        offers: dict[tuple[str, ...], list[DevicePrice]] = {}
        for spot in (True, False):
            parts = [
                held[name, spot].get(number) if name in prices else None
                for name, number in speed.devices.items()
            ]
            machines = [one for part in parts if part is not None for one in part]
            if None not in parts:  # if spot is not cheaper, both are the same machines
                offers.setdefault(_titles(machines), machines)
            whole = _one_machine(speed, prices, spot=spot)
            if whole is not None and speed.apart_seconds is not None:
                offers.setdefault(_titles([whole]), [whole])
        for machines in offers.values():
            step = speed.on(len(machines))
            if isfinite(step):
                found.append(_choice(speed.devices, machines, step, steps, batch_size))
    return _marked(found)


def _titles(machines: Sequence[DevicePrice]) -> tuple[str, ...]:
    return tuple(sorted(one.title for one in machines))


def _one_machine(
    speed: _Speed, prices: Mapping[str, Sequence[DevicePrice]], *, spot: bool
) -> DevicePrice | None:
    """Find the cheapest machine that has all devices; None if there is none."""
    if len(speed.devices) > 1:
        return None
    ((name, number),) = speed.devices.items()
    fitting = [
        one
        for one in prices.get(name, ())
        if one.num_devices == number and (spot or not one.is_spot)
    ]
    return min(fitting, key=lambda one: one.dollars_per_hour, default=None)


def _choice(
    devices: Mapping[str, int],
    machines: Sequence[DevicePrice],
    step_seconds: float,
    steps: int,
    batch_size: int | None,
) -> StaticChoice:
    hourly = sum(one.dollars_per_hour * one.num_devices for one in machines)
    return StaticChoice(
        devices=devices,
        machines=dict(Counter(one.title for one in machines)),
        is_spot=any(one.is_spot for one in machines),
        step_seconds=step_seconds,
        hours=step_seconds * steps / 3600,
        dollars=hourly * step_seconds * steps / 3600,
        dollars_per_million_samples=None
        if batch_size is None
        else dollars_per_million_samples(hourly, batch_size / step_seconds),
    )


def chosen(
    choices: Sequence[StaticChoice],
    *,
    deadline_hours: float | None = None,
    budget_dollars: float | None = None,
) -> StaticChoice:
    """Select the cheapest choice within the deadline; with only a budget, the fastest within it.

    Raises:
        ProblemError: The deadline or the budget is not a number > 0.
        InfeasibleError: No choice keeps the deadline or the budget; the message names the nearest.
    """
    for flag, value in (
        (option("deadline_seconds"), deadline_hours),
        (option("budget_dollars"), budget_dollars),
    ):
        if value is not None and not value > 0:
            raise ProblemError(f"{flag} must be > 0, got {value:g}")
    soonest = min(choices, key=lambda one: (one.hours, one.dollars))
    if deadline_hours is not None and soonest.hours > deadline_hours:
        raise InfeasibleError(
            f"no choice ends within {deadline_hours:g} h; the soonest takes "
            f"{soonest.hours:.4g} h and {soonest.dollars:.2f} $",
            hint="allow more devices, or a later deadline",
        )
    in_time = [one for one in choices if deadline_hours is None or one.hours <= deadline_hours]
    cheapest = min(in_time, key=lambda one: (one.dollars, one.hours))
    if budget_dollars is None:
        return cheapest
    if cheapest.dollars > budget_dollars:
        raise InfeasibleError(
            f"no choice costs {budget_dollars:g} $ or less"
            + (f" within {deadline_hours:g} h" if deadline_hours is not None else "")
            + f"; the cheapest is {cheapest.dollars:.2f} $ and {cheapest.hours:.4g} h",
            hint="raise the budget",
        )
    if deadline_hours is not None:
        return cheapest
    affordable = [one for one in in_time if one.dollars <= budget_dollars]
    return min(affordable, key=lambda one: (one.hours, one.dollars))


def _pools(names: Sequence[str], most: int) -> Iterator[dict[str, int]]:
    """Yield the pools of one device type, then those of two."""
    for name in names:
        yield from ({name: number} for number in range(1, most + 1))
    for first, second in combinations(names, 2):
        for a, b in product(range(1, most + 1), repeat=2):
            yield {first: a, second: b}


def plan_of_choice(
    choice: StaticChoice,
    profiles: Sequence[Profile],
    markets: Sequence[Market],
    *,
    batch_size: int,
    at: str | None = None,
) -> Plan:
    """Return the plan of one of ``static_choices``, for a pool whose servers are its machines.

    Raises:
        InfeasibleError: The devices have no plan that uses them all.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    plan = _plan_of_all(profiles, choice.devices, batch_size)
    if plan is None:
        raise InfeasibleError(f"no plan uses all of {dict(choice.devices)}")
    offers = {
        one.title: (device_type, one)
        for device_type, each in _known_prices(markets, at, choice.devices).items()
        for one in each
    }
    servers = tuple(
        ServerGroup(count=number, devices={offers[title][0]: offers[title][1].num_devices})
        for title, number in choice.machines.items()
    )
    kinds = {name: DeviceType() for name in choice.devices}
    return replace(plan, cluster=Cluster(device_types=kinds, servers=servers))


def _plan_of_all(
    profiles: Sequence[Profile], devices: Mapping[str, int], batch_size: int
) -> Plan | None:
    """Find the best plan on the devices; None if it does not use them all."""
    # A plan that leaves devices unused belongs to the choice without these devices.
    pool = Cluster.parse(",".join(f"{number}x{name}" for name, number in devices.items()))
    try:
        problem = split_problem(Problem(profiles, pool, batch_size))
        plan = solve(problem, fastest=True)
    except InfeasibleError:
        return None
    faults = check(plan, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    return plan if plan.devices_by_type == devices else None


def _cheapest(prices: Sequence[DevicePrice], most: int) -> dict[int, list[DevicePrice]]:
    """Find, for each number of devices, the cheapest machines that have exactly so many."""
    by_size: dict[int, DevicePrice] = {}
    for one in prices:
        known = by_size.get(one.num_devices)
        if known is None or one.dollars_per_hour < known.dollars_per_hour:
            by_size[one.num_devices] = one
    sizes = [one for one in prices if by_size[one.num_devices] is one]
    best: dict[int, tuple[float, list[DevicePrice]]] = {0: (0.0, [])}
    for number in range(1, most + 1):
        ways = [
            (best[before][0] + one.dollars_per_hour * one.num_devices, one)
            for one in sizes
            if (before := number - one.num_devices) in best
        ]
        if ways:
            dollars, last = min(ways, key=lambda way: way[0])
            best[number] = (dollars, [*best[number - last.num_devices][1], last])
    return {number: machines for number, (_, machines) in best.items() if number}


def _marked(found: Sequence[StaticChoice]) -> tuple[StaticChoice, ...]:
    """Sort choices by dollars and mark the Pareto front over hours and dollars."""
    ordered = sorted(found, key=lambda one: (one.dollars, one.hours))
    soonest, marked = float("inf"), []
    for one in ordered:
        marked.append(replace(one, is_pareto=one.hours < soonest))
        soonest = min(soonest, one.hours)
    return tuple(marked)
