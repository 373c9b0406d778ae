"""``hetflow.cluster``: the jobs of a live cluster, which ``hetflow cluster start`` runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from ..clusters.scheduler import submission, view
from ..clusters.scheduler.requests import Request, send
from ..clusters.scheduler.view import QueuedJob
from ..formats.importers.recognise import read_throughputs
from ..schema.errors import ProblemError
from ..schema.records import Index
from .calls import checks

__all__ = ["cancel", "hold", "queue", "release", "submit"]

STATE = Path("hetflow-cluster")
"""Folder of the cluster's state, where none is named."""


@checks
def submit(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    state: Path | str = STATE,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Add a job to the queue.

    Args:
        script: The training script, or a job's .toml file.
        arguments: The script's own arguments.
        state: Folder of the cluster's state.
        options: What a job's .toml file may hold: ``profiles`` or ``throughputs``, ``batch_size``,
            ``steps``, ``devices``, ...; they count before the file's.

    Returns:
        The job's number.

    Raises:
        ProblemError: The cluster cannot run such a job.
        FileError: There is no such cluster, or an option makes no sense.

    Example:
        >>> import hetflow, pathlib
        >>> options = {"profiles": pathlib.Path("profiles"), "batch_size": 16, "steps": 100}
        >>> try:
        ...     hetflow.cluster.submit("train.py", options=options)
        ... except hetflow.ProblemError as error:
        ...     print(error.message.endswith("profiles: no such folder"))
        True
    """
    given = {name: str(v) if isinstance(v, Path) else v for name, v in (options or {}).items()}
    if arguments:
        given["arguments"] = list(arguments)
    asked = submission_of(Path(script), given)
    [number] = send(Path(state), Request(wish="submit", submission=asked))
    return int(number)


def submission_of(script: Path, given: Mapping[str, Any]) -> submission.Submission:
    """Return what is asked for by a script or a job's file, and by options, which count first.

    Raises:
        ProblemError: No plan can be what is asked for, or a file and the caller give arguments.
        FileError: The file or an option makes no sense.
    """
    read_table = partial(read_throughputs, pairs=False)
    if script.suffix != ".toml":
        values = {"script": str(script), **given}
        return submission.submission(values, base=Path.cwd(), name="submit", read_table=read_table)
    if given.get("arguments"):
        raise ProblemError(
            f"{' '.join(given['arguments'])}: comes after {script}",
            hint="write hetflow's options before it, and the script's arguments in it",
        )
    return submission.read_submission(script, dict(given), read_table=read_table)


@checks
def queue(*, state: Path | str = STATE, finished: Index = 10) -> list[QueuedJob]:
    """Return the jobs that are not over, in order of submission, then those that ended last.

    Args:
        state: Folder of the cluster's state.
        finished: Number of ended jobs to return.

    Raises:
        FileError: There is no such cluster.

    Example:
        >>> import hetflow
        >>> try:
        ...     [job.state for job in hetflow.cluster.queue(state="nowhere")]
        ... except hetflow.FileError as error:
        ...     print(error.message)
        nowhere: no cluster was started there
    """
    return view.rows_from(send(Path(state), Request(wish="queue", finished=finished)))


class Ask(Protocol):
    """Asks for something about a job."""

    def __call__(self, job: int | str, *, state: Path | str = STATE) -> None:
        """Ask for it; ``job`` is its number or its name."""


def _wish(wish: Literal["cancel", "hold", "release"], words: str) -> Ask:
    """The function that asks for something about a job."""

    def ask(job: int | str, *, state: Path | str = STATE) -> None:
        send(Path(state), Request(wish=wish, job=str(job)))

    ask.__name__ = ask.__qualname__ = wish
    ask.__doc__ = f"""{words}

    Args:
        job: Its number or its name.
        state: Folder of the cluster's state.

    Raises:
        ProblemError: There is no such job.
        FileError: There is no such cluster.

    Example:
        >>> import hetflow
        >>> try:
        ...     hetflow.cluster.{wish}(1, state="nowhere")
        ... except hetflow.FileError as error:
        ...     print(error.message)
        nowhere: no cluster was started there
    """
    return checks(ask)


cancel = _wish("cancel", "Take a job out of the queue; if it runs, it saves and stops first.")
hold = _wish(
    "hold", "Keep a job from running until it is released; if it runs, it saves and stops first."
)
release = _wish("release", "Let a held job run again.")
