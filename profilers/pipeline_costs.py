"""Train a model's own pipelines on two local devices, to measure their costs beyond layers.

Each is trained by the runtime's ``PipelineEngine`` in two processes, as a launch trains it, over
the transport that a launch uses. All take turns over several rounds, so that a drift of the machine
meets all of them. The step of each is replayed (planning/schedules/replay.py) with the passes that
it measured itself, so that a machine that was slower for a while changes nothing. What the step
took longer lies between its passes: messages are written and read there, by the devices that
compute.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ..devices.backend import DeviceRequest
from ..planning.costs.comm import Wire, collective_seconds
from ..planning.costs.compute import busy_ratio
from ..planning.costs.corrected_layers import RanStage, with_stages
from ..planning.costs.memory import workspaces
from ..planning.costs.pipeline import num_in_flight
from ..planning.schedules.replay import StepStage, flush_step_seconds
from ..runtime.measurements import StepTimes, stage_runs
from ..schema.errors import HetflowError
from ..schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot
from ..schema.profile import LayerGraph, Links, PipelineCosts, Profile
from ..schema.schedule import schedule_in_order
from .busy import Progress
from .links import said, too_few_devices
from .process import ChildDied
from .several_devices import Crew
from .targets import Target
from .timing import RepeatTiming

Passes = tuple[float, float]
"""Seconds of a forward and of a backward pass of a stage."""


class TimedStep(NamedTuple):
    """A step of a trial: its seconds, and [stages] the passes of a microbatch in it."""

    seconds: float
    passes: Sequence[Passes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A pipeline on two devices to rehearse: the first stage holds ``cut`` layers.

    Two stages, or with ``num_replicas`` 2 one stage of all layers on both devices.
    """

    cut: int
    schedule: str
    num_microbatches: int
    recompute: bool = False
    num_replicas: int = 1


class Ring(Wire):
    """Of an all-reduce: seconds of a message beside its bytes, and the rate of its links."""

    def slowed_to(self, seconds: float, num_bytes: int) -> "Ring":
        """The ring whose all-reduce of so many bytes between two takes ``seconds``.

        At the end of a step gradients are copied into a buffer and back, caches are cold, and
        workers wait for each other. All-reduces of other sizes are taken to last as much longer.
        """
        alone = collective_seconds("all-reduce", num_bytes, 2, self)
        slower = seconds / alone
        return Ring(self.latency_seconds * slower, self.bytes_per_second / slower)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """What is known of layers, links and steps before pipelines are rehearsed.

    Attributes:
        graph: Layers at the microbatch size of the trials, in running order.
        links: The link between the two devices.
        update_seconds: One update of the whole model.
        scale: Of layer times, where both devices are at work, to those of one alone.
        ring: Of the all-reduces that were measured by themselves, where they were.
        reduce_seconds: Of the whole model's gradients between two replicas, at a step's end.
        update_workspace_bytes: What an update of the whole model takes for a while.
    """

    graph: LayerGraph
    links: Links
    update_seconds: float
    scale: float = 1.0
    ring: Ring | None = None
    reduce_seconds: float = 0.0
    update_workspace_bytes: int = 0

    @classmethod
    def of(cls, profile: Profile) -> "KnownCosts":
        """What a profile with layers and links says of two devices that both work."""
        graph, links, sync, ring = profile.layers, profile.links, profile.sync, None
        assert graph is not None
        assert links is not None
        if sync is not None and sync.latency_seconds is not None and sync.bytes_per_second:
            ring = Ring(sync.latency_seconds, sync.bytes_per_second)
        scale, busy = 1.0, profile.busy
        if busy is not None:
            scale = busy_ratio(profile.batch_curve, busy.batch_curve, graph.microbatch_size)
        return cls(
            graph=graph,
            links=links,
            update_seconds=(busy or profile).update_seconds,
            scale=scale,
            ring=ring,
            update_workspace_bytes=profile.update_workspace_bytes or 0,
        )

    @property
    def weight_bytes(self) -> int:
        """Of all layers; as many bytes of gradients."""
        return sum(node.weight_bytes for node in self.graph.nodes)

    def crossing_bytes(self, cut: int) -> int:
        """What the first layers make and later ones take, for one microbatch."""
        position = {node.id: index for index, node in enumerate(self.graph.nodes)}
        sources = {
            source
            for source, target in self.graph.edges
            if position[source] < cut <= position[target]
        }
        return sum(node.activation_bytes for node in self.graph.nodes if node.id in sources)

    def passing_bytes(self, trial: Trial) -> list[int]:
        """[stages] what a step of a trial takes for a while and leaves free: the planner's terms.

        What passes keep for the backward pass and a stage's inputs, of all microbatches in flight;
        the dearest layer's workspace with the gradients of its output and inputs; the update's.
        """
        nodes = self.graph.nodes
        aside = max(workspaces(self.graph).values(), default=0)
        found = []
        parts = [part for part in (nodes[: trial.cut], nodes[trial.cut :]) if part]
        for number, part in enumerate(parts):
            workers = trial.num_replicas * (len(parts) - number)
            in_flight = num_in_flight(
                trial.schedule, workers, trial.num_replicas, trial.num_microbatches
            )
            kept = sum(
                node.activation_bytes if node.stashed_bytes is None else node.stashed_bytes
                for node in part
            )
            entering = self.crossing_bytes(trial.cut) if number else 0
            stashes = 1 if trial.recompute else in_flight
            passing = stashes * kept + in_flight * entering
            found.append(passing + aside + self.update_workspace_bytes)
        return found

    def step_seconds(
        self, trial: Trial, costs: PipelineCosts, took: Sequence[Passes] | None = None
    ) -> float:
        """The step of a trial as the planner predicts it.

        Args:
            trial: The pipeline.
            costs: What its passes, messages and steps cost besides.
            took: [stages] its passes as they were timed, in place of those of the layers.
        """
        nodes = self.graph.nodes
        total_weight = max(self.weight_bytes, 1)
        sent = self.crossing_bytes(trial.cut) / self.links.bytes_per_second
        timed = costs.pass_seconds if costs.lone_pass_seconds is None else costs.lone_pass_seconds
        own = costs.pass_seconds if trial.num_replicas == 1 else timed
        stages = []
        for number, part in enumerate(filter(None, (nodes[: trial.cut], nodes[trial.cut :]))):
            forward = self.scale * sum(node.forward_seconds for node in part)
            backward = self.scale * sum(node.backward_seconds for node in part)
            if took is not None:
                forward, backward = (seconds - timed for seconds in took[number])
            weight = sum(node.weight_bytes for node in part)
            stages.append(
                StepStage(
                    num_replicas=trial.num_replicas,
                    forward_seconds=forward + own,
                    backward_seconds=backward + own + (forward if trial.recompute else 0.0),
                    transfer_seconds=sent + costs.message_seconds,
                    reduce_seconds=self.reduce_seconds * weight / total_weight,
                    update_seconds=self.update_seconds * weight / total_weight,
                )
            )
        replayed = flush_step_seconds(trial.schedule, tuple(stages), trial.num_microbatches)
        return replayed + costs.fixed_seconds


def with_passes(
    profiled: KnownCosts,
    costs: PipelineCosts,
    trials: Sequence[Trial],
    steps: Sequence[Sequence[TimedStep]],
) -> PipelineCosts:
    """The costs with what passes take between them, which messages cause.

    Of each trial of two stages it is what makes the replay of a step as long as the step. The lower
    quartile of its steps counts: other work makes steps longer and never shorter. Of all trials the
    median counts. ``step_error`` is the median over all trials of how far the planner's prediction
    by layers is from the step. It uses the time between passes that the other trials have.

    Args:
        profiled: Layers and links.
        costs: Of messages and of a step; ``lone_pass_seconds`` lies within timed passes.
        trials: Some of two stages.
        steps: [trials][steps] as measured.
    """
    lone = costs.pass_seconds if costs.lone_pass_seconds is None else costs.lone_pass_seconds

    def with_more(more: float) -> PipelineCosts:
        return replace(costs, pass_seconds=lone + more, lone_pass_seconds=lone)

    def between(trial: Trial, step: TimedStep) -> float:
        """Of each pass, from the slope of the replay at a good guess."""
        without = profiled.step_seconds(trial, with_more(0.0), step.passes)
        guess = (step.seconds - without) / (2 * trial.num_microbatches)
        if guess <= 0:
            return 0.0
        longer = profiled.step_seconds(trial, with_more(guess), step.passes) - without
        return guess * (step.seconds - without) / longer

    found = {
        index: sorted(between(trial, step) for step in made)[len(made) // 4]
        for index, (trial, made) in enumerate(zip(trials, steps, strict=True))
        if trial.num_replicas == 1
    }
    errors = []
    for index, (trial, made) in enumerate(zip(trials, steps, strict=True)):
        measured = statistics.median(step.seconds for step in made)
        others = [more for other, more in found.items() if other != index]
        predicted = profiled.step_seconds(trial, with_more(statistics.median(others)))
        errors.append(abs(predicted - measured) / measured)
    return replace(
        with_more(statistics.median(found.values())), step_error=statistics.median(errors)
    )


# Which pipelines a profile rehearses, and the launch configs of them.


def trials_of(graph: LayerGraph) -> tuple[Trial, ...]:
    """Pipelines on two devices from which the costs can be told apart, the most useful first.

    One stage on both devices sends no messages, so it tells what passes cost from what messages
    do; and it tells what replicas wait for their all-reduce. The others have two stages, cut near
    the middle of the layers' time, and where about a quarter is before the cut. GPipe waits for
    one message in filling and one in draining, however many microbatches there are; equal 1F1B
    stages wait for one in every round.

    Args:
        graph: Layers in running order; fewer than two, or edges that go backwards, give none.
    """
    position = {node.id: index for index, node in enumerate(graph.nodes)}
    goes_back = any(position[source] >= position[target] for source, target in graph.edges)
    if len(graph.nodes) < 2 or goes_back:
        return ()
    # GPipe and 1F1B
    filling, alternating = schedule_in_order("forward-first"), schedule_in_order("alternating")
    middle, uneven, whole = _cut(graph, 1 / 2), _cut(graph, 1 / 4), len(graph.nodes)
    found = (
        Trial(cut=middle, schedule=alternating, num_microbatches=2),
        Trial(cut=middle, schedule=alternating, num_microbatches=8),
        Trial(cut=uneven, schedule=filling, num_microbatches=2),
        Trial(cut=middle, schedule=filling, num_microbatches=8),
        Trial(cut=whole, schedule=alternating, num_microbatches=8, num_replicas=2),
        Trial(cut=whole, schedule=alternating, num_microbatches=2, num_replicas=2),
        Trial(cut=uneven, schedule=alternating, num_microbatches=8),
        Trial(cut=middle, schedule=filling, num_microbatches=2),
        Trial(cut=uneven, schedule=filling, num_microbatches=8),
        Trial(cut=uneven, schedule=alternating, num_microbatches=2),
    )
    return tuple(dict.fromkeys(found))


def _cut(graph: LayerGraph, share: float) -> int:
    """How many layers take about this share of the time; at least one stays on either side."""
    sums = list(accumulate(node.forward_seconds + node.backward_seconds for node in graph.nodes))
    cuts: Sequence[int] = range(1, len(sums))
    return min(cuts, key=lambda cut: (abs(sums[cut - 1] - share * sums[-1]), cut))


def launch_config(graph: LayerGraph, trial: Trial, *, device_type: str) -> LaunchConfig:
    """The launch config of a trial.

    Rank 0 holds the layers before the cut and rank 1 the others, or both hold all.
    """
    names = tuple(node.id for node in graph.nodes)
    stages: tuple[PipelineStage, ...] = (
        PipelineStage(layers=names[: trial.cut], ranks=(0,)),
        PipelineStage(layers=names[trial.cut :], ranks=(1,)),
    )
    if trial.num_replicas > 1:
        stages = (PipelineStage(layers=names, ranks=tuple(range(trial.num_replicas))),)
    nodes = tuple(
        VirtualNode(index=index, batch_size=graph.microbatch_size)
        for index in range(trial.num_microbatches)
    )
    return LaunchConfig(
        model="model",
        global_batch_size=graph.microbatch_size * trial.num_microbatches,
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=device_type,
                virtual_nodes=nodes[rank % trial.num_replicas :: trial.num_replicas],
            )
            for rank in range(2)
        ),
        pipeline=PipelineWork(
            schedule=trial.schedule,
            num_microbatches=trial.num_microbatches,
            recompute=trial.recompute,
            stages=stages,
            trace=graph.trace,
        ),
    )


_ROUNDS = 2
_WARM_UP_STEPS = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 20  # of a trial in a round
_FEWEST_TRIALS = 6  # of which two have replicas
_NOTHING = PipelineCosts(pass_seconds=0.0, message_seconds=0.0, fixed_seconds=0.0)

_Step = tuple[StepTimes, ...]
"""[workers] of one step."""


def measure_pipeline(
    target: Target,
    request: DeviceRequest,
    profile: Profile,
    *,
    optimizer: str,
    budget_seconds: float,
    progress: Progress = lambda text, left: None,
) -> tuple[Profile, dict[str, Any]]:
    """Rehearse pipelines on two devices, calibrate layers to their stages and fit their costs.

    Args:
        target: What to train.
        request: The device type, a real one. Where its memory does not hold the whole model, one
            stage on both devices is left out.
        profile: With layers, links and update.
        optimizer: For targets that bring none.
        budget_seconds: For the steps, about; at least six pipelines make a few.
        progress: Told what is being measured now.

    Returns:
        The profile with its pipeline's costs and with layers that take in stages what stages took,
        as it was where they could not be measured; and their provenance: how, or why not.
    """
    alone = KnownCosts.of(profile)
    why_not = too_few_devices(request, 2) or _obstacle(alone)
    if why_not:
        return profile, {"skipped": why_not}
    trials = affordable(alone, budget_seconds)
    again = replace(trials[1], recompute=True)

    def rehearsed(trials: Sequence[Trial]) -> tuple[list[list[_Step]], int | None]:
        return _rehearse(
            target, request, alone, (*trials, again), optimizer, budget_seconds, progress
        )

    no_replicas: dict[str, Any] = {}
    try:
        try:
            steps, fragmentation_bytes = rehearsed(trials)
        except MemoryError:
            # Two halves may fit where one device does not train the whole model.
            trials = tuple(trial for trial in trials if trial.num_replicas == 1)
            steps, fragmentation_bytes = rehearsed(trials)
            no_replicas = {"replicas": {"skipped": "out of memory: one stage of all layers"}}
    except (HetflowError, ChildDied, MemoryError) as error:
        return profile, {"skipped": f"the pipelines failed: {said(error)}"}
    timings = [RepeatTiming.of([_slowest(step) for step in made]) for made in steps]
    reduction = _reduction(trials, steps)
    took = [[*_passes(made).values()] for made in steps]
    profile = calibrated(profile, trials, took)
    profiled, costs = KnownCosts.of(profile), profile.pipeline
    assert costs is not None
    if reduction is not None:
        profiled = replace(profiled, reduce_seconds=reduction.median_seconds)
    timed = [
        [TimedStep(_slowest(step), [*_passes([step]).values()]) for step in made]
        for made in steps[:-1]
    ]
    costs = with_passes(profiled, costs, trials, timed)
    costs = replace(_with_ring(costs, profiled), fragmentation_bytes=fragmentation_bytes)
    told = [
        {
            **asdict(trial),
            **asdict(timing),
            "predicted": profiled.step_seconds(trial, costs),
            "stages": passes,
        }
        for trial, timing, passes in zip((*trials, again), timings, took, strict=True)
    ]
    return replace(profile, pipeline=costs), {
        "method": "steps on two devices in the runtime's own loop, against their replay",
        "step_error": "median over trials, each with the others' time between passes",
        "layer_scale": profiled.scale,
        "trials": told[:-1],
        "recompute": told[-1],
        "reduction": None if reduction is None else asdict(reduction),
        **no_replicas,
    }


def calibrated(
    profile: Profile, trials: Sequence[Trial], took: Sequence[Sequence[Passes]]
) -> Profile:
    """The profile with layers that take in stages what those of two-stage pipelines took.

    Layers alone do not add up to a stage: a shorter stage fits the caches better, and the loss is
    in the last one. Within a pass are also loading and the runtime's part of a virtual node, half
    of them in each of its two passes. Costs of messages and steps are those that were measured of
    links and of splits.
    """
    known, among = KnownCosts.of(profile), profile.busy or profile
    size, names = known.graph.microbatch_size, [node.id for node in known.graph.nodes]
    near = min(among.batch_curve, key=lambda point: abs(point.batch_size - size))
    beside = (near.step_seconds - near.pass_seconds) / 2
    costs = PipelineCosts(
        pass_seconds=beside,
        lone_pass_seconds=beside,
        message_seconds=known.links.latency_seconds,
        fixed_seconds=among.fixed_seconds or 0.0,
    )
    ran = [
        RanStage(
            graph=known.graph,
            layers=frozenset(names[trial.cut :] if stage else names[: trial.cut]),
            forward_seconds=forward,
            backward_seconds=backward,
            slowed=known.scale,
        )
        for trial, stages in zip(trials, took, strict=False)
        if trial.num_replicas == 1
        for stage, (forward, backward) in enumerate(stages)
    ]
    return with_stages(replace(profile, pipeline=costs), ran)


def _passes(steps: Sequence[_Step]) -> dict[int, Passes]:
    """By stage, the seconds of a forward and of a backward pass of a microbatch."""
    runs = stage_runs([worker for step in steps for worker in step])
    return {run.stage: (run.forward.seconds, run.backward.seconds) for run in runs}


def _reduction(trials: Sequence[Trial], steps: Sequence[Sequence[_Step]]) -> RepeatTiming | None:
    """Seconds that a replica waits for gradients at a step's end, without a step's small sums."""
    # A worker's own wait, stragglers included: the passes beside it are a worker's own too.
    waits: list[float] = []
    sums: list[float] = []
    for trial, made in zip(trials, steps, strict=False):
        of_step = [[worker.sync_seconds for worker in step] for step in made]
        if trial.num_replicas > 1:
            waits += [statistics.fmean(step) for step in of_step]
        else:  # the stage that ends last waits for nobody
            sums += [min(step) for step in of_step]
    if not waits:
        return None
    alike = statistics.median(sums)
    return RepeatTiming.of([max(0.0, seconds - alike) for seconds in waits])


def _with_ring(costs: PipelineCosts, profiled: KnownCosts) -> PipelineCosts:
    """The ring whose all-reduce of the model takes as long as replicas waited."""
    seconds, num_bytes = profiled.reduce_seconds, profiled.weight_bytes
    if not seconds or not num_bytes:
        return costs
    ring = profiled.ring or Ring(0.0, num_bytes / seconds)
    ring = ring.slowed_to(seconds, num_bytes)
    return replace(
        costs,
        reduce_latency_seconds=ring.latency_seconds,
        reduce_bytes_per_second=ring.bytes_per_second,
    )


def _slowest(step: _Step) -> float:
    """The time of each step: that of its slower worker."""
    return max(worker.ended for worker in step)


def affordable(profiled: KnownCosts, budget_seconds: float) -> tuple[Trial, ...]:
    """The trials whose fewest steps fit the budget together; at least six."""
    trials = trials_of(profiled.graph)
    left, number = budget_seconds, 0
    for trial in trials:
        left -= _ROUNDS * (_WARM_UP_STEPS + _FEWEST_STEPS) * profiled.step_seconds(trial, _NOTHING)
        if left < 0 and number >= _FEWEST_TRIALS:
            break
        number += 1
    return trials[:number]


def _obstacle(profiled: KnownCosts) -> str | None:
    trace = profiled.graph.trace
    if trace is not None and trace.obstacle is not None:
        return f"layers {trace.obstacle}"
    if not trials_of(profiled.graph):
        return f"{len(profiled.graph.nodes)} layers cannot be cut"
    return None


def _rehearse(
    target: Target,
    request: DeviceRequest,
    profiled: KnownCosts,
    trials: Sequence[Trial],
    optimizer: str,
    budget_seconds: float,
    progress: Progress,
) -> tuple[list[list[_Step]], int | None]:
    """Train all trials in turns.

    Returns:
        [trials][steps] the times of both workers; and the most that one's allocator held free after
        a trial's last step, beyond what a step takes for a while, None where it is not known.
    """
    samples: list[list[_Step]] = [[] for _ in trials]
    fragments: list[int] = []
    expected = [profiled.step_seconds(trial, _NOTHING) for trial in trials]
    share = budget_seconds / (_ROUNDS * len(trials))
    with Crew(target, request, 2, optimizer) as crew:
        # In rounds over all trials, so that a machine that becomes slower is so for all alike.
        for number in range(_ROUNDS):
            for index, trial in enumerate(trials):
                which = f"pipeline {index + 1} of {len(trials)}, round {number + 1} of {_ROUNDS}"
                progress(f"{target.model} on {request.device_type}: {which}", None)
                config = launch_config(profiled.graph, trial, device_type=request.device_type)
                num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, int(share / expected[index])))
                total = _WARM_UP_STEPS + num_steps
                if number < _ROUNDS - 1:
                    workers = crew.together(config, num_steps=total)
                else:
                    workers, held = crew.together_with_held(config, num_steps=total)
                    fragments += _beyond_passes(profiled.passing_bytes(trial), held)
                samples[index] += list(zip(*workers, strict=True))[_WARM_UP_STEPS:]
    return samples, max(fragments, default=None)


def _beyond_passes(passing: Sequence[int], held: Sequence[int | None]) -> list[int]:
    """[workers] what each held free beyond its stage's passes, where that is known."""
    # [stages], of which one is on all workers.
    of_worker = passing if len(passing) == len(held) else [*passing] * len(held)
    return [
        max(0, free - own) for own, free in zip(of_worker, held, strict=True) if free is not None
    ]
