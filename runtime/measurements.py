"""How long each part of a step took, without slowing it: perf_counter, or events read late."""

import statistics
from collections import deque
from dataclasses import dataclass

import torch

from ..devices.backend import DeviceBackend, Mark, backend_of
from ..schema.run import StageRun, StepTerms
from .step_times import StagePass, StepTimes
from .terms import stage_runs, step_terms

WARMUP_STEPS = 3
MAX_STEPS_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Timings:
    """Medians over full steps after the warm-up, in seconds; None where nothing was measured.

    ``spread`` is the interquartile range of the step time. ``terms`` and ``stages`` are what a
    prediction is made of (runtime/terms.py).
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
    """Mark the parts of each step and reduce them to medians."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend_of(device)
        self._open: _StepMarks | None = None
        self._asked: Mark | None = None
        self._first: Mark | None = None
        self._pending: deque[_StepMarks] = deque()
        self._times: deque[StepTimes] = deque(maxlen=MAX_STEPS_KEPT)
        self.num_steps = 0
        self.num_samples = 0
        self._samples_before = 0

    def ask(self) -> None:
        """The script asks for a batch: the step over it begins here."""
        self._asked = self._mark()

    def begin_step(self, *, is_full: bool) -> None:
        """The step's first pass is about to start."""
        self.end_step()
        asked, self._asked = self._asked, None
        began = self._mark() if asked is None else asked
        self._open = _StepMarks(is_full=is_full, began=began, passes=[], stages=[])
        self.num_steps += 1
        self._samples_before = self.num_samples

    def undo_step(self) -> None:
        """The step was not completed, and will be begun again."""
        if self._open is not None:
            self._open = None
            self.num_steps -= 1
            self.num_samples = self._samples_before

    def begin_pass(self) -> Mark:
        """A pass starts; hand the answer to ``end_pass``."""
        return self._mark()

    def end_pass(self, began: Mark, *, num_samples: int, is_full: bool) -> None:
        """A pass has ended."""
        self.num_samples += num_samples
        if self._open is not None and is_full:
            self._open.passes.append((began, self._mark()))

    def end_stage_pass(self, stage: int, began: Mark, *, is_backward: bool) -> None:
        """A pass of a pipeline's stage, or half a backward pass, has ended."""
        if self._open is not None:
            self._open.stages.append((stage, is_backward, began, self._mark()))

    def computed(self) -> None:
        """This worker's passes are done."""
        if self._open is not None:
            self._open.computed = self._mark()

    def synchronised(self) -> None:
        """Gradients are the mean over all workers."""
        if self._open is not None:
            self._open.synchronised = self._mark()

    def end_step(self) -> None:
        """The script asks for the next batch, or is done."""
        step, self._open = self._open, None
        if step is None or step.synchronised is None or not step.is_full:
            return
        step.ended = self._mark()
        self._pending.append(step)
        self._harvest(wait=False)

    def timings(self) -> Timings:
        """Medians so far, the first steps dropped. Waits for the device."""
        self._harvest(wait=True)
        times = list(self._times)
        # A short run keeps at least half of its steps.
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
        """Every full step that has ended, the newest MAX_STEPS_KEPT. Waits for the device."""
        self._harvest(wait=True)
        return tuple(self._times)

    def _mark(self) -> Mark:
        return self._backend.mark(self._device)

    def _harvest(self, *, wait: bool) -> None:
        while self._pending:
            last = self._pending[0].ended
            if wait:
                self._backend.wait_for(last)
            elif not self._backend.has_passed(last):
                return
            step = self._pending.popleft()
            if self._first is None:
                self._first = step.began
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
    """Most memory this worker held: of the device, or resident of the process on a host's own."""
    return backend_of(device).peak_bytes(device)
