"""One layout and schedule of equal pipelines: costs of its cuts, and the least maximum."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from ....planning.schedules.of_plan import times_of
from ....planning.schedules.timing import time_schedule
from ....schema.operations import Schedule
from ....schema.pipeline import PipelineProblem
from ....schema.plan import Stage
from ...effort import Effort
from ..assemble import stage_between
from ..at_once import even_cuts, in_one_line
from ..cuts import Floats
from ..infeasible import needs
from ..stage_costs import StageCosts
from .layouts import PipelineLayout, link, span


@dataclass(frozen=True, slots=True)
class ScheduledLayout:
    """A layout with its schedule: what each stage holds, and the place that holds it."""

    layout: PipelineLayout
    num_chunks: int
    schedule: Schedule
    place: tuple[int, ...]
    held: tuple[tuple[int, int], ...]

    @property
    def num_stages(self) -> int:
        """Stages over all places."""
        return len(self.place)


Cut = tuple[int, ...]
"""Indices of the cuts between stages, the empty and the full one included."""


class ShapeOption:
    """One shape with or without recomputation: costs, memory, bound, and time of its cuts."""

    def __init__(self, problem: PipelineProblem, costs: StageCosts, shape: ScheduledLayout) -> None:
        self.problem, self.costs, self.shape = problem, costs, shape
        layout = shape.layout
        self.spans = [span(problem, layout, place) for place in shape.place]
        self.links = [
            link(problem, layout, one, other)
            for one, other in zip(shape.place, shape.place[1:], strict=False)
        ]
        self.pools = [layout.places[place].pool for place in shape.place]
        self.rounds = ceil(problem.num_microbatches / layout.num_replicas)
        self.bound = self.bound_of_any_order = self._bound()

    def _bound(self) -> float:
        """A lower bound, in seconds, on every cut of this shape."""
        compute = self.costs.compute_seconds[self.pools]
        if self.costs.cuts.before is None:
            way = float(np.diff(compute, axis=1).min(axis=0).sum())
        else:
            way = float(compute[:, -1].min()) if len(set(self.pools)) == 1 else 0.0
        way += float(self.costs.own_seconds[self.pools].sum())
        share = way / len(self.shape.layout.places)
        if self.problem.traits.flushes:
            # Of a backward pass in halves only the first is on a microbatch's way.
            is_way = not self.problem.traits.splits_backward
            return max(self.rounds * share, way if is_way else 0.0)
        return share / self.shape.layout.num_replicas

    def raise_bound(self, heaviest: float | None) -> None:
        """Take in the least time of the heaviest stage; None where nothing fits."""
        busy = np.inf if heaviest is None else self.rounds * heaviest * (1 - 1e-12)
        self.bound = max(self.bound, busy)

    def memory(self, stage: int, first: int, last: int) -> float:
        """Bytes of one replica of a stage between two cuts."""
        return self.costs.stage_memory(first, last, *self.shape.held[stage])

    def fits(self, cut: Cut) -> bool:
        """Whether the stages of every device fit it together, and none splits a tied weight."""
        between = self.costs.between()
        if not all(between[one, other] for one, other in zip(cut, cut[1:], strict=False)):
            return False
        return all(limit is None or used <= limit for used, limit in self._filled(cut))

    def _filled(self, cut: Cut) -> list[tuple[float, int | None]]:
        """[places] bytes that stages take of a device, and what they may take."""
        used = [0.0] * len(self.shape.layout.places)
        for stage, place in enumerate(self.shape.place):
            used[place] += self.memory(stage, cut[stage], cut[stage + 1])
        limits = [self.problem.pools[place.pool].limit_bytes for place in self.shape.layout.places]
        return list(zip(used, limits, strict=True))

    def nearest(self) -> tuple[float, str] | None:
        """Bytes that a cut of even memory lacks, and the device that lacks them; None: no cut."""

        def beyond(stage: int) -> Floats:
            """Bytes beyond a chunk's share; without a limit any stage is as good."""
            limit, size = self.problem.pools[self.pools[stage]].limit_bytes, self.costs.cuts.size
            over = np.full((size, size), -1.0)
            if limit is not None:
                kept = self.costs.own_bytes(*self.shape.held[stage])
                over = kept - limit / self.shape.num_chunks
            return np.where(self.costs.between(), over, np.inf)

        found = self._least(beyond)
        if found is None:
            return None
        filled = self._filled(found[1])
        lack, used, place = max(
            (used - limit if limit is not None else -np.inf, used, place)
            for place, (used, limit) in enumerate(filled)
        )
        if lack <= 0:
            return None
        return lack, needs(self.problem.pools[self.shape.layout.places[place].pool], used)

    def matrix(self, stage: int, transfers: float, share: int) -> Floats:
        """[cuts, cuts] what a stage weighs; infinite where it breaks its share of the memory.

        Args:
            stage: Which.
            transfers: How much of its transfers counts.
            share: The device's memory is dealt to so many chunks.
        """
        cuts, pool = self.costs.cuts, self.pools[stage]
        if self.problem.traits.flushes:
            compute = self.costs.compute_seconds[pool]
            ends = compute + self.costs.own_seconds[pool]
            found: Floats = ends[None, :] - compute[:, None]
            if stage > 0:
                found = (
                    found + (transfers * 2 / self.links[stage - 1]) * cuts.crossing_bytes[:, None]
                )
                found = found + transfers * 2 * self.costs.message_seconds[:, None]
        else:
            index = self.costs.bandwidths.index(self.spans[stage])
            found = self.costs.matrix(pool, self.shape.layout.num_replicas, index)
            if stage > 0:
                edge = 2 * cuts.crossing_bytes / self.links[stage - 1]
                edge = edge + 2 * self.costs.message_seconds
                found = np.maximum(found, edge[:, None])
        limit = self.problem.pools[pool].limit_bytes
        barred = ~self.costs.between()
        if limit is not None:
            in_flight, versions = self.shape.held[stage]
            used = self.costs.own_bytes(in_flight, versions)
            barred |= used > limit / share
        return np.where(barred, np.inf, found)

    def even_cut(self) -> Cut | None:
        """A cut in the layers' own order whose stages take about as long; None if there is none."""
        at = in_one_line(self.problem, self.costs)
        stages = [(pool, 1) for pool in self.pools]
        if len(at) <= len(stages):
            return None
        curve = self.costs.compute_seconds.mean(axis=0)[at]
        return tuple(int(at[cut]) for cut in even_cuts(self.problem, curve, stages))

    def least_maximum(
        self, transfers: float, share: int, effort: Effort
    ) -> tuple[float, Cut] | None:
        """The cut with the least heaviest stage; O(stages x cuts^2).

        Raises:
            OutOfTimeError: The effort's limit came first.
        """

        def matrix(stage: int) -> Floats:
            effort.check()
            return self.matrix(stage, transfers, share)

        return self._least(matrix)

    def _least(self, matrix: Callable[[int], Floats]) -> tuple[float, Cut] | None:
        """The least of the largest entries, one of each stage's matrix, and its cut."""
        size = self.costs.cuts.size
        best = np.full(size, np.inf)
        best[0] = -np.inf
        chosen = []
        for stage in range(self.shape.num_stages):
            total = np.maximum(best[:, None], matrix(stage))
            chosen.append(total.argmin(axis=0))
            best = total[chosen[-1], np.arange(size)]
        if not np.isfinite(best[-1]):
            return None
        cut = [size - 1]
        for begins in reversed(chosen):
            cut.append(int(begins[cut[-1]]))
        return float(best[-1]), tuple(reversed(cut))

    def slowest(self, cut: Cut) -> float:
        """The steady state's slowest stage or boundary, in seconds per input."""
        slowest = 0.0
        for stage, pool in enumerate(self.pools):
            index = self.costs.bandwidths.index(self.spans[stage])
            replicas = self.shape.layout.num_replicas
            seconds = self.costs.stage_seconds(cut[stage], cut[stage + 1], pool, replicas, index)
            slowest = max(slowest, seconds)
            if stage > 0:
                sent = self.costs.output_seconds(cut[stage], self.links[stage - 1])
                slowest = max(slowest, sent)
        return slowest

    def stages(self, cut: Cut) -> list[Stage]:
        """The stages of a cut, as a plan has them."""
        costs, shape, found = self.costs, self.shape, []
        for stage, place in enumerate(shape.place):
            last, sent = cut[stage + 1], 0.0
            if stage + 1 < shape.num_stages:
                sent = costs.output_seconds(last, self.links[stage])
            found.append(
                stage_between(
                    costs,
                    (cut[stage], last),
                    self.pools[stage],
                    shape.layout.places[place].devices,
                    span=costs.bandwidths.index(self.spans[stage]),
                    held=shape.held[stage],
                    sent=sent,
                    is_further=place in shape.place[:stage],
                )
            )
        return found

    def objective(self, cut: Cut) -> float:
        """What is minimised: the step, or without a flush the slowest stage or boundary."""
        return self.step(cut) if self.problem.traits.flushes else self.slowest(cut)

    def step(self, cut: Cut) -> float:
        """The step of a cut as the timer has it."""
        times = times_of(self.stages(cut), flushes=True)
        return time_schedule(self.shape.schedule, times).makespan_seconds
