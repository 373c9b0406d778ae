"""The commands that run a queue of jobs on a pool of devices, and look after both."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.requests import cluster as requests
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit, emit_either, emit_json, note, say

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
_REFRESH_SECONDS = 1.0
_FOLLOW_SECONDS = 0.2


@asks(requests.StartRequest)
def start(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
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
    from ..clusters.mechanisms.round_state import RoundRules
    from ..clusters.scheduler.serve import serve, systemd_unit
    from ..clusters.scheduler.sharing import ClusterSettings
    from ..clusters.scheduler.submission import read_entities
    from ..planning.inputs import pool_of

    request = requests.StartRequest(**asked)
    pool, entities = pool_of(request.pool), request.entities
    settings = ClusterSettings(
        policy=request.policy,
        rules=RoundRules(round_seconds=request.round_seconds, reset_seconds=0.0),
        grace_seconds=request.grace_seconds,
        entities=() if entities is None else read_entities(entities),
        dollars_per_hour=pool.dollars_per_hour,
        on_change=request.on_change,
        group=request.group,
    )
    if request.print_unit:
        given = [word for word in sys.argv[1:] if word != "--print-unit"]
        if not any(word == "--state" or word.startswith("--state=") for word in given):
            given += ["--state", str(state)]
        unit = systemd_unit(given)
        emit_either(json, {"unit": unit}, unit)
        return
    with ExitStack() as beside:
        url = None
        if request.dashboard is not None:
            from ..clusters.dashboard.server import serving

            url = beside.enter_context(serving(request.dashboard, state)).url
            say(f"dashboard: {url}")
        unsaid = [{"state": str(state), "policy": request.policy, "dashboard": url}] if json else []

        def tell(text: str) -> None:
            say(text)
            if unsaid:  # the first words are that it runs
                emit_json(unsaid.pop())

        serve(state, pool, request.engine, settings, tell)


@asks(requests.DrainRequest)
def drain(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Let jobs leave a device type or a server with the next round.

    \b
    hetflow cluster drain P100
    hetflow cluster drain P100 --undo
    """
    from ..clusters.scheduler import view
    from ..clusters.scheduler.store import ClusterStore

    request = requests.DrainRequest(**asked)
    view.drain(ClusterStore.open(state), request.named, undo=request.undo)
    if json:
        emit_json({"named": request.named, "drained": not request.undo})


def recover(state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Put the last good copy in the place of a broken state, which the scheduler keeps.

    Launches that began after the copy are asked to save and end when the cluster is started again.

    \b
    hetflow cluster recover
    """
    from ..clusters.scheduler import copies

    said = copies.recover(state)
    emit_either(json, {"state": str(state), "detail": said}, said)


@asks(requests.UsageRequest)
def usage(
    asked: Asked,
    output: OutputOption = None,
    state: StateOption = DEFAULT_STATE,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Print what users and entities used of each device type, over time, as CSV.

    \b
    hetflow cluster usage --per month
    hetflow cluster usage -o usage.csv
    """
    from typing import cast, get_args

    from ..clusters.scheduler.history import Period, csv_of
    from ..clusters.scheduler.history import usage as used
    from ..clusters.scheduler.store import ClusterStore
    from ..schema.files import write_text

    per = requests.UsageRequest(**asked).per
    if per not in get_args(Period):
        raise ProblemError(f"--per {per}: is none of {', '.join(get_args(Period))}")
    rows = used(ClusterStore.open(state), period=cast("Period", per), now=time.time())
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
    from ..clusters.scheduler.store import ClusterStore
    from .machine import fold_runs

    store = ClusterStore.open(state)
    profiles, model, runs = view.finished_runs(store, view.job_number(store, job))
    fold_runs(runs, profiles, model, output, force=force, json=json)


def stop(state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Let all jobs save and end, and the scheduler with them; what is not done stays queued.

    \b
    hetflow cluster stop
    """
    from ..clusters.scheduler.serve import request_stop

    request_stop(state)
    if json:
        emit_json({"state": str(state), "stopped": True})


@asks(requests.ReplayRequest)
def replay(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Simulate the jobs of a live cluster, or of a Slurm cluster's log, and compare.

    Simulated jobs run at their predicted speed. What a job was to get is the sum of its shares, by
    the policy, over the time that it was there. Jobs that were cancelled or are held are
    left out.

    \b
    hetflow cluster replay
    hetflow cluster replay --policy fifo --restart-seconds 20 --resize-seconds 1
    hetflow cluster replay --sacct jobs.txt --policy las --rate v100=3.5 --rate k80=1
    """
    from ..api.simulate import replay as compared
    from ..formats.reports.cluster_tables import replay_table
    from .simulate import warn_of_left_out

    document, run = compared(requests.ReplayRequest(**asked), state)
    warn_of_left_out(run.left_out)
    emit_either(json, document, partial(replay_table, document))


@asks(requests.SubmitRequest)
def submit(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
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

    script, array = asked.pop("script"), asked.pop("array", None)
    environment = dict(map(_variable, asked.pop("environment", None) or ()))
    given = {key: str(one) if isinstance(one, Path) else one for key, one in asked.items()}
    indices = None if array is None else array_indices(array)
    if environment:
        given["environment"] = environment
    submission = submission_of(script, given)
    numbers = send(state, Request(wish="submit", submission=submission, indices=indices))
    found = {"number": numbers[0]} if indices is None else {"numbers": numbers}
    emit_either(json, found | {"name": submission.name}, "\n".join(map(str, numbers)))


def _variable(text: str) -> tuple[str, str]:
    """A variable's name and value; that of this process where none is given."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise ProblemError(f"--env {name}: is not set here", hint=f"give --env {name}=VALUE")
    return name, os.environ[name]


@asks(requests.QueueRequest)
def queue(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Show running jobs with their devices, waiting jobs, and ended ones.

    \b
    hetflow queue
    hetflow queue --json
    """
    from ..clusters.scheduler.requests import Request, send
    from ..formats.reports.cluster_tables import queue_table

    request = requests.QueueRequest(**asked)
    clear = "\x1b[H\x1b[2J" if request.watch and sys.stdout.isatty() else ""
    while True:
        jobs = send(state, Request(wish="queue", finished=request.finished))
        is_read = emit_json({"jobs": jobs}) if json else emit(clear + queue_table(jobs))
        if not (request.watch and is_read):
            return
        time.sleep(_REFRESH_SECONDS)


@asks(requests.LogsRequest)
def logs(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Print the output of a job's launches, one after another.

    \b
    hetflow logs 3
    hetflow logs -f train
    """
    from ..clusters.scheduler.requests import Request, send

    request = requests.LogsRequest(**asked)
    job, read = request.job, dict[Path, int]()
    while True:
        found = send(state, Request(wish="outputs", job=job))
        job = str(found["number"])
        outputs = [(devices, state / name) for devices, name in found["outputs"]]
        goes_on = request.follow and found["is_open"]
        for devices, path in outputs if not json else ():
            if path not in read:
                note(f"==> on {devices}")
            with path.open("rb") as stream:
                stream.seek(read.get(path, 0))
                if not emit(stream.read()):
                    return
                read[path] = stream.tell()
        if not goes_on:
            break
        time.sleep(_FOLLOW_SECONDS)
    if json:
        launches = [
            {"devices": devices, "output": path.read_text(encoding="utf-8", errors="replace")}
            for devices, path in outputs
        ]
        emit_json({"number": found["number"], "launches": launches})


def _wish(name: str, words: str) -> Callable[..., None]:
    """The command that asks for something about a job."""

    def ask(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
        from ..api import cluster

        getattr(cluster, name)(asked["job"], state=state)
        if json:
            emit_json({"job": asked["job"], "asked": name})

    return asks(requests.JobRequest, doc=f"{words}\n\n    \b\n    hetflow {name} 3\n    ")(ask)


cancel = _wish("cancel", "Take a job out of the queue; if it runs, it saves and stops first.")
hold = _wish(
    "hold", "Keep a job from running until it is released; if it runs, it saves and stops first."
)
release = _wish("release", "Let a held job run again.")


@asks(requests.DashboardRequest)
def dashboard(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Serve a web page that shows a cluster, until interrupted; it changes nothing.

    The URL that is printed holds a token: whoever has it can read the page. It works beside a
    scheduler that runs, and without one.

    \b
    hetflow dashboard
    hetflow dashboard --listen 127.0.0.1:8080 --state hetflow-cluster
    """
    from ..clusters.dashboard.server import serving
    from ..clusters.scheduler.store import ClusterStore

    ClusterStore.read(state).close()
    with serving(requests.DashboardRequest(**asked).listen, state) as served:
        emit_either(json, {"url": served.url, "address": str(served.address)}, served.url)
        threading.Event().wait()
