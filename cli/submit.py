"""``hetflow submit``: add a job to a cluster's queue."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..schema.errors import ProblemError
from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json


def submit(
    script: Annotated[
        Path, typer.Argument(metavar="JOB.toml|SCRIPT", help="A job's file, or its script.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The job's name [default: the script's].")
    ] = None,
    profiles: Annotated[Path | None, typer.Option(help="Profiles of its model.")] = None,
    throughputs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of profiles: throughputs (hetflow.throughputs/1, .csv, or Gavel's table) "
            "with each number of devices that it may hold; its batch is split evenly."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles or throughputs hold several.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Global batch: samples of a step.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole job.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices, all of one type [default: 1].")
    ] = None,
    devices_at_least: Annotated[
        int | None,
        typer.Option(
            min=1, help="Instead: a range, for policies elastic, easyscale* [default: 1]."
        ),
    ] = None,
    devices_at_most: Annotated[
        int | None,
        typer.Option(min=1, help="Its end; other policies give the job the most that can run it."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Instead: just these devices, at once, such as 1xV100,2xP100."),
    ] = None,
    virtual_nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of virtual nodes; the result then does not depend on devices."
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Kind of its plans: split, pipeline, parallel, or auto, on each turn the fastest "
            "of the three [default: split]."
        ),
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a microbatch, for all but splits.")
    ] = None,
    determinism: Annotated[
        str | None,
        typer.Option(help="As for `hetflow launch` [default: elastic with --virtual-nodes]."),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=0, help="Steps between checkpoints [default: only when it has to stop]."),
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Priority weight [default: 1].")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds from now until it should be done.")
    ] = None,
    entity: Annotated[
        str | None,
        typer.Option(help="The node of `hetflow cluster start --entities` that it belongs to."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="A variable of the job's environment; without a value, yours. It gets no other of "
            "yours, but those of the scheduler.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds that it may hold devices, over all its turns; it is held then."),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB[:ok]", help="Begin when this job is over; with :ok, when it is done."
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
    from ..scheduler.requests import Request, send
    from ..scheduler.submission import array_indices

    given: dict[str, Any] = {
        "name": name, "profiles": None if profiles is None else str(profiles),
        "throughputs": None if throughputs is None else str(throughputs), "model": model,
        "batch_size": batch_size, "steps": steps, "devices": devices,
        "devices_at_least": devices_at_least, "devices_at_most": devices_at_most, "gpus": gpus,
        "virtual_nodes": virtual_nodes, "strategy": strategy,
        "microbatch_size": microbatch_size, "determinism": determinism,
        "checkpoint_every": checkpoint_every, "priority_weight": weight,
        "deadline_seconds": deadline, "entity": entity, "arguments": arguments or None,
        "time_limit_seconds": time_limit, "after": after or None,
    }  # fmt: skip
    indices = None if array is None else array_indices(array)
    if env:
        given["environment"] = dict(_variable(one) for one in env)
    given = {key: value for key, value in given.items() if value is not None}
    asked = submission_of(script, given)
    numbers = send(state, Request(wish="submit", submission=asked, indices=indices))
    if not json:
        emit("\n".join(map(str, numbers)))
    elif indices is None:
        emit_json({"number": numbers[0], "name": asked.name})
    else:
        emit_json({"numbers": numbers, "name": asked.name})


def _variable(text: str) -> tuple[str, str]:
    """A variable's name and value; that of this process where none is given."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise ProblemError(f"--env {name}: is not set here", hint=f"give --env {name}=VALUE")
    return name, os.environ[name]
