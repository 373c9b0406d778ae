"""``hetflow rent zones``: where and how to rent a machine for a job under a deadline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json
from .rent_options import (
    DeadlineHours,
    EveryHours,
    OnDemand,
    Output,
    Policies,
    RestartSeconds,
    WindowsHistory,
    WorkHours,
    finite,
)


def rent_zones(
    windows: Annotated[
        list[Path],
        typer.Argument(
            help="Availability of several zones that says when it begins: hetflow.market/1."
        ),
    ],
    work_hours: WorkHours,
    deadline_hours: DeadlineHours,
    on_demand: OnDemand,
    spot: Annotated[
        list[str],
        typer.Option(help="Dollars per hour of a spot machine, or ZONE=DOLLARS of each (repeat)."),
    ],
    restart_seconds: RestartSeconds = 300.0,
    move_dollars: Annotated[
        float,
        typer.Option(
            min=0.0, callback=finite, help="Dollars for each move between zones (egress)."
        ),
    ] = 0.0,
    every_hours: EveryHours = None,
    history: WindowsHistory = None,
    learn_until: Annotated[
        str | None,
        typer.Option(help="Else learn from what is before this time: 2023-02-20T00:00:00Z."),
    ] = None,
    policy: Policies = None,
    output: Output = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Choose between zones, spot and on demand, for a job under a deadline.

    The job goes on in another zone when its spot machine is lost. Policies are replayed on windows
    of the zones' availability, beside the least possible cost.

    \b
    hetflow rent zones 2a.json 2b.json --learn-until 2023-02-21T00:00:00Z --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    """  # noqa: E501
    from ..api.rent_zones import rent_zones as replay
    from ..reports.market_tables import zones_table
    from ..schema.files import check_writable, to_plain

    if output is not None:
        check_writable(output, force=force)
    report = replay(
        windows,
        work_seconds=work_hours * 3600,
        deadline_seconds=deadline_hours * 3600,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=_prices(spot),
        restart_seconds=restart_seconds,
        move_dollars=move_dollars,
        every_seconds=None if every_hours is None else every_hours * 3600,
        history=history or (),
        learn_until=learn_until,
        policies=policy or None,
    )
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        emit_json(to_plain(report))
    else:
        emit(zones_table(report))


def _prices(given: Sequence[str]) -> float | dict[str, float]:
    """One price for all zones, or the price of each."""
    from ..schema.errors import ProblemError

    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ProblemError(
                f"--spot must be a price or such as us-west-2a=0.97, got {text[:60]!r}"
            ) from None
    if "" in found and len(given) > 1:
        raise ProblemError("--spot must be one price for all zones, or ZONE=DOLLARS of each")
    return found.get("", found)
