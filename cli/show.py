"""``hetflow show``: any hetflow file as a table, a picture or a timeline."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.requests.show import ShowRequest
from .asking import Asked, asks
from .common import JsonFlag, emit, emit_json


@asks(ShowRequest, source=None)
def show(
    asked: Asked,
    file: Annotated[
        Path, typer.Argument(help="Any hetflow file, or the folder of profiles or of a run.")
    ],
    json: JsonFlag = False,
) -> None:
    """Show a profile, pool, plan, allocation or run as a table; some also as pictures.

    \b
    hetflow show plan.json
    hetflow show plan.json --explain
    hetflow show market.json --plot prices.svg
    hetflow show profiles --plot curves.svg
    hetflow show hetflow-runs/a
    hetflow show hetflow-runs/a/run.json --csv devices.csv
    hetflow show pipeline.json --timeline --html timeline.html --trace trace.json
    """
    from .. import show as text_of
    from ..api.show import document_of

    asked["source"] = file
    if json:
        emit_json(document_of(ShowRequest(**asked)))
    else:
        emit(text_of(**asked))
