"""Emulated device types: real arithmetic, with each pass stretched to a fixed time.

A table gives the seconds of one forward + backward pass at each batch size. A pass that is done
early sleeps for the rest. A fixed time from a table holds within a few percent, also on a busy
machine; sleeping in proportion, CPU quotas and niceness are unstable.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..schema.errors import ProblemError
from ..schema.plan import PassTime


class PassHolder:
    """Stretch passes to the times of a table.

    Deadlines count from the start of the step: pass k ends no earlier than the start plus the
    table times of passes 1 to k, so small delays between passes do not add up.
    """

    def __init__(self, passes: Sequence[PassTime]) -> None:
        """Take at least one (batch size, seconds) pair, in any order."""
        if not passes:
            raise ProblemError("an emulated device needs at least one pass time")
        ordered = sorted(passes, key=lambda entry: entry.batch_size)
        self._sizes = [entry.batch_size for entry in ordered]
        self._seconds = [entry.step_seconds for entry in ordered]
        self._deadline, self._allowed, self._started = 0.0, 0.0, 0.0
        self.num_passes = 0
        self.num_overruns = 0
        self.worst_overrun_seconds = 0.0

    def pass_seconds(self, batch_size: int) -> float:
        """How long a pass of ``batch_size`` samples lasts, in seconds.

        Linear between the table's sizes, proportional below the first, and with the last slope
        above the last (proportional where the table has one size only).
        """
        sizes, seconds = self._sizes, self._seconds
        if batch_size <= sizes[0] or len(sizes) == 1:
            return seconds[0] * batch_size / sizes[0]
        right = min(bisect_left(sizes, batch_size), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return max(seconds[left] + slope * (batch_size - sizes[left]), 0.0)

    def begin_step(self) -> None:
        """Start the step's clock: the deadlines of its passes count from here."""
        self._deadline = time.perf_counter()

    @contextmanager
    def hold(self, batch_size: int) -> Iterator[None]:
        """Run one pass inside the ``with`` block; leave it no earlier than its deadline."""
        self.begin_pass(batch_size)
        yield
        self.end_pass()

    def begin_pass(self, batch_size: int) -> None:
        """Note that a pass of ``batch_size`` samples begins."""
        self._allowed, self._started = self.pass_seconds(batch_size), time.perf_counter()

    def end_pass(self) -> None:
        """Wait for the deadline of the pass that has begun.

        A pass whose real arithmetic took longer than its table time is counted: there the
        emulated device was slower than the table says.
        """
        overrun = time.perf_counter() - self._started - self._allowed
        self.num_passes += 1
        if overrun > 0:
            self.num_overruns += 1
            self.worst_overrun_seconds = max(self.worst_overrun_seconds, overrun)
        self._deadline += self._allowed
        left = self._deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)
