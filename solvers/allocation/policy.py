"""What a policy is, and the registry that finds them: one file each in ``policies/``."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeGuard

import numpy as np

from ...schema.errors import ProblemError
from ...schema.records import nearest
from . import policies
from .engine import Outcome
from .goals import Goal, LeastCurve, MaxMin
from .instance import Instance
from .program import Floats
from .water_filling.filling import filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy as an optimisation problem over effective throughputs.

    ``goal`` says what to optimise for an instance. ``report`` turns the program's objective
    (and its bound) into the policy's own figure, in ``unit``. ``leaves_idle`` says why devices
    that the optimum gives to nobody stay idle on purpose, in a simulator's rounds too; empty
    where they may be given away.
    """

    name: str
    title: str
    sense: Literal["max", "min"]
    unit: str
    goal: Callable[[Instance], Goal]
    report: Callable[[Instance, float], float] = lambda _, value: value
    leaves_idle: str = ""


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


@cache
def all_policies() -> dict[str, Policy]:
    """Every policy by name, from the modules of ``policies/``."""
    names = sorted(module.name for module in pkgutil.iter_modules(policies.__path__))
    found: dict[str, Policy] = {}
    for name in names:
        module = importlib.import_module(f"{policies.__name__}.{name}")
        for policy in module.POLICIES:
            found[policy.name] = policy
    return found


def policy_named(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ProblemError: There is none.
    """
    known = all_policies()
    if name not in known:
        guess = nearest(name, list(known))
        mend = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
        raise ProblemError(f"no policy {name!r}; {mend}")
    return known[name]


def inverse(_: Instance, value: float) -> float:
    """1 / value: programs maximise a rate where a policy minimises a time."""
    return 1.0 / value if value > 0 else float("inf")


def normalised(instance: Instance, weight: Floats | None = None) -> Floats:
    """Throughput per unit of w_m^-1 throughput / throughput(m, X^equal) * scale_factor (5.4.1)."""
    weights: Floats = np.ones(instance.num_jobs) if weight is None else weight
    return weights * instance.equal / instance.scale
