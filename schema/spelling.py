"""Suggest a known name for a mistyped one."""

import difflib


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """Return the known name that is closest to a mistyped one; None if none is close."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None
