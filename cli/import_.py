"""``hetflow import``: foreign layer profiles, price histories and traces become hetflow files."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema.requests.import_ import ImportRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit_file, note

if TYPE_CHECKING:
    from ..schema.market import Market
    from ..schema.profile import LayerGraph

SACCT = "sacct"
CATALOGUE = "instance-types"


@asks(ImportRequest)
def import_(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
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
    from ..importers.recognise import is_market, read_market
    from ..importers.registry import LAYER_IMPORTERS, PRICE_IMPORTERS, TRACE_IMPORTERS
    from ..schema.cluster import is_device_type, parse_memory
    from ..schema.errors import ProblemError
    from ..schema.files import check_writable, read_text
    from ..schema.market import Market
    from ..schema.spelling import nearest

    request = ImportRequest(**asked)
    file, source = request.file, request.source
    recognised = "source" not in asked and is_market(file)
    if output is not None:
        check_writable(output, force=force)
    if source == SACCT:
        _jobs(request, output, force=force, json=json)
        return
    if source == CATALOGUE:
        catalogue = _catalogue(file)
        emit_file(catalogue, output, force=force, json=json)
        if output is not None:
            number = len(catalogue.instance_types)
            note(f"{number} instance types written to {output}; next: hetflow show")
        return
    if recognised or PRICE_IMPORTERS.find(source) is not None:
        if recognised:
            read = read_market(file)
        else:
            read = Market(prices=PRICE_IMPORTERS.get(source).read(file))
        market = _market(read, file, request.instance_types)
        emit_file(market, output, force=force, json=json)
        if output is not None:
            note(f"{_contents(market)} written to {output}; next: hetflow show")
        return
    if TRACE_IMPORTERS.find(source) is not None:
        traces = _traces(request)
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
    if request.device_type is None or request.device_memory is None:
        missing = "--device-type" if request.device_type is None else "--device-memory"
        raise ProblemError(f"Missing option '{missing}'", hint="see `hetflow import --help`")
    if not is_device_type(request.device_type):
        raise ProblemError(
            f"--device-type {request.device_type!r} is not the name of one device type",
            hint="name it as in --gpus, for example V100",
        )
    memory_bytes = parse_memory(request.device_memory)
    if memory_bytes is None:
        raise ProblemError(
            f"--device-memory {request.device_memory!r} is no amount of memory",
            hint="write a number and a unit, for example 16GB",
        )
    text = read_text(file)
    graph = chosen.read(text, microbatch_size=request.microbatch_size, name=str(file))
    if not request.keep_placeholders and chosen.without_placeholders is not None:
        graph = chosen.without_placeholders(graph)
    _refuse_broken(graph, file)
    profile = profile_of(
        graph,
        model=request.model or file.name.split(".")[0],
        device_type=request.device_type,
        device_memory_bytes=memory_bytes,
        source=file.name,
        format_title=chosen.title,
    )
    if chosen.tensor_layers is not None:
        groups = chosen.tensor_layers(text, microbatch_size=request.microbatch_size, name=str(file))
        profile = replace(profile, tensor_layers=groups)
    emit_file(profile, output, force=force, json=json)
    if output is not None:
        note(f"{len(graph.nodes)} layers written to {output}; next: hetflow solve --profiles")


def _jobs(request: ImportRequest, output: Path | None, *, force: bool, json: bool) -> None:
    """Jobs of Slurm's log, and the throughputs that a simulation of them needs."""
    from ..importers.sacct import read_sacct
    from ..schema.files import check_writable

    throughputs = request.throughputs
    if throughputs is not None:
        check_writable(throughputs, force=force)
    log = read_sacct(request.file)
    jobs, table = log.as_jobs(request.rates or {})
    emit_file(jobs, output, force=force, json=json)
    if throughputs is not None:
        emit_file(table, throughputs, force=force)
    pool = ",".join(f"{number}x{name}" for name, number in log.num_devices.items())
    note(
        f"{len(log.jobs)} jobs, {log.num_left_out} left out (no GPU, or not over); at most {pool} "
        "at once; next: hetflow simulate"
    )


def _traces(request: ImportRequest) -> "Market":
    """Availability or capacity over time."""
    from ..importers.registry import TRACE_IMPORTERS, TraceOptions
    from ..schema.errors import ProblemError

    units, values = {"seconds": 1.0, "hours": 3600.0}, request.values
    if request.time_unit not in units:
        raise ProblemError(f"--time-unit must be seconds or hours, got {request.time_unit[:60]!r}")
    if values not in (None, "instances", "preempted"):
        raise ProblemError(f"--values must be instances or preempted, got {values[:60]!r}")
    options = TraceOptions(
        tick_seconds=request.tick_seconds,
        time_unit_seconds=units[request.time_unit],
        trace_start=request.trace_start,
        values=values,  # type: ignore[arg-type]  # one of them
    )
    return TRACE_IMPORTERS.get(request.source).read(request.file, options)


def _catalogue(path: Path) -> "Market":
    """Machines with the prices that their table has."""
    from ..importers.instance_types import read_instance_types
    from ..schema.errors import FileError
    from ..schema.market import Market

    machines = read_instance_types(path)
    if not machines:
        raise FileError(f"{path}: describes no machine", hint="add a line for each")
    return Market(instance_types=machines)


def _contents(market: "Market") -> str:
    """How much of what a market has."""
    numbers = {
        "instance types": len(market.instance_types) if not market.prices else 0,
        "price histories": len(market.prices),
        "traces": len(market.availability) + len(market.capacity),
    }
    return ", ".join(f"{number} {what}" for what, number in numbers.items() if number)


def _market(market: "Market", path: Path, instance_types: Path | None) -> "Market":
    """A market with the machines that its prices are of."""
    from ..importers.instance_types import read_instance_types
    from ..schema.errors import ProblemError
    from ..schema.spelling import nearest

    known = read_instance_types(instance_types) if instance_types is not None else ()
    market = replace(market, instance_types=(*known, *market.instance_types))
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
