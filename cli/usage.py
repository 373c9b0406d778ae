"""What the parser of the command line says of a bad value, in plain words."""

import re
from typing import Any

from ..schema.spelling import nearest

_NOT_ONE = re.compile(r"'([^']*)' is not one of ('[^']*'(?:, '[^']*')*)$")
_RULES = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "greater_than": "must be above {gt:g}",
    "less_than": "must be below {lt:g}",
}


def plain_message(error: Exception) -> str:
    """One line for an error of the parser, with the name that may have been meant.

    typer checks values with pydantic, whose words are for programmers.
    """
    message = str(error.format_message()).replace("\n", " ").rstrip(".")  # type: ignore[attr-defined]
    for fault in _faults(error)[:1]:
        rule = _RULES.get(fault["type"])
        if rule is not None:
            plain = f"{rule.format(**fault.get('ctx', {}))}, got {str(fault['input'])!r}"
            message = message.replace(fault["msg"], plain)
    message = message.replace(": Value error, ", ": ")
    found = _NOT_ONE.search(message)
    guess = found and nearest(found[1], re.findall(r"'([^']*)'", found[2]))
    return f"{message}; did you mean {guess!r}?" if guess else message


def _faults(error: Exception) -> list[dict[str, Any]]:
    """What pydantic found, where it is the cause; none with another release of typer."""
    listed = getattr(error.__cause__ or error.__context__, "errors", None)
    return listed() if callable(listed) else []
