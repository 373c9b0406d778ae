"""Measure each part of a step without slowing it: by perf_counter, or by events read later."""

import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..devices.backend import DeviceBackend, Mark, backend_of
from ..schema.run import StageRun, StepTerms
from .step_times import StagePass, StepTimes
from .terms import stage_runs, step_terms

WARMUP_STEPS = 3
MAX_STEPS_KEPT = 20_000
_HARVESTED_AT_ONCE = 16  # steps of a device: reading their marks one by one takes longer


@dataclass(frozen=True, slots=True)
class Timings:
    """Medians over full steps after the warm-up, in seconds; None where nothing was measured.

    Attributes:
        passes: One pass: forward and backward of a virtual node.
        compute: From the step's begin to the end of this worker's last pass.
        sync: From then until gradients are the mean over all workers.
        update: From then until the script asks for the next batch.
        step: The whole step.
        spread: Interquartile range of the step time.
        terms: The terms of a predicted step, as measured (runtime/terms.py).
        stages: The passes of each pipeline stage, as measured.
    """

    passes: float | None
    compute: float | None
    sync: float | None
    update: float | None
    step: float | None
    spread: float | None
    terms: StepTerms | None = None
    stages: tuple[StageRun, ...] = ()


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
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._mark: Callable[[], Mark] = partial(self._backend.mark, device)
        self._open: _StepMarks | None = None
        self._asked: Mark | None = None
        self._first: Mark | None = None
        self._pending: deque[_StepMarks] = deque()
        self._times: deque[StepTimes] = deque(maxlen=MAX_STEPS_KEPT)
        self._harvesting = threading.Lock()
        self.num_steps = 0
        self.num_samples = 0
        self._samples_before = 0

    def ask(self) -> None:
        """The script asks for a batch: the step with this batch begins now."""
        self._asked = self._mark()

    def begin_step(self, *, is_full: bool) -> None:
        """Mark that the step's first pass is about to start; ``is_full`` says if it is measured."""
        self.end_step()
        asked, self._asked = self._asked, None
        began = self._mark() if asked is None else asked
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

    def begin_pass(self) -> Mark:
        """Mark the start of a pass; give the mark to ``end_pass``."""
        return self._mark()

    def end_pass(self, began: Mark, *, num_samples: int, is_full: bool) -> None:
        """Mark the end of a pass over ``num_samples`` samples."""
        self.num_samples += num_samples
        if self._open is not None and is_full:
            self._open.passes.append((began, self._mark()))

    def end_stage_pass(self, stage: int, began: Mark, *, is_backward: bool) -> None:
        """Mark the end of a pipeline stage's pass, or of half a backward pass."""
        if self._open is not None:
            self._open.stages.append((stage, is_backward, began, self._mark()))

    def computed(self) -> None:
        """Mark that this worker's passes are done."""
        if self._open is not None:
            self._open.computed = self._mark()

    def synchronised(self) -> None:
        """Mark that gradients are the mean over all workers."""
        if self._open is not None:
            self._open.synchronised = self._mark()

    def end_step(self) -> None:
        """Mark the end of the step: the script asks for the next batch, or is done."""
        step, self._open = self._open, None
        if step is None or step.synchronised is None or not step.is_full:
            return
        step.ended = self._mark()
        if self._first is None:
            self._first = step.began
        self._pending.append(step)
        if self._backend.is_host:  # marks are numbers, which may wait until someone asks
            if len(self._pending) > MAX_STEPS_KEPT:
                self._pending.popleft()
        elif len(self._pending) >= _HARVESTED_AT_ONCE:
            with self._harvesting:
                self._harvest(wait=False)

    def timings(self, *, wait: bool = True) -> Timings:
        """Medians so far, without the first steps.

        Args:
            wait: Whether to wait for the device; else the steps count that it has done.
        """
        times = self._ended(wait=wait)
        # Drop at most half of the steps, so that a short run keeps some.
        times = times[min(WARMUP_STEPS, len(times) // 2) :]
        if not times:
            return Timings(None, None, None, None, None, None)
        steps = [entry.ended for entry in times]
        return Timings(
            passes=_median([seconds for entry in times for seconds in entry.pass_seconds]),
            compute=_median([entry.computed for entry in times]),
            sync=_median([entry.sync_seconds for entry in times]),
            update=_median([entry.update_seconds for entry in times]),
            step=_median(steps),
            spread=_interquartile_range(steps),
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
