"""The policies for several zones by name."""

from collections.abc import Callable

from .. import named
from ..by_name import PoliciesByName
from ..deadline import DeadlineJob, Policy
from .chain import ZonesChain
from .job import ZonesJob, ZonesPolicy
from .policies import dynamic_program
from .policies.anywhere import Anywhere


def _anywhere(make: Callable[[DeadlineJob], Policy]) -> Callable[[ZonesJob], ZonesPolicy]:
    return lambda job: Anywhere(make(job.job))


POLICIES: PoliciesByName[ZonesJob, ZonesChain, ZonesPolicy] = PoliciesByName(
    plain={name: _anywhere(make) for name, make in named.POLICIES.plain.items()},
    learned={"dynamic_program": dynamic_program.solve},
    history_hint="add --history FILE or --learn-until TIME",
)
NAMES, policy_of = POLICIES.names, POLICIES.policy_of
