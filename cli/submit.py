"""``hetflow submit``: add a job to a cluster's queue."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.requests.submit import SubmitRequest
from .asking import Asked, asks
from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json


@asks(SubmitRequest)
def submit(
    asked: Asked,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="A variable of the job's environment; without a value, yours. It gets no other of "
            "yours, but those of the scheduler.",
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES",
            help="A job for each index, such as 0-9 or 1,3,5-7; each has its own in the variable "
            "HETFLOW_ARRAY_INDEX.",
        ),
    ] = None,
    state: StateOption = DEFAULT_STATE,
    json: JsonFlag = False,
) -> None:
    """Add a job to the queue, and print its number.

    hetflow's own options stand before the script.

    \b
    hetflow submit train.toml
    hetflow submit --profiles profiles --batch-size 256 --steps 1000 train.py --epochs 3
    hetflow submit --devices-at-least 2 --devices-at-most 8 train.toml
    hetflow submit --throughputs rates.json --model resnet50 --batch-size 256 --steps 1000 train.py
    hetflow submit --env WANDB_API_KEY --env SEED=3 --time-limit 3600 train.toml
    hetflow submit --array 0-9 --after prepare:ok train.toml
    """
    from ..api.cluster import submission_of
    from ..clusters.scheduler.requests import Request, send
    from ..clusters.scheduler.submission import array_indices

    script = asked.pop("script")
    given = {key: str(one) if isinstance(one, Path) else one for key, one in asked.items()}
    indices = None if array is None else array_indices(array)
    if env:
        given["environment"] = dict(_variable(one) for one in env)
    submission = submission_of(script, given)
    numbers = send(state, Request(wish="submit", submission=submission, indices=indices))
    if not json:
        emit("\n".join(map(str, numbers)))
    elif indices is None:
        emit_json({"number": numbers[0], "name": submission.name})
    else:
        emit_json({"numbers": numbers, "name": submission.name})


def _variable(text: str) -> tuple[str, str]:
    """A variable's name and value; that of this process where none is given."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise ProblemError(f"--env {name}: is not set here", hint=f"give --env {name}=VALUE")
    return name, os.environ[name]
