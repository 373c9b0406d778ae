"""``hetflow import``: foreign layer profiles become hetflow profiles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import ForceFlag, JsonFlag, emit_file, note

if TYPE_CHECKING:
    from ..schema.profile import LayerGraph


def import_(
    file: Annotated[
        Path, typer.Argument(help="A graph.txt of PipeDream's profiler, or a plug-in's file.")
    ],
    device_type: Annotated[str, typer.Option(help="The device it was profiled on, such as V100.")],
    device_memory: Annotated[str, typer.Option(help="That device's memory, such as 16GB.")],
    model: Annotated[
        str | None, typer.Option(help="Name of the model; by default the file's.")
    ] = None,
    microbatch_size: Annotated[
        int, typer.Option(min=1, help="Samples of the profiled input; the format does not say.")
    ] = 1,
    source: Annotated[
        str, typer.Option("--format", help="pipedream (graph.txt), or a plug-in's.")
    ] = "pipedream",
    keep_placeholders: Annotated[
        bool,
        typer.Option(
            "--keep-placeholders",
            help="Keep Input sources and unused __getitem__ sinks, which PipeDream drops.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Turn PipeDream's graph.txt, or a plug-in's format, into a profile with layers.

    \b
    hetflow import graph.txt --device-type V100 --device-memory 16GB -o v100.json
    """
    from ..importers.pipedream import profile_of
    from ..importers.registry import LAYER_IMPORTERS
    from ..schema.cluster import Cluster
    from ..schema.errors import ProblemError
    from ..schema.files import check_writable, read_text

    if output is not None:
        check_writable(output, force=force)
    chosen = LAYER_IMPORTERS.get(source)
    pool = Cluster.parse(f"{device_type}:1:{device_memory}")
    if list(pool.device_types) != [device_type]:
        raise ProblemError(
            f"--device-type {device_type!r} is not the name of one device type",
            hint="name it as in --gpus, for example V100",
        )
    graph = chosen.read(read_text(file), microbatch_size=microbatch_size, name=str(file))
    if not keep_placeholders and chosen.without_placeholders is not None:
        graph = chosen.without_placeholders(graph)
    _refuse_broken(graph, file)
    profile = profile_of(
        graph,
        model=model or file.name.split(".")[0],
        device_type=device_type,
        device_memory_bytes=pool.device_types[device_type].memory_bytes or 1,
        source=file.name,
        format_title=chosen.title,
    )
    emit_file(profile, output, force=force, json=json)
    if output is not None:
        note(f"{len(graph.nodes)} layers written to {output}; next: hetflow solve --profiles")


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
