"""``hetflow rent``: how to rent machines for a job under a deadline."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.requests.rent import RentRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here.")]
Next = Annotated[
    Path | None,
    typer.Option(
        metavar="STATE",
        help="Instead: say what a running job should hold now, and why. STATE is a "
        "hetflow.rent_state/1 file; dynamic_program learns from the history, else from all.",
    ),
]


@asks(RentRequest)
def rent(
    asked: Asked,
    next: Next = None,  # noqa: A002  # the option's name
    output: Output = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Choose between spot and on-demand machines for a job under a deadline.

    Policies are replayed on windows of availability. Beside them stands the least possible cost,
    with the window known in advance.

    \b
    hetflow rent windows/ --history older/ --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    hetflow rent 2a.json 2b.json --between-zones --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    hetflow rent p2.json --machines 16 --work-hours 90 --deadline-hours 8 --on-demand 0.9 --spot 0.27
    hetflow rent windows/ --next state.json --work-hours 48 --deadline-hours 52 --on-demand 3.06 --spot 0.97
    """  # noqa: E501
    _rent(asked, output, next, force=force, json=json)


@asks(RentRequest, between_zones=True)
def rent_zones(
    asked: Asked, output: Output = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """`hetflow rent --between-zones`, under its name until the next release."""
    _rent(asked, output, force=force, json=json)


@asks(RentRequest, between_zones=False, restart_seconds=60.0)
def rent_fleet(
    asked: Asked,
    resize_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds without work whenever the machines change.")
    ] = 60.0,
    output: Output = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """`hetflow rent --machines N --restart-seconds S`, under its name until the next release."""
    _rent({**asked, "restart_seconds": resize_seconds}, output, force=force, json=json)


def _rent(
    asked: Asked, output: Path | None, state: Path | None = None, *, force: bool, json: bool
) -> None:
    from .. import rent as renting
    from ..reports.market_tables import advice_text, rent_table
    from ..schema.files import check_writable, to_plain
    from ..schema.market import RentAdvice

    if output is not None:
        check_writable(output, force=force)
    found = renting.deadline(**asked) if state is None else renting.advice(state, **asked)
    if output is not None:
        emit_file(found, output, force=force)
    if json:
        emit_json(to_plain(found))
    else:
        emit(advice_text(found) if isinstance(found, RentAdvice) else rent_table(found))
