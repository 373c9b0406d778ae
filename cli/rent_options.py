"""Options that the commands for renting under a deadline share."""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer


def above_zero(value: float | None) -> float | None:
    """Refuse what is no positive number, under the option's own name."""
    if value is not None and not (isfinite(value) and value > 0):
        raise typer.BadParameter(f"must be above 0 and finite, got '{value:g}'")
    return value


def finite(value: float) -> float:
    """Refuse infinity where an option must be a number."""
    if not isfinite(value):
        raise typer.BadParameter(f"must be finite, got '{value:g}'")
    return value


DeadlineHours = Annotated[
    float, typer.Option(callback=above_zero, help="Hours until it must be done.")
]
EveryHours = Annotated[
    float | None,
    typer.Option(
        callback=above_zero,
        help="Start a window each so many hours; else one after another.",
    ),
]
OnDemand = Annotated[
    float,
    typer.Option(min=0.0, callback=finite, help="Dollars per hour of a machine on demand."),
]
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
    typer.Option(
        min=0.0,
        callback=finite,
        help="Seconds from a launch until work continues from a checkpoint.",
    ),
]
Spot = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Dollars per hour of a spot machine.")
]
WindowsHistory = Annotated[
    list[Path] | None,
    typer.Option(help="Windows that dynamic_program learns from; may be repeated."),
]
WorkHours = Annotated[
    float,
    typer.Option(callback=above_zero, help="Hours of work, on a machine that is never lost."),
]
