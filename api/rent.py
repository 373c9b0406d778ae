"""``hetflow.rent``: under a deadline, on machines to stay on, at changing prices; their odds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clusters.simulator.renting import Adviser, compare, compare_from
from ..formats.importers.availability import read_availability
from ..formats.importers.recognise import read_market
from ..planning.inputs import profiles_of
from ..planning.market_prices import egress_dollars
from ..schema import files
from ..schema.arguments import Arguments
from ..schema.errors import FileError, ProblemError
from ..schema.market import (
    Availability,
    Capacity,
    Market,
    OddsReport,
    PriceHistory,
    PriceReport,
    RentAdvice,
    RentReport,
    RentState,
    utc_seconds,
    utc_text,
)
from ..schema.options import option
from ..schema.records import PositiveSeconds
from ..schema.requests.kinds import MachineSpeeds, Offers
from ..schema.requests.rent import MachinesRequest, PricesRequest, RentRequest
from ..schema.spelling import did_you_mean
from ..solvers.market.job import RentJob
from ..solvers.market.odds import Zone
from ..solvers.market.odds import odds as estimate
from ..solvers.market.offers import OfferHistory, history_of, job_on
from ..solvers.market.windows import Traces, apart, fewest_parts, traces_of
from .calls import checks, takes
from .files import markets_of, plan_of, throughputs_of

if TYPE_CHECKING:
    from ..planning.static_choice import StaticChoice

_DEADLINES = 6  # of a plot, beside the last
_FIRST_CHOICE = "aws"  # the thesis's


@takes(RentRequest)
def rent(request: RentRequest) -> RentReport:
    """Compare policies for renting machines for a job with a deadline: spot, on demand, or both.

    Policies are replayed on windows of availability that are as long as the deadline. Their costs
    are compared with the least possible cost of each window, which needs to know it in advance. A
    job that uses several machines goes on with what is left when spot machines are taken away.

    Returns:
        The cost of each policy on each window, and the cheapest policy that missed no deadline.

    Raises:
        ProblemError: A number, a window, a zone or a policy's name cannot be used.
        InfeasibleError: The work cannot end in time on any machines.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability
        >>> there = Availability(zone="a", tick_seconds=600, available=(1, 1, 0, 1, 1, 1))
        >>> report = hetflow.rent.deadline(
        ...     [there], work_seconds=1800, deadline_seconds=3600, restart_seconds=0,
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
        ... )
        >>> report.choice, report.bound_dollars
        ('greedy', (0.5,))
    """
    job, traces, history = asked_job(request)
    return compare(
        job,
        traces,
        history=history,
        policies=request.policies or None,
        every_seconds=request.every_seconds,
    )


def by_deadline(**asked: Any) -> list[RentReport]:
    """Compare policies for deadlines from the tightest one up to the one that is asked for.

    Arguments and errors are those of ``deadline``.
    """
    request = RentRequest(**Arguments(RentRequest, "by_deadline").checked((), asked))
    job, traces, history = asked_job(request)
    first, last = job.ticks_for(job.work_seconds), job.num_ticks
    ticks = {round(first * (last / first) ** (part / _DEADLINES)) for part in range(_DEADLINES)}
    return [
        compare(
            replace(job, deadline_seconds=number * job.tick_seconds),
            traces,
            history=history,
            policies=request.policies or None,
            every_seconds=request.every_seconds,
        )
        for number in sorted({*ticks, last})
    ]


def advice(state: RentState | Path | str, offers: Offers, **asked: Any) -> RentAdvice:
    """Say what a running job should hold now, and why: a policy, asked for one decision.

    Args:
        state: What the job holds and sees now, or its file.
        offers: As for ``deadline``. Nothing is replayed: without a history, ``dynamic_program``
            learns from these.
        **asked: All other arguments of ``deadline``. The first of ``policies`` decides.

    Returns:
        What to hold until the next tick, and what other policies would hold.

    Raises:
        ProblemError: A number, the state, a window or a policy's name cannot be used.
        InfeasibleError: The work cannot end in time on any machines.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability, RentState
        >>> there = Availability(zone="a", tick_seconds=600, available=(1, 1, 0, 1, 1, 1))
        >>> now = RentState(elapsed_seconds=600, work_left_seconds=1200, available={"a": 1})
        >>> advice = hetflow.rent.advice(
        ...     now, [there], work_seconds=1800, deadline_seconds=3600, restart_seconds=0,
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=1, policies=["greedy"],
        ... )
        >>> advice.num_spot, advice.num_on_demand, advice.zone
        (1, 0, 'a')
    """
    request = RentRequest(**Arguments(RentRequest, "advice").checked((offers,), asked))
    job, traces, history = asked_job(request)
    now = state if isinstance(state, RentState) else files.read(Path(state), RentState)
    zones, policies = traces[0].zones, request.policies or None
    return Adviser(job, zones, history=history or traces, policies=policies)(now)


def zones(windows: Offers, **asked: Any) -> RentReport:
    """An older name of ``deadline`` with ``between_zones``.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability
        >>> start = "2026-01-01T00:00:00Z"
        >>> there = Availability(
        ...     zone="a", start=start, tick_seconds=600, available=(1, 1, 0, 1, 1, 1)
        ... )
        >>> hetflow.rent.zones(
        ...     [there], work_seconds=1800, deadline_seconds=3600, restart_seconds=0,
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
        ... ).choice
        'greedy'
    """
    return rent(windows, between_zones=True, **asked)


def fleet(traces: Offers, *, resize_seconds: float = 60.0, **asked: Any) -> RentReport:
    """An older name of ``deadline`` with ``num_machines`` or ``speeds``.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Capacity
        >>> there = Capacity(zone="a", tick_seconds=600, num_machines=(2, 2, 0, 1, 2, 2))
        >>> hetflow.rent.fleet(
        ...     [there], num_machines=2, work_seconds=1800, deadline_seconds=3600,
        ...     resize_seconds=0, on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
        ... ).choice
        'greedy'
    """
    return rent(traces, restart_seconds=resize_seconds, **asked)


def asked_job(request: RentRequest) -> tuple[RentJob, list[Traces], list[Traces]]:
    """The job that a request has, what to replay on, and what to learn from."""
    speeds = _speeds(request)
    (offers, prices), (past, past_prices) = (
        _read_all(given, several=len(speeds) > 2) for given in (request.offers, request.history)
    )
    told = (*prices, *(one for one in past_prices if one not in prices))
    if request.spot_dollars_per_hour is not None:
        told = ()
    traces, history = (
        _traces(windows, told, between_zones=request.between_zones) for windows in (offers, past)
    )
    if not traces:
        raise ProblemError("there is no window of availability to replay on")
    # A job whose end falls between two looks at the market is in time all the same.
    rates = _rates(request.machine_speeds or {})
    parts, fastest = 1, max(speeds, default=0.0) * max(rates.values(), default=1.0)
    if fastest > 0:
        needed = request.work_seconds / fastest + request.restart_seconds
        parts = fewest_parts(traces[0].tick_seconds, needed, request.deadline_seconds)
    traces, history = ([one.in_parts(parts) for one in each] for each in (traces, history))
    if request.learn_until is not None:
        traces, history = _split(traces, history, request.learn_until)
    job = RentJob(
        work_seconds=request.work_seconds,
        deadline_seconds=request.deadline_seconds,
        restart_seconds=request.restart_seconds,
        tick_seconds=traces[0].tick_seconds,
        on_demand_dollars_per_hour=_on_demand(request, traces),
        spot_dollars_per_hour=_spot(request, traces),
        move_dollars=request.move_dollars,
        speeds=speeds,
        rates=_of_zones("machine_speeds", rates, traces) if rates else (),
    )
    return job, traces, history


def _speeds(request: RentRequest) -> tuple[float, ...]:
    number, speeds = request.num_machines, request.speeds
    if speeds is None:
        number = 1 if number is None else number
        if number > 64:
            raise ProblemError(f"{option('num_machines')} must be 1 to 64, got {number}")
        return tuple(map(float, range(number + 1)))
    if number is not None:
        raise ProblemError(
            f"say how fast the job is: give {option('num_machines')} or {option('speeds')}, not "
            "both"
        )
    return tuple(speeds)


_Windows = list[Availability | Capacity]


def _traces(
    windows: _Windows, prices: Sequence[PriceHistory], *, between_zones: bool
) -> list[Traces]:
    together = windows and between_zones
    return [traces_of(windows, prices)] if together else apart(windows, prices)


def _read_all(given: Offers, *, several: bool) -> tuple[_Windows, list[PriceHistory]]:
    windows: _Windows = []
    prices: list[PriceHistory] = []
    for one in given:
        if isinstance(one, PriceHistory):
            prices.append(one)
        elif isinstance(one, Availability | Capacity):
            windows.append(one)
        else:
            found, told = _read(Path(one), several)
            windows += found
            prices += told
    return windows, prices


def _read(
    path: Path, several: bool
) -> tuple[Sequence[Availability | Capacity], Sequence[PriceHistory]]:
    """What a file has: for several machines counts; for one whether there was one, else counts."""
    # And its price histories, which a file may also have alone.
    market = read_market(path)
    found = market.capacity if several else market.availability or market.capacity
    if not found and not market.prices:
        what = "capacity: holds no counts of spot machines" if several else "availability: holds "
        raise FileError(
            f"{path}: $.{what}" + ("" if several else "no windows"),
            hint="import them in the format bamboo-trace or parcae-trace (hetflow import)"
            if several
            else None,
        )
    return found, market.prices


def _split(
    traces: list[Traces], history: list[Traces], time: str
) -> tuple[list[Traces], list[Traces]]:
    """What is after a time, and what is before it."""
    if history:
        raise ProblemError(
            f"say what to learn from: give {option('history')} or {option('learn_until')}, not both"
        )
    when = utc_seconds(time, option("learn_until"), "time")
    halves = [one.split(when) for one in traces]
    before, after = ([half[side] for half in halves if half[side].ticks[0]] for side in (0, 1))
    if not before or not after:
        raise ProblemError(
            f"{option('learn_until', time)} leaves nothing to "
            + ("replay on" if before else "learn from"),
            hint="name a time within the windows",
        )
    return after, before


def _rates(given: MachineSpeeds) -> dict[str, float]:
    """How fast machines are; by their plans, relative to the fastest."""
    plans = {name: plan_of(one) for name, one in given.items() if not isinstance(one, float | int)}
    if plans and len(plans) < len(given):
        raise ProblemError(
            f"{option('machine_speeds')}: some are numbers and some are plans",
            hint="give the speed of each, or the plan of each",
        )
    if not plans:
        return {name: float(one) for name, one in given.items() if isinstance(one, float | int)}
    per_second = {name: plan.predicted.samples_per_second for name, plan in plans.items()}
    return {name: rate / max(per_second.values()) for name, rate in per_second.items()}


def _on_demand(request: RentRequest, traces: Sequence[Traces]) -> float | tuple[float, ...]:
    given = request.on_demand_dollars_per_hour
    if not isinstance(given, Mapping):
        return given
    return _of_zones("on_demand_dollars_per_hour", given, traces)


def _spot(request: RentRequest, traces: Sequence[Traces]) -> tuple[float, ...]:
    """The spot price of each zone; where prices move, their mean."""
    zones, given = range(len(traces[0].zones)), request.spot_dollars_per_hour
    if given is None:
        return tuple(_mean_price(traces, zone) for zone in zones)
    if not isinstance(given, Mapping):
        return (given,) * len(zones)
    return _of_zones("spot_dollars_per_hour", given, traces)


_WHAT = {
    "machine_speeds": ("speed", "SPEED"),
    "on_demand_dollars_per_hour": ("price on demand", "DOLLARS"),
    "spot_dollars_per_hour": ("spot price", "DOLLARS"),
}


def _of_zones(name: str, given: Mapping[str, float], traces: Sequence[Traces]) -> tuple[float, ...]:
    """What an option says of each zone, by its name, or by its place or type of machine."""
    zones = traces[0].zones
    other = next((one.title for one in traces if one.zones != zones), None)
    if other is not None:
        raise ProblemError(
            f"{option(name)} is by zone, and windows of {traces[0].title} and "
            f"{other} are replayed one by one",
            hint=f"add {option('between_zones')}, or compare the windows of one zone",
        )
    known = {zone: (zone, *zone.split()) for zone in zones}
    names = dict.fromkeys(word for words in known.values() for word in words)
    for told in given:
        if told not in names:
            raise ProblemError(
                f"{option(name)} names zone {told!r}; the windows are of {', '.join(zones)}",
                hint=did_you_mean(told, names) or None,
            )
    what, form = _WHAT[name]
    found = []
    for zone, words in known.items():
        own = next((word for word in words if word in given), None)
        if own is None:
            raise ProblemError(
                f"there is no {what} of zone {zone!r}",
                hint=f"add {option(name, f'{zone}={form}')}, or give one price for all"
                if name != "machine_speeds"
                else f"add {option(name, f'{words[-1]}={form}')}",
            )
        found.append(given[own])
    return tuple(found)


def _mean_price(traces: Sequence[Traces], zone: int) -> float:
    known = [
        price
        for one in traces
        for price in (one.spot_dollars_per_hour or [()] * (zone + 1))[zone]
        if price is not None
    ]
    if not known:
        raise ProblemError(
            f"there is no spot price of zone {traces[0].zones[zone]!r}",
            hint=f"give {option('spot_dollars_per_hour', 'DOLLARS')}, or offers with price "
            "histories of the same time",
        )
    return sum(known) / len(known)


@takes(MachinesRequest)
def rent_machines(request: MachinesRequest) -> "tuple[StaticChoice, ...]":
    """List the machines that could train a model, with hours and dollars; cheapest first.

    With profiles, each choice has a number of devices of one or two types, and the batch split
    solver predicts its step. With throughputs, choices are the numbers of devices and the mixes
    that these list. Whole machines are paid for, spot or on demand, at the prices of one time.

    Returns:
        The choices, those of the Pareto front over hours and dollars marked.

    Raises:
        ProblemError: Not just one of profiles and throughputs is given, no machine has a device
            that they know, or a number is not >= 1.
        InfeasibleError: No choice has a plan for the batch, or just the devices of a throughput.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import InstanceType, Market
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.5, peak_memory_bytes=1)
        >>> profile = hetflow.Profile(model="m", device_type="V100", device_memory_bytes=2,
        ...     weight_bytes=1, update_seconds=0.0, batch_curve=(point,))
        >>> machine = InstanceType(name="p3", device_type="V100", on_demand_dollars_per_hour=3.6)
        >>> choices = hetflow.rent.machines(
        ...     Market(instance_types=(machine,)), [profile], batch_size=8, steps=1000)
        >>> round(choices[0].dollars, 6), choices[0].machines
        (0.5, {'p3 on demand': 1})
    """
    from ..planning.static_choice import measured_choices, static_choices

    profiles, throughputs, batch_size = request.profiles, request.throughputs, request.batch_size
    asked: dict[str, Any] = {"steps": request.steps, "at": request.at}
    if throughputs is not None and profiles is None:
        return measured_choices(
            throughputs_of(throughputs, pairs=False),
            markets_of(request.market),
            batch_size=batch_size,
            most_devices=request.most_devices,
            model=request.model,
            **asked,
        )
    if profiles is None or throughputs is not None:
        given = "neither profiles nor" if profiles is None else "both profiles and"
        raise ProblemError(
            f"{given} throughputs are given",
            hint=f"give one of {option('profiles')} and {option('throughputs')}",
        )
    if batch_size is None:
        raise ProblemError("profiles need a batch size", hint=f"add {option('batch_size', 'N')}")
    return static_choices(
        profiles_of(profiles, request.model),
        markets_of(request.market),
        batch_size=batch_size,
        most_devices=request.most_devices or 8,
        **asked,
    )


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
    """The cloud of the strategies that use only one."""
    clouds = list(dict.fromkeys(offer.cloud for offer in history.offers))
    if asked is None:
        return _FIRST_CHOICE if _FIRST_CHOICE in clouds else clouds[0]
    if asked not in clouds:
        raise ProblemError(
            f"{option('cloud', repr(asked))} has no price of such devices; the "
            "markets have prices in "
            f"{', '.join(clouds)}",
            hint=did_you_mean(asked, clouds) or None,
        )
    return asked


# How long spot machines last: ``hetflow.rent.odds``.


@checks
def odds(
    sources: Sequence[Market | Path | str], *, checkpoint_seconds: PositiveSeconds | None = None
) -> OddsReport:
    """Estimate from a market's past how long spot machines last, their prices, and correlations.

    Args:
        sources: Markets, their files, or folders of availability files of one zone, which is named
            after the folder.
        checkpoint_seconds: Seconds to write a checkpoint, as measured or from a run record. If
            given, the report says how often to write one in each zone.

    Returns:
        Lifetimes by zone, quantiles of prices, and correlations between zones.

    Raises:
        ProblemError: There is nothing to estimate from, or ``checkpoint_seconds`` is not > 0.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability, Market
        >>> seen = Availability(zone="a", tick_seconds=600, available=(0, 1, 1, 1, 0, 1, 0))
        >>> report = hetflow.rent.odds([Market(availability=(seen,))], checkpoint_seconds=60)
        >>> report.zones[0].rate.mean_seconds, round(report.zones[0].young_seconds)
        (1200.0, 379)
    """
    windows: dict[Zone, list[Availability]] = {}
    prices: list[PriceHistory] = []
    for source in sources:
        market: Market | None
        if isinstance(source, Market):
            found, market = source.availability, source
        else:
            found, market = _zones_of(Path(source))
        for window in found:
            folder = None if market is not None else Path(str(source)).name
            windows.setdefault((folder or window.zone, window.instance_type), []).append(window)
        prices += market.prices if market is not None else ()
    report = estimate(windows, prices, checkpoint_seconds)
    if not report.zones and not report.prices:
        raise ProblemError(
            "there is nothing to estimate from",
            hint="give windows of availability in which a machine was there, or price histories",
        )
    return report


def _zones_of(path: Path) -> tuple[tuple[Availability, ...], Market | None]:
    """Read windows of availability, and the market that holds them (None for a folder)."""
    if path.is_file():
        data = files.read_text(path)
        if '"hetflow.market/1"' in data[:1000]:
            market = files.from_json(data, Market, name=str(path))
            return market.availability, market
    return read_availability(path), None
