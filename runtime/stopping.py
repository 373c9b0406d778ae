"""Handle the signals that ask a job to save and leave, from its start to its end.

The script's own handlers are kept: an earlier handler is called when a job has saved, and is
installed again when the last job is over. A signal after that acts as without hetflow. One that
came too late for a job to save and leave is raised again.
"""

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn

from .finish import report_stopped
from .group import complete
from .protocol import handover
from .protocol.handover import STOPPED_EXIT_CODE
from .session import Session


class StopRequests:
    """The requests to one job. Only the main thread of a process can receive signals."""

    _open: ClassVar[list["StopRequests"]] = []
    _before: ClassVar[dict[int, Any]] = {}
    _received: ClassVar[list[int]] = []

    def __init__(self, numbers: Sequence[signal.Signals], ask: Callable[[], None]) -> None:
        self._ask, self._numbers = ask, numbers
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            before = signal.signal(number, _noted)
            if before is not _noted:
                self._before[number] = before
        if numbers:
            self._open.append(self)

    @classmethod
    def pass_on(cls) -> None:
        """Call the handlers installed before any job, for the signals that came."""
        for number in cls._received:
            handler = cls._before[number]
            if callable(handler):
                handler(number, None)

    def close(self) -> None:
        """End this job's requests; the last job restores the earlier handlers.

        A handler that the script set since stays. A signal that no job obeyed is raised again.
        """
        if self not in self._open:
            return
        self._open.remove(self)
        if self._open:
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) is _noted:
                after = signal.SIG_DFL if handler is None else handler
                if number == handover.SIGNAL and after == signal.SIG_DFL:
                    after = signal.SIG_IGN  # a request that comes too late must not end the process
                signal.signal(number, after)
        late = [number for number in self._received if number != handover.SIGNAL]
        self._before.clear()
        self._received.clear()
        for number in late:
            sys.stdout.flush()
            signal.raise_signal(number)

    @classmethod
    def note(cls, number: int) -> None:
        """Record a signal, and ask all open jobs that want it to stop."""
        cls._received.append(number)
        for requests in cls._open:
            requests._take(number)

    def _take(self, number: int) -> None:
        if number in self._numbers:
            self._ask()


def leave(session: Session) -> NoReturn:
    """Report and stop as asked, after the script's own handlers of the signal have run."""
    complete(session.place.device)
    report_stopped(session)
    session.is_finished = True  # the exit of the interpreter has nothing left to do
    StopRequests.pass_on()
    sys.exit(STOPPED_EXIT_CODE)


def _noted(number: int, frame: FrameType | None) -> None:
    StopRequests.note(number)
