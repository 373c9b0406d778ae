"""Rehearse a model's own pipelines on two local devices, to find what they cost beyond layers.

Each is trained by the runtime's ``PipelineJob`` in two processes, as a launch trains it, over the
transport that a launch uses. All take turns over several rounds, so that a drift of the machine
meets all of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..schema.errors import HetflowError
from ..schema.step_costs import PipelineCosts
from .busy import Progress
from .crew import Crew
from .devices import DeviceRequest
from .links import said, too_few_devices
from .pipeline_fit import Profiled, Trial, fit_costs
from .pipeline_trials import launch_config, trials_of
from .process import ChildDied
from .targets import Target
from .timing import Timing

_ROUNDS = 2
_WARM_UP_STEPS = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 20  # of a trial in a round
_FEWEST_TRIALS = 4
_NOTHING = PipelineCosts(pass_seconds=0.0, message_seconds=0.0, fixed_seconds=0.0)


def measure_pipeline(
    target: Target,
    request: DeviceRequest,
    profiled: Profiled,
    *,
    optimizer: str,
    budget_seconds: float,
    progress: Progress = lambda text, left: None,
) -> tuple[PipelineCosts | None, dict[str, Any]]:
    """Rehearse pipelines of two stages and fit their costs.

    Args:
        target: What to train.
        request: The device type, a real one.
        profiled: Its layers, links and update.
        optimizer: For targets that bring none.
        budget_seconds: For the steps, about; at least four pipelines make a few.
        progress: Told what is being measured now.

    Returns:
        The costs, None where they could not be measured, and their provenance: how, or why not.
    """
    why_not = too_few_devices(request, 2) or _obstacle(profiled)
    if why_not:
        return None, {"skipped": why_not}
    trials = affordable(profiled, budget_seconds)
    again = replace(trials[1], recompute=True)
    try:
        samples = _rehearse(
            target, request, profiled, (*trials, again), optimizer, budget_seconds, progress
        )
    except (HetflowError, ChildDied, MemoryError) as error:
        return None, {"skipped": f"the pipelines failed: {said(error)}"}
    timings = [Timing.of(sample) for sample in samples]
    costs = fit_costs(profiled, trials, [timing.median_seconds for timing in timings[:-1]])
    told = [
        {**asdict(trial), **asdict(timing), "predicted": profiled.step_seconds(trial, costs)}
        for trial, timing in zip((*trials, again), timings, strict=True)
    ]
    return costs, {
        "method": "steps of two stages in the runtime's own loop, against their replay",
        "step_error": "median over trials, each against a fit without it",
        "layer_scale": profiled.scale,
        "trials": told[:-1],
        "recompute": told[-1],
    }


def affordable(profiled: Profiled, budget_seconds: float) -> tuple[Trial, ...]:
    """As many trials as make their fewest steps within the budget; at least four."""
    trials = trials_of(profiled.graph)
    left, number = budget_seconds, 0
    for trial in trials:
        left -= _ROUNDS * (_WARM_UP_STEPS + _FEWEST_STEPS) * profiled.step_seconds(trial, _NOTHING)
        if left < 0 and number >= _FEWEST_TRIALS:
            break
        number += 1
    return trials[:number]


def _obstacle(profiled: Profiled) -> str | None:
    trace = profiled.graph.trace
    if trace is not None and trace.obstacle is not None:
        return f"layers {trace.obstacle}"
    if len(trials_of(profiled.graph)) < _FEWEST_TRIALS:
        return f"{len(profiled.graph.nodes)} layers cannot be cut"
    return None


def _rehearse(
    target: Target,
    request: DeviceRequest,
    profiled: Profiled,
    trials: Sequence[Trial],
    optimizer: str,
    budget_seconds: float,
    progress: Progress,
) -> list[list[float]]:
    """[trials][steps] seconds; a step takes what it takes its slower worker."""
    samples: list[list[float]] = [[] for _ in trials]
    expected = [profiled.step_seconds(trial, _NOTHING) for trial in trials]
    share = budget_seconds / (_ROUNDS * len(trials))
    with Crew(target, request, 2, optimizer) as crew:
        for number in range(_ROUNDS):
            for index, trial in enumerate(trials):
                which = f"pipeline {index + 1} of {len(trials)}, round {number + 1} of {_ROUNDS}"
                progress(f"{target.model} on {request.device_type}: {which}", None)
                config = launch_config(profiled.graph, trial, device_type=request.device_type)
                num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, int(share / expected[index])))
                workers = crew.together(config, num_steps=_WARM_UP_STEPS + num_steps)
                samples[index] += [
                    max(step.ended for step in steps)
                    for steps in list(zip(*workers, strict=True))[_WARM_UP_STEPS:]
                ]
    return samples
