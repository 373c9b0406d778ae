"""``hetflow queue``, ``logs``, ``cancel``, ``hold`` and ``release``: look after the jobs."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_bytes, emit_json, note

JobArgument = Annotated[str, typer.Argument(help="Its number, or its name.")]
_REFRESH_SECONDS = 1.0
_FOLLOW_SECONDS = 0.2


def queue(
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second.")] = False,
    finished: Annotated[int, typer.Option(min=0, help="Number of ended jobs to show.")] = 10,
    state: StateOption = DEFAULT_STATE,
    json: JsonFlag = False,
) -> None:
    """Show running jobs with their devices, waiting jobs, and ended ones.

    \b
    hetflow queue
    hetflow queue --json
    """
    from ..reports.cluster_tables import queue_table
    from ..scheduler.requests import Request, send
    from ..scheduler.view import rows_from

    while True:
        rows = rows_from(send(state, Request(wish="queue", finished=finished)))
        jobs = [row.to_plain() for row in rows]
        if json:
            is_read = emit_json({"jobs": jobs})
        else:
            clear = "\x1b[H\x1b[2J" if watch and sys.stdout.isatty() else ""
            is_read = emit(clear + queue_table(jobs))
        if not (watch and is_read):
            return
        time.sleep(_REFRESH_SECONDS)


def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the job is over.")
    ] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Print the output of a job's launches, one after another.

    \b
    hetflow logs 3
    hetflow logs -f train
    """
    from ..scheduler.requests import Request, send

    read: dict[Path, int] = {}
    while True:
        found = send(state, Request(wish="outputs", job=job))
        job = str(found["number"])
        for devices, name in found["outputs"]:
            path = state / name
            if path not in read:
                note(f"==> on {devices}")
            with path.open("rb") as stream:
                stream.seek(read.get(path, 0))
                if not emit_bytes(stream.read()):
                    return
                read[path] = stream.tell()
        if not (follow and found["is_open"]):
            return
        time.sleep(_FOLLOW_SECONDS)


def cancel(job: JobArgument, state: StateOption = DEFAULT_STATE) -> None:
    """Take a job out of the queue; if it runs, it saves and stops first.

    \b
    hetflow cancel 3
    """
    from ..api import cluster

    cluster.cancel(job, state=state)


def hold(job: JobArgument, state: StateOption = DEFAULT_STATE) -> None:
    """Keep a job from running until it is released; if it runs, it saves and stops first.

    \b
    hetflow hold 3
    """
    from ..api import cluster

    cluster.hold(job, state=state)


def release(job: JobArgument, state: StateOption = DEFAULT_STATE) -> None:
    """Let a held job run again.

    \b
    hetflow release 3
    """
    from ..api import cluster

    cluster.release(job, state=state)
