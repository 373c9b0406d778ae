"""``hetflow rent``: which machines to rent, when and where."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..schema.errors import ProblemError
from ..schema.requests.rent import (
    AnyRentRequest,
    MachinesRequest,
    OddsRequest,
    PricesRequest,
    RentRequest,
    RunRentRequest,
    question_of,
)
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, ReportOption, emit, emit_either, emit_file, emit_json, note

PlanOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the choice's plan here, for `hetflow export`."),
]
Deadline = Annotated[float | None, typer.Option(help="Take the cheapest that ends by then.")]
Budget = Annotated[
    float | None,
    typer.Option(help="With --steps: take the fastest choice for so many dollars."),
]
Top = Annotated[
    int,
    typer.Option(
        min=0, help="With --steps: show so many of the cheapest, beside the Pareto front."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="With --steps: draw the choices by hours and dollars, .png or .svg."),
]
AnyPlot = Annotated[
    Path | None,
    typer.Option(
        help="Draw dollars against the deadline, from the tightest on; with --steps the choices "
        "by hours and dollars: .png or .svg."
    ),
]
Next = Annotated[
    Path | None,
    typer.Option(
        metavar="STATE",
        help="Instead: say what a running job should hold now, and why. STATE is a "
        "hetflow.rent_state/1 file; dynamic_program learns from the history, else from all.",
    ),
]


@asks(AnyRentRequest)
def rent(
    asked: Asked,
    next: Next = None,  # noqa: A002  # the option's name
    budget: Budget = None,
    top: Top = 0,
    plot: AnyPlot = None,
    output: ReportOption = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Choose machines to rent: spot or on demand, where, and when to move.

    For a job under a deadline, policies are replayed on windows of availability. Beside them
    stands the least possible cost, with the window known in advance. With --steps: which machines
    train a model for the fewest dollars, if nothing is to move. With --rate: one device at
    changing prices, perhaps without a deadline.

    \b
    hetflow rent windows/ --history older/ --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    hetflow rent 2a.json 2b.json --between-zones --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    hetflow rent p2.json --machines 16 --work-hours 90 --deadline-hours 8 --on-demand 0.9 --spot 0.27
    hetflow rent windows/ --next state.json --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    hetflow rent aws.json azure.json --profiles profiles --batch-size 1024 --steps 90000 -o plan.json
    hetflow rent aws.json azure.json --rate V100=9.6 --rate K80=1 --work-hours 96
    """  # noqa: E501
    deadline = asked.pop("deadline_seconds", None) if "steps" in asked else None
    record, question = question_of(asked)
    if record is MachinesRequest:
        hours = None if deadline is None else deadline / 3600
        _machines(question, hours, budget, top, output, plot, force=force, json=json)
    else:
        if plot is not None:
            _draw_deadlines("rates" in asked or next is not None, question, plot, force=force)
        _report(record, question, output, next, force=force, json=json)


@asks(RunRentRequest, every_seconds=None, folder=None)
def rent_run(
    asked: Asked,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder of the run; started again, it goes on from there."
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Train on rented machines: the policy of the replays decides, real launches follow it.

    hetflow's own options stand before PLAN. The market is a window of the past, replayed from now
    on. What was held and paid stands in rent_run.json of the run's folder, beside what was
    predicted.

    \b
    hetflow rent run --offers zones.json --between-zones --work-hours 0.6 --deadline-hours 1 --on-demand 3 --spot 1 --steps 1200 --time-scale 20 -o rented plan.json train.py 40
    """  # noqa: E501
    from .. import rent as renting
    from ..formats.reports.market_tables import rent_run_table
    from ..schema.files import to_plain

    found = renting.run(**{**asked, "folder": output})
    emit_either(json, to_plain(found), lambda: rent_run_table(found))


@asks(RentRequest, between_zones=False, restart_seconds=60.0)
def rent_fleet(
    asked: Asked,
    resize_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds without work whenever the machines change.")
    ] = 60.0,
    output: ReportOption = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """`hetflow rent --machines N --restart-seconds S`, under its name until the next release."""
    asked = {**asked, "restart_seconds": resize_seconds}
    _report(RentRequest, asked, output, force=force, json=json)


def _renamed(record: type, words: str, **fixed: Any) -> Callable[..., None]:
    """A command that `hetflow rent` has taken the place of, under its name until the next release.

    It has no other options than those of ``record``.
    """

    def command(
        asked: Asked, output: ReportOption = None, force: ForceFlag = False, json: JsonFlag = False
    ) -> None:
        _report(record, asked, output, force=force, json=json)

    return asks(record, doc=words, **fixed)(command)


rent_zones = _renamed(
    RentRequest,
    "`hetflow rent --between-zones`, under its name until the next release.",
    between_zones=True,
)
rent_prices = _renamed(
    PricesRequest,
    """`hetflow rent --rate TYPE=SPEED`, under its name until the next release.

    Strategies for one job are replayed on price histories, beside a lower bound on the cost.

    \b
    hetflow rent prices aws.json azure.json --rate V100=9.6 --rate K80=1 --work-hours 96
    """,
)


@asks(MachinesRequest)
def rent_machines(
    asked: Asked,
    deadline_hours: Deadline = None,
    budget: Budget = None,
    top: Top = 0,
    output: PlanOutput = None,
    plot: Plot = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """`hetflow rent --steps N`, under its name until the next release.

    The table has every choice that no other one beats in both time and dollars.

    \b
    hetflow rent machines aws.json azure.json --profiles profiles --batch-size 1024 --steps 90000 -o plan.json
    hetflow rent machines aws.json --throughputs throughputs.json --model resnet50 --steps 90000
    hetflow export plan.json --to skypilot --market aws.json -- train.py
    """  # noqa: E501
    _machines(asked, deadline_hours, budget, top, output, plot, force=force, json=json)


@asks(OddsRequest)
def rent_odds(
    asked: Asked, output: ReportOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Estimate how long spot machines last, how prices spread, and how zones go together.

    \b
    hetflow rent odds us-west-2a us-west-2b --checkpoint-seconds 30
    """
    from ..api.rent import odds
    from ..formats.reports.market_tables import odds_table
    from ..schema.files import check_outputs, to_plain

    check_outputs(output, force=force)
    report = odds(**asked)
    if output is not None:
        emit_file(report, output, force=force)
    emit_either(json, to_plain(report), lambda: odds_table(report))


def _draw_deadlines(has_none: bool, asked: Asked, plot: Path, *, force: bool) -> None:
    """Draw what a later deadline saves."""
    from ..api.rent import by_deadline
    from ..formats.reports.plots import deadlines_image, image_format
    from ..schema.files import check_outputs, write_bytes

    kind = image_format(plot)
    if has_none:
        raise ProblemError("--plot says nothing with --rate or --next", hint="leave it out")
    check_outputs(plot, force=force)
    write_bytes(plot, deadlines_image(by_deadline(**asked), kind), force=force)
    note(f"{plot} written")


def _report(
    record: type,
    asked: Asked,
    output: Path | None,
    state: Path | None = None,
    *,
    force: bool,
    json: bool,
) -> None:
    """Replay, or advise; write what was found and show it."""
    from .. import rent as renting
    from ..formats.reports import market_tables
    from ..schema.files import check_outputs, to_plain
    from ..schema.market import PriceReport, RentAdvice

    check_outputs(output, force=force)
    found: Any
    if record is PricesRequest:
        found = renting.prices(**asked)
    elif state is not None:
        found = renting.advice(state, **asked)
    else:
        found = renting.deadline(**asked)
    if output is not None:
        emit_file(found, output, force=force)
    table = {PriceReport: market_tables.strategies_table, RentAdvice: market_tables.advice_text}
    shown: Any = table.get(type(found), market_tables.rent_table)
    emit_either(json, to_plain(found), lambda: shown(found))


def _machines(
    asked: Asked,
    deadline_hours: float | None,
    budget: float | None,
    top: int,
    output: Path | None,
    plot: Path | None,
    *,
    force: bool,
    json: bool,
) -> None:
    """Show the choices of machines, and write the plan of the one to take."""
    from .. import rent as renting
    from ..api.files import markets_of
    from ..formats.reports.market_tables import choices_table, counted
    from ..formats.reports.plots import choices_image, image_format
    from ..planning.inputs import profiles_of
    from ..planning.static_choice import chosen, plan_of_choice
    from ..schema.files import check_outputs, write, write_bytes

    if output is not None and "throughputs" in asked:
        raise ProblemError(
            "throughputs make no plan to write",
            hint="leave --output out, or give --profiles DIR instead of --throughputs",
        )
    kind = "" if plot is None else image_format(plot)
    check_outputs(output, plot, force=force)
    found = renting.machines(**asked)
    best = chosen(found, deadline_hours=deadline_hours, budget_dollars=budget)
    batch_size = asked.get("batch_size")
    if output is not None:
        profiles = profiles_of(asked["profiles"], asked.get("model"))
        markets, at = markets_of(asked["market"]), asked.get("at")
        plan = plan_of_choice(best, profiles, markets, batch_size=asked["batch_size"], at=at)
        write(output, plan, force=force)
    shown = [one for place, one in enumerate(found) if one.is_pareto or place < top]
    if plot is not None:
        samples = "" if batch_size is None else f" of {batch_size} samples"
        points = [
            (one.hours, one.dollars,
             counted(one.devices) + ("" if one.is_spot else " on demand"), one.is_pareto)
            for one in found
        ]  # fmt: skip
        title = f"{asked['steps']} steps{samples}"
        write_bytes(plot, choices_image(points, kind, title=title), force=force)
        note(f"{plot} written")
    if json:
        emit_json({"choice": asdict(best), "choices": [asdict(one) for one in shown]})
        return
    emit(choices_table([asdict(one) for one in shown]))
    rented = counted(best.machines, " x ")
    note(f"take {rented}: {best.dollars:.2f} $, {best.hours:.4g} h")
    if output is not None:
        note(f"plan written to {output}; next: hetflow export {output} --to skypilot --market ...")
