"""``hetflow rent prices``: which machine to take when prices change, and when to move."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import JsonFlag, emit, emit_json, rates_of

if TYPE_CHECKING:
    from ..simulator.market.price_compare import PriceComparison


def rent_prices(
    markets: Annotated[
        list[Path], typer.Argument(help="Markets with price histories: hetflow.market/1.")
    ],
    rate: Annotated[
        list[str],
        typer.Option(help="Speed of one device of a type, in any unit: V100=9.6 (repeatable)."),
    ],
    work_hours: Annotated[
        float, typer.Option(help="Work to do, in hours of the first --rate's device.", min=0.0)
    ],
    start: Annotated[
        str | None,
        typer.Option(help="Start: 2020-03-07T00:00:00Z [default: when all prices are known]."),
    ] = None,
    cloud: Annotated[
        str, typer.Option(help="The cloud of the strategies that use only one.")
    ] = "aws",
    restart_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds from a launch until work continues.")
    ] = 300.0,
    cloud_move_dollars: Annotated[
        float, typer.Option(min=0.0, help="Dollars for each move between clouds (egress).")
    ] = 0.0,
    json: JsonFlag = False,
) -> None:
    """Replay strategies for one job on price histories, beside a lower bound on the cost.

    \b
    hetflow rent prices aws.json azure.json --rate V100=9.6 --rate K80=1 --work-hours 96
    """
    from ..schema.files import read
    from ..schema.market import Market, utc_seconds
    from ..simulator.market.price_compare import compare_from
    from ..solvers.market.offers import MovingJob, history_of

    rates = rates_of(rate)
    first = next(iter(rates))
    job = MovingJob(
        work=work_hours * 3600 * rates[first],
        work_per_second=rates,
        restart_seconds=restart_seconds,
        cloud_move_dollars=cloud_move_dollars,
    )
    history = history_of([read(path, Market) for path in markets], rates)
    begin = history.all_known_seconds() if start is None else utc_seconds(start, "--start", "time")
    compared = compare_from(job, history, begin, cloud=cloud, device_type=first)
    if json:
        from dataclasses import asdict

        emit_json(asdict(compared))
    else:
        emit(_table(compared))


def _table(compared: "PriceComparison") -> str:
    from ..reports.grid import grid
    from ..schema.market import utc_text

    rows: list[tuple[object, ...]] = [
        (
            name,
            f"{outcome.dollars:.2f}",
            f"{outcome.seconds / 3600:.1f}",
            outcome.num_moves,
            " > ".join(f"{one.cloud} {one.place} {one.instance_type}" for one in outcome.held),
        )
        for name, outcome in compared.outcomes.items()
    ]
    rows.append(("(bound)", f"{compared.bound_dollars:.2f}", "-", "-", "-"))
    lines = [f"from {utc_text(compared.start_seconds)}"]
    lines.append(grid(("strategy", "$", "hours", "moves", "held"), rows))
    lines += [f"{name}: {why}" for name, why in compared.refused.items()]
    return "\n".join(lines)
