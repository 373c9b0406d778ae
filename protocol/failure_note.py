"""What a worker writes down of its own failure, before the others can notice that it is gone.

It stays in the run's folder as ``logs/rank<name>.failed.json``. A failing process writes it, in
whatever state it is, so nothing here validates what is written; what is read may be torn.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """One worker's failure in its own words.

    ``at_seconds`` is the host's monotonic clock. ``lost_peer`` says that the worker failed only
    because another was gone, ``timed_out`` that it waited for it in vain, ``may_be_echo`` that its
    own error may follow from such a loss.
    """

    error: str = ""
    traceback: str = ""
    exit_code: int = 1
    hint: str | None = None
    # One that wrote nothing died too suddenly to; it can hardly have died of the others.
    at_seconds: float = 0.0
    lost_peer: bool = False
    may_be_echo: bool = False
    timed_out: bool = False


_NOTHING = FailureNote()


def read_note(path: Path) -> FailureNote | None:
    """What a worker wrote; None where there is nothing, or no whole note.

    An entry of another type than a note's counts as not written.
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
