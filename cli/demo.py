"""``hetflow demo``: the main job on this machine, as the shell commands a user would type."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .common import JsonFlag, emit, emit_json


def demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep profiles, plan and run in this new folder."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training.")] = 3,
    json: JsonFlag = False,
) -> None:
    """Profile, solve, launch and compare, on this machine's own devices.

    Uses the machine's GPUs; where there are none, two emulated CPU types, which are real
    processes doing the real arithmetic with only their time stretched. Under two minutes.

    \b
    hetflow demo
    hetflow demo -o demo --epochs 5
    """
    from ..examples.demonstration import check_installed, demonstrate
    from ..schema.errors import FileError

    if output is not None and output.exists():
        raise FileError(f"{output}: exists already", hint="name a new folder")
    check_installed()
    with ExitStack() as until_the_end:
        if output is None:
            temporary = tempfile.TemporaryDirectory(prefix="hetflow-demo-")
            folder = Path(until_the_end.enter_context(temporary))
        else:
            folder = output
            folder.mkdir(parents=True)
        text, document = demonstrate(folder, epochs, None if json else emit)
    if json:
        emit_json(document)
    else:
        emit(text)
