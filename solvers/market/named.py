"""The policies by name."""

from collections.abc import Callable

from ...schema.errors import ProblemError
from ...schema.spelling import nearest
from .chain import Chain
from .deadline import DeadlineJob, Policy
from .policies import dynamic_program
from .policies.greedy import Greedy
from .policies.on_demand import OnDemand
from .policies.time_sliced import TimeSliced
from .policies.uniform_progress import UniformProgress

_PLAIN: dict[str, Callable[[], Policy]] = {
    "on_demand": OnDemand,
    "greedy": Greedy,
    "time_sliced": TimeSliced,
    "uniform_progress": UniformProgress,
}
LEARNED = ("dynamic_program",)
"""Those that need a history."""
NAMES = (*_PLAIN, *LEARNED)


def policy_of(name: str, job: DeadlineJob, chain: Chain | None) -> Policy:
    """A policy, ready for a job.

    Raises:
        ProblemError: There is none of that name, or it needs a history and there is none.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    if name not in LEARNED:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"no rent policy {name!r}; known are {', '.join(NAMES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    if chain is None:
        raise ProblemError(f"{name} learns from a history", hint="add --history FILE")
    return dynamic_program.solve(job, chain)
