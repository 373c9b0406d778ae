"""``hetflow.rent.prices``."""

from math import inf
from typing import Any

from ..clusters.simulator.market.prices import compare_from
from ..planning.market_prices import egress_dollars
from ..schema.errors import ProblemError
from ..schema.market import PriceReport, utc_seconds, utc_text
from ..schema.options import option
from ..schema.requests.rent import PricesRequest
from ..schema.spelling import nearest
from ..solvers.market.offers import OfferHistory, history_of, job_on
from .calls import takes
from .files import markets_of

_FIRST_CHOICE = "aws"  # the thesis's


@takes(PricesRequest)
def rent_prices(request: PricesRequest) -> PriceReport:
    """Replay strategies for one job on price histories, beside a lower bound on the cost.

    The job uses one device at a time and may move when a price changes (thesis section 6.3).
    Machines on demand, and spot machines at a price without a history, count beside the histories,
    for as long as these last; where none is of such devices, for ever.

    Returns:
        What each strategy pays, how long it takes and what it holds.

    Raises:
        ProblemError: A number is out of range, or no machine (of ``cloud``) has such a device. Or
            there are no prices at the start, or the job cannot end before they do.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import InstanceType, Market, PriceHistory
        >>> machine = InstanceType(name="p3.2xlarge", device_type="V100")
        >>> history = PriceHistory(
        ...     cloud="aws", zone="us-east-1d", instance_type="p3.2xlarge", known_until=
        ...     "2020-03-09T00:00:00Z", times=("2020-03-07T00:00:00Z", "2020-03-08T00:00:00Z"),
        ...     dollars_per_hour=(1.0, 2.0))
        >>> report = hetflow.rent.prices(
        ...     Market(instance_types=(machine,), prices=(history,)), rates={"V100": 1.0},
        ...     work_hours=30, restart_seconds=0)
        >>> report.outcomes["dynamic"].dollars
        36.0
    """
    rates = request.rates
    if not rates:
        raise ProblemError(f"no device type has a speed: give {option('rates', 'V100=9.6')}")
    for name, rate in rates.items():
        if not 0 < rate < inf:
            raise ProblemError(f"{option('rates', f'{name}={rate:g}')} must be finite and > 0")
    first = next(iter(rates))
    read = markets_of(request.market)
    history = history_of(read, rates, fixed="until the last change")
    clouds = [offer.cloud for offer in history.offers if offer.cloud]
    size = request.checkpoint_gigabytes
    costs: dict[str, Any] = {
        "restart_seconds": request.restart_seconds,
        "cloud_move_dollars": request.cloud_move_dollars,
        "egress_dollars": {} if size is None else egress_dollars(read, size, clouds),
    }
    job = job_on(
        history.offers,
        work=request.work_hours * 3600 * rates[first],
        work_per_second=rates,
        deadline_seconds=request.deadline_seconds or inf,
        **costs,
    )
    only = _cloud_of(history, request.cloud)
    begin = (
        history.all_known_seconds()
        if request.start is None
        else utc_seconds(request.start, option("start"), "time")
    )
    found = compare_from(job, history, begin, cloud=only, device_type=first)
    return PriceReport(
        start=utc_text(found.start_seconds),
        work_hours=request.work_hours,
        deadline_seconds=request.deadline_seconds,
        rates=dict(rates),
        bound_dollars=found.bound_dollars,
        outcomes=found.outcomes,
        refused=found.refused,
        **costs,
    )


def _cloud_of(history: OfferHistory, asked: str | None) -> str:
    """The cloud of the strategies that use only one.

    Raises:
        ProblemError: No offer is in the cloud that was asked for.
    """
    clouds = list(dict.fromkeys(offer.cloud for offer in history.offers))
    if asked is None:
        return _FIRST_CHOICE if _FIRST_CHOICE in clouds else clouds[0]
    if asked not in clouds:
        guess = nearest(asked, clouds)
        raise ProblemError(
            f"{option('cloud', repr(asked))} has no price of such devices; the "
            "markets have prices in "
            f"{', '.join(clouds)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return asked
