"""What users type: the name that they meant, whole numbers, values in errors."""

import difflib
from collections.abc import Iterable


def whole_number(text: str) -> int | None:
    """Read a whole number of at most 18 ASCII digits; None for any other text."""
    # ``str.isdigit`` also takes digits that ``int`` refuses, and numbers of any length.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """Return the known name that is closest to a mistyped one; None if none is close."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, before: str = "") -> str:
    """What an error says of a name that is not ``known``: ``did you mean 'V100'?``, or otherwise.

    ``before`` stands before the question, such as ``"; "``.
    """
    guess = nearest(name, tuple(known))
    return f"{before}did you mean {guess!r}?" if guess else otherwise


def shown(value: object) -> str:
    """A value as errors show it: its ``repr``, of 60 characters at most."""
    try:
        text = repr(value)
    except Exception:  # somebody else's
        text = object.__repr__(value)
    return text if len(text) <= 60 else text[:57] + "..."
