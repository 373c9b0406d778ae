"""``hetflow queue``, ``logs``, ``cancel``, ``hold`` and ``release``: look after the jobs."""

import sys
import time
from collections.abc import Callable
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
    from ..clusters.scheduler.requests import Request, send
    from ..clusters.scheduler.view import rows_from
    from ..formats.reports.cluster_tables import queue_table

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
    from ..clusters.scheduler.requests import Request, send

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


def _wish(name: str, words: str) -> Callable[..., None]:
    """The command that asks for something about a job."""

    def ask(job: JobArgument, state: StateOption = DEFAULT_STATE) -> None:
        from ..api import cluster

        getattr(cluster, name)(job, state=state)

    ask.__doc__ = f"{words}\n\n    \b\n    hetflow {name} 3\n    "
    return ask


cancel = _wish("cancel", "Take a job out of the queue; if it runs, it saves and stops first.")
hold = _wish(
    "hold", "Keep a job from running until it is released; if it runs, it saves and stops first."
)
release = _wish("release", "Let a held job run again.")
