"""The oldest torch that training runs on.

Planning needs no torch. Training does, and an older one fails late: under 2.4.1 all workers of a
launch wait in the store for minutes.
"""

import re
from importlib import metadata

from ..schema.errors import HetflowError

OLDEST = (2, 9)
"""The oldest on which training has run; pyproject.toml declares the same."""


def check_torch(version: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        HetflowError: It is older than OLDEST.
    """
    if is_too_old(version):
        oldest = ".".join(map(str, OLDEST))
        raise HetflowError(
            f"torch {version} is too old: training needs {oldest} or newer",
            hint=f"pip install 'torch>={oldest}'",
        )


def check_installed_torch() -> None:
    """Check the torch that is installed, without importing it; none at all is another error's."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    check_torch(version)


def is_too_old(version: str) -> bool:
    """Whether a version is older than OLDEST; one that cannot be read is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST
