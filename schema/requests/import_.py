"""The request to read a foreign format."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .cluster import RATES

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Count, Mapping, WaitSeconds


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What ``import`` needs to know."""

    file: Annotated[
        "Path",
        Option(
            argument=True,
            help="A graph.txt of PipeDream's profiler, an input of Piper, a plug-in's file, or "
            "prices or traces (or a folder).",
        ),
    ]
    _: KW_ONLY
    device_type: Annotated[
        str | None, Option(help="The device it was profiled on, such as V100. Layers need it.")
    ] = None
    device_memory: Annotated[
        str | None, Option(help="That device's memory, such as 16GB. Layers need it.")
    ] = None
    model: Annotated[str | None, Option(help="Name of the model; by default the file's.")] = None
    microbatch_size: Annotated[
        "Count", Option(help="Samples of the profiled input; the format does not say.")
    ] = 1
    source: Annotated[
        str,
        Option(
            flag="--format",
            help="pipedream (graph.txt), piper (JSON); aws-spot-prices, azure-spot-prices, "
            "csv-spot-prices; instance-types (a CSV of machines and prices); cant-be-late, "
            "bamboo-trace, parcae-trace; sacct (Slurm's log of jobs); or a plug-in's.",
            default="recognised where it is market data, else pipedream",
        ),
    ] = "pipedream"
    keep_placeholders: Annotated[
        bool, Option(help="Keep Input sources and unused __getitem__ sinks, which PipeDream drops.")
    ] = False
    instance_types: Annotated[
        "Path | None",
        Option(help="For prices: a CSV of machines: Instance, GPU type, # GPUs, prices."),
    ] = None
    throughputs: Annotated[
        "Path | None", Option(help="For sacct: write the jobs' throughputs here.")
    ] = None
    rates: Annotated[
        "Mapping[str, float] | None",
        replace(RATES, help="For sacct: a type's relative speed, v100=3.5; may be repeated."),
    ] = None
    tick_seconds: Annotated[
        "WaitSeconds", Option(help="bamboo-trace: make ticks of this length.")
    ] = 300.0
    time_unit: Annotated[
        str, Option(help="bamboo-trace: what its times are in: seconds or hours.")
    ] = "seconds"
    trace_start: Annotated[
        str | None,
        Option(
            help="For traces: when they begin, as 2023-02-15T00:00:00Z; cant-be-late: the traces "
            "that the windows were cut from. Else times are not known."
        ),
    ] = None
    values: Annotated[
        str | None,
        Option(
            help="cant-be-late: what a file of 0 and 1 means: instances (that there were) or "
            "preempted.",
            default="where the file tells it",
        ),
    ] = None
