"""``hetflow.solve``."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..planning.inputs import pool_of
from ..planning.limits import SolveLimits, TimeShares
from ..planning.request import question_of
from ..planning.solve import solve as best_plan
from ..schema.plan import Plan
from ..schema.requests.solve import SolveRequest
from .calls import takes

if TYPE_CHECKING:
    from ..planning.market_prices import DevicePrice


@takes(SolveRequest)
def solve(request: SolveRequest) -> Plan:
    """Find the best plan for a model on a pool; the plan carries its proof and has been checked.

    An option that no kind of plan in question reads is refused, also if it is given the value that
    it has by default.

    Returns:
        A plan that ``hetflow.check`` accepts for these profiles and this pool.

    Raises:
        ProblemError: Profiles, pool and options do not fit together, or a device type of the pool
            has no price in the market.
        InfeasibleError: No plan exists; the message says what to relax.
        FileError: A file is missing or has faults.
        BackendError: A solver's plan fails its check, which is a bug.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> v100 = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> plan = hetflow.solve([v100], "V100", batch_size=16)
        >>> plan.groups[0].virtual_nodes, plan.predicted.step_seconds, plan.proof.gap
        (2, 0.2, 0.0)
    """
    clock = TimeShares(SolveLimits(request.time_limit_seconds, request.gap))
    pool = pool_of(request.pool)
    offers: dict[str, DevicePrice] = {}
    if request.market is not None or request.at is not None or request.spot is not None:
        from .files import priced_pool

        pool, offers = priced_pool(pool, request.market, request.at, spot=request.spot)
    plan = best_plan(question_of(request, pool), clock)
    if not offers:
        return plan
    prices = {
        name: {"dollars_per_hour": one.dollars_per_hour, "machine": one.title}
        for name, one in offers.items()
    }
    return replace(plan, provenance={**(plan.provenance or {}), "prices": prices})
