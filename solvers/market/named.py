"""The policies for a job under a deadline by name."""

from collections.abc import Mapping

from ...schema.errors import ProblemError
from ...schema.options import told
from ...schema.spelling import nearest
from . import dynamic_program, rules
from .chain import Chain
from .deadline import DeadlineJob, Policy

PLAIN: Mapping[str, Policy] = {
    "on_demand": rules.on_demand,
    "greedy": rules.greedy,
    "time_sliced": rules.time_sliced,
    "uniform_progress": rules.uniform_progress,
}
LEARNED = "dynamic_program"
NAMES = (*PLAIN, LEARNED)


def policy_of(name: str, job: DeadlineJob, history: Chain | None) -> Policy:
    """A policy, ready for a job.

    Raises:
        ProblemError: There is none of that name, or it needs a history and there is none.
    """
    if name in PLAIN:
        return PLAIN[name]
    if name != LEARNED:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"no rent policy {name!r}; known are {', '.join(NAMES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    if history is None:
        hint = told("add {history=FILE}, or with zones by time {learn_until=TIME}")
        raise ProblemError(f"{name} learns from a history", hint=hint)
    return dynamic_program.Programs(job, history)
