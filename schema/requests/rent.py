"""The requests for renting machines: under a deadline, to stay on, at changing prices; odds.

``hetflow rent`` asks for the first three in one record, ``AnyRentRequest``; ``question_of`` says
which of them was asked.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ProblemError
from ..options import Option, asked_of, option
from . import ARGUMENTS, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .kinds import (
        Count,
        Dollars,
        MachineSpeeds,
        Markets,
        Offers,
        OnDemandPrices,
        Plan,
        PositiveSeconds,
        Profiles,
        Speeds,
        SpotPrices,
        ThroughputsTable,
        WaitSeconds,
        Windows,
    )


@dataclass(frozen=True, slots=True)
class RentRequest:
    """What ``rent`` needs to know for a job under a deadline."""

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
        "OnDemandPrices",
        Option(
            flag="--on-demand",
            help="Dollars per hour of a machine on demand; or of each type or zone, such as "
            "p3.2xlarge=3.06.",
            python="A number, or one by type or zone.",
        ),
    ]
    spot_dollars_per_hour: Annotated[
        "SpotPrices | None",
        Option(
            flag="--spot",
            help="Dollars per hour of a spot machine; or of each zone or type, such as "
            "us-west-2a=0.97.",
            python="A number, or one by zone or type.",
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
    machine_speeds: Annotated[
        "MachineSpeeds | None",
        Option(
            flag="--machine-speed",
            metavar="TYPE=SPEED",
            help="Machines of several types, each beside the others in its zone (with "
            "{between_zones}): how fast one is, such as p2.xlarge=0.2; or its plan, by whose "
            "predictions the fastest has speed 1 (repeat).",
            default="all are alike",
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
class RunRentRequest(RentRequest):
    """What ``rent run`` needs to know."""

    plan: Annotated[
        "Plan | Path | str",
        Option(argument=True, help="A plan for one machine (hetflow.plan/2)."),
    ]
    script: Annotated["str | Path", SCRIPT]
    arguments: Annotated["Sequence[str]", ARGUMENTS] = ()
    _: KW_ONLY
    offers: Annotated[
        "Offers",
        Option(
            help="When spot machines were there, as for `hetflow rent`; the first window as long "
            "as the deadline is replayed. May be repeated."
        ),
    ]
    steps: Annotated["Count", Option(help="Steps of the whole training.")]
    more_plans: Annotated[
        "Sequence[Path | str]",
        Option(
            metavar="FILE",
            help="With {num_machines}: the plans for 2 machines, for 3, and so on (repeat).",
            default="a run on one machine",
        ),
    ] = ()
    folder: Annotated[
        "Path | str",
        Option(flag="--output", help="Folder of the run; started again, it goes on from there."),
    ]
    engine: Annotated[str, Option(help="Where launches run: local, slurm, ray, skypilot.")] = (
        "local"
    )
    time_scale: Annotated[
        "PositiveSeconds",
        Option(help="Market seconds per real second: 20 replays an hour in three minutes."),
    ] = 1.0
    notice_seconds: Annotated[
        "WaitSeconds",
        Option(help="Market seconds before a machine is taken away at which that is announced."),
    ] = 120.0
    save_seconds: Annotated[
        "WaitSeconds", Option(help="Real seconds before that at which the training saves.")
    ] = 10.0
    checkpoint_seconds: Annotated[
        "PositiveSeconds",
        Option(
            help="Market seconds that writing a checkpoint takes; the interval between them is "
            "Daly's, by how long the machines of the history last."
        ),
    ] = 10.0
    checkpoint_every: Annotated[
        "Count | None", Option(help="Instead: steps between checkpoints.")
    ] = None
    retry_seconds: Annotated[
        "WaitSeconds",
        Option(
            help="With an engine that rents: seconds until it is asked again for a machine in a "
            "zone that lost one, or had none.",
        ),
    ] = 600.0
    grace_seconds: Annotated[
        "WaitSeconds",
        Option(flag="--grace", help="Real seconds that workers have to write a checkpoint."),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class PricesRequest:
    """What ``rent`` needs to know for one device at changing prices."""

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
    deadline_seconds: Annotated[
        "PositiveSeconds | None",
        Option(unit="hours", help="Time from the start until it must be done.", default="none"),
    ] = None
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


@dataclass(frozen=True, slots=True)
class MachinesRequest:
    """What ``rent`` needs to know to choose machines for a training that stays on them."""

    market: Annotated[
        "Markets", Option(argument=True, help="Markets with prices: hetflow.market/1.")
    ]
    profiles: Annotated["Profiles | None", Option(help="Profiles of the model, a folder.")] = None
    _: KW_ONLY
    steps: Annotated["Count", Option(help="Steps of the whole training.")]
    batch_size: Annotated[
        "Count | None",
        Option(help="The global batch; with throughputs only for $/million samples."),
    ] = None
    throughputs: Annotated[
        "ThroughputsTable | None",
        Option(
            help="Instead of profiles: throughputs (hetflow.throughputs/1, .csv, or Gavel's "
            "table), with the numbers of devices that they list.",
            python="Also a DataFrame.",
        ),
    ] = None
    most_devices: Annotated[
        "Count | None",
        Option(
            help="Devices of each type at most.", default="8; with throughputs all that they list"
        ),
    ] = None
    model: Annotated[
        str | None, Option(help="The model, where profiles or throughputs hold several.")
    ] = None
    at: Annotated[
        str | None, Option(help="When, as 2020-03-07T00:00:00Z; else the market's last prices.")
    ] = None


@dataclass(frozen=True, slots=True)
class OddsRequest:
    """What ``rent odds`` needs to know."""

    sources: Annotated[
        "Windows",
        Option(
            argument=True,
            help="Markets (hetflow.market/1), or windows of Can't Be Late; a folder is one zone.",
        ),
    ]
    _: KW_ONLY
    checkpoint_seconds: Annotated[
        "WaitSeconds | None",
        Option(help="What writing a checkpoint takes; says how often to write."),
    ] = None


_QUESTIONS = {
    "": RentRequest,
    "steps": MachinesRequest,
    "rates": PricesRequest,
}
"""The option that only this question has -> its record."""
_SAME = {"market": "offers", "work_hours": "work_seconds"}
"""Fields of the others -> what stands for them in a question."""
_PANELS = {
    MachinesRequest: "Which machines, if nothing is to move (with --steps)",
    PricesRequest: "One device at changing prices (with --rate)",
}


def _all_in_one() -> type:
    """A record of every option, of which only the offers are required."""
    made: dict[str, Any] = {}
    for record in _QUESTIONS.values():
        for asked in asked_of(record):
            if asked.name not in _SAME and asked.name not in made:
                said = replace(asked.option, panel=_PANELS.get(record, ""))
                default = field(default=asked.default, kw_only=not asked.option.argument)
                made[asked.name] = (asked.name, Annotated[asked.kind, said], default)
    made["offers"] = made["offers"][:2]
    return make_dataclass("AnyRentRequest", made.values(), namespace={"__module__": __name__})


AnyRentRequest = _all_in_one()


def question_of(asked: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The record that a question is of, and its fields.

    Raises:
        ProblemError: Something that this question needs is missing, or it does not read something.
    """
    marks = [mark for mark in _QUESTIONS if mark in asked]
    if len(marks) > 1:
        raise ProblemError(
            f"{option(marks[0])} and {option(marks[1])} ask two questions", hint="give one of them"
        )
    mark = marks[0] if marks else ""
    given, needs = dict(asked), {one.name: one for one in asked_of(_QUESTIONS[mark])}
    for name, other in _SAME.items():
        if name in needs and other in given:
            value = given.pop(other)
            given[name] = value / 3600 if name == "work_hours" else value
    for name in given:
        if name not in needs:
            raise ProblemError(
                f"{option(name)} says nothing "
                + (f"with {option(mark)}" if mark else "of a job under a deadline"),
                hint="leave it out",
            )
    for name, one in needs.items():
        if one.is_required and name not in given:
            raise ProblemError(
                f"{option(_SAME.get(name, name))} is missing",
                hint="a job under a deadline needs it; give "
                f"{option('steps', 'N')} for which machines to stay on, or "
                f"{option('rates', 'V100=1')} for one device at changing prices"
                if not mark
                else None,
            )
    return _QUESTIONS[mark], given
