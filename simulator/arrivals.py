"""Jobs as they come: checked one at a time, so that a trace may be larger than memory."""

from collections.abc import Iterable, Iterator

from ..schema.errors import ProblemError
from ..schema.jobs import Job


def in_order(jobs: Iterable[Job]) -> Iterator[Job]:
    """Pass jobs on, refusing what makes no trace.

    Only the ids are kept.

    Raises:
        ProblemError: A job arrives before the one above it, or its id was there before.
    """
    last, seen = 0.0, set[str]()
    for job in jobs:
        if job.arrival_seconds < last:
            raise ProblemError(
                f"job {job.id!r} arrives at {job.arrival_seconds} s, before the job above it at "
                f"{last} s; sort the trace by arrival"
            )
        if job.id in seen:
            raise ProblemError(f"job id {job.id!r} appears twice in the trace; keep one")
        last = job.arrival_seconds
        seen.add(job.id)
        yield job
    if not seen:
        raise ProblemError("the trace holds no jobs; give at least one")


class Queue:
    """Arrivals with a look at the next one."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = in_order(jobs)
        self.next: Job | None = next(self._jobs, None)

    @property
    def next_seconds(self) -> float:
        """When the next job arrives; infinite where none is left."""
        return float("inf") if self.next is None else self.next.arrival_seconds

    def until(self, now_seconds: float) -> list[Job]:
        """Take all jobs that have arrived by now."""
        taken = []
        while self.next is not None and self.next.arrival_seconds <= now_seconds:
            taken.append(self.next)
            self.next = next(self._jobs, None)
        return taken
