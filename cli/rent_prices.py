"""``hetflow rent prices``: which machine to take when prices change, and when to move."""

from pathlib import Path
from typing import Annotated

import typer

from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json, rates_of
from .rent_options import above_zero, finite


def rent_prices(
    markets: Annotated[list[Path], typer.Argument(help="Markets with prices: hetflow.market/1.")],
    rate: Annotated[
        list[str],
        typer.Option(help="Speed of one device of a type, in any unit: V100=9.6 (repeatable)."),
    ],
    work_hours: Annotated[
        float,
        typer.Option(
            callback=above_zero, help="Work to do, in hours of the first --rate's device."
        ),
    ],
    start: Annotated[
        str | None,
        typer.Option(help="Start: 2020-03-07T00:00:00Z [default: when all prices are known]."),
    ] = None,
    cloud: Annotated[
        str | None,
        typer.Option(
            help="The cloud of the strategies that use only one [default: aws if the markets have "
            "it, else their first]."
        ),
    ] = None,
    restart_seconds: Annotated[
        float,
        typer.Option(min=0.0, callback=finite, help="Seconds from a launch until work continues."),
    ] = 300.0,
    cloud_move_dollars: Annotated[
        float,
        typer.Option(min=0.0, callback=finite, help="Dollars for each move between clouds."),
    ] = 0.0,
    checkpoint_gigabytes: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Moves between clouds pay egress for this, by the market's prices."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report here.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Replay strategies for one job on price histories, beside a lower bound on the cost.

    \b
    hetflow rent prices aws.json azure.json --rate V100=9.6 --rate K80=1 --work-hours 96
    """
    from ..api.rent_prices import rent_prices as replay
    from ..reports.market_tables import strategies_table
    from ..schema.files import check_writable, to_plain

    if output is not None:
        check_writable(output, force=force)
    report = replay(
        markets,
        rates=rates_of(rate),
        work_hours=work_hours,
        start=start,
        cloud=cloud,
        restart_seconds=restart_seconds,
        cloud_move_dollars=cloud_move_dollars,
        checkpoint_gigabytes=checkpoint_gigabytes,
    )
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        emit_json(to_plain(report))
    else:
        emit(strategies_table(report))
