"""``hetflow submit``: add a job to a cluster's queue."""

from functools import partial
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
    """
    from ..importers.jobs_files import read_throughputs
    from ..scheduler.store import Store
    from ..scheduler.submission import read_submission, submission
    from ..scheduler.submission import submit as add

    store, read_table = Store.open(state), partial(read_throughputs, pairs=False)
    given: dict[str, Any] = {
        "name": name, "profiles": None if profiles is None else str(profiles),
        "throughputs": None if throughputs is None else str(throughputs), "model": model,
        "batch_size": batch_size, "steps": steps, "devices": devices,
        "devices_at_least": devices_at_least, "devices_at_most": devices_at_most, "gpus": gpus,
        "virtual_nodes": virtual_nodes, "strategy": strategy,
        "microbatch_size": microbatch_size, "determinism": determinism,
        "checkpoint_every": checkpoint_every, "priority_weight": weight,
        "deadline_seconds": deadline, "entity": entity, "arguments": arguments or None,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    if script.suffix == ".toml":
        if arguments:
            raise ProblemError(
                f"{' '.join(arguments)}: comes after {script}",
                hint="write hetflow's options before it, and the script's arguments in it",
            )
        asked = read_submission(script, given, read_table=read_table)
    else:
        asked = submission(
            {"script": str(script), **given}, base=Path.cwd(), name="submit", read_table=read_table
        )
    number = add(store, asked)
    if json:
        emit_json({"number": number, "name": asked.name})
    else:
        emit(str(number))
