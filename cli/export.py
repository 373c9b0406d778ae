"""``hetflow export``: a hetflow file in a foreign format."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from .common import ForceFlag, JsonFlag, emit, emit_json, note


def export(
    file: Annotated[
        Path, typer.Argument(help="A hetflow file; for pipedream a profile with layers.")
    ],
    to: Annotated[
        str, typer.Option("--format", help="pipedream (graph.txt), or a plug-in's.")
    ] = "pipedream",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write a profile's layers as PipeDream's graph.txt, or a file in a plug-in's format.

    \b
    hetflow export v100.json -o graph.txt
    """
    from ..exporters.registry import EXPORTERS
    from ..schema import files

    chosen = EXPORTERS.get(to)
    one = chosen.takes[0] if len(chosen.takes) == 1 else None
    record = files.read_any(file) if one is None else files.read(file, one)
    if not isinstance(record, chosen.takes):
        known = ", ".join(sorted(each.__name__ for each in chosen.takes))
        raise ProblemError(f"{file}: {to} is a format of {known}, not of a {type(record).__name__}")
    text = chosen.render(record, str(file))
    if output is not None:
        files.write_text(output, text, force=force)
        note(f"{chosen.wrote(record)} written to {output}")
    if json:
        emit_json(chosen.document(record, text))
    elif output is None:
        emit(text)
