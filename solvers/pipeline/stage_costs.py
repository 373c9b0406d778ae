"""The costs of stages between cuts, as arrays (planning/costs/pipeline.py holds the formulas)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...planning.costs.pipeline import (
    AllReduce,
    ReplicaBytes,
    all_reduce,
    boundary_seconds,
    largest_message_bytes,
    num_in_flight,
    overheads,
    replica_moments,
    rounds,
    slowest_of_all,
    stage_bytes,
    tied_seconds,
    updates,
    weight_versions,
)
from ...schema.pipeline import PipelineProblem
from ..effort import Effort, OutOfTimeError
from .cuts import Cuts, Floats, Mask
from .placements import Move, PlacedStage, PlacementSpace


@dataclass(frozen=True, slots=True)
class Slopes:
    """A stage's seconds per input: the larger of compute and its all-reduces.

    max(per_compute C + per_weight w, sync_per_weight w + sync_start). C is what its layers take
    and what its passes cost themselves (``StageCosts.own_seconds``).
    """

    per_compute: float
    per_weight: float
    sync_per_weight: float
    sync_start: float = 0.0


class StageCosts:
    """Stage costs of one problem with or without recomputation.

    ``compute_seconds``: [pools, cuts] of the layers before a cut; ``own_seconds``: [pools] what
    the passes of a microbatch cost a stage themselves, however many layers it has;
    ``message_seconds``: [cuts] of a message over a cut beyond its bytes, none at both ends;
    ``boundary_seconds``: [bandwidths, cuts], as they weigh in the objective.
    """

    def __init__(
        self,
        problem: PipelineProblem,
        cuts: Cuts,
        bandwidths: tuple[float, ...],
        *,
        recompute: bool,
    ) -> None:
        self.problem, self.cuts, self.recompute = problem, cuts, recompute
        self.bandwidths = bandwidths
        # Recomputation runs the forward pass twice.
        passes = 2 if recompute else 1
        self.compute_seconds = passes * cuts.forward_seconds + cuts.backward_seconds
        self.overheads = overheads(problem)
        self.reductions: tuple[AllReduce, ...] = tuple(
            all_reduce(problem, pool) for pool in problem.pools
        )
        self.own_seconds = np.array(self.overheads.stage_seconds)
        self.message_seconds = np.full(cuts.size, self.overheads.message_seconds)
        # Nothing is sent into the first cut, nor out of the last.
        self.message_seconds[[0, -1]] = 0.0
        weight = boundary_weight(problem)
        self.boundary_seconds = np.array(
            [
                weight * 2 * cuts.crossing_bytes / bandwidth + weight * 2 * self.message_seconds
                for bandwidth in bandwidths
            ]
        )
        self.total_weight = float(cuts.weight_bytes[-1])
        self.largest_message_bytes = largest_message_bytes(problem)
        self.is_line = self._is_line()

    def slopes(self, pool: int, num_replicas: int, span: int) -> Slopes:
        """The factors by which compute seconds and weight bytes enter a stage's cost."""
        bandwidth, count = self.bandwidths[span], self.problem.num_microbatches
        # Thesis 2.4.1: max(compute, 2 (m - 1) w / (B m)), both by replica.
        if self.problem.stage_cost == "thesis":
            return Slopes(
                1 / num_replicas, 0.0, 2 * (num_replicas - 1) / (bandwidth * num_replicas)
            )
        schedule = self.problem.schedule
        # All-reduces and updates come once in so many inputs.
        often = updates(schedule, num_replicas, count) / count
        update = self.problem.pools[pool].update_seconds / max(self.total_weight, 1.0)
        reduction = self.reductions[pool]
        return Slopes(
            rounds(schedule, num_replicas, count) / count,
            often * update,
            often * 2 * (num_replicas - 1) / (num_replicas * reduction.rate(bandwidth)),
            often * reduction.start_seconds(num_replicas),
        )

    def stage_seconds(
        self, first: int, last: int, pool: int, num_replicas: int, span: int
    ) -> float:
        """One stage's seconds per input, its boundaries within its own span included."""
        slopes = self.slopes(pool, num_replicas, span)
        compute = self.stage_compute(first, last, pool)
        weight = float(self.cuts.weight_bytes[last] - self.cuts.weight_bytes[first])
        return max(
            slopes.per_compute * compute + slopes.per_weight * weight,
            slopes.sync_per_weight * weight + slopes.sync_start,
            float(self.boundary_seconds[span, first]),
            float(self.boundary_seconds[span, last]),
        )

    def stage_compute(self, first: int, last: int, pool: int) -> float:
        """Seconds of a microbatch's passes through the stage between two cuts."""
        seconds, again = self.compute_seconds[pool], self.cuts.repeated_seconds[pool]
        # Of a backward pass in halves only the first stage, whose first half is empty, repeats
        # nothing; so ``compute_seconds`` are the least of any stage.
        repeated = float(again[last] - again[first]) if first else 0.0
        return float(seconds[last] - seconds[first]) + repeated + float(self.own_seconds[pool])

    def stage_forward(self, first: int, last: int, pool: int) -> float:
        """The forward pass's part of ``stage_compute``."""
        seconds = self.cuts.forward_seconds[pool]
        return float(seconds[last] - seconds[first]) + self.overheads.forward_seconds[pool]

    def stage_weight_gradient(self, first: int, last: int, pool: int) -> float | None:
        """The part of ``stage_compute`` for the weights' gradients; None where halves are equal."""
        if not self.problem.pools[pool].input_gradient_seconds:
            return None
        inputs = self.cuts.input_gradient_seconds[pool]
        ahead = float(inputs[last] - inputs[first]) if first else 0.0
        ahead += self.overheads.forward_seconds[pool]  # each half is a pass of the runtime's
        both = self.stage_compute(first, last, pool) - self.stage_forward(first, last, pool)
        return both - ahead

    def output_seconds(self, cut: int, bytes_per_second: float) -> float:
        """Both messages of a microbatch over a cut between two stages."""
        crossing = float(self.cuts.crossing_bytes[cut])
        return boundary_seconds(crossing, bytes_per_second, float(self.message_seconds[cut]))

    def matrix(self, pool: int, num_replicas: int, span: int) -> Floats:
        """[cuts, cuts] of ``stage_seconds``; infinite where no stage lies between two cuts."""
        slopes, cuts = self.slopes(pool, num_replicas, span), self.cuts
        compute = self.compute_seconds[pool]
        busy = slopes.per_compute * compute + slopes.per_weight * cuts.weight_bytes
        # [ends] less [begins] is a stage's busy time: prefix sums, with what each stage pays once
        # at its end.
        ends = busy + slopes.per_compute * self.own_seconds[pool]
        sync = slopes.sync_per_weight * cuts.weight_bytes
        reduced = sync[None, :] - sync[:, None] + slopes.sync_start
        found: Floats = np.maximum(ends[None, :] - busy[:, None], reduced)
        # A boundary inside the stage's own span is no faster than its links, on either side.
        edge = self.boundary_seconds[span]
        np.maximum(found, edge[:, None], out=found)
        np.maximum(found, edge[None, :], out=found)
        found[~self.between()] = np.inf
        return found

    def _is_line(self) -> bool:
        """Whether cuts are in one line, where a stage that ends at a later cut is never smaller.

        So a limit of memory allows all ends up to a last one. Tied weights are copied by a stage
        that lacks their holder; one that goes on up to the holder has its weights instead.
        """
        if self.cuts.before is not None or self.cuts.copied_bytes is None:
            return self.cuts.before is None
        held = self.cuts.weight_bytes[None, :] + self.cuts.copied_bytes
        # With all its users a weight is shared no more, and its gradient does not wait.
        split = self.cuts.split_bytes
        waits = any(pool.waiting_bytes for pool in self.problem.pools)
        tables = [held] if split is None or not waits else [held, held + split]
        grows = all(np.triu(np.diff(table, axis=1)).min() >= 0 for table in tables)
        return self.problem.traits.flushes and grows

    def between(self) -> Mask:
        """[cuts, cuts]: whether a stage may lie between two cuts."""
        found: Mask = np.triu(np.ones((self.cuts.size, self.cuts.size), bool), 1)
        if self.cuts.before is not None:
            found = self.cuts.before
        # Without a flush each stage updates at its own time, so all users of a tied weight are in
        # one stage.
        if self.cuts.split_bytes is not None and not self.problem.traits.flushes:
            found = found & (self.cuts.split_bytes == 0)
        return found

    def own_bytes(self, pool: int, num_replicas: int, in_flight: int, versions: int) -> Floats:
        """[cuts, cuts] memory of one replica of a stage between two cuts, its inputs included."""
        some, full, updating = (
            self._table(moment) for moment in self.moments(pool, num_replicas, in_flight, versions)
        )
        found: Floats = np.maximum(np.minimum(some, full), updating)
        return found

    def _table(self, moment: ReplicaBytes) -> Floats:
        """[cuts, cuts] bytes at a moment."""
        cuts = self.cuts
        curve = self.memory_curve(moment)
        entered = moment.per_input * cuts.crossing_bytes + moment.fixed
        found: Floats = curve[None, :] - (curve - entered)[:, None]
        if cuts.copied_bytes is None or cuts.split_bytes is None:
            return found
        return found + moment.per_weight * cuts.copied_bytes + moment.per_tied * cuts.split_bytes

    def memory_curve(self, moment: ReplicaBytes) -> Floats:
        """[cuts] bytes of which the difference is what a stage's own layers take at a moment."""
        cuts = self.cuts
        found: Floats = (
            moment.per_weight * cuts.weight_bytes + moment.per_activation * cuts.activation_bytes
        )
        return found

    def moments(
        self, pool: int, num_replicas: int, in_flight: int, versions: int
    ) -> tuple[ReplicaBytes, ReplicaBytes, ReplicaBytes]:
        """``replica_moments`` of a stage on devices of a pool."""
        return replica_moments(
            self.problem,
            self.problem.pools[pool],
            num_replicas,
            in_flight,
            versions,
            largest_message_bytes=self.largest_message_bytes,
            recompute=self.recompute,
        )

    def tied_seconds(self, first: int, last: int, num_replicas: int) -> float:
        """The all-reduce of a stage's weights that other stages hold too."""
        if self.cuts.split_bytes is None or not self.problem.traits.flushes:
            return 0.0
        shared = float(self.cuts.split_bytes[first, last])
        return shared * self.tied_seconds_per_byte(num_replicas)

    def tied_seconds_per_byte(self, num_replicas: int) -> float:
        """What a byte of weights that other stages hold too costs a stage at a flush."""
        return tied_seconds(1.0, num_replicas, slowest_of_all(self.problem))

    def stashed(self, num_replicas: int, workers: int) -> tuple[int, int]:
        """In-flight microbatches and weight versions of a stage's replica."""
        problem = self.problem
        in_flight = num_in_flight(problem.schedule, workers, num_replicas, problem.num_microbatches)
        return in_flight, weight_versions(problem.schedule, in_flight)

    def stage_memory(
        self, first: int, last: int, pool: int, num_replicas: int, held: tuple[int, int]
    ) -> float:
        """Bytes of one replica of the stage between two cuts.

        ``held`` are its microbatches in flight and its weight versions.
        """
        cuts = self.cuts
        copied = 0.0 if cuts.copied_bytes is None else float(cuts.copied_bytes[first, last])
        return stage_bytes(
            self.moments(pool, num_replicas, *held),
            float(cuts.weight_bytes[last] - cuts.weight_bytes[first]) + copied,
            0.0 if cuts.split_bytes is None else float(cuts.split_bytes[first, last]),
            float(cuts.activation_bytes[last] - cuts.activation_bytes[first]),
            float(cuts.crossing_bytes[first]),
        )

    def lack_bytes(self, first: int, last: int, move: Move, workers: int | None = None) -> float:
        """Bytes that a replica of a placed stage lacks; what it leaves free is negative."""
        limit = self.problem.pools[move.pool].limit_bytes
        stash = self.stashed(move.num_replicas, workers or move.workers)
        used = self.stage_memory(first, last, move.pool, move.num_replicas, stash)
        return used - (np.inf if limit is None else limit)


def boundary_weight(problem: PipelineProblem) -> float:
    """How a boundary counts: a flushing schedule's first microbatch is part of the filling."""
    if not problem.count_boundaries:
        return 0.0
    if problem.stage_cost == "ring" and problem.traits.flushes:
        return (problem.num_microbatches - 1) / problem.num_microbatches
    return 1.0


class PlacementSearch(Protocol):
    """A method: the best placement under limits raised by some bytes, or None."""

    def __call__(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        extra_bytes: float = 0.0,
        *,
        below: float = ...,
        effort: Effort = ...,
    ) -> list[PlacedStage] | None:
        """Stages in the model's order."""


class StoppedError(OutOfTimeError):
    """The caller's limit ended a search; ``bound`` is the lower bound proved so far."""

    def __init__(self, bound: float, placed: list[PlacedStage] | None = None) -> None:
        super().__init__("stopped")
        self.bound, self.placed = bound, placed
