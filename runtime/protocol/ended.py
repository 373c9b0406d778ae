"""What a worker leaves behind at its end, in the folder of the run's logs.

- Two empty files say how far it has come. It makes the first one at the script's last line. From
  then on the worker ignores the signals that end a launch, and the launcher obeys none once every
  worker has made its file. It makes the second one when the last save and all exit functions are
  done too. Then the launch is done, even if SIGKILL ends worker or launcher before they can say so.
- A note, ``rank<name>.failed.json``, says how it failed, written before the others notice that it
  is gone. The failing process may be in any state, so writing validates nothing, and a note that is
  read may be incomplete.
"""

import contextlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_FAILED = ".failed.json"


def ended_path(failure: Path) -> Path:
    """The first file of a worker whose failure note would be ``failure``."""
    return failure.with_name(failure.name.replace(_FAILED, ".ended"))


def left_path(failure: Path) -> Path:
    """The second file."""
    return failure.with_name(failure.name.replace(_FAILED, ".left"))


def have_all_left(logs: Path) -> bool:
    """Whether every worker that was ever started in a launch had nothing left to do."""
    started = [path.stem for path in logs.glob("rank*.out")]
    return "rank0" in started and all((logs / f"{name}.left").exists() for name in started)


def touch(path: Path) -> None:
    """Make one of these files."""
    with contextlib.suppress(OSError):  # a full disk: a signal then counts as during the script
        path.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """One worker's report of its own failure.

    ``at_seconds`` is the host's monotonic clock. ``lost_peer`` means that the worker failed only
    because another one was lost, ``timed_out`` that it waited for the other until the time limit.
    ``may_be_echo`` means that its own error may be a consequence of such a loss.
    """

    error: str = ""
    traceback: str = ""
    exit_code: int = 1
    hint: str | None = None
    # A worker without a note died suddenly, so its failure is hardly a consequence of others'.
    at_seconds: float = 0.0
    lost_peer: bool = False
    may_be_echo: bool = False
    timed_out: bool = False


_NOTHING = FailureNote()


def read_note(path: Path) -> FailureNote | None:
    """Read a worker's note; None if there is none or it is incomplete.

    Entries of a wrong type are ignored.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    entries: dict[str, Any] = {}
    for field in fields(FailureNote):
        value = found.get(field.name)
        expected = str if field.name == "hint" else type(getattr(_NOTHING, field.name))
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is expected:
            entries[field.name] = value
    return FailureNote(**entries)
