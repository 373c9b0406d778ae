"""How far a worker is at its end, as empty files beside the worker's failure note.

It writes the first one at the script's last line. From then on the worker ignores the signals that
end a launch, and the launcher obeys none once every worker has written its file. It writes the
second one when the last save and all exit functions are done too. Then the launch is done, even if
SIGKILL ends worker or launcher before they can say so.
"""

import contextlib
from pathlib import Path

_FAILED = ".failed.json"


def ended_path(failure: Path) -> Path:
    """The first file of a worker whose failure note would be ``failure``."""
    return failure.with_name(failure.name.replace(_FAILED, ".ended"))


def left_path(failure: Path) -> Path:
    """The second file."""
    return failure.with_name(failure.name.replace(_FAILED, ".left"))


def tell_ended(failure: Path) -> None:
    """Record that this worker's script has ended well."""
    _touch(ended_path(failure))


def tell_left(failure: Path) -> None:
    """Record that this worker has nothing left to do."""
    _touch(left_path(failure))


def have_all_left(logs: Path) -> bool:
    """Whether every worker that was ever started in a launch had nothing left to do."""
    started = [path.stem for path in logs.glob("rank*.out")]
    return "rank0" in started and all((logs / f"{name}.left").exists() for name in started)


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk: a signal then counts as during the script
        path.touch()
