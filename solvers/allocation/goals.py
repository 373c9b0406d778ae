"""The goals that a policy may optimise, and how each kind becomes linear programs.

A policy names its goal in terms of effective throughputs; nothing here knows any policy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from .engine import Outcome, optimise
from .instance import Instance
from .interior import can_reach
from .program import Bools, Floats, Ints

PRECISION = 1e-10
MAX_CUTS = 60
MAX_NAMED = 10  # jobs in a message
# Floors are raised by so much where they have room: rounding then never breaks them.
FLOOR_MARGIN = 2e-10
# Where this much room turns up, how much there is does not matter.
ROOM = 1e-6


@runtime_checkable
class Goal(Protocol):
    """What a policy may ask for: anything that knows how to optimise itself."""

    def optimise(self, instance: Instance) -> Outcome:
        """Optimise for the jobs and the pool; the objective and bound are the program's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxMin:
    """Maximise z with throughput_m >= z * ``level_m`` [jobs]; one linear program.

    With ``dollars`` [columns] per second, also z * ``budget`` >= what all jobs cost per second.
    ``allowed`` [jobs, columns] shuts the other columns.
    """

    level: Floats
    dollars: Floats | None = None
    budget: float = 0.0
    allowed: Bools | None = None

    def optimise(self, instance: Instance) -> Outcome:
        """One linear program."""
        if self.allowed is not None:
            instance = replace(instance, rate=np.where(self.allowed, instance.rate, 0.0))
        program = instance.program(level=self.level)
        if self.dollars is not None:
            program = replace(
                program,
                resources=np.vstack((program.resources, self.dollars)),
                capacity=np.append(program.capacity, 0.0),
                level_capacity=np.append(program.level_capacity, self.budget),
            )
        return optimise(instance, program)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Maximise sum over jobs and columns of ``worth`` [jobs, columns] * throughput there.

    ``floor`` [jobs] is the least throughput of each job, 0 where there is none; ``charge``
    [columns] is taken off for each unit held; ``unit`` is the objective's scale where its
    optimum may be near 0.
    """

    worth: Floats
    floor: Floats | None = None
    charge: Floats | None = None
    unit: float = 0.0

    def optimise(self, instance: Instance) -> Outcome:
        """Solve a total, after making sure that its floors can be met together.

        Raises:
            InfeasibleError: They cannot; it says which jobs, and by how much.
        """
        floor = self.floor
        if floor is not None and (floor > 0).any():
            floor = floor * (1.0 + FLOOR_MARGIN * (_room(instance, floor) > 1e-8))
        worth, charge = self.worth, self.charge
        program = instance.program(worth=worth, floor=floor, charge=charge, unit=self.unit)
        return optimise(instance, program, worth, charge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Maximise (sum of ``worth`` * throughput) / (sum of dollars per second), with floors."""

    worth: Floats
    dollars: Floats
    floor: Floats | None = None

    def optimise(self, instance: Instance) -> Outcome:
        """Maximise a ratio of linear functions exactly (Dinkelbach's sequence of programs).

        Each program maximises N - q D; its optimum is 0 exactly at the best ratio q. Without
        floors the optimum is the ratio of the best single columns, and of all allocations that
        reach it one with the largest numerator is returned.

        Raises:
            InfeasibleError: The floors cannot be met together.
        """
        if self.floor is None or not (self.floor > 0).any():
            return _best_columns(instance, self)
        found = Total(worth=self.worth, floor=self.floor).optimise(instance)
        earned, spent = _earned_and_spent(instance, found, self)
        steps = 0
        while steps < MAX_CUTS:
            steps += 1
            value = earned / spent
            charge = value * self.dollars
            asked = Total(worth=self.worth, charge=charge, floor=self.floor, unit=earned)
            found = asked.optimise(instance)
            earned, spent = _earned_and_spent(instance, found, self)
            if earned / spent <= value * (1 + PRECISION) or instance.should_stop():
                break
        # N <= q D + excess and D >= least for all x, so no ratio passes q + excess / least.
        spends = Total(worth=0 * self.worth, charge=self.dollars, floor=self.floor)
        least = -spends.optimise(instance).bound
        upper = max(value + max(found.bound, 0.0) / least, value)
        objective = max(value, earned / spent)
        return replace(
            found, objective=earned / spent, bound=upper, gap=max(0.0, (upper - objective) / upper),
            method=f"{found.method}; {steps} steps of Dinkelbach",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCurve:
    """Minimise the largest of decreasing functions of each job's throughput.

    ``needed(v)`` [jobs] is the throughput at which a job's function equals v. ``value`` is the
    largest function at given throughputs [jobs], ``lowest`` the v below which some job's function
    cannot be. Solved by cutting planes from the dual: exact, a few linear programs.
    """

    needed: Callable[[float], Floats]
    value: Callable[[Floats], float]
    lowest: float

    def optimise(self, instance: Instance) -> Outcome:
        """Minimise the largest curve: each program's prices cut off every smaller value.

        Take prices y with sum y_m * throughput_m <= h for every allocation (h their dual bound).
        They refute each v with sum y_m * needed_m(v) > h, so the root of that equation is a lower
        bound.
        """
        start = instance.isolated * 0.999
        upper = self.value(np.maximum(start, 1e-300))
        guess, lower = upper, self.lowest
        best: Outcome | None = None
        proof: Outcome | None = None
        cuts = 0
        while cuts < MAX_CUTS:
            cuts += 1
            level = self.needed(guess)
            found = optimise(instance, instance.program(level=level))
            reached = self.value(found.throughput)
            if best is None or reached < best.objective:
                best = replace(found, objective=reached)
            root = _root(self, found.job_prices, found.bound, lower, guess)
            if root > lower or proof is None:
                lower, proof = max(lower, root), found
            if best.objective - lower <= PRECISION * best.objective or instance.should_stop():
                break
            guess = lower * (1 + PRECISION / 4)
        assert best is not None
        assert proof is not None
        return replace(
            best, bound=lower, gap=max(0.0, 1 - lower / best.objective),
            job_prices=proof.job_prices, resource_prices=proof.resource_prices,
            time_prices=proof.time_prices,
            method=f"{best.method}; {cuts} cuts",
        )  # fmt: skip


def _room(instance: Instance, floor: Floats) -> float:
    """By how much all floors could be raised at once, relative, or ``ROOM`` if there is as much.

    Raises:
        InfeasibleError: They cannot be met at all.
    """
    best = instance.rate.max(axis=1)
    alone = np.flatnonzero(floor > best * (1 + PRECISION))
    if len(alone) and instance.pair_rate is None:
        first = alone[0]
        whose = "its SLO" if len(alone) == 1 else "every SLO"
        worst = float((floor / best)[alone].max())
        raise InfeasibleError(
            f"job {str(instance.ids[first])!r} needs {floor[first]:.6g} steps/s for its SLO, but "
            f"its fastest devices give {best[first]:.6g}{_others(instance, alone, floor / best)}",
            hint=f"make {whose} at least {worst:.4g} times as long",
        )
    program = instance.program(level=floor)
    if instance.pair_rate is None and can_reach(program, 1.0 + ROOM):
        return ROOM
    found = optimise(instance, program)
    if found.objective < 1.0 - PRECISION:
        binding = np.flatnonzero(found.job_prices * floor > 1e-6)
        names = ", ".join(repr(str(instance.ids[i])) for i in binding[:MAX_NAMED])
        names += ", ..." if len(binding) > MAX_NAMED else ""
        raise InfeasibleError(
            f"the SLOs cannot be met together: at best {100 * found.objective:.6g} % of the "
            f"throughput they need; {len(binding)} jobs bind ({names})",
            hint=f"make every SLO {1 / max(found.objective, 1e-12):.6g} times as long, or grow "
            "the pool",
        )
    return found.objective - 1.0


def _others(instance: Instance, places: Ints, factor: Floats) -> str:
    """Name the other jobs whose floors alone cannot be met, and by what factor."""
    if len(places) == 1:
        return ""
    named = [f"{str(instance.ids[i])!r} {factor[i]:.4g}" for i in places[1 : MAX_NAMED + 1]]
    more = ", ..." if len(places) > MAX_NAMED + 1 else ""
    return f" ({len(places)} such jobs; times too much: {', '.join(named)}{more})"


def _root(goal: LeastCurve, y: Floats, bound: float, low: float, high: float) -> float:
    """The v with sum y * needed(v) = bound; needed falls with v. Bisection to the last bit."""

    def excess(v: float) -> float:
        return float(y @ goal.needed(v)) - bound

    while excess(high) > 0:
        low, high = high, high + (abs(high) or 1.0)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def _earned_and_spent(instance: Instance, found: Outcome, goal: Ratio) -> tuple[float, float]:
    earned = float((goal.worth * instance.rate * found.x).sum())
    spent = float((instance.usage * goal.dollars * found.x).sum())
    if found.pairs is not None and instance.pair_rate is not None:
        a, b, c, time = found.pairs.a, found.pairs.b, found.pairs.column, found.pairs.time
        first = instance.pair_rate[instance.kind[a], instance.kind[b], c]
        second = instance.pair_rate[instance.kind[b], instance.kind[a], c]
        earned += float((goal.worth[a, c] * first + goal.worth[b, c] * second) @ time)
        spent += float((instance.usage[a, c] * goal.dollars[c]) @ time)
    return earned, spent


def _best_columns(instance: Instance, goal: Ratio) -> Outcome:
    if instance.pair_rate is not None:
        raise ProblemError(
            "a cost ratio without SLOs does not weigh pairs; leave space sharing out, or use "
            "min_cost"
        )
    each = np.where(instance.rate > 0, goal.worth * instance.rate, 0.0)
    each = each / (instance.usage * goal.dollars)
    best = float(each.max())
    kept = replace(instance, rate=np.where(each >= best * (1 - 1e-12), instance.rate, 0.0))
    found = optimise(kept, kept.program(worth=goal.worth), goal.worth)
    earned, spent = _earned_and_spent(instance, found, goal)
    return replace(
        found, objective=earned / spent, bound=best, gap=max(0.0, 1 - earned / spent / best),
        method="the columns of the best ratio",
    )  # fmt: skip
