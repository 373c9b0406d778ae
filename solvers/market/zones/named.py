"""The policies for several zones by name."""

from ....schema.errors import ProblemError
from ....schema.spelling import nearest
from .. import named
from .chain import ZonesChain
from .job import ZonesJob, ZonesPolicy
from .policies import dynamic_program
from .policies.anywhere import Anywhere

LEARNED = ("dynamic_program",)
"""Those that need a history."""
NAMES = (*(name for name in named.NAMES if name not in named.LEARNED), *LEARNED)


def policy_of(name: str, job: ZonesJob, chain: ZonesChain | None) -> ZonesPolicy:
    """A policy, ready for a job.

    Raises:
        ProblemError: There is none of that name, or it needs a history and there is none.
    """
    if name not in NAMES:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"no rent policy {name!r}; known are {', '.join(NAMES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    if name not in LEARNED:
        return Anywhere(named.policy_of(name, job.job, None))
    if chain is None:
        raise ProblemError(
            f"{name} learns from a history", hint="add --history FILE or --learn-until TIME"
        )
    return dynamic_program.solve(job, chain)
