"""Make public functions of request records: their signature, their checks and their words.

A function that takes a record (``schema/requests``) is called with the record's fields as
arguments. Type checkers see the same signature, because it is that of the record's constructor.
"""

import re
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..schema.arguments import Arguments
from ..schema.options import asked_of, told

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")

_WIDTH = 100
_SECTION = re.compile(r"^    (Returns|Raises|Example):", re.MULTILINE)


def takes(record: Callable[P, Q]) -> Callable[[Callable[[Q], R]], Callable[P, R]]:
    """Let a function of a request record be called with the record's fields.

    The call raises a ProblemError for an argument that is not what its field says, and a TypeError
    for one that there is not.

    Args:
        record: The request record, a dataclass whose fields have an ``Option``. Where it has a
            field ``stated``, that gets the names of the arguments that ask for something.

    Returns:
        A decorator for the function.
    """
    kind: Any = record
    notes_stated = "stated" in kind.__dataclass_fields__

    def decorate(function: Callable[[Q], R]) -> Callable[P, R]:
        arguments = Arguments(kind, function.__name__)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given = arguments.checked(args, kwargs)
            request = kind(**given)
            if notes_stated:
                names = frozenset(name for name, value in given.items() if value)
                object.__setattr__(request, "stated", names)
            return function(request)

        answer = function.__annotations__["return"]
        called.__signature__ = arguments.signature.replace(  # type: ignore[attr-defined]
            return_annotation=answer
        )
        called.__annotations__ = {**arguments.kinds, "return": answer}
        called.__doc__ = _with_arguments(function.__doc__ or "", kind)
        return called

    return decorate


def checks(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a public function that has few of them, by its annotations."""
    arguments = Arguments(function)
    plainly: Callable[..., R] = function

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given = arguments.checked(args, kwargs)
        return plainly(**given)

    return called


def _with_arguments(words: str, record: type) -> str:
    """The words of a function, with what its record says of each argument."""
    lines = ["    Args:"]
    for asked in asked_of(record):
        said = " ".join(told(text) for text in (asked.option.help, asked.option.python) if text)
        if asked.option.default:
            said += f" [default: {told(asked.option.default)}]"
        lines += textwrap.wrap(
            f"{asked.name}: {said}",
            _WIDTH,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
    found = _SECTION.search(words)
    place = len(words) if found is None else found.start()
    return words[:place] + "\n".join(lines) + "\n\n" + words[place:]
