"""``hetflow rent odds``: how long spot machines last, and what that means."""

from pathlib import Path
from typing import Annotated

import typer

from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json


def rent_odds(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Markets (hetflow.market/1), or windows of Can't Be Late; a folder is one zone."
        ),
    ],
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="What writing a checkpoint takes; says how often to write."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report here.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Estimate how long spot machines last, how prices spread, and how zones go together.

    \b
    hetflow rent odds us-west-2a us-west-2b --checkpoint-seconds 30
    """
    from ..api.odds import odds
    from ..formats.reports.market_tables import odds_table
    from ..schema.files import check_outputs, to_plain

    check_outputs(output, force=force)
    report = odds(sources, checkpoint_seconds=checkpoint_seconds)
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        emit_json(to_plain(report))
    else:
        emit(odds_table(report))
