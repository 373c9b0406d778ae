"""Change a method of a library's class in this process, in versions that were tested."""

import functools
from importlib.metadata import version
from typing import Any

from ...schema.errors import TargetError


def around(kind: Any, name: str, other: Any) -> None:
    """Let ``other(original, ...)`` run in place of a method or function."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(*values: Any, **options: Any) -> Any:
        return other(original, *values, **options)

    setattr(kind, name, method)


def check_version(library: str, versions: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Refuse a library's version outside of the range (oldest, newest) that was tested.

    Raises:
        TargetError: It is older or newer.
    """
    found = version(library)
    major, minor = (int(number) for number in found.split(".")[:2])
    oldest, newest = versions
    if not oldest <= (major, minor) <= newest:
        raise TargetError(
            f"{library} {found} is installed, and scripts as they are train under a plan with "
            f"{_text(oldest)} to {_text(newest)}",
            hint=f"pip install '{library}>={_text(oldest)},<{newest[0]}.{newest[1] + 1}', or train "
            "with hf.prepare",
        )


def _text(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
