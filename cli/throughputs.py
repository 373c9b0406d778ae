"""``hetflow throughputs``: what jobs reach on each device type, from profiles."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.spelling import whole_number
from .common import ForceFlag, JsonFlag, asked_reserve, emit_file, note


def throughputs(
    profiles: Annotated[Path, typer.Argument(help="Folder of profiles (hetflow profile -o).")],
    batch_size: Annotated[
        str,
        typer.Option(help="Samples of a job's step: one number, or resnet50=256,gpt=64 by model."),
    ],
    scale_factors: Annotated[
        str, typer.Option(help="Numbers of devices that jobs ask for, such as 1,2,4.")
    ] = "1",
    mixes: Annotated[
        bool, typer.Option("--mixes", help="Add jobs that hold several device types at once.")
    ] = False,
    memory_reserve: Annotated[
        str | None,
        typer.Option(help="Memory of each device to leave free, such as 2GiB, as for solve."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Turn profiles into the throughputs that allocate and simulate need.

    A job keeps its batch whatever it runs on: a rate is one over the step that `hetflow solve`
    predicts for that batch on so many devices of the type.

    \b
    hetflow throughputs profiles --batch-size 256 --scale-factors 1,2,4 -o throughputs.json
    """
    from .. import throughputs as rates_of
    from ..schema import files

    if output is not None:
        files.check_writable(output, force=force)
    scales = [_positive(part, "--scale-factors") for part in scale_factors.split(",")]
    table = rates_of(
        profiles,
        batch_size=_batches(batch_size),
        scale_factors=scales,
        mixes=mixes,
        memory_reserve_bytes=asked_reserve(memory_reserve) or 0,
    )
    emit_file(table, output, force=force, json=json)
    if output is not None:
        rows = len(table.models)
        note(f"{rows} rows written to {output}; next: hetflow allocate JOBS --throughputs")


def _batches(text: str) -> int | dict[str, int]:
    """The batch of all models, or of each.

    Raises:
        ProblemError: Not a number.
    """
    if "=" not in text:
        return _positive(text, "--batch-size")
    parts = [part.partition("=") for part in text.split(",")]
    return {name.strip(): _positive(number, "--batch-size") for name, _, number in parts}


def _positive(text: str, option: str) -> int:
    number = whole_number(text.strip())
    if number is None or not 0 < number <= 10**9:
        raise ProblemError(f"{option}: must be a whole number of at least 1, got {text[:60]!r}")
    return number
