"""``hetflow cluster``: run a queue of jobs on a pool of devices."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.requests.start import StartRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit, emit_json

StateOption = Annotated[
    Path,
    typer.Option(
        "--state",
        envvar="HETFLOW_STATE",
        help="Folder of the cluster's state.",
        readable=False,  # that of a group is not, and its scheduler answers all the same
    ),
]
DEFAULT_STATE = Path("hetflow-cluster")  # as in api/cluster.py, which commands load when they run


@asks(StartRequest)
def start(
    asked: Asked,
    state: StateOption = DEFAULT_STATE,
    dashboard: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS:PORT", help="Serve a web page too, e.g. 127.0.0.1:8080."),
    ] = None,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd unit that runs this; stop.")
    ] = False,
) -> None:
    """Schedule jobs on a pool of devices until interrupted.

    Running jobs survive the scheduler; when it is started again it takes them over.

    \b
    hetflow cluster start --gpus 1xcpu:fast,2xcpu:slow --round 30
    hetflow cluster start --gpus 4xcpu:fast --policy elastic
    hetflow cluster start --gpus 1xcpu:fast,2xcpu:slow --policy easyscale
    hetflow cluster start --gpus 4xcpu:fast --policy hierarchical --entities lab.toml
    hetflow submit train.toml
    hetflow queue
    """
    from ..clusters.mechanisms.rounds.rules import RoundRules
    from ..clusters.scheduler.serve import serve
    from ..clusters.scheduler.settings import Settings
    from ..clusters.scheduler.submission import read_entities
    from ..clusters.scheduler.unit import systemd_unit
    from ..planning.inputs import pool_of

    request = StartRequest(**asked)
    pool, entities = pool_of(request.pool), request.entities
    settings = Settings(
        policy=request.policy,
        rules=RoundRules(round_seconds=request.round_seconds, reset_seconds=0.0),
        grace_seconds=request.grace_seconds,
        entities=() if entities is None else read_entities(entities),
        dollars_per_hour=pool.dollars_per_hour,
        on_change=request.on_change,
        group=request.group,
    )
    if print_unit:
        given = [word for word in sys.argv[1:] if word != "--print-unit"]
        if not any(word == "--state" or word.startswith("--state=") for word in given):
            given += ["--state", str(state)]
        emit(systemd_unit(given))
        return
    with ExitStack() as beside:
        if dashboard is not None:
            from ..clusters.dashboard.server import serving

            _say(f"dashboard: {beside.enter_context(serving(dashboard, state)).url}")
        serve(state, pool, request.engine, settings, _say)


def drain(
    named: Annotated[
        str,
        typer.Argument(
            metavar="TYPE|SERVER", help="The device type or server that jobs shall leave."
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let jobs use it again.")] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Let jobs leave a device type or a server with the next round.

    \b
    hetflow cluster drain P100
    hetflow cluster drain P100 --undo
    """
    from ..clusters.scheduler import view
    from ..clusters.scheduler.store import Store

    view.drain(Store.open(state), named, undo=undo)


def recover(state: StateOption = DEFAULT_STATE) -> None:
    """Put the last good copy in the place of a broken state, which the scheduler keeps.

    Launches that began after the copy are asked to save and end when the cluster is started again.

    \b
    hetflow cluster recover
    """
    from ..clusters.scheduler import copies

    emit(copies.recover(state))


def usage(
    per: Annotated[
        str, typer.Option(help="Periods of the calendar, in UTC: hour, day, month, or all.")
    ] = "day",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of stdout.")
    ] = None,
    state: StateOption = DEFAULT_STATE,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Print what users and entities used of each device type, over time, as CSV.

    \b
    hetflow cluster usage --per month
    hetflow cluster usage -o usage.csv
    """
    import time
    from typing import cast, get_args

    from ..clusters.scheduler.store import Store
    from ..clusters.scheduler.usage import Period, csv_of
    from ..clusters.scheduler.usage import usage as used
    from ..schema.files import write_text

    if per not in get_args(Period):
        raise ProblemError(f"--per {per}: is none of {', '.join(get_args(Period))}")
    period = cast("Period", per)
    rows = used(Store.open(state), period=period, now=time.time())
    if json:
        emit_json({"usage": [row.to_plain() for row in rows]})
    elif output is None:
        emit(csv_of(rows))
    else:
        write_text(output, csv_of(rows), force=force)


def correct(
    job: Annotated[str, typer.Argument(help="The job's number, or its name.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the corrected profiles.")
    ],
    state: StateOption = DEFAULT_STATE,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Correct a job's profiles by what finished jobs with the same profiles measured.

    Counted are launches that trained to the end and were never resized, as by `hetflow profile
    --from-run`, the last 20 of them. The profiles are written into a folder of their own.

    \b
    hetflow cluster correct train -o corrected
    """
    from ..clusters.scheduler import view
    from ..clusters.scheduler.store import Store
    from .profile import fold_runs

    store = Store.open(state)
    profiles, model, runs = view.finished_runs(store, view.job_number(store, job))
    fold_runs(runs, profiles, model, output, force=force, json=json)


def stop(state: StateOption = DEFAULT_STATE) -> None:
    """Let all jobs save and end, and the scheduler with them; what is not done stays queued.

    \b
    hetflow cluster stop
    """
    from ..clusters.scheduler.serve import request_stop

    request_stop(state)


def _say(text: str) -> None:
    typer.echo(text, err=True)
