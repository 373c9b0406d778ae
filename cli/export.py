"""``hetflow export``: a profile's layers in a foreign format."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import HetflowError
from .common import ForceFlag, JsonFlag, emit, emit_json, note


def export(
    file: Annotated[Path, typer.Argument(help="A hetflow profile with layers.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write a profile's layers as PipeDream's graph.txt.

    \b
    hetflow export v100.json -o graph.txt
    """
    from ..exporters.pipedream import write_graph
    from ..schema import files
    from ..schema.profile import Profile

    profile = files.read(file, Profile)
    if profile.layers is None:
        raise HetflowError(f"{file}: holds no layers", hint="run `hetflow profile --layers`")
    text = write_graph(profile.layers)
    if output is not None:
        files.write_text(output, text, force=force)
        note(f"{len(profile.layers.nodes)} layers written to {output}")
    if json:
        emit_json({"model": profile.model, "layers": len(profile.layers.nodes), "graph": text})
    elif output is None:
        emit(text)
