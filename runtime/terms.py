"""Compute the measured terms of a step, in the form of a predicted step.

A predicted step is ``v * virtual_node + fixed + sync + update`` seconds, for v virtual nodes. The
terms measured here add up to the measured step in the same way, so they can correct a prediction.
"""

import statistics
from collections.abc import Sequence

from ..schema.run import MeasuredTerm, StageRun, StepTerms
from .median import half_width
from .step_times import StepTimes


def step_terms(steps: Sequence[StepTimes]) -> StepTerms | None:
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
        return StepTerms(num_steps=len(steps), step=step, sync=sync, update=update)
    node, load = _term([_one_more(entry) for entry in steps]), _term([_wait(e) for e in steps])
    number = len(steps[0].passes)
    left = [e.ended - number * node.seconds - e.sync_seconds - e.update_seconds for e in steps]
    others = number * node.seconds + sync.seconds + update.seconds
    return StepTerms(
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


def _one_more(step: StepTimes) -> float:
    """Seconds for one more virtual node: from the end of a pass to the end of the next."""
    return (step.passes[-1][1] - step.passes[0][1]) / (len(step.passes) - 1)


def _wait(step: StepTimes) -> float:
    return sum(step.gap_seconds) / len(step.gap_seconds)


def stage_runs(steps: Sequence[StepTimes]) -> tuple[StageRun, ...]:
    """The seconds of each stage's forward and backward passes, for one microbatch each.

    Halves of a backward pass are added up.
    """
    numbers = sorted({entry.stage for step in steps for entry in step.stages})
    return tuple(run for run in (_stage_run(steps, number) for number in numbers) if run)


def _stage_run(steps: Sequence[StepTimes], number: int) -> StageRun | None:
    forward, backward = [], []
    for step in steps:
        ahead = [p.seconds for p in step.stages if p.stage == number and not p.is_backward]
        back = [p.seconds for p in step.stages if p.stage == number and p.is_backward]
        if ahead and back:
            forward.append(sum(ahead) / len(ahead))
            backward.append(sum(back) / len(ahead))
    if not forward:
        return None
    return StageRun(stage=number, forward=_term(forward), backward=_term(backward))


def _term(values: Sequence[float]) -> MeasuredTerm:
    return MeasuredTerm(seconds=statistics.median(values), interval_seconds=half_width(values))
