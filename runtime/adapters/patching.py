"""Change a method of a library's class in this process, in versions that were tested."""

import functools
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...schema.errors import TargetError


def around(kind: Any, name: str, other: Any) -> None:
    """Let ``other(original, ...)`` run in place of a method or function."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(*values: Any, **options: Any) -> Any:
        return other(original, *values, **options)

    setattr(kind, name, method)


class ScriptReads:
    """Whether the script itself has asked how many processes there are."""

    number = False


def be_one_process(kind: Any, name: str) -> None:
    """Let a script read 1 as the number of processes, where a loader's batch is one process's.

    It scales rates, accumulation, warmup and decay by this number. What is installed beside the
    library, and the library itself, still read the workers: they gather and reduce.
    """
    own = vars(kind).get(name)
    module = sys.modules[kind.__module__.partition(".")[0]]
    installed = str(Path(str(module.__file__)).parents[1])

    def read(self: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(installed):
            ScriptReads.number = True
            return 1
        if own is not None:
            return own.fget(self)
        if name not in vars(self):
            raise AttributeError(name)
        return vars(self)[name]

    def write(self: Any, number: Any) -> None:
        vars(self)[name] = number

    setattr(kind, name, property(read, write))


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
