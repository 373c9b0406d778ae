"""The policies for a job under a deadline by name."""

from . import dynamic_program, rules
from .by_name import PoliciesByName
from .chain import Chain
from .deadline import DeadlineJob, Policy

POLICIES: PoliciesByName[DeadlineJob, Chain, Policy] = PoliciesByName(
    plain={
        "on_demand": lambda _: rules.Anywhere(rules.on_demand),
        "greedy": lambda _: rules.Anywhere(rules.greedy),
        "time_sliced": lambda _: rules.Anywhere(rules.time_sliced),
        "uniform_progress": lambda _: rules.Anywhere(rules.uniform_progress),
    },
    learned={"dynamic_program": dynamic_program.solve},
    history_hint="add {history=FILE}, or for zones {learn_until=TIME}",
)
NAMES, policy_of = POLICIES.names, POLICIES.policy_of
