"""What a pipeline's passes cost beside their layers, from the steps of rehearsed pipelines.

The step of each is replayed (planning/schedules/replay.py) with the passes that it measured itself,
so that a machine that was slower for a while changes nothing. What the step took longer lies
between its passes: messages are written and read there, by the devices that compute.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..planning.costs.comm import Wire, collective_seconds
from ..planning.costs.compute import busy_ratio
from ..planning.costs.pipeline import num_in_flight
from ..planning.schedules.replay import StepStage, flush_step_seconds
from ..schema.profile import LayerGraph, Links, PipelineCosts, Profile

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
        made = {node.id: node.activation_bytes for node in nodes}
        inputs = dict.fromkeys(made, 0)
        for source, target in self.graph.edges:
            inputs[target] += made[source]
        aside = max(
            (
                node.workspace_bytes + made[node.id] + inputs[node.id]
                for node in nodes
                if node.workspace_bytes is not None
            ),
            default=0,
        )
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

    Of each trial of two stages it is what makes the replay of a step as long as the step, at the
    lower quartile of its steps: other work makes steps longer and never shorter. Of all trials the
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
        index: _quartile([between(trial, step) for step in made])
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


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]
