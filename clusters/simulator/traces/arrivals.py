"""Arriving jobs, checked one at a time, so that a trace may be larger than memory."""

from collections.abc import Iterable, Iterator

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.jobs import Job
from ...mechanisms.cluster.pool import Pool

LONGEST_SECONDS = 1e8  # three years: a run goes through every round of them


def _refuse_endless(job: Job, most_steps_per_second: float) -> None:
    alone = job.steps / most_steps_per_second
    if not max(alone, job.arrival_seconds) <= LONGEST_SECONDS:
        raise ProblemError(
            f"job {job.id!r} arrives at {job.arrival_seconds:g} s and would run {alone:g} s on its "
            f"fastest devices; simulated jobs may take at most {LONGEST_SECONDS:g} s (3 years)"
        )


def in_order(jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the jobs of a trace, and refuse what is no valid trace.

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


class Queue:
    """Arrivals with a look at the next one.

    ``left_out`` says of each job so far that fits nowhere in the pool why; it never arrives.
    """

    def __init__(self, jobs: Iterable[Job], pool: Pool) -> None:
        """Look at the first job.

        Args:
            jobs: In order of arrival; may be a stream, and may be empty.
            pool: Says which jobs fit.

        Raises:
            InfeasibleError: There are jobs, and none fits.
        """
        self.left_out: dict[str, str] = {}
        self._jobs = self._fitting(in_order(jobs), pool)
        self.next: Job | None = next(self._jobs, None)

    def _fitting(self, jobs: Iterator[Job], pool: Pool) -> Iterator[Job]:
        fits = False
        for job in jobs:
            reason = pool.why_left_out(job)
            if reason is None:
                fits = True
                _refuse_endless(job, float(pool.rate(job).max()))
                yield job
            else:
                self.left_out[job.id] = reason
        if self.left_out and not fits:
            name, reason = next(iter(self.left_out.items()))
            raise InfeasibleError(
                f"none of the {len(self.left_out)} jobs fits the pool; job {name!r}: {reason}"
            )

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
