"""Read NCCL's watchdog messages: why it aborted a process.

The watchdog aborts a process that waited too long for another or lost it, and also one whose own
device failed. No Python runs any more by then, so the messages on stderr are the only evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NUM_LINES = 1000
"""Of a log's end that hold what it says, and the stacks of C++ that follow."""
_WAITED_IN_VAIN = "Watchdog caught collective operation timeout"
_LOST_ANOTHER = "remote process exited"
_OWN_DEVICE = "CUDA error"
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogAbort:
    """An abort for lack of another process; ``timed_out`` where it waited for it in vain."""

    said: str
    timed_out: bool


def find_abort(lines: Sequence[str]) -> WatchdogAbort | None:
    """The abort that a log tells of; None for none, or one for an error of the own device."""
    if any(_OWN_DEVICE in line for line in lines):
        return None
    for sign in (_WAITED_IN_VAIN, _LOST_ANOTHER):
        for line in lines:
            if sign in line:
                said = line[line.index(sign) :][:_MAX_CHARACTERS]
                return WatchdogAbort(said=said, timed_out=sign == _WAITED_IN_VAIN)
    return None
