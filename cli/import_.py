"""``hetflow import``: foreign layer profiles and price histories become hetflow files."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import ForceFlag, JsonFlag, emit_file, note

if TYPE_CHECKING:
    from ..schema.market import Market
    from ..schema.profile import LayerGraph


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A graph.txt of PipeDream's profiler, an input of Piper, a plug-in's file, or "
            "prices (or a folder)."
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
            help="pipedream (graph.txt), piper (JSON), aws-spot-prices, azure-spot-prices, or a "
            "plug-in's.",
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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Turn a layer profile of PipeDream or Piper into a profile, or prices into a market.

    \b
    hetflow import graph.txt --device-type V100 --device-memory 16GB -o v100.json
    hetflow import bert32.json --format piper --device-type V100 --device-memory 8GB -o v100.json
    hetflow import aws/ --format aws-spot-prices --instance-types machines.csv -o market.json
    """
    from ..importers.pipedream import profile_of
    from ..importers.registry import LAYER_IMPORTERS, PRICE_IMPORTERS
    from ..schema.cluster import is_device_type, parse_memory
    from ..schema.errors import ProblemError
    from ..schema.files import check_writable, read_text
    from ..schema.spelling import nearest

    if output is not None:
        check_writable(output, force=force)
    if PRICE_IMPORTERS.find(source) is not None:
        market = _market(source, file, instance_types)
        emit_file(market, output, force=force, json=json)
        if output is not None:
            note(f"{len(market.prices)} price histories written to {output}; next: hetflow show")
        return
    chosen = LAYER_IMPORTERS.find(source)
    if chosen is None:
        known = tuple(dict.fromkeys((*LAYER_IMPORTERS.names(), *PRICE_IMPORTERS.names())))
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
