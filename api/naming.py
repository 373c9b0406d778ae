"""Check a public function's arguments, and name them in errors: as arguments, or as flags.

Messages are written with flags (``add --batch-size N``), because the code that raises them serves
both. If a program called the function, the flags are replaced by the function's arguments.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from ..schema.arguments import Arguments
from ..schema.errors import HetflowError, LaunchError
from ..schema.options import spelled_by

P = ParamSpec("P")
R = TypeVar("R")

RENTED_JOB = {
    "work_hours": "work_seconds",
    "deadline_hours": "deadline_seconds",
    "on_demand": "on_demand_dollars_per_hour",
    "spot": "spot_dollars_per_hour",
    "policy": "policies",
}
"""Flags of a job with a deadline, in every command of ``hetflow rent`` -> their arguments."""

_flags_are_meant: ContextVar[bool] = ContextVar("flags_are_meant", default=False)
_QUOTED = re.compile(r"(`[^`]*`)")  # a command to type, which keeps its flags
_FLAG = re.compile(
    r"(?P<ask>\b(?:add|give|try|with|such as|for example) )?"
    r"(?<![\w./-])--(?P<name>[a-z][a-z0-9-]*)"
    r"(?: (?!(?:and|or|to|too|out|both)\b)(?P<value>'[^']*'|[\w.][\w./:=|-]*\w|\w))?"
)


@contextmanager
def flags_are_meant() -> Iterator[None]:
    """Keep flags in errors inside this context, because the command line is the caller."""
    before = _flags_are_meant.set(True)
    try:
        yield
    finally:
        _flags_are_meant.reset(before)


def names_arguments(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a public function, and name them in its errors instead of flags.

    The function raises a ProblemError for an argument that is not what its annotation says, and a
    TypeError for one that it does not have.

    Args:
        renamed: Flags whose argument has another name: ``gpus="pool"``. A value that is no plain
            name (``optimizer=OptimizerState(...)``) is written as it is.

    Returns:
        A decorator for the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        arguments = Arguments(function)
        kinds = arguments.kinds
        unknown = [new for new in renamed.values() if new.isidentifier() and new not in kinds]
        if unknown:
            raise TypeError(f"{function.__name__} has no argument {unknown[0]}")
        plainly: Callable[..., R] = function
        flags = {new: flag for flag, new in reversed(renamed.items())}

        def spelled(name: str, value: object = None) -> str:
            return "--" + flags.get(name, name).replace("_", "-")

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with spelled_by(spelled) if _flags_are_meant.get() else nullcontext():
                given: Any = arguments.checked(args, kwargs)
            try:
                return plainly(**given)
            except HetflowError as error:
                if not _flags_are_meant.get():
                    if not isinstance(error, LaunchError):  # that quotes the script's error
                        error.message = _in_python(error.message, kinds, renamed)
                        error.args = (error.message,)
                    error.hint = error.hint and _in_python(error.hint, kinds, renamed)
                raise

        return called

    return decorate


def _in_python(text: str, kinds: dict[str, Any], renamed: dict[str, str]) -> str:
    parts = _QUOTED.split(text)
    return "".join(p if p.startswith("`") else _renamed(p, kinds, renamed) for p in parts)


def _renamed(text: str, kinds: dict[str, Any], renamed: dict[str, str]) -> str:
    made, end, asked = "", 0, False
    for match in _FLAG.finditer(text):
        between = text[end : match.start()]
        follows = between == " " and asked  # the second of: add --a --b 1
        asked = bool(match["ask"]) or follows
        made += (", " if follows else between) + (match["ask"] or "")
        made += _argument(match, kinds, renamed, asked=asked)
        end = match.end()
    return made + text[end:]


def _argument(
    match: re.Match[str], kinds: dict[str, Any], renamed: dict[str, str], *, asked: bool
) -> str:
    """Return the Python text that replaces a flag, and its value if one follows."""
    name, value = match["name"].replace("-", "_"), match["value"]
    name = renamed.get(name, name)
    if name.isidentifier() and name not in kinds:  # a flag of another command
        return match[0].removeprefix(match["ask"] or "")
    if name in kinds and value is not None and _is_value(value, kinds[name], asked=asked):
        is_plain = value.startswith("'") or value.isupper() or _is_number(value)
        return f"{name}=" + (value if is_plain else "|".join(f'"{v}"' for v in value.split("|")))
    is_switch = asked and kinds.get(name) is bool
    return name + ("=True" if is_switch else "") + (f" {value}" if value else "")


def _is_value(word: str, kind: Any, *, asked: bool) -> bool:
    """Whether the word after a flag is its value, rather than the sentence's next word."""
    if kind is bool:
        return False
    return (
        asked
        or word.startswith("'")
        or word.isupper()
        or _is_number(word)
        or word in _choices_of(kind)
    )


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", word) is not None


def _choices_of(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _choices_of(part)
