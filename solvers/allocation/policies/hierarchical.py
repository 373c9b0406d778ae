"""Multi-level fairness: entities share by weight, and share on by their own policy (5.4.3)."""

from ....schema.errors import ProblemError
from ..instance import Instance
from ..policy import Policy, normalised, register
from ..water_filling.water import WaterFilling


def _goal(jobs: Instance) -> WaterFilling:
    if jobs.entity is None or not jobs.entities:
        raise ProblemError("the hierarchical policy needs entities; the jobs name none")
    return WaterFilling(
        unit=normalised(jobs), weight=jobs.weight, entity=jobs.entity, entities=jobs.entities
    )


register(
    Policy(
        name="hierarchical",
        title="weighted fairness over entities of any depth, fairness or FIFO inside",
        sense="max",
        unit="normalised throughput per share",
        goal=_goal,
    ),
)
