"""A worker's note of its own failure, written before the others notice that it is gone.

It is kept in the run's folder as ``logs/rank<name>.failed.json``. The failing process may be in
any state, so writing validates nothing, and a note that is read may be incomplete.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """One worker's report of its own failure.

    ``at_seconds`` is the host's monotonic clock. ``lost_peer`` means that the worker failed only
    because another one was lost, ``timed_out`` that it waited for the other until the time limit,
    ``may_be_echo`` that its own error may be a consequence of such a loss.
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
