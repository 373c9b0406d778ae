"""How often a launch starts again from a checkpoint."""

from typing import Protocol

from ..protocol import handover

MAX_TRIES = 3


class Readable(Protocol):
    """The launch's store, for who only reads it."""

    def read(self, key: str) -> str | None:
        """What workers have left there."""


class Store(Readable, Protocol):
    """The launch's store."""

    def write(self, key: str, value: str) -> None:
        """Leave something for workers."""


class Tries:
    """Three restarts from one checkpoint; one that comes as far as a newer one counts anew.

    Args:
        store: Where workers say what they go on from.
    """

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._place: str | None = None
        self._number = 0

    def take(self, generation: int) -> bool:
        """Whether there may be one more restart.

        Args:
            generation: The one that has started last, from nothing or from a checkpoint.
        """
        found = self._store.read(handover.key(generation, handover.FOUND))
        self._number = self._number + 1 if found == self._place else 1
        self._place = found
        return self._number <= MAX_TRIES

    def forget(self) -> None:
        """All workers have taken up another plan."""
        self._place, self._number = None, 0
