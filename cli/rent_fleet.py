"""``hetflow rent fleet``: how to rent machines for an elastic job under a deadline."""

from pathlib import Path
from typing import Annotated

import typer

from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json
from .rent_options import DeadlineHours, EveryHours, OnDemand, Output, Spot, above_zero, finite


def rent_fleet(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Markets with the capacity to replay on: hetflow.market/1."),
    ],
    work_hours: Annotated[
        float, typer.Option(callback=above_zero, help="Hours of work, on one machine.")
    ],
    deadline_hours: DeadlineHours,
    on_demand: OnDemand,
    spot: Spot,
    machines: Annotated[
        int | None,
        typer.Option(min=1, help="The most to use, if n machines are n times as fast as one."),
    ] = None,
    speed: Annotated[
        list[float] | None,
        typer.Option(help="Else the speed on 1 machine, on 2, and so on (repeat)."),
    ] = None,
    resize_seconds: Annotated[
        float,
        typer.Option(
            min=0.0, callback=finite, help="Seconds without work whenever the machines change."
        ),
    ] = 60.0,
    every_hours: EveryHours = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(help="Markets that dynamic_program learns from; may be repeated."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="on_demand, greedy, uniform_progress or dynamic_program; may be repeated. "
            "Default: all that can be used."
        ),
    ] = None,
    output: Output = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Choose spot and on-demand machines for a job that can use several, under a deadline.

    The job goes on with what is left when spot machines are taken away. Policies are replayed on
    traces of how many there were, beside a lower bound on the cost.

    \b
    hetflow rent fleet p2.json --history older.json --machines 16 --work-hours 90 --deadline-hours 8 --on-demand 0.9 --spot 0.27
    """  # noqa: E501
    from ..api.rent_fleet import rent_fleet as replay
    from ..reports.market_tables import fleet_table
    from ..schema.files import check_writable, to_plain

    if output is not None:
        check_writable(output, force=force)
    report = replay(
        traces,
        work_seconds=work_hours * 3600,
        deadline_seconds=deadline_hours * 3600,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=spot,
        num_machines=machines,
        speeds=(0.0, *speed) if speed else None,
        resize_seconds=resize_seconds,
        every_seconds=None if every_hours is None else every_hours * 3600,
        history=history or (),
        policies=policy or None,
    )
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        emit_json(to_plain(report))
    else:
        emit(fleet_table(report))
