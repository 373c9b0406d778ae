"""What EasyScale's schedulers know of a live job: the devices that it can use, and how fast it is.

A job's database of plans (EasyScale 3.4, companion module) begins with its throughputs on each type
alone. Plans on several types are made when a decision first asks for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...schema.cluster import Cluster
from ...schema.errors import FileError, InfeasibleError
from ...schema.jobs import MixThroughput
from ..mechanisms.cluster.seats import DeviceLayout
from ..mechanisms.easyscale import ByType, Elastic, Fixed, Variant, Wish, alone
from .plans import Rate, kind_of, may_mix, rate_on, rates_of
from .submission import Submission


def rates_and_wish(
    asked: Submission, num_devices: Mapping[str, int], layout: DeviceLayout, variant: Variant
) -> tuple[tuple[Rate, ...], Wish]:
    """A new job's rates, as ``plans.rates_of`` gives them, and its wish.

    Args:
        asked: The job.
        num_devices: The cluster's devices by type.
        layout: These on servers.
        variant: Which of EasyScale's schedulers.

    Raises:
        InfeasibleError: No server can hold it.
        HetflowError: Its profiles are gone, or have faults.
    """
    types = list(num_devices)
    try:
        rates = rates_of(asked, num_devices)
    except InfeasibleError:
        if asked.devices_at_most is None:
            raise
        wish = wish_of(asked, (), types)  # perhaps it can on several types
        if (found := alone(wish, layout, variant)) is None:
            raise
        assert isinstance(wish, Elastic)
        rates = (_rate_of_mix(asked, found, types, wish.rate(found)),)
    wish = wish_of(asked, rates, types)
    if alone(wish, layout, variant) is None:
        least = asked.gpus or f"{asked.fewest_devices} devices"
        raise InfeasibleError(f"it asks for {least} on one server, and none can hold it")
    return rates, wish


def wish_of(
    asked: Submission,
    rates: Sequence[Rate],
    types: Sequence[str],
    ratio: Callable[[Iterable[str]], float] = lambda types: 1.0,
) -> Wish:
    """What a job can run on.

    Args:
        asked: The job.
        rates: Those that are known.
        types: Of the cluster, in order.
        ratio: Measured over predicted speed on some types, for rates that are made later.
    """
    known = dict[ByType, float]()
    for one in rates:
        if isinstance(one, MixThroughput):
            known[tuple(one.devices.get(name, 0) for name in types)] = one.steps_per_second
            continue
        for kind, name in enumerate(types):
            if found := one.steps_per_second.get(name):
                counts = tuple(one.scale_factor if k == kind else 0 for k in range(len(types)))
                known[counts] = found
    if asked.devices_at_most is None:
        if asked.gpus is not None:
            named = Cluster.parse(asked.gpus).num_devices
            return Fixed((tuple(named.get(name, 0) for name in types),))
        return Fixed(tuple(sorted(known, key=lambda counts: -known[counts])))

    def rate(counts: ByType) -> float:
        if not any(counts):
            return 0.0
        if counts not in known:
            used = {name: number for name, number in zip(types, counts, strict=True) if number}
            try:
                is_known = len(used) == 1 and bool(rates)
                known[counts] = 0.0 if is_known else rate_on(asked, used) * ratio(used)
            except FileError:
                return 0.0  # its profiles are gone
        return known[counts]

    return Elastic(
        least=asked.fewest_devices,
        most=asked.devices_at_most,
        rate=rate,
        full_rate=max(known.values(), default=1.0),
        mixes=_may_mix(asked, types),
    )


def _may_mix(asked: Submission, types: Sequence[str]) -> bool:
    try:
        return may_mix(asked, types)
    except FileError:
        return False  # as above: nobody knows


def _rate_of_mix(
    asked: Submission, counts: ByType, types: Sequence[str], steps_per_second: float
) -> MixThroughput:
    devices = {name: number for name, number in zip(types, counts, strict=True) if number}
    return MixThroughput(
        model=kind_of(asked), scale_factor=sum(counts), steps_per_second=steps_per_second,
        devices=devices,
    )  # fmt: skip
