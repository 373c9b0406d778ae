"""What a training process tells its user: the logger ``hetflow``, as lines on stderr."""

import logging
import sys

log = logging.getLogger("hetflow")


class _Lines(logging.Handler):
    """Writes ``hetflow: ...`` and ``hetflow: warning: ...`` to stderr, whatever it is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        sys.stderr.write(f"hetflow: {kind}{record.getMessage()}\n")


def speak() -> None:
    """Let messages reach the user's terminal, unless the script has given them another way.

    A handler that the script has put on the logger ``hetflow`` is that; handlers of the root
    logger would repeat what stands on stderr already, so messages do not go up to it.
    """
    if not log.handlers:
        log.addHandler(_Lines())
        log.setLevel(logging.INFO)
        log.propagate = False
