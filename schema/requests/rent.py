"""The requests for renting machines: under a deadline, and at changing prices."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .kinds import (
        Count,
        Dollars,
        Markets,
        Offers,
        PositiveSeconds,
        RentDollars,
        Speeds,
        SpotPrices,
        WaitSeconds,
    )


@dataclass(frozen=True, slots=True)
class RentRequest:
    """What ``rent`` needs to know."""

    offers: Annotated[
        "Offers",
        Option(
            argument=True,
            help="When spot machines were there: hetflow.market/1, Can't Be Late's JSON, or "
            "folders. One that is several deadlines long counts as so many windows.",
            python="Also ``Availability``, ``Capacity`` and ``PriceHistory`` records.",
        ),
    ]
    _: KW_ONLY
    work_seconds: Annotated[
        "PositiveSeconds",
        Option(unit="hours", help="The work, on one machine that is never lost."),
    ]
    deadline_seconds: Annotated[
        "PositiveSeconds", Option(unit="hours", help="Time from the start until it must be done.")
    ]
    on_demand_dollars_per_hour: Annotated[
        "RentDollars", Option(flag="--on-demand", help="Dollars per hour of a machine on demand.")
    ]
    spot_dollars_per_hour: Annotated[
        "SpotPrices | None",
        Option(
            flag="--spot",
            help="Dollars per hour of a spot machine; or of each zone, such as us-west-2a=0.97.",
            python="A number, or one by zone.",
            default="the price histories of the offers, which may move",
        ),
    ] = None
    restart_seconds: Annotated[
        "WaitSeconds",
        Option(
            help="Seconds without work whenever machines are launched or lost, until it goes on "
            "from a checkpoint."
        ),
    ] = 300.0
    num_machines: Annotated[
        "Count | None",
        Option(
            flag="--machines",
            help="Machines at most, for a job that can be resized; n are n times as fast as one.",
            default="1",
        ),
    ] = None
    speeds: Annotated[
        "Speeds | None",
        Option(
            flag="--speed",
            help="Else the speed on 1 machine, on 2, and so on (repeat).",
            python="With that on none, which is 0, before them.",
        ),
    ] = None
    between_zones: Annotated[
        bool,
        Option(
            help="Let the job go on in another zone. Windows must say when they begin; those of a "
            "zone are joined by their times."
        ),
    ] = False
    move_dollars: Annotated[
        "Dollars", Option(help="Dollars for each move between zones (egress).")
    ] = 0.0
    every_seconds: Annotated[
        "PositiveSeconds | None",
        Option(
            unit="hours",
            help="From the start of one window to that of the next.",
            default="one after another",
        ),
    ] = None
    history: Annotated[
        "Offers",
        Option(
            help="What dynamic_program learns from, as the first argument; it should hold none of "
            "that. May be repeated."
        ),
    ] = ()
    learn_until: Annotated[
        str | None,
        Option(
            metavar="TIME", help="Else learn from what is before this time: 2023-02-20T00:00:00Z."
        ),
    ] = None
    policies: Annotated[
        "Sequence[str]",
        Option(
            flag="--policy",
            metavar="NAME",
            help="on_demand, greedy, time_sliced, uniform_progress or dynamic_program; may be "
            "repeated.",
            default="all that can be used",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class PricesRequest:
    """What ``rent prices`` needs to know."""

    market: Annotated[
        "Markets", Option(argument=True, help="Markets with prices: hetflow.market/1.")
    ]
    _: KW_ONLY
    rates: Annotated[
        "Mapping[str, float]",
        Option(
            flag="--rate",
            help="Speed of one device of a type, in any unit: V100=9.6 (repeatable).",
        ),
    ]
    work_hours: Annotated[
        "PositiveSeconds", Option(help="Work to do, in hours of the first {rates}'s device.")
    ]
    start: Annotated[
        str | None,
        Option(help="Start: 2020-03-07T00:00:00Z.", default="when all prices are known"),
    ] = None
    cloud: Annotated[
        str | None,
        Option(
            help="The cloud of the strategies that use only one.",
            default="aws if the markets have it, else their first",
        ),
    ] = None
    restart_seconds: Annotated[
        "WaitSeconds", Option(help="Seconds from a launch until work continues.")
    ] = 300.0
    cloud_move_dollars: Annotated[
        "Dollars", Option(help="Dollars for each move between clouds.")
    ] = 0.0
    checkpoint_gigabytes: Annotated[
        "float | None",
        Option(help="Moves between clouds pay egress for this, by the market's prices."),
    ] = None
