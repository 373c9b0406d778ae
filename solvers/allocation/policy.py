"""Policies, and their registry: those of ``policies.py``, and plug-ins."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, TypeGuard

import numpy as np

from ...schema.errors import BackendError, ProblemError
from ...schema.plugins import Registry
from ...schema.spelling import did_you_mean
from ..effort import OutOfTimeError, never
from .engine import Outcome
from .goals import Goal, LeastCurve, MaxMin
from .instance import Instance
from .program import Floats, equal_rows
from .water_filling.water import WaterFilling, fill

# A filled allocation may lose this part of the objective to rounding.


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


KEPT = 1e-9
# Entries (rows x columns) of all programs together that are looked at without a time limit: half
# a minute of work, some six times that of the optimum where that ends the filling.
MOST_WORK = 2e8


def filled(instance: Instance, goal: MaxMin | LeastCurve, bare: Outcome) -> Outcome:
    """Share out what an optimum leaves idle; unique throughputs, with a proof of every level.

    Without a limit of the caller's it ends after a fixed amount of work.

    Args:
        instance: The jobs and the pool.
        goal: What was optimised.
        bare: An optimum, with the program's own objective.

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
