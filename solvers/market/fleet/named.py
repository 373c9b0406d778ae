"""The policies for elastic jobs by name."""

from ..by_name import PoliciesByName
from .chain import Transitions
from .job import FleetJob, FleetPolicy
from .policies import dynamic_program
from .policies.greedy import Greedy
from .policies.on_demand import OnDemand
from .policies.uniform_progress import UniformProgress

POLICIES: PoliciesByName[FleetJob, Transitions, FleetPolicy] = PoliciesByName(
    plain={
        "on_demand": lambda _: OnDemand(),
        "greedy": lambda _: Greedy(),
        "uniform_progress": lambda _: UniformProgress(),
    },
    learned={"dynamic_program": dynamic_program.solve},
)
NAMES, policy_of = POLICIES.names, POLICIES.policy_of
