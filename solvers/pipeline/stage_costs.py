"""The costs of stages between cuts, as arrays (planning/costs/pipeline.py holds the formulas)."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.pipeline import (
    AllReduce,
    StageHeld,
    StageParts,
    all_reduce,
    boundary_seconds,
    held_moments,
    last_readers,
    num_in_flight,
    overheads,
    pass_bytes,
    replica_bytes,
    rounds,
    slowest_of_all,
    tied_seconds,
    tied_weights,
    update_bytes,
    updates,
    weight_versions,
    worker_bytes,
)
from ...schema.pipeline import PipelineProblem
from ...schema.schedule import HeldMoment
from ..effort import Effort, OutOfTimeError
from .cuts import Cuts, Floats, Mask
from .placements import Move, PlacedStage, PlacementSpace

Ints = NDArray[np.int64]


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
        self.memory = StageMemory(problem, cuts)
        self._own: dict[tuple[int, bool, int, StageHeld, bool], Floats] = {}
        # A stage that ends at a later cut is never smaller, so memory allows all ends up to one.
        self.is_line = cuts.before is None and (cuts.copied_bytes is None or problem.traits.flushes)

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
        return max(both - ahead, 0.0)

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

    def own_bytes(
        self, pool: int, num_replicas: int, held: StageHeld, *, standing: bool = False
    ) -> Floats:
        """[cuts, cuts] memory of one replica of a stage between two cuts.

        ``standing`` leaves out what the pass that runs takes for a while.
        """
        # It matters if there are other replicas, and how many microbatches have own statistics.
        share = ceil(self.problem.num_microbatches / num_replicas)
        share *= any(layer.statistics_bytes for layer in self.problem.layers)
        key = pool, num_replicas > 1, share, held, standing
        if key not in self._own:
            self._own[key] = self.memory.table(
                pool, num_replicas, held, recompute=self.recompute, standing=standing
            )
        return self._own[key]

    def tied_seconds(self, first: int, last: int, num_replicas: int) -> float:
        """The all-reduce of a stage's weights that other stages hold too."""
        if self.cuts.split_bytes is None or not self.problem.traits.flushes:
            return 0.0
        shared = float(self.cuts.split_bytes[first, last])
        return shared * self.tied_seconds_per_byte(num_replicas)

    def tied_seconds_per_byte(self, num_replicas: int) -> float:
        """What a byte of weights that other stages hold too costs a stage at a flush."""
        return tied_seconds(1.0, num_replicas, slowest_of_all(self.problem))

    def stashed(self, num_replicas: int, workers: int) -> StageHeld:
        """What a stage's replica holds."""
        name, count = self.problem.schedule, self.problem.num_microbatches
        in_flight = num_in_flight(name, workers, num_replicas, count)
        moments = held_moments(name, in_flight, num_replicas, count)
        return StageHeld(in_flight, weight_versions(name, in_flight), moments)

    def memory_parts(
        self, first: int, last: int, pool: int, num_replicas: int, held: StageHeld
    ) -> tuple[float, float]:
        """Bytes of one replica of a stage: without the pass that runs, and what that takes."""
        whole, standing = (
            float(self.own_bytes(pool, num_replicas, held, standing=part)[first, last])
            for part in (False, True)
        )
        return standing, whole - standing

    def device_bytes(self, pool: int, num_replicas: int, standing: float, passing: float) -> int:
        """What a plan states of a device whose stages hold so much, as ``memory_parts`` has it."""
        own = self.problem.pools[pool]
        return round(standing + worker_bytes(self.problem, own, num_replicas, passing))

    def lack_bytes(self, first: int, last: int, move: Move, workers: int | None = None) -> float:
        """Bytes that a replica of a placed stage lacks; what it leaves free is negative."""
        limit = self.problem.pools[move.pool].limit_bytes
        stash = self.stashed(move.num_replicas, workers or move.workers)
        used = self.own_bytes(move.pool, move.num_replicas, stash)[first, last]
        return float(used) - (np.inf if limit is None else limit)


class StageMemory:
    """Memory of the stages between all cuts.

    A backward pass holds most at one of its layers: those behind it have freed what they kept, and
    it takes its workspace. Between its halves a graph is kept whole.

        layers that keep 3, 5, 4 and take 1, 1, 9 for a while: 12 + 9 at the last one
        layers that keep 3, 5, 4 and take 1, 6, 1: 8 + 6 at the second one

    A stage of layers in their own order, behind all before them, counts at least as much as if it
    ended at an earlier one: outputs shrink, and the searches rely on stages that never do.
    """

    def __init__(self, problem: PipelineProblem, cuts: Cuts) -> None:
        self._problem, self._cuts = problem, cuts
        layers = problem.layers
        counted = [one.has_bytes for one in layers]
        # Layers without bytes count nowhere, so where they lie between two cuts does not matter.
        self._chosen = np.flatnonzero(counted if any(counted) else [1] * len(layers))
        chosen = [layers[layer] for layer in self._chosen]
        self._weights = np.array([float(one.weight_bytes + one.padding_bytes) for one in chosen])
        self._kept = np.array([float(one.kept_bytes) for one in chosen])
        self._halved = np.array([float(one.halved_bytes) for one in chosen])
        # Where all users of a weight are in one stage, gradients of the later ones wait for that of
        # the first, which holds it.
        number = {layers[layer].id: place for place, layer in enumerate(self._chosen.tolist())}
        # [makers, savers] what a stage keeps of a layer's outputs only if it holds a later layer.
        self._later = np.zeros((len(chosen), len(chosen)))
        for place, one in enumerate(chosen):
            for saver, size in one.saved_later:
                if layers[saver].id in number:
                    self._later[place, number[layers[saver].id]] += size
        self._shared = [
            (number[one.id], [number[name] for name in one.shared_with], one.shared_weight_bytes)
            for one in chosen
            if one.shared_with and number.keys() >= set(one.shared_with)
        ]
        sets = cuts.layer_sets
        self._inside = np.array(
            [[inside >> layer & 1 for layer in self._chosen.tolist()] for inside in sets], bool
        ).reshape(len(sets), len(chosen))
        self._number = self._inside.sum(axis=1)
        # [cuts] whether a cut has layers in their own order: as many as there are up to its last.
        order = np.arange(len(chosen))
        self._is_prefix = (self._inside == (order[None, :] < self._number[:, None])).all(axis=1)
        # [layers] what crosses behind each, in their own order.
        change = np.zeros(len(layers) + 1)
        for source, last in last_readers(problem).items():
            change[source] += layers[source].activation_bytes
            change[last] -= layers[source].activation_bytes
        self._sent = np.cumsum(change)[self._chosen]

    def table(
        self, pool: int, num_replicas: int, held: StageHeld, *, recompute: bool, standing: bool
    ) -> Floats:
        """[cuts, cuts] bytes of one replica; of pairs that no stage lies between, anything."""
        problem, own = self._problem, self._problem.pools[pool]
        space = self._space(pool, num_replicas)

        def counted(parts: StageParts) -> Floats:
            if standing:
                parts = parts._replace(passing=0.0, waiting=0.0)
            found: Floats = replica_bytes(
                problem, own, num_replicas, held, parts, recompute=recompute
            )
            return found

        rows = np.flatnonzero(self._is_prefix)
        if len(rows) == self._cuts.size:
            found = np.zeros((self._cuts.size, self._cuts.size))
        else:
            every = np.arange(self._cuts.size)
            found = counted(self._between(space, every[:, None], every[None, :]))
        # [prefixes, ends] the stages that end behind each layer, and the most up to each.
        smaller = np.where(self._inside[rows], 0.0, counted(self._prefixes(space, rows)))
        smaller = np.maximum.accumulate(smaller, axis=1)
        ends = self._number[rows]
        exact = counted(self._prefixes(space, rows, rows))
        before = np.where(
            ends[None, :] - 1 > ends[:, None], smaller[:, np.maximum(ends - 2, 0)], 0.0
        )
        found[np.ix_(rows, rows)] = np.maximum(exact, before)
        return found

    def at_moments(
        self,
        pool: int,
        num_replicas: int,
        versions: int,
        moments: HeldMoment,
        stage: tuple[int, int],
        *,
        recompute: bool,
    ) -> tuple[float, Floats, Floats]:
        """Bytes of one replica of a stage between two cuts, as ``table`` counts them, but samples.

        ``moments`` are arrays [moments, 1], ``stage`` are its cuts.

        Returns:
            In an update; [moments] without the pass that runs; and with it.
        """
        problem, own = self._problem, self._problem.pools[pool]
        space = self._space(pool, num_replicas)
        row, end = np.array(stage[:1]), np.array(stage[1:])
        if not (self._is_prefix[row[0]] and self._is_prefix[end[0]]):
            parts = [self._between(space, row, end)]
        else:
            exact, earlier = self._prefixes(space, row, end), self._prefixes(space, row)
            parts = [StageParts(*(np.ravel(each) for each in exact))]
            chosen = slice(int(self._number[row[0]]), max(int(self._number[end[0]]) - 1, 0))
            shape = np.shape(earlier.kept)
            parts += [StageParts(*(np.broadcast_to(x, shape)[0, chosen] for x in earlier))]
        found: list[list[Floats]] = []
        for each in parts:
            bare = each._replace(passing=0.0, waiting=0.0)
            found.append(
                [update_bytes(problem, own, versions, each)[None, :]]
                + [
                    pass_bytes(
                        problem, own, num_replicas, versions, moments, one, recompute=recompute
                    )
                    for one in (bare, each)
                ]
            )
        update, standing, whole = (
            np.concatenate(each, axis=1).max(axis=1) for each in zip(*found, strict=True)
        )
        return float(update[0]), standing, whole

    def _space(self, pool: int, num_replicas: int) -> Floats:
        """[2, layers] what the passes of those that count take for a while; and buffers."""
        aside = self._problem.pools[pool].layer_workspace_bytes
        share, layers = ceil(self._problem.num_microbatches / num_replicas), self._problem.layers
        return np.array(
            [
                [aside[layer] if aside else 0.0 for layer in self._chosen.tolist()],
                [
                    2.0 * layers[n].buffer_bytes + share * layers[n].statistics_bytes
                    for n in self._chosen.tolist()
                ],
            ]
        )

    def _prefixes(self, space: Floats, rows: Ints, ends: Ints | None = None) -> StageParts:
        """Stages from cuts in the layers' own order [rows] to each layer, or to such cuts."""
        cuts, own, begins = self._cuts, ~self._inside[rows], rows[:, None] > 0
        # What only later layers save is kept from the first of these on.
        moved = own @ self._later - own * self._later.sum(axis=1)
        weight, kept, halved, buffers = (
            np.cumsum(own * each, axis=1)
            for each in (self._weights, self._kept, self._halved, space[1])
        )
        kept = frees = kept + np.cumsum(moved, axis=1)
        if self._problem.traits.splits_backward:
            # The first stage has no first half: its second one is a whole pass.
            frees = np.where(begins, 0.0, kept)
        behind, shared = np.zeros((2, *own.shape))
        for layer, holders, size in self._shared:
            shared[:, layer] = size * own[:, layer]
            behind[:, layer] = shared[:, layer] * own[:, holders].all(axis=1)
        gradients = np.cumsum(shared, axis=1) + weight
        passing, waiting = (
            np.maximum.accumulate(np.where(own, frees + space[0] - each, -np.inf), axis=1) + each
            for each in (np.cumsum(behind, axis=1), gradients)
        )
        copied: Any = 0.0
        tied: Any = 0.0
        columns = [weight, kept, passing - frees, waiting - frees, halved, buffers]
        if ends is not None:
            number = self._number[ends]
            weight, kept, passing, waiting, halved, buffers = (
                np.where(number > 0, each[:, np.maximum(number - 1, 0)], 0.0) for each in columns
            )
            sent = np.broadcast_to(cuts.crossing_bytes[ends], kept.shape)
            if cuts.copied_bytes is not None and cuts.split_bytes is not None:
                copied, tied = (
                    each[np.ix_(rows, ends)] for each in (cuts.copied_bytes, cuts.split_bytes)
                )
        else:
            weight, kept, passing, waiting, halved, buffers = columns
            sent = np.broadcast_to(self._sent, kept.shape)
            if cuts.copied_bytes is not None:
                copied, tied = self._tied(own)
        received = np.broadcast_to(cuts.crossing_bytes[rows][:, None], kept.shape)
        return StageParts(
            weight + copied, tied, kept, np.maximum(passing, 0.0), np.maximum(waiting, 0.0),
            np.where(begins, halved, sent), received, sent, buffers,
        )  # fmt: skip

    def _tied(self, own: Mask) -> tuple[Floats, Floats]:
        """[rows, ends] tied weights of such stages: copied, and shared with others."""
        copied, split = np.zeros(own.shape), np.zeros(own.shape)
        for tied in tied_weights(self._problem.layers):
            holders, sharers = (
                np.cumsum(own & np.isin(self._chosen, sorted(those)), axis=1)
                for those in (tied.holders, tied.sharers)
            )
            users = holders + sharers
            lacks = (sharers > 0) & (holders < len(tied.holders))
            copied += tied.weight_bytes * lacks
            is_split = (users > 0) & (users < len(tied.holders | tied.sharers))
            split += tied.weight_bytes * is_split
        return copied, split

    def _between(self, space: Floats, first: Ints, last: Ints) -> StageParts:
        """Stages between two cuts, of which there may be many: arrays that broadcast."""
        cuts, shape = self._cuts, np.broadcast_shapes(first.shape, last.shape)
        begins = first > 0
        keeps = self._problem.traits.splits_backward & begins
        weight, kept, halved, buffers = np.zeros((4, *shape))
        passing, waiting = np.full((2, *shape), -np.inf)
        shared = {layer: (holders, held) for layer, holders, held in self._shared}
        behind, gradients = np.zeros((2, *shape))
        for layer, column in enumerate(self._inside.T):
            own = column[last] & ~column[first]
            holders, held = shared.get(layer, ([], 0.0))
            if held:
                users = self._inside[:, [layer, *holders]]
                behind += held * (users[last] & ~users[first]).all(axis=-1)
            weight += own * self._weights[layer]
            kept += own * self._kept[layer]
            halved += own * self._halved[layer]
            buffers += own * space[1, layer]
            at_layer = np.where(own, np.where(keeps, 0.0, kept) + space[0, layer], -np.inf)
            passing = np.maximum(passing, at_layer - behind)
            gradients += own * (self._weights[layer] + held)
            waiting = np.maximum(waiting, at_layer - gradients)
        passing, waiting = passing + behind, waiting + gradients
        frees = np.where(keeps, 0.0, kept)
        copied: Any = 0.0 if cuts.copied_bytes is None else cuts.copied_bytes[first, last]
        tied: Any = 0.0 if cuts.split_bytes is None else cuts.split_bytes[first, last]
        received, sent = np.broadcast_arrays(cuts.crossing_bytes[first], cuts.crossing_bytes[last])
        return StageParts(
            weight + copied, tied, kept, np.maximum(passing - frees, 0.0),
            np.maximum(waiting - frees, 0.0), np.where(begins, halved, sent), received, sent,
            buffers,
        )  # fmt: skip


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
