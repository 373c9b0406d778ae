"""What NCCL's watchdog writes before it aborts a process, and what that says of the process.

It aborts whoever waited for another in vain or lost another, and also for an error of the process's
own device. By then the process runs no Python, so what it wrote to stderr is the only sign.
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
    """The abort that a log tells of; None for none, or one for an error of the own device.

    Args:
        lines: The last lines of the log.
    """
    if any(_OWN_DEVICE in line for line in lines):
        return None
    for sign in (_WAITED_IN_VAIN, _LOST_ANOTHER):
        for line in lines:
            if sign in line:
                said = line[line.index(sign) :][:_MAX_CHARACTERS]
                return WatchdogAbort(said=said, timed_out=sign == _WAITED_IN_VAIN)
    return None
