"""Print a training process's messages, of the logger ``hetflow``, as lines on stderr."""

import contextlib
import logging
import sys

log = logging.getLogger("hetflow")


class _Lines(logging.Handler):
    """Writes ``hetflow: ...`` and ``hetflow: warning: ...`` to the stderr of that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a full disk behind stderr must not end the training."""
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"hetflow: {kind}{record.getMessage()}\n")


def speak() -> None:
    """Print messages on the user's terminal, unless the script has installed its own handler.

    A handler that the script installed on the logger ``hetflow`` takes precedence. Messages are
    not passed to the root logger: its handlers would print them on stderr a second time.
    """
    if not log.handlers:
        log.addHandler(_Lines())
        log.setLevel(logging.INFO)
        log.propagate = False
