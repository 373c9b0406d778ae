"""Arriving jobs, checked one at a time, so that a trace may be larger than memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import Job, Throughputs
from ...schema.spelling import did_you_mean
from ..mechanisms.pool import ClusterPool

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

    def __init__(self, jobs: Iterable[Job], pool: ClusterPool) -> None:
        """Look at the first job.

        ``jobs`` are in order of arrival; they may be a stream, and may be empty.

        Raises:
            InfeasibleError: There are jobs, and none fits.
        """
        self.left_out: dict[str, str] = {}
        self._jobs = self._fitting(in_order(jobs), pool)
        self.next: Job | None = next(self._jobs, None)

    def _fitting(self, jobs: Iterator[Job], pool: ClusterPool) -> Iterator[Job]:
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


TraceKind = Literal[
    "continuous-single", "continuous-multiple", "static-single", "static-multiple"
]  # fmt: skip


# Traces drawn from a seed by the thesis's rules (5.7.1).
#
# Models are uniform over those of a throughput table; arrivals are Poisson; durations on the
# reference device are 10^x minutes, x uniform in [1.5, 3] for 80 % of jobs and in [3, 4] for the
# others; steps are duration times throughput there. ``continuous-multiple`` asks for 1 device in 70
# % of jobs, 2 or 4 in 25 % (2 in 10 %, 4 in 15 %: the thesis gives only the sum, the split is that
# of its code) and 8 in 5 %; a model that does not run on so many is drawn anew, so that the shares
# hold. Where no model of the table does, the job asks for one device.


_SCALES = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """What to draw. ``jobs_per_hour`` is the Poisson rate of continuous traces.

    ``priority_share`` of the jobs get weight ``priority_weight``.
    """

    kind: TraceKind
    num_jobs: int
    jobs_per_hour: float = 1.0
    seed: int = 0
    reference_device: str = "v100"
    priority_share: float = 0.0
    priority_weight: float = 5.0

    def __post_init__(self) -> None:
        if self.num_jobs < 1:
            raise ProblemError(f"a trace needs at least one job, got {self.num_jobs}")
        if not 0 < self.jobs_per_hour < float("inf"):
            raise ProblemError(f"jobs_per_hour must be > 0, got {self.jobs_per_hour}")


def draw_jobs(options: DrawOptions, throughputs: Throughputs) -> Iterator[Job]:
    """Draw a trace, one job at a time; the same seed draws the same trace.

    Raises:
        ProblemError: No model of the table runs on the reference device.
    """
    device = options.reference_device
    rates = {
        (entry.model, entry.scale_factor): entry.steps_per_second.get(device, 0.0)
        for entry in throughputs.models
    }
    models = [model for (model, scale), rate in rates.items() if scale == 1 and rate > 0]
    if not models:
        types = sorted({t for entry in throughputs.models for t in entry.steps_per_second})
        fix = did_you_mean(device, types, f"known: {', '.join(types)}")
        raise ProblemError(f"no model has a throughput on device type {device!r}; {fix}")
    scales = {scale for (model, scale), rate in rates.items() if rate > 0 and model in models}
    random = np.random.default_rng(options.seed)
    now = 0.0
    for index in range(options.num_jobs):
        if index and options.kind.startswith("continuous"):
            now += float(random.exponential(3600.0 / options.jobs_per_hour))
        model = models[int(random.integers(len(models)))]
        scale = _scale(random) if options.kind.endswith("multiple") else 1
        while not rates.get((model, scale)) and scale in scales:
            model = models[int(random.integers(len(models)))]
        scale, rate = (scale, rates[model, scale]) if scale in scales else (1, rates[model, 1])
        preferred = float(random.random()) < options.priority_share
        yield Job(
            id=str(index),
            model=model,
            steps=max(1.0, float(np.floor(_duration_seconds(random) * rate))),
            scale_factor=scale,
            arrival_seconds=now,
            priority_weight=options.priority_weight if preferred else 1.0,
        )


def _duration_seconds(random: np.random.Generator) -> float:
    low, high = (3.0, 4.0) if random.random() >= 0.8 else (1.5, 3.0)
    exponent = low + (high - low) * float(random.random())  # as ``uniform``, in half the time
    return float(60.0 * 10.0**exponent)


def _scale(random: np.random.Generator) -> int:
    draw = float(random.random())
    for scale, share in _SCALES:
        draw -= share
        if draw < 0:
            return scale
    return _SCALES[-1][0]
