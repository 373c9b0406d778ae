"""Policies and their registry, the goals that they may optimise, and how goals become programs.

A policy names its goal in terms of effective throughputs. The own ones stand in ``policies.py``,
others are plug-ins.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np

from ...schema.errors import BackendError, InfeasibleError, ProblemError
from ...schema.plugins import Registry
from ...schema.spelling import did_you_mean
from ..effort import OutOfTimeError, never
from .engine import Outcome, optimise
from .instance import Instance
from .interior import can_reach
from .program import Bools, Floats, Ints, equal_rows
from .water_filling.water import WaterFilling, fill

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
            # Raised a little where there is room, so that rounding never breaks a floor.
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
        # q rises with each program; at the best ratio the optimum N - q D is 0.
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
        """Minimise the largest curve: each program's prices cut off every smaller value."""
        # A little under what each has alone: feasible, so its value is an upper bound.
        start = instance.isolated * 0.999
        upper = self.value(np.maximum(start, 1e-300))
        guess, lower = upper, self.lowest
        best: Outcome | None = None
        proof: Outcome | None = None
        cuts = 0
        while cuts < MAX_CUTS:
            cuts += 1
            # What each job must have for no function to be above the guess.
            level = self.needed(guess)
            found = optimise(instance, instance.program(level=level))
            reached = self.value(found.throughput)
            if best is None or reached < best.objective:
                best = replace(found, objective=reached)
            # Prices y with sum y_m throughput_m <= h for every allocation refute each v with sum
            # y_m needed_m(v) > h: the root of that equation is a lower bound.
            root = _root(self, found.job_prices, found.bound, lower, guess)
            if root > lower or proof is None:
                lower, proof = max(lower, root), found
            if best.objective - lower <= PRECISION * best.objective or instance.should_stop():
                break
            # Just above what is proved: either it can be had, or its prices prove more.
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
    """By how much all floors could be raised at once, relative, or ``ROOM`` if there is as much."""
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
    # A few iterations tell that there is enough; how much does not matter.
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

    # Needed falls with v, so the root is looked for upwards until the excess is gone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastAttained:
    """Max-min fairness over normalised throughput, ``weighted`` by priority or not (5.4.1)."""

    weighted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy as an optimisation problem over effective throughputs.

    Attributes:
        name: What users call it.
        title: What it is for, in a few words.
        sense: Whether its figure is a ``max`` or a ``min``.
        unit: Of its figure.
        goal: What to optimise for an instance.
        report: Turns the program's objective (and its bound) into the policy's own figure.
        leaves_idle: Why devices that the optimum gives to no job stay idle on purpose, in a
            simulator's rounds too; empty where they may be given away.
        single_use: Why it means nothing for jobs that come and go, as in "spends one budget on
            the jobs of one allocation"; empty where it does.
        incremental: The goal in a form that simulators solve again from their last answer as
            jobs come and go; None where each allocation is solved from nothing.
    """

    name: str
    title: str
    sense: Literal["max", "min"]
    unit: str
    goal: Callable[[Instance], Goal]
    report: Callable[[Instance, float], float] = lambda _, value: value
    leaves_idle: str = ""
    single_use: str = ""
    incremental: LeastAttained | None = None


def solve(instance: Instance, policy: Policy, *, fills: bool = False) -> Outcome:
    """Optimise an instance under a policy; the objective and bound are the policy's own.

    Args:
        instance: The jobs and the pool.
        policy: What to optimise.
        fills: Whether to share out what a max-min policy's optimum leaves idle (``filling``).
            Goals that add up leave nothing that a job with any worth could use, and those with
            a budget leave it on purpose.

    Raises:
        InfeasibleError: The policy's constraints (SLOs, a budget) cannot be met.
        ProblemError: The policy needs something that the instance lacks.
        BackendError: A method broke down.
    """
    goal = policy.goal(instance)
    if not isinstance(goal, Goal):
        raise ProblemError(
            f"the goal of policy {policy.name!r} returned {type(goal).__name__}, which has no "
            "optimise",
            hint="return a MaxMin, Total, Ratio, LeastCurve or WaterFilling",
        )
    outcome = goal.optimise(instance)
    if fills and _can_be_filled(goal):
        outcome = filled(instance, goal, outcome)
    return replace(
        outcome,
        objective=policy.report(instance, outcome.objective),
        bound=policy.report(instance, outcome.bound),
    )


def _can_be_filled(goal: object) -> TypeGuard[MaxMin | LeastCurve]:
    return isinstance(goal, LeastCurve) or (isinstance(goal, MaxMin) and goal.dollars is None)


POLICIES: Registry[Policy] = Registry(
    "policy", group="hetflow.policies", own=("hetflow.solvers.allocation.policies",)
)


def register(*defined: Policy) -> None:
    """Register policies; the module that defines their goals is theirs."""
    for entry in defined:
        POLICIES.add(entry.name, entry, entry.goal.__module__)


def policy(
    name: str,
    *,
    title: str,
    sense: Literal["max", "min"],
    unit: str,
    report: Callable[[Instance, float], float] = lambda _, value: value,
    leaves_idle: str = "",
    single_use: str = "",
    incremental: LeastAttained | None = None,
) -> Callable[[Callable[[Instance], Goal]], Callable[[Instance], Goal]]:
    """Register a goal as a policy; the arguments are the attributes of ``Policy``.

    Returns:
        A decorator that leaves the goal as it is.
    """

    def registered(goal: Callable[[Instance], Goal]) -> Callable[[Instance], Goal]:
        register(
            Policy(
                name=name,
                title=title,
                sense=sense,
                unit=unit,
                goal=goal,
                report=report,
                leaves_idle=leaves_idle,
                single_use=single_use,
                incremental=incremental,
            )
        )
        return goal

    return registered


def all_policies() -> dict[str, Policy]:
    """Every policy by name, those of installed plug-ins too."""
    return {name: POLICIES.get(name) for name in POLICIES.names()}


def policy_named(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ProblemError: There is none, or its plug-in cannot be loaded.
    """
    found = POLICIES.find(name)
    if found is None:
        known = POLICIES.names()
        fix = did_you_mean(name, known, f"known: {', '.join(known)}")
        raise ProblemError(f"no policy {name!r}; {fix}")
    return found


def inverse(_: Instance, value: float) -> float:
    """1 / value: programs maximise a rate where a policy minimises a time."""
    return 1.0 / value if value > 0 else float("inf")


def normalised(instance: Instance, weight: Floats | None = None) -> Floats:
    """Throughput per unit of w_m^-1 throughput / throughput(m, X^equal) * scale_factor (5.4.1)."""
    weights: Floats = np.ones(instance.num_jobs) if weight is None else weight
    return weights * instance.equal / instance.scale


# Share out what an optimum leaves idle: lexicographic max-min past the bottleneck (5.4.3).
#
# The optimum of a max-min policy asks a throughput of every job and says nothing of what is left.
# Water filling from there raises all throughputs together, each in proportion to what the optimum
# asks of its job, until some can rise no further; the others rise on. The first level is the
# optimum itself, so the policy's objective stays.


# A filled allocation may lose this part of the objective to rounding.
KEPT = 1e-9
# Entries (rows x columns) of all programs together that are looked at without a time limit: half
# a minute of work, some six times that of the optimum where that ends the filling.
MOST_WORK = 2e8


def filled(instance: Instance, goal: MaxMin | LeastCurve, bare: Outcome) -> Outcome:
    """Share out what an optimum leaves idle; unique throughputs, with a proof of every level.

    Without a limit of the caller's it ends after a fixed amount of work.

    Returns:
        The filled outcome under the optimum's bound and prices; ``bare`` again, saying why,
        where water filling finds no proof, or not in time.
    """
    asked = goal.level if isinstance(goal, MaxMin) else goal.needed(bare.objective)
    if isinstance(goal, MaxMin) and goal.allowed is not None:
        instance = replace(instance, rate=np.where(goal.allowed, instance.rate, 0.0))
    each = WaterFilling(
        unit=asked, weight=np.ones(len(asked)), entity=np.full(len(asked), -1, dtype=np.int64)
    )
    should_stop, late = instance.should_stop, "the time limit came before they were shared out"
    # Without a limit of time, a number of looks: the same on every machine.
    if should_stop is never:
        rows = int(equal_rows(np.column_stack((instance.rate, asked))).max()) + 1
        pieces, done = int(MOST_WORK / (rows * instance.rate.shape[1])), count()

        def should_stop() -> bool:
            return next(done) >= pieces

        late = "sharing them out takes more work than is done without a time limit"
    try:
        found = fill(replace(instance, should_stop=should_stop), each)
    except OutOfTimeError:
        return replace(bare, unfilled=late)
    except BackendError as error:
        return replace(bare, unfilled=f"sharing them out broke down ({error.message})")
    value = _value(goal, found.throughput)
    bound = bare.bound if np.isfinite(bare.bound) else value
    # Minimised for curves, maximised for levels.
    lost = (bare.objective - value) * (1.0 if isinstance(goal, MaxMin) else -1.0)
    if lost > KEPT * abs(bare.objective) or found.num_unproved:
        unproved = "no way of sharing them out could be proved"
        return replace(bare, unfilled=late if should_stop() else unproved)
    return replace(
        found,
        objective=value,
        bound=bare.bound,
        gap=max(abs(bound - value) / max(abs(bound), abs(value), 1e-300), found.gap),
        job_prices=bare.job_prices,
        resource_prices=bare.resource_prices,
        time_prices=bare.time_prices,
        method=f"{bare.method}; filled: {found.method}",
        is_filled=True,
    )


def _value(goal: MaxMin | LeastCurve, throughput: Floats) -> float:
    """The program's objective at throughputs [jobs]."""
    if isinstance(goal, LeastCurve):
        return goal.value(throughput)
    rows = goal.level > 0
    return float((throughput[rows] / goal.level[rows]).min())
