"""``hetflow rent``: how to rent a machine for a job under a deadline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json
from .rent_options import (
    DeadlineHours,
    OnDemand,
    Output,
    Policies,
    RestartSeconds,
    Spot,
    WindowsHistory,
    WorkHours,
)

if TYPE_CHECKING:
    from ..schema.market import RentReport


def rent(
    windows: Annotated[
        list[Path],
        typer.Argument(
            help="Windows of availability: hetflow.market/1, Can't Be Late's JSON, or folders."
        ),
    ],
    work_hours: WorkHours,
    deadline_hours: DeadlineHours,
    on_demand: OnDemand,
    spot: Spot,
    restart_seconds: RestartSeconds = 300.0,
    history: WindowsHistory = None,
    policy: Policies = None,
    output: Output = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Choose between spot and on-demand machines for a job under a deadline.

    Policies are replayed on windows of availability. Beside them stands the least possible cost,
    with the window known in advance.

    \b
    hetflow rent windows/ --history older/ --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    """  # noqa: E501
    from ..api.rent import rent as replay
    from ..schema.files import check_writable

    if output is not None:
        check_writable(output, force=force)
    report = replay(
        windows,
        work_seconds=work_hours * 3600,
        deadline_seconds=deadline_hours * 3600,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=spot,
        restart_seconds=restart_seconds,
        history=history or (),
        policies=policy or None,
    )
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        from ..schema.files import to_plain

        emit_json(to_plain(report))
    else:
        emit(_table(report))


def _table(report: "RentReport") -> str:
    from ..reports.market_tables import rent_table

    return rent_table(report)
