"""The launch's token: workers' keys in the store stand behind a prefix that is drawn from it.

It comes by the environment and is taken out of there, so that what the script starts or logs does
not hold it. Nothing here imports torch.
"""

import hashlib
import os
from typing import ClassVar

from .environment import TOKEN


class _Held:
    token: ClassVar[str | None] = None


def take_token() -> str:
    """The token of this process's launch; empty where the launcher gave none."""
    found = os.environ.pop(TOKEN, None)
    if found is not None:
        _Held.token = found
    return _Held.token or ""


def prefix_of(token: str) -> str:
    """The prefix of all keys; who sees it (keys can be listed) has not seen the token."""
    return hashlib.sha256(f"hetflow store {token}".encode()).hexdigest()[:32] if token else "open"


def fingerprint_of(token: str) -> str:
    """What hosts compare to know whether they were given one token."""
    return hashlib.sha256(f"hetflow fingerprint {token}".encode()).hexdigest()[:32]
