"""Prices of device types from markets at one time, for pools and for simulations."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.market import InstanceType, Market, PriceHistory, utc_seconds, utc_text
from ..schema.options import option
from ..schema.spelling import did_you_mean
from ..solvers.market.offers import Prices, history_of, where_available

_LAST_SECONDS = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrice:
    """An offer of devices of one type: dollars per hour of one device, and the machine to rent."""

    dollars_per_hour: float
    instance_type: str
    num_devices: int
    place: str
    is_spot: bool
    cloud: str = ""

    @property
    def title(self) -> str:
        """Place, instance type, and ``spot`` or ``on demand``, for messages and tables."""
        kind = "spot" if self.is_spot else "on demand"
        return " ".join(word for word in (self.place, self.instance_type, kind) if word)


def device_prices(
    markets: Sequence[Market], at: str | None = None, *, spot: bool | None = None
) -> dict[str, DevicePrice]:
    """Find the cheapest price of a device of each type at a time, spot or on demand (None: both).

    Without a time in UTC, such as ``2020-03-07T00:00:00Z``, it is for each market the last one at
    which all histories are known that end on its last day.

    Raises:
        ProblemError: A history is of an instance type that the market does not describe.
    """
    return {
        name: min(kept, key=lambda price: price.dollars_per_hour)
        for name, each in all_prices(markets, at).items()
        if (kept := [price for price in each if spot in (None, price.is_spot)])
    }


def egress_dollars(
    markets: Sequence[Market], gigabytes: float, clouds: Iterable[str]
) -> dict[str, float]:
    """Find the dollars that taking so much out of each cloud costs, at its highest price.

    Raises:
        ProblemError: The size is out of range, or a cloud's egress price is not known.
    """
    if not 0 <= gigabytes < float("inf"):
        raise ProblemError(
            f"{option('checkpoint_gigabytes')} must be >= 0 and finite, got {gigabytes:g}"
        )
    prices: dict[str, float] = {}
    clouds = list(dict.fromkeys(clouds))
    for market in markets:
        told = [(history.cloud, market.instance_type_of(history)) for history in market.prices]
        told += [(machine.cloud, machine) for machine in market.instance_types if machine.cloud]
        for cloud, machine in told:
            price = None if machine is None else machine.egress_dollars_per_gigabyte
            if price is not None:
                prices[cloud] = max(price, prices.get(cloud, 0.0))
    for cloud in clouds:
        if cloud not in prices:
            raise ProblemError(
                f"no instance type of {cloud} has an egress price",
                hint=f"import its prices with {option('instance_types', 'that')} have Egress "
                "$/GB, or give "
                f"{option('cloud_move_dollars')} instead",
            )
    return {cloud: prices[cloud] * gigabytes for cloud in clouds}


def all_prices(markets: Sequence[Market], at: str | None = None) -> dict[str, list[DevicePrice]]:
    """List every price of each device type, in the order of the markets; see ``device_prices``."""
    found: dict[str, list[DevicePrice]] = {}
    when = None if at is None else utc_seconds(at, option("at"), "time")
    for market in markets:
        if when is not None and market.prices:
            _check_within(market.prices, when)
        for device_type, price in _offers(market, when):
            found.setdefault(device_type, []).append(price)
    return found


def _offers(market: Market, when: float | None) -> Iterator[tuple[str, DevicePrice]]:
    for machine in market.instance_types:
        place = " ".join(word for word in (machine.cloud, machine.region) if word)
        prices = (machine.on_demand_dollars_per_hour, False), (machine.spot_dollars_per_hour, True)
        for dollars, is_spot in prices:
            if dollars and not (is_spot and market.has_history(machine)):
                yield _price(machine, dollars, place, machine.cloud or "", is_spot=is_spot)
    if when is None and market.prices:
        when = _last_seconds(market.prices)
    for history in market.prices:
        owner = market.described(history)
        dollars = None if when is None else _price_at(history.stretches(), when)
        if dollars:
            place = f"{history.cloud} {history.place}"
            yield _price(owner, dollars, place, history.cloud, is_spot=True)


def _price(
    machine: InstanceType, dollars: float, place: str, cloud: str, *, is_spot: bool
) -> tuple[str, DevicePrice]:
    """A device of a machine that costs so many dollars per hour."""
    number = machine.num_devices
    return machine.device_type, DevicePrice(
        dollars_per_hour=dollars / number, instance_type=machine.name, num_devices=number,
        place=place, is_spot=is_spot, cloud=cloud,
    )  # fmt: skip


def _check_within(histories: Sequence[PriceHistory], when: float) -> None:
    """Refuse a time before all histories of a market or after its last one."""
    # What was on demand at another time would be all that is left, and nobody had asked for that.
    first = min(history.start_seconds()[0] for history in histories)
    last = max(history.end_seconds() for history in histories)
    if not first <= when <= last:
        clouds = ", ".join(dict.fromkeys(history.cloud for history in histories))
        raise ProblemError(
            f"{option('at', utc_text(when))}: the price histories of {clouds} are "
            "known from "
            f"{utc_text(first)} to {utc_text(last)}",
            hint=f"give a time within, newer prices, or leave {option('at')} or that market out",
        )


def _last_seconds(histories: Sequence[PriceHistory]) -> float:
    """Return the last time at which all histories are known that end on the last day."""
    # Histories end with the last change that was reported, so hardly two end at the same time.
    ends = [history.end_seconds() for history in histories]
    return min(end for end in ends if end >= max(ends) - _LAST_SECONDS)


def _price_at(stretches: Sequence[tuple[float, float, float | None]], when: float) -> float | None:
    """Return the price at a time; the last interval includes its end. None if unknown."""
    for start, end, price in stretches:
        if start <= when < end or (when == end and end == stretches[-1][1]):
            return price
    return None


def priced_pool(
    pool: Cluster,
    markets: Sequence[Market] | None,
    at: str | None = None,
    *,
    spot: bool | None = None,
) -> tuple[Cluster, dict[str, DevicePrice]]:
    """Replace a pool's prices by the markets' cheapest ones (``device_prices``), if there are any.

    Returns:
        The pool with the new prices, and its device types -> the offers that give them.

    Raises:
        ProblemError: A device type of the pool has no such price at that time; or a time or a kind
            of prices is given without a market.
    """
    if markets is None:
        if at is not None or spot is not None:
            what = "time" if at is not None else "kind"
            raise ProblemError(
                f"a {what} of prices is given, and no market",
                hint=f"add {option('market', 'FILE')}",
            )
        return pool, {}
    prices = device_prices(markets, at, spot=spot)
    theirs = dict(zip(pool.num_devices, pool.spelled_as(prices).num_devices, strict=True))
    for name in theirs.values():
        if name not in prices:
            kind = {None: "price", True: "spot price", False: "price on demand"}[spot]
            has_other = spot is not None and name in device_prices(markets, at)
            raise ProblemError(
                f"the market has no {kind} of {name!r}"
                + (f" at {utc_text(utc_seconds(at, option('at'), 'time'))}" if at else "")
                + did_you_mean(name, prices, before="; "),
                hint=f"it has another one: leave {option('spot', bool(spot))} out"
                if has_other
                else f"it has prices of {', '.join(sorted(prices)) or 'nothing'}",
            )
    used = {own: prices[name] for own, name in theirs.items()}
    kinds = {
        name: replace(known, dollars_per_hour=used[name].dollars_per_hour)
        if name in used
        else known
        for name, known in pool.device_types.items()
    }
    return replace(pool, device_types=kinds), used


def market_offers(
    markets: Sequence[Market], device_types: Iterable[str], start: str | None
) -> tuple[Prices, bool]:
    """Collect what can be rented from a start time on: histories, fixed prices, availability.

    Without a time in UTC, it is the first at which the most prices are known at once.

    Returns:
        The offers, and whether the markets state when spot machines were available.

    Raises:
        ProblemError: Nothing can be rented, or no price is known at the start.
    """
    history = history_of(markets, tuple(device_types), fixed="for ever")
    begin = history.all_known_seconds() if start is None else utc_seconds(start, "start", "time")
    return where_available(history.table().since(begin), markets)
