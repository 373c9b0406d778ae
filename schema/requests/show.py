"""The request to show a file."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Profiles, Record

# What each option is for: kinds of plans, and classes of other records.
DRAWN = ("Profile", "split", "pipeline", "SimulationRun", "Market")
MARKETS = ("Market",)
PIPELINES = ("pipeline",)
PLANS = ("split", "pipeline", "parallel")
RUNS = ("RunRecord", "SimulationRun")


@dataclass(frozen=True, slots=True)
class ShowRequest:
    """What ``show`` needs to know."""

    source: Annotated[
        "Record | Profiles",
        Option(
            argument=True,
            help="A record, profiles, the file of a record, or the folder of profiles or of a run.",
        ),
    ]
    _: KW_ONLY
    plot: Annotated[
        "Path | str | None",
        Option(
            read_by=DRAWN,
            help="Draw profiles, a plan, a simulated run, a market's prices, or when its spot "
            "machines were there, into this .png or .svg.",
        ),
    ] = None
    per_device: Annotated[
        bool, Option(read_by=MARKETS, help="Draw prices per device, not per machine.")
    ] = False
    by_cloud: Annotated[
        bool, Option(read_by=MARKETS, help="Draw the least and the greatest price of each cloud.")
    ] = False
    presence: Annotated[
        bool,
        Option(
            read_by=MARKETS, help="Draw when spot machines were there, in a market with prices too."
        ),
    ] = False
    timeline: Annotated[
        bool, Option(read_by=PIPELINES, help="Draw a pipeline plan's schedule in the terminal.")
    ] = False
    html: Annotated[
        "Path | str | None",
        Option(read_by=PIPELINES, help="Write a pipeline plan's timeline as one HTML file."),
    ] = None
    trace: Annotated[
        "Path | str | None",
        Option(read_by=PIPELINES, help="Write the timeline as a trace file for Perfetto."),
    ] = None
    explain: Annotated[
        bool, Option(read_by=PLANS, help="List the terms of a plan's predicted step.")
    ] = False
    csv: Annotated[
        "Path | str | None",
        Option(read_by=RUNS, help="Write a run's devices, or a simulated run's jobs, as a table."),
    ] = None
    force: Annotated[bool, Option(help="Overwrite an existing output.")] = False
