"""Choose machines to rent for a whole training, comparing dollars and hours.

A choice is a number of devices of one or two types, and the cheapest machines that have them, at
one time, either with spot machines or on demand only. The batch split solver predicts the step on
these devices, so choices are compared by their price per sample, not per hour.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from ..checks.batch_split import check
from ..schema.cluster import Cluster, DeviceType, ServerGroup
from ..schema.errors import BackendError, InfeasibleError, ProblemError
from ..schema.market import Market
from ..schema.plan import SplitPlan
from ..schema.profile import Profile
from ..solvers.split.solve import solve
from .market_prices import DevicePrice, all_prices
from .split_problem import split_problem


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
        dollars_per_million_samples: Price that does not depend on the length of the training.
        is_pareto: Whether no other choice is both as fast and as cheap.
    """

    devices: Mapping[str, int]
    machines: Mapping[str, int]
    is_spot: bool
    step_seconds: float
    hours: float
    dollars: float
    dollars_per_million_samples: float
    is_pareto: bool = False


def static_choices(
    profiles: Sequence[Profile],
    markets: Sequence[Market],
    *,
    batch_size: int,
    steps: int,
    most_devices: int = 8,
    at: str | None = None,
) -> tuple[StaticChoice, ...]:
    """List every choice, cheapest first.

    Args:
        profiles: Profiles of one model; types without a profile are not rented.
        markets: Instance types with prices, and price histories.
        batch_size: Global batch, samples per step.
        steps: Steps of the whole training.
        most_devices: Most devices of each type.
        at: The time of the prices, in UTC; None takes the last that each market knows.

    Raises:
        ProblemError: No machine has a profiled device, or a number is not >= 1.
        InfeasibleError: No choice has a plan for the batch.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    if steps < 1 or most_devices < 1:
        raise ProblemError(f"steps and devices must be >= 1, got {steps} and {most_devices}")
    prices = all_prices(markets, at)
    known = list(dict.fromkeys(profile.device_type for profile in profiles))
    names = [name for name in known if name in prices]
    if not names:
        raise ProblemError(
            f"no machine with a price has one of {', '.join(known)}",
            hint=f"the market has {', '.join(sorted(prices)) or 'nothing'} then",
        )
    found: list[StaticChoice] = []
    held = {
        (name, spot): _cheapest([one for one in prices[name] if spot or not one.is_spot],
                                most_devices)
        for name in names
        for spot in (True, False)
    }  # fmt: skip
    for devices in _pools(names, most_devices):
        plan = _plan_of_all(profiles, devices, batch_size)
        if plan is None:
            continue
        step = plan.predicted.step_seconds
        offers: dict[tuple[str, ...], list[DevicePrice]] = {}
        for spot in (True, False):
            parts = [held[name, spot].get(number) for name, number in devices.items()]
            machines = [one for part in parts if part is not None for one in part]
            if None not in parts:  # if spot is not cheaper, both are the same machines
                offers.setdefault(tuple(sorted(one.title for one in machines)), machines)
        for machines in offers.values():
            hourly = sum(one.dollars_per_hour * one.num_devices for one in machines)
            dollars = hourly * step * steps / 3600
            found.append(
                StaticChoice(
                    devices=devices,
                    machines=dict(Counter(one.title for one in machines)),
                    is_spot=any(one.is_spot for one in machines),
                    step_seconds=step,
                    hours=step * steps / 3600,
                    dollars=dollars,
                    dollars_per_million_samples=dollars / (steps * batch_size) * 1e6,
                )
            )
    if not found:
        raise InfeasibleError(
            f"no choice of up to {most_devices} devices a type has a plan for batch {batch_size}",
            hint="allow more devices, or another batch",
        )
    return _marked(found)


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
    for flag, value in (("--deadline-hours", deadline_hours), ("--budget", budget_dollars)):
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
) -> SplitPlan:
    """Return the plan of a choice, for a pool whose servers are its machines.

    Args:
        choice: One of ``static_choices`` for the other arguments.
        profiles: Profiles of one model.
        markets: Where the machines are from.
        batch_size: Global batch, samples per step.
        at: The time of the prices, in UTC; None takes the last that each market knows.

    Raises:
        InfeasibleError: The devices have no plan that uses them all.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    plan = _plan_of_all(profiles, choice.devices, batch_size)
    if plan is None:
        raise InfeasibleError(f"no plan uses all of {dict(choice.devices)}")
    offers = {
        one.title: (device_type, one)
        for device_type, each in all_prices(markets, at).items()
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
) -> SplitPlan | None:
    """Find the best plan on the devices; None if it does not use them all.

    A plan that leaves devices unused belongs to the choice without these devices.

    Raises:
        BackendError: The solver's plan fails its check, which is a bug.
    """
    pool = Cluster.parse(",".join(f"{number}x{name}" for name, number in devices.items()))
    try:
        problem = split_problem(profiles, pool, batch_size)
        plan = solve(problem, fastest=True)
    except InfeasibleError:
        return None
    faults = check(plan, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    used: Counter[str] = Counter()
    for group in plan.groups:
        used[group.device_type] += group.num_devices
    return plan if used == Counter(devices) else None


def _cheapest(prices: Sequence[DevicePrice], most: int) -> dict[int, list[DevicePrice]]:
    """Find, for each number of devices, the cheapest machines that have exactly so many."""
    best: dict[int, tuple[float, list[DevicePrice]]] = {0: (0.0, [])}
    for number in range(1, most + 1):
        ways = [
            (before[0] + one.dollars_per_hour * one.num_devices, [*before[1], one])
            for one in prices
            if (before := best.get(number - one.num_devices)) is not None
        ]
        if ways:
            best[number] = min(ways, key=lambda way: way[0])
    return {number: machines for number, (_, machines) in best.items() if number}


def _marked(found: Sequence[StaticChoice]) -> tuple[StaticChoice, ...]:
    """Sort choices by dollars and mark the Pareto front over hours and dollars."""
    ordered = sorted(found, key=lambda one: (one.dollars, one.hours))
    soonest, marked = float("inf"), []
    for one in ordered:
        marked.append(replace(one, is_pareto=one.hours < soonest))
        soonest = min(soonest, one.hours)
    return tuple(marked)
