"""What ends slowly does not hold the worker up."""

import threading
import time

from hetflow.runtime.group import release_apart


class Slow:
    """Ends when it is told to."""

    def __init__(self, may_end: threading.Event, ends_in: list[str]) -> None:
        self._may_end, self._ends_in = may_end, ends_in

    def __del__(self) -> None:
        self._ends_in.append(threading.current_thread().name)
        self._may_end.wait(60)


def test_an_end_that_hangs_is_left_to_a_thread() -> None:
    may_end, ends_in = threading.Event(), []
    begin = time.monotonic()
    release_apart([Slow(may_end, ends_in)], patience_seconds=0.2)
    assert time.monotonic() - begin < 30
    assert ends_in == ["hetflow-old-groups"]
    may_end.set()


def test_an_end_that_is_quick_is_over_afterwards() -> None:
    may_end, ends_in = threading.Event(), []
    may_end.set()
    release_apart([Slow(may_end, ends_in)])
    assert ends_in == ["hetflow-old-groups"]
