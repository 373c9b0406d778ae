"""Options that the commands for renting under a deadline share."""

from pathlib import Path
from typing import Annotated

import typer

DeadlineHours = Annotated[float, typer.Option(help="Hours until it must be done.", min=0.0)]
EveryHours = Annotated[
    float | None,
    typer.Option(min=0.0, help="Start a window each so many hours; else one after another."),
]
OnDemand = Annotated[float, typer.Option(help="Dollars per hour of a machine on demand.", min=0.0)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        help="on_demand, greedy, time_sliced, uniform_progress or dynamic_program; may be "
        "repeated. Default: all that can be used."
    ),
]
RestartSeconds = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds from a launch until work continues from a checkpoint."),
]
Spot = Annotated[float, typer.Option(help="Dollars per hour of a spot machine.", min=0.0)]
WindowsHistory = Annotated[
    list[Path] | None,
    typer.Option(help="Windows that dynamic_program learns from; may be repeated."),
]
WorkHours = Annotated[
    float, typer.Option(help="Hours of work, on a machine that is never lost.", min=0.0)
]
