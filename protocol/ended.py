"""That a worker's script has ended, as an empty file beside the worker's failure note.

The worker writes it at the script's last line. From then on the worker ignores the signals that
end a launch, and the launcher obeys none once every worker has written its file.
"""

import contextlib
from pathlib import Path


def ended_path(failure: Path) -> Path:
    """The file of a worker whose failure note would be ``failure``."""
    return failure.with_name(failure.name.replace(".failed.json", ".ended"))


def tell_ended(failure: Path) -> None:
    """Record that this worker's script has ended well."""
    with contextlib.suppress(OSError):  # a full disk: a signal then counts as during the script
        ended_path(failure).touch()
