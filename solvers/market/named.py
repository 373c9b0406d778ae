"""The policies by name."""

from .by_name import PoliciesByName
from .chain import Chain
from .deadline import DeadlineJob, Policy
from .policies import dynamic_program
from .policies.greedy import Greedy
from .policies.on_demand import OnDemand
from .policies.time_sliced import TimeSliced
from .policies.uniform_progress import UniformProgress

POLICIES: PoliciesByName[DeadlineJob, Chain, Policy] = PoliciesByName(
    plain={
        "on_demand": lambda _: OnDemand(),
        "greedy": lambda _: Greedy(),
        "time_sliced": lambda _: TimeSliced(),
        "uniform_progress": lambda _: UniformProgress(),
    },
    learned={"dynamic_program": dynamic_program.solve},
)
NAMES, policy_of = POLICIES.names, POLICIES.policy_of
