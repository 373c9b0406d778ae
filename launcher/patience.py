"""The store of another host, asked with a time limit.

Torch's client waits forever for the answer of a host that has disappeared (frozen, or the network
is gone). So a thread of its own asks, and the caller waits for that thread with a time limit.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Unreachable(RuntimeError):
    """The store does not answer; its message says how that was seen."""


class PatientStore:
    """Keys and values of a launch. Once it did not answer it is never asked again.

    Args:
        store: Torch's.
        limit_seconds: How long an answer may take.
    """

    def __init__(self, store: Any, limit_seconds: float) -> None:
        self._store, self._limit_seconds = store, limit_seconds
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], _Reply]] = queue.SimpleQueue()
        self._gone: str | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def under(self, prefix: str) -> "Part":
        """The part of it whose keys begin with a prefix."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return Part(self, PrefixStore(prefix, self._store))

    @property
    def whole(self) -> "Part":
        """All of it."""
        return Part(self, self._store)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Have the thread ask, and wait for the answer.

        Raises:
            Unreachable: None came.
        """
        if self._gone is None:
            reply = _Reply()
            self._asked.put((question, reply))
            if not reply.is_there.wait(self._limit_seconds):
                self._gone = f"its launcher did not answer for {self._limit_seconds:g} s"
            elif reply.error is not None:
                self._gone = "its launcher is gone, and the store with it"
            else:
                answer: Answer = reply.answer
                return answer
        raise Unreachable(self._gone)

    def _serve(self) -> None:
        while True:
            question, reply = self._asked.get()
            try:
                reply.answer = question()
            except RuntimeError as error:
                reply.error = error
            reply.is_there.set()


class _Reply:
    """What the thread has found."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.answer: Any = None
        self.error: RuntimeError | None = None


class Part:
    """Some keys of a store; each method as torch's.

    Args:
        through: Who asks.
        store: Torch's, with the prefix.
    """

    def __init__(self, through: PatientStore, store: Any) -> None:
        self._through, self._store = through, store

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._through.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """A value that is there."""
        found: bytes = self._through.ask(lambda: self._store.get(key))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there."""
        return bool(self._through.ask(lambda: self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value where another stands; what stands there then."""
        found: bytes = self._through.ask(lambda: self._store.compare_set(key, expected, value))
        return found
