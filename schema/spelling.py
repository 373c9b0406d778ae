"""Guess the known name that a mistyped one meant."""

import difflib


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known name closest to a mistyped one, or None where none is close."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None
