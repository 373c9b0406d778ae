"""A plan of any kind: the pool that it was solved for, and what is proved of it."""

from .cluster import Cluster
from .frames import listed
from .parallel import ParallelPlan
from .pipeline import PipelinePlan
from .plan import SplitPlan

Plan = SplitPlan | PipelinePlan | ParallelPlan


def devices_for(plan: Plan) -> dict[str, int]:
    """Return device type -> devices of the pool that a plan was solved for."""
    if plan.cluster is not None:
        return plan.cluster.num_devices
    stated = None if plan.restrictions is None else plan.restrictions.devices
    return dict(stated or plan.devices_by_type)


def claim_of(plan: Plan, pool: Cluster | None = None) -> str:
    """Return what is proved, and among which plans: ``optimal among plans with 2 stages``.

    Args:
        plan: A plan of any kind.
        pool: The pool that the plan is judged for; None is the one that it was solved for.
    """
    known, among = devices_for(plan), str(plan.restrictions or "")
    text = str(plan.proof.termination)
    if among:
        text += f" among plans with {among}"
    more = {} if pool is None else pool.num_devices
    if any(number > known.get(name, 0) for name, number in more.items()):
        own = {name: known[name] for name in more if name in known}
        text += f"{',' if among else ' among plans'} on {listed(own)} of {listed(more)}"
    return text
