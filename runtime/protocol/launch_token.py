"""The launch's token, from which the prefix of all keys in the store is derived.

A worker gets it in its environment and removes it from there, so that the script's child processes
and logs do not contain it. Nothing here imports torch.
"""

import hashlib
import os
from typing import ClassVar

from .environment import TOKEN


class _Held:
    token: ClassVar[str | None] = None


def take_token() -> str:
    """Remove the launch's token from the environment and return it; empty if there is none."""
    found = os.environ.pop(TOKEN, None)
    if found is not None:
        _Held.token = found
    return _Held.token or ""


def prefix_of(token: str) -> str:
    """Derive the prefix of all keys; it does not reveal the token, since keys can be listed."""
    return hashlib.sha256(f"hetflow store {token}".encode()).hexdigest()[:32] if token else "open"


def fingerprint_of(token: str) -> str:
    """Derive the fingerprint by which hosts check that they were given the same token."""
    return hashlib.sha256(f"hetflow fingerprint {token}".encode()).hexdigest()[:32]
