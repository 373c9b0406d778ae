"""Measure each part of a step without slowing it: by perf_counter, or by events read later."""

import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, lgamma, log
from typing import Any, NamedTuple

import torch

from ..devices.backend import DeviceBackend, Mark, backend_of
from ..schema.run import MeasuredTerm, MeasuredTerms, StageRun

# A confidence interval for a median that assumes nothing about the distribution.
#
# The probability that the true median lies between two given order statistics of n samples follows
# from the binomial law alone. So the interval between these two samples is valid for any noise;
# timing noise is skewed, never normal.

FEWEST_FOR_AN_INTERVAL = 6
"""Fewer values give no 95 % interval: the true median may lie outside their whole range."""
_CONFIDENCE = 0.95


def median_interval(
    samples: Sequence[float], confidence: float = _CONFIDENCE
) -> tuple[float, float] | None:
    """The tightest symmetric order-statistic interval that holds the median.

    The median lies between the k-th smallest and the k-th largest of n samples with probability
    ``1 - 2 * P(Binomial(n, 1/2) < k)``.

    Args:
        samples: In any unit, in any order.
        confidence: Least probability that the interval holds the median, 0 to 1.

    Returns:
        (low, high) in the samples' unit; None where n is too small (below 6 for 95 %).
    """
    ordered = sorted(samples)
    total = len(ordered)
    outside = 0.0
    best: tuple[float, float] | None = None
    for k in range(1, total // 2 + 1):
        # By logarithms: powers overflow for thousands of steps.
        ways = lgamma(total + 1) - lgamma(k) - lgamma(total - k + 2)
        outside += exp(ways - total * log(2))
        if 1 - 2 * outside < confidence:
            break
        best = (ordered[k - 1], ordered[total - k])
    return best


def half_width(samples: Sequence[float]) -> float | None:
    """Half the width of `median_interval`, in the samples' unit; None for too few samples."""
    interval = median_interval(samples)
    return None if interval is None else (interval[1] - interval[0]) / 2


# The times of one step's parts, as a worker's ``StepClock`` has marked them.


@dataclass(frozen=True, slots=True)
class StagePass:
    """One forward pass of a pipeline's stage, one backward pass, or half of a backward pass."""

    stage: int
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One full step of one worker. Times are in seconds since the step began.

    A step begins when the script asks for its batch, and ends when it asks for the next one.

    Attributes:
        asked_seconds: When this step began, in seconds since the first step that is kept began.
        passes: (begin, end) of each pass, in order: forward and backward of a virtual node, or a
            pipeline's forward passes. The runtime's own work for a virtual node is included;
            waiting for its samples comes before.
        computed: When the last pass has ended, and the rest of the gradients is on its way.
        synchronised: When gradients are the mean over all workers.
        ended: When the script has updated, cleared gradients, and asks for the next batch.
        stages: The passes of a pipeline's stages, loading included.
    """

    asked_seconds: float
    passes: tuple[tuple[float, float], ...]
    computed: float
    synchronised: float
    ended: float
    stages: tuple[StagePass, ...] = ()

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "StepTimes":
        """Read back the values of ``as_json``."""
        passes = tuple((float(began), float(ended)) for began, ended in found["passes"])
        stages = tuple(StagePass(**entry) for entry in found.get("stages", ()))
        return cls(**{**found, "passes": passes, "stages": stages})

    def as_json(self) -> dict[str, Any]:
        """The times as plain values, for JSON."""
        return asdict(self)

    @property
    def pass_seconds(self) -> list[float]:
        """[passes] the seconds that each took."""
        return [ended - began for began, ended in self.passes]

    @property
    def gap_seconds(self) -> list[float]:
        """[passes - 1] seconds from the end of each pass to the next one's begin: loading."""
        return [after[0] - before[1] for before, after in pairwise(self.passes)]

    @property
    def sync_seconds(self) -> float:
        """Seconds from this worker's last pass until gradients are the mean over all workers."""
        return self.synchronised - self.computed

    @property
    def update_seconds(self) -> float:
        """Seconds from the mean gradients to the request for the next batch."""
        return self.ended - self.synchronised


# On a GPU its launch takes some 10 us.
_REFERENCE_SECONDS, _REFERENCE_REPEATS = 2.5e-4, 9


def reference_seconds(device: torch.device) -> float | None:
    """Seconds of a fixed product of matrices, which tell how fast a device is now.

    Profiles and launches measure it alike, so their ratio is what the device has become slower. On
    an accelerator it is in double precision, which no setting of a script rounds, and as large as
    it takes to last far longer than its launch: a slow one has done a small product by then.

    Returns:
        The median of a few products, for one of 512 rows, 256 on a CPU; None where there is no
        memory for them, or no such numbers.
    """
    backend = backend_of(device)
    size, dtype = (256, torch.float32) if backend.is_host else (512, torch.float64)
    times = 1.0 if backend.is_host else 0.25
    try:
        seconds = _product_seconds(int(times * size), dtype, device)
        while seconds < _REFERENCE_SECONDS and times < 4 and not backend.is_host:
            times *= 2
            seconds = _product_seconds(int(times * size), dtype, device)
    except (RuntimeError, TypeError):
        return None
    return seconds / times**3


def _product_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The median of a few products of two square matrices."""
    backend = backend_of(device)
    ones = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.empty_like(ones)
    mark, found = backend.marker(device), []
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.mm(ones, ones, out=product)  # warms up
        for _ in range(_REFERENCE_REPEATS):
            if not backend.is_host:
                # The device is busy while the host launches what is timed.
                torch.mm(ones, ones, out=product)
            began = mark()
            torch.mm(ones, ones, out=product)
            ended = mark()
            backend.wait_for(ended)
            found.append(backend.seconds_between(began, ended))
    return statistics.median(found)


# Compute the measured terms of a step, in the form of a predicted step.
#
# A predicted step is ``v * virtual_node + fixed + sync + update`` seconds, for v virtual nodes. The
# terms measured here add up to the measured step in the same way, so they can correct a prediction.


def step_terms(steps: Sequence[StepTimes]) -> MeasuredTerms | None:
    """Medians over steps of each term in seconds, with 95 % intervals; None without steps.

    The time of one more virtual node is, in each step, the mean over all but the first: from the
    end of one pass to the end of the next. The extra time of the first virtual node (cold caches)
    is fixed cost. The fixed cost is the rest of the median step, so that the terms add up to it.
    """
    if not steps:
        return None
    step = _term([entry.ended for entry in steps])
    sync = _term([entry.sync_seconds for entry in steps])
    update = _term([entry.update_seconds for entry in steps])
    if steps[0].stages or any(len(entry.passes) < 2 for entry in steps):
        return MeasuredTerms(num_steps=len(steps), step=step, sync=sync, update=update)
    number = len(steps[0].passes)
    # One more virtual node: from the end of a pass to the end of the next.
    each = [(e.passes[-1][1] - e.passes[0][1]) / (len(e.passes) - 1) for e in steps]
    node, load = _term(each), _term([statistics.mean(e.gap_seconds) for e in steps])
    left = [e.ended - number * node.seconds - e.sync_seconds - e.update_seconds for e in steps]
    others = number * node.seconds + sync.seconds + update.seconds
    return MeasuredTerms(
        num_steps=len(steps),
        step=step,
        sync=sync,
        update=update,
        virtual_node=node,
        load=load,
        fixed=MeasuredTerm(
            seconds=max(0.0, step.seconds - others), interval_seconds=half_width(left)
        ),
    )


def stage_runs(steps: Sequence[StepTimes]) -> tuple[StageRun, ...]:
    """The seconds of each stage's forward and backward passes, for one microbatch each.

    Halves of a backward pass are added up.
    """
    runs = []
    for number in sorted({entry.stage for step in steps for entry in step.stages}):
        forward, backward = [], []
        for step in steps:
            ahead = [p.seconds for p in step.stages if p.stage == number and not p.is_backward]
            back = [p.seconds for p in step.stages if p.stage == number and p.is_backward]
            if ahead and back:
                forward.append(sum(ahead) / len(ahead))
                backward.append(sum(back) / len(ahead))
        if forward:
            runs.append(StageRun(stage=number, forward=_term(forward), backward=_term(backward)))
    return tuple(runs)


def _term(values: Sequence[float]) -> MeasuredTerm:
    return MeasuredTerm(seconds=statistics.median(values), interval_seconds=half_width(values))


WARMUP_STEPS = 3
MAX_STEPS_KEPT = 20_000
_HARVESTED_AT_ONCE = 16  # steps of a device: reading their marks one by one takes longer


class Timings(NamedTuple):
    """Medians over full steps after the warm-up, as a ``DeviceRun`` names them.

    ``compute_seconds`` lasts from the step's begin to the end of this worker's last pass. From
    then ``sync_seconds`` pass until gradients are the mean over all workers. From then
    ``update_seconds`` pass until the script asks for the next batch. None: nothing was measured.
    """

    pass_seconds: float | None
    compute_seconds: float | None
    sync_seconds: float | None
    update_seconds: float | None
    step_seconds: float | None
    step_seconds_spread: float | None
    terms: MeasuredTerms | None
    stages: tuple[StageRun, ...]


@dataclass(slots=True)
class _StepMarks:
    is_full: bool
    began: Mark
    passes: list[tuple[Mark, Mark]]
    stages: list[tuple[int, bool, Mark, Mark]]
    computed: Mark | None = None
    synchronised: Mark | None = None
    ended: Mark | None = None


class StepClock:
    """Mark the parts of each step, and reduce the marks to medians.

    The script's thread marks; any thread may ask for what has been measured so far.

    Attributes:
        mark: Marks a moment, such as the start of a pass, for ``end_pass``.
        asked: When the script asked for a batch, whose step began then; None after it has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self.mark = self._backend.marker(device)
        self._open: _StepMarks | None = None
        self.asked: Mark | None = None
        self._first: Mark | None = None
        self._pending: deque[_StepMarks] = deque()
        self._times: deque[StepTimes] = deque(maxlen=MAX_STEPS_KEPT)
        self._harvesting = threading.Lock()
        self.num_steps = 0
        self.num_samples = 0
        self._samples_before = 0

    def begin_step(self, *, is_full: bool) -> None:
        """Mark that the step's first pass is about to start; ``is_full`` says if it is measured."""
        self.end_step()
        # From when the script asked for the batch, so that loading counts as the step's.
        asked, self.asked = self.asked, None
        began = self.mark() if asked is None else asked
        self._open = _StepMarks(is_full=is_full, began=began, passes=[], stages=[])
        self.num_steps += 1
        self._samples_before = self.num_samples

    def undo_step(self) -> None:
        """Drop the step that was not completed; it will be begun again."""
        if self._open is not None:
            self._open = None
            self.num_steps -= 1
            self.num_samples = self._samples_before

    @property
    def done(self) -> tuple[int, int]:
        """The steps, and their samples, whose gradients this worker has."""
        step = self._open
        if step is None or step.synchronised is not None:
            return self.num_steps, self.num_samples
        return self.num_steps - 1, self._samples_before

    def end_pass(self, began: Mark, *, num_samples: int, is_full: bool) -> None:
        """Mark the end of a pass over ``num_samples`` samples."""
        self.num_samples += num_samples
        if self._open is not None and is_full:
            self._open.passes.append((began, self.mark()))

    def end_stage_pass(self, stage: int, began: Mark, *, is_backward: bool) -> None:
        """Mark the end of a pipeline stage's pass, or of half a backward pass."""
        if self._open is not None:
            self._open.stages.append((stage, is_backward, began, self.mark()))

    def computed(self) -> None:
        """Mark that this worker's passes are done."""
        if self._open is not None:
            self._open.computed = self.mark()

    def synchronised(self) -> None:
        """Mark that gradients are the mean over all workers."""
        if self._open is not None:
            self._open.synchronised = self.mark()

    def end_step(self) -> Mark | None:
        """Mark the end of the step: the script asks for the next batch, or is done.

        It gives the mark; None where no step is measured.
        """
        step, self._open = self._open, None
        if step is None or step.synchronised is None or not step.is_full:
            return None
        step.ended = self.mark()
        if self._first is None:
            self._first = step.began
        self._pending.append(step)
        if self._backend.is_host:  # marks are numbers, which may wait until someone asks
            if len(self._pending) > MAX_STEPS_KEPT:
                self._pending.popleft()
        elif len(self._pending) >= _HARVESTED_AT_ONCE:
            with self._harvesting:
                self._harvest(wait=False)
        return step.ended

    def timings(self, *, wait: bool = True) -> Timings:
        """Medians so far, without the first steps.

        With ``wait`` it waits for the device; else the steps count that it has done.
        """
        times = self._ended(wait=wait)
        # Drop at most half of the steps, so that a short run keeps some.
        times = times[min(WARMUP_STEPS, len(times) // 2) :]
        steps = [entry.ended for entry in times]
        return Timings(
            pass_seconds=_median([each for entry in times for each in entry.pass_seconds]),
            compute_seconds=_median([entry.computed for entry in times]),
            sync_seconds=_median([entry.sync_seconds for entry in times]),
            update_seconds=_median([entry.update_seconds for entry in times]),
            step_seconds=_median(steps),
            step_seconds_spread=_interquartile_range(steps),
            terms=step_terms(times),
            stages=stage_runs(times),
        )

    @property
    def steps(self) -> tuple[StepTimes, ...]:
        """The newest MAX_STEPS_KEPT full steps that have ended. Waits for the device."""
        return tuple(self._ended(wait=True))

    def _ended(self, *, wait: bool) -> list[StepTimes]:
        with self._harvesting:
            self._harvest(wait=wait)
            return list(self._times)

    def _harvest(self, *, wait: bool) -> None:
        while self._pending:
            last = self._pending[0].ended
            if wait:
                self._backend.wait_for(last)
            elif not self._backend.has_passed(last):
                return
            step = self._pending.popleft()
            assert self._first is not None
            self._times.append(_times_of(step, self._first, self._backend))


def _times_of(step: _StepMarks, first: Mark, backend: DeviceBackend) -> StepTimes:
    between = backend.seconds_between

    def since(mark: Mark | None) -> float:
        return 0.0 if mark is None else between(step.began, mark)

    return StepTimes(
        asked_seconds=between(first, step.began),
        passes=tuple((since(began), since(ended)) for began, ended in step.passes),
        computed=since(step.computed),
        synchronised=since(step.synchronised),
        ended=since(step.ended),
        stages=tuple(
            StagePass(stage, is_backward, between(began, ended))
            for stage, is_backward, began, ended in step.stages
        ),
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _interquartile_range(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory of this worker in bytes: of the device, or resident memory on a CPU."""
    return backend_of(device).peak_bytes(device)
