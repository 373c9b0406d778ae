"""``hetflow import``: foreign layer profiles, price histories and traces become hetflow files."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import ForceFlag, JsonFlag, emit_file, note, rates_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..schema.market import Market
    from ..schema.profile import LayerGraph

SACCT = "sacct"
CATALOGUE = "instance-types"


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A graph.txt of PipeDream's profiler, an input of Piper, a plug-in's file, or "
            "prices or traces (or a folder)."
        ),
    ],
    device_type: Annotated[
        str | None,
        typer.Option(help="The device it was profiled on, such as V100. Layers need it."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="That device's memory, such as 16GB. Layers need it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; by default the file's.")
    ] = None,
    microbatch_size: Annotated[
        int, typer.Option(min=1, help="Samples of the profiled input; the format does not say.")
    ] = 1,
    source: Annotated[
        str,
        typer.Option(
            "--format",
            help="pipedream (graph.txt), piper (JSON); aws-spot-prices, azure-spot-prices, "
            "csv-spot-prices; instance-types (a CSV of machines and prices); cant-be-late, "
            "bamboo-trace, parcae-trace; sacct (Slurm's log of jobs); or a plug-in's.",
        ),
    ] = "pipedream",
    keep_placeholders: Annotated[
        bool,
        typer.Option(
            "--keep-placeholders",
            help="Keep Input sources and unused __getitem__ sinks, which PipeDream drops.",
        ),
    ] = False,
    instance_types: Annotated[
        Path | None,
        typer.Option(help="For prices: a CSV of machines: Instance, GPU type, # GPUs, prices."),
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="For sacct: write the jobs' throughputs here.")
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="For sacct: a type's relative speed, v100=3.5; may be repeated [default: a job "
            "runs only on the type that it ran on]."
        ),
    ] = None,
    tick_seconds: Annotated[
        float, typer.Option(min=0.0, help="bamboo-trace: make ticks of this length.")
    ] = 300.0,
    time_unit: Annotated[
        str, typer.Option(help="bamboo-trace: what its times are in: seconds or hours.")
    ] = "seconds",
    trace_start: Annotated[
        str | None,
        typer.Option(
            help="For traces: when they begin, as 2023-02-15T00:00:00Z; cant-be-late: the traces "
            "that the windows were cut from. Else times are not known."
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="cant-be-late: what a file of 0 and 1 means: instances (that there were) or "
            "preempted [default: where the file tells it]."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Turn layers into a profile, prices or traces into a market, or Slurm's log into jobs.

    \b
    hetflow import graph.txt --device-type V100 --device-memory 16GB -o v100.json
    hetflow import bert32.json --format piper --device-type V100 --device-memory 8GB -o v100.json
    hetflow import aws/ --format aws-spot-prices --instance-types machines.csv -o market.json
    hetflow import machines.csv --format instance-types -o market.json
    hetflow import log.txt --format sacct --throughputs rates.json -o jobs.json
    hetflow import counts.csv --format bamboo-trace --time-unit hours -o market.json
    """
    from ..importers.pipedream import profile_of
    from ..importers.registry import LAYER_IMPORTERS, PRICE_IMPORTERS, TRACE_IMPORTERS
    from ..schema.cluster import is_device_type, parse_memory
    from ..schema.errors import ProblemError
    from ..schema.files import check_writable, read_text
    from ..schema.spelling import nearest

    if output is not None:
        check_writable(output, force=force)
    if source == SACCT:
        _jobs(file, rate or (), throughputs, output, force=force, json=json)
        return
    if source == CATALOGUE:
        catalogue = _catalogue(file)
        emit_file(catalogue, output, force=force, json=json)
        if output is not None:
            number = len(catalogue.instance_types)
            note(f"{number} instance types written to {output}; next: hetflow show")
        return
    if PRICE_IMPORTERS.find(source) is not None:
        market = _market(source, file, instance_types)
        emit_file(market, output, force=force, json=json)
        if output is not None:
            note(f"{len(market.prices)} price histories written to {output}; next: hetflow show")
        return
    if TRACE_IMPORTERS.find(source) is not None:
        traces = _traces(source, file, tick_seconds, time_unit, trace_start, values)
        emit_file(traces, output, force=force, json=json)
        if output is not None:
            number = len(traces.availability) + len(traces.capacity)
            note(f"{number} traces written to {output}; next: hetflow show")
        return
    chosen = LAYER_IMPORTERS.find(source)
    if chosen is None:
        formats = (LAYER_IMPORTERS, PRICE_IMPORTERS, TRACE_IMPORTERS)
        names = (name for each in formats for name in each.names())
        known = tuple(dict.fromkeys((*names, CATALOGUE, SACCT)))
        guess = nearest(source, known)
        raise ProblemError(
            f"unknown import format {source!r}; known are {', '.join(known)}",
            hint=f"did you mean {guess!r}?"
            if guess
            else f"install the plug-in that has it (entry points {LAYER_IMPORTERS.group})",
        )
    if device_type is None or device_memory is None:
        missing = "--device-type" if device_type is None else "--device-memory"
        raise ProblemError(f"Missing option '{missing}'", hint="see `hetflow import --help`")
    if not is_device_type(device_type):
        raise ProblemError(
            f"--device-type {device_type!r} is not the name of one device type",
            hint="name it as in --gpus, for example V100",
        )
    memory_bytes = parse_memory(device_memory)
    if memory_bytes is None:
        raise ProblemError(
            f"--device-memory {device_memory!r} is no amount of memory",
            hint="write a number and a unit, for example 16GB",
        )
    text = read_text(file)
    graph = chosen.read(text, microbatch_size=microbatch_size, name=str(file))
    if not keep_placeholders and chosen.without_placeholders is not None:
        graph = chosen.without_placeholders(graph)
    _refuse_broken(graph, file)
    profile = profile_of(
        graph,
        model=model or file.name.split(".")[0],
        device_type=device_type,
        device_memory_bytes=memory_bytes,
        source=file.name,
        format_title=chosen.title,
    )
    if chosen.tensor_layers is not None:
        groups = chosen.tensor_layers(text, microbatch_size=microbatch_size, name=str(file))
        profile = replace(profile, tensor_layers=groups)
    emit_file(profile, output, force=force, json=json)
    if output is not None:
        note(f"{len(graph.nodes)} layers written to {output}; next: hetflow solve --profiles")


def _jobs(
    path: Path,
    rate: "Sequence[str]",
    throughputs: Path | None,
    output: Path | None,
    *,
    force: bool,
    json: bool,
) -> None:
    """Jobs of Slurm's log, and the throughputs that a simulation of them needs."""
    from ..importers.sacct import read_sacct
    from ..schema.files import check_writable

    if throughputs is not None:
        check_writable(throughputs, force=force)
    log = read_sacct(path)
    jobs, table = log.as_jobs(rates_of(rate))
    emit_file(jobs, output, force=force, json=json)
    if throughputs is not None:
        emit_file(table, throughputs, force=force)
    pool = ",".join(f"{number}x{name}" for name, number in log.num_devices.items())
    note(
        f"{len(log.jobs)} jobs, {log.num_left_out} left out (no GPU, or not over); at most {pool} "
        "at once; next: hetflow simulate"
    )


def _traces(
    source: str,
    path: Path,
    tick_seconds: float,
    time_unit: str,
    trace_start: str | None,
    values: str | None,
) -> "Market":
    """Availability or capacity over time."""
    from ..importers.registry import TRACE_IMPORTERS, TraceOptions
    from ..schema.errors import ProblemError

    units = {"seconds": 1.0, "hours": 3600.0}
    if time_unit not in units:
        raise ProblemError(f"--time-unit must be seconds or hours, got {time_unit[:60]!r}")
    if values not in (None, "instances", "preempted"):
        raise ProblemError(f"--values must be instances or preempted, got {values[:60]!r}")
    options = TraceOptions(
        tick_seconds=tick_seconds,
        time_unit_seconds=units[time_unit],
        trace_start=trace_start,
        values=values,  # type: ignore[arg-type]  # one of them
    )
    return TRACE_IMPORTERS.get(source).read(path, options)


def _catalogue(path: Path) -> "Market":
    """Machines with the prices that their table has."""
    from ..importers.instance_types import read_instance_types
    from ..schema.errors import FileError
    from ..schema.market import Market

    machines = read_instance_types(path)
    if not machines:
        raise FileError(f"{path}: describes no machine", hint="add a line for each")
    return Market(instance_types=machines)


def _market(source: str, path: Path, instance_types: Path | None) -> "Market":
    """Prices, and the machines that they are of."""
    from ..importers.instance_types import read_instance_types
    from ..importers.registry import PRICE_IMPORTERS
    from ..schema.errors import ProblemError
    from ..schema.market import Market
    from ..schema.spelling import nearest

    known = read_instance_types(instance_types) if instance_types is not None else ()
    market = Market(instance_types=known, prices=PRICE_IMPORTERS.get(source).read(path))
    for history in market.prices if known else ():
        if market.instance_type_of(history) is None:
            guess = nearest(history.instance_type, [one.name for one in known])
            raise ProblemError(
                f"{instance_types}: does not describe {history.instance_type!r}, which "
                f"{path} has prices of",
                hint=f"nearest is {guess!r}" if guess else "add a line for it",
            )
    return market


def _refuse_broken(graph: "LayerGraph", file: Path) -> None:
    """Refuse a graph with a cycle or in several parts, which nothing could be planned for."""
    from ..planning.pipeline_problem import layers_of_graph
    from ..schema.errors import ProblemError
    from ..schema.pipeline import check_joined

    try:
        layers, edges, _ = layers_of_graph(graph)
        check_joined([layer.id for layer in layers], edges)
    except ProblemError as error:
        raise ProblemError(f"{file}: {error.message}", hint=error.hint) from None
