"""Fit the costs of a pipeline's passes, messages and steps beyond its layers to measured steps.

The step of each rehearsed pipeline is replayed (planning/schedules/replay.py) with the profiled
layers and links and unknown costs, which are fitted to the measured steps. A replay is linear in
the costs as long as the same passes decide it, so the fit linearises it, solves, and goes on from
there.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planning.costs.comm import Wire, collective_seconds
from ..planning.costs.pipeline import num_in_flight
from ..planning.schedules.replay import StepStage, flush_step_seconds
from ..schema.profile import LayerGraph, Links, PipelineCosts
from .fits import least_deviations

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_ROUNDS, _HALVINGS = 30, 12
_NUDGE = 1e-4  # of a step, to tell its slope in a cost
_START = 0.1  # of the shortest step, for one cost after another


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
    """What is known of the layers and links before pipelines are rehearsed.

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

    def step_seconds(self, trial: Trial, costs: PipelineCosts) -> float:
        """The step of a trial as the planner predicts it."""
        nodes = self.graph.nodes
        total_weight = max(self.weight_bytes, 1)
        sent = self.crossing_bytes(trial.cut) / self.links.bytes_per_second
        own = costs.pass_seconds
        if trial.num_replicas > 1 and costs.lone_pass_seconds is not None:
            own = costs.lone_pass_seconds
        stages = []
        for part in filter(None, (nodes[: trial.cut], nodes[trial.cut :])):
            forward = self.scale * sum(node.forward_seconds for node in part)
            backward = self.scale * sum(node.backward_seconds for node in part)
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


def fit_costs(
    profiled: KnownCosts, trials: Sequence[Trial], seconds: Sequence[float]
) -> PipelineCosts:
    """Fit the costs to measured steps, by least absolute relative errors, none negative.

    A pass with a message beside it costs at least what one without costs.
    ``step_error`` is the median over the trials of how far each is from what the others predict
    for it (fitted without it): a fit to few steps follows its own.

    Args:
        profiled: Layers and links.
        trials: At least four pipelines that differ in schedule and microbatches. Where none has
            replicas, what passes cost without messages is None.
        seconds: The measured step of each, > 0.
    """
    import numpy as np

    shortest = min(seconds)
    number = 4 if any(trial.num_replicas > 1 for trial in trials) else 3
    # What decides a step differs with the costs, so the error has several valleys.
    starts = [np.zeros(number), *(_START * shortest * unit for unit in np.eye(number))]
    found = _fit(profiled, trials, seconds, starts)
    errors = []
    for left_out, (trial, measured) in enumerate(zip(trials, seconds, strict=True)):
        others = [index for index in range(len(trials)) if index != left_out]
        fitted = _fit(profiled, [trials[i] for i in others], [seconds[i] for i in others], [found])
        errors.append(abs(profiled.step_seconds(trial, _costs(fitted)) - measured) / measured)
    return _costs(found, statistics.median(errors))


def _costs(values: "Array", error: float | None = None) -> PipelineCosts:
    one_pass, message, fixed, *lone = values.tolist()
    return PipelineCosts(
        pass_seconds=one_pass + sum(lone),
        lone_pass_seconds=sum(lone) if lone else None,
        message_seconds=message,
        fixed_seconds=fixed,
        step_error=error,
    )


def _fit(
    profiled: KnownCosts,
    trials: Sequence[Trial],
    seconds: Sequence[float],
    starts: Sequence["Array"],
) -> "Array":
    """A pass's cost (beyond a lone one's), a message's, a step's, and a lone pass's if asked."""
    import numpy as np

    measured = np.asarray(seconds, dtype=np.float64)

    def replay(values: "Array") -> "Array":
        costs = _costs(values)
        return np.array([profiled.step_seconds(trial, costs) for trial in trials])

    def error(values: "Array") -> float:
        return float(np.abs(replay(values) / measured - 1).sum())

    found = [_descend(replay, error, measured, start) for start in starts]
    return min(found, key=error)


def _descend(
    replay: Callable[["Array"], "Array"],
    error: Callable[["Array"], float],
    measured: "Array",
    start: "Array",
) -> "Array":
    """Repeat linear fits until none gives a smaller error."""
    import numpy as np

    nudge = _NUDGE * float(measured.min())
    best, least = start, error(start)
    for _ in range(_ROUNDS):
        here = replay(best)
        slopes = np.stack(
            [(replay(best + nudge * unit) - here) / nudge for unit in np.eye(len(best))], axis=1
        )
        # The line through this point, by relative residuals; its optimum may be too far.
        target = (measured - here + slopes @ best) / measured
        towards = least_deviations(slopes / measured[:, None], target)
        for halving in range(_HALVINGS):
            candidate = best + (towards - best) / 2**halving
            reached = error(candidate)
            if reached < least * (1 - 1e-9):
                break
        else:
            return best
        best, least = candidate, reached
    return best
