"""Which solver answers which flags."""

import dataclasses
from typing import Literal

from ..schema.errors import ProblemError
from ..schema.plan import EmulatedDevice, PassTime, SplitPlan
from ..schema.problem import SplitProblem
from ..schema.profile import Profile


def solve_split(
    problem: SplitProblem, objective: str, method: str, top: int, time_limit: float | None
) -> SplitPlan:
    """Answer a split problem with the solver that the flags name.

    Raises:
        ProblemError: Flags that do not go together.
        InfeasibleError: No plan exists.
    """
    if objective == "waste":
        return _solve_waste(problem, method, top)
    if top != 1:
        raise ProblemError("--top lists EasyScale's configurations", hint="add --objective waste")
    if method == "exact":
        if time_limit is not None:
            raise ProblemError("--time-limit concerns the MILP", hint="add --method cbc or highs")
        from ..solvers import batch_split

        return batch_split.solve(problem)
    from ..solvers import batch_split_milp

    backend: Literal["cbc", "highs"] = "cbc" if method == "cbc" else "highs"
    return batch_split_milp.solve(problem, backend=backend, time_limit_seconds=time_limit)


def _solve_waste(problem: SplitProblem, method: str, top: int) -> SplitPlan:
    if problem.virtual_nodes is None:
        raise ProblemError("--objective waste needs maxP", hint="add --virtual-nodes maxP")
    if method != "exact":
        raise ProblemError("--objective waste has one method", hint="leave --method out")
    from ..solvers import est_mapping

    return est_mapping.solve(problem, top=top)


def with_origin(plan: SplitPlan, profiles: tuple[Profile, ...], pool: str) -> SplitPlan:
    """Add what a launch needs of emulated devices, and where the plan came from."""
    used = {group.device_type for group in plan.groups}
    emulated = tuple(
        EmulatedDevice(
            device_type=profile.device_type,
            base_device_type=profile.emulation.base_device_type,
            speed=profile.emulation.speed,
            passes=tuple(
                PassTime(batch_size=point.batch_size, step_seconds=point.step_seconds)
                for point in profile.batch_curve
            ),
        )
        for profile in profiles
        if profile.emulation is not None and profile.device_type in used
    )
    origin = {**(plan.provenance or {}), "pool": pool}
    return dataclasses.replace(plan, emulated=emulated, provenance=origin)
