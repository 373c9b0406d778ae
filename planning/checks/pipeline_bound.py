"""Prove the bound of a pipeline, by a table of caps of the judge's own.

A cut divides the layers in those before it and those behind; a stage lies between two cuts. In a
chain of layers each layer but the last ends before a cut. In a graph the layers before a cut are
any that need no layer behind it; where these are too many, the bound is not proved.

For the slowest stage: no cuts have all stages and boundaries below the bound. For a step with a
flush, each stage s shows that the step takes at least a sum and a rest,

    sum over stages (C + 2c)  +  rest of s  +  all-reduce and update of the first stage,

because the first microbatch goes through all stages and back, and when its gradient arrives, s has
passes left. If no rest is above a cap, the sum is at least some S; then the bound holds for all
plans with a rest above bound - S, which is the next, lower cap. The table ends where no plan is
left. Links are taken as the fastest that so many devices can have, so a bound may be true and not
be proved here; it is never proved and untrue.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Restrictions
from . import definitions

Table = NDArray[np.float64]
MOST_WORK = 4e7
"""Stages that a table may try, about 1 s; the bound of a larger problem is not proved."""
_MOST_CAPS = 100


@dataclass(frozen=True)
class _Stage:
    """All stages of one kind, by the cuts [first, end] that they lie between.

    Attributes:
        seconds: [first, end] a microbatch's passes.
        figure: [first, end] what a cap limits: the rest, or the seconds per input.
        closing: [end] all-reduces and update, if it is the first stage.
        alone: [first, end] seconds of a step that such a stage alone makes necessary.
    """

    seconds: Table
    figure: Table
    closing: Table
    alone: Table


def is_proved(problem: PipelineProblem, bound: float, asked: Restrictions) -> bool:
    """Whether the judge can show that no plan of a problem beats a bound.

    Args:
        problem: The problem; most devices and stages are left out, which allows more plans.
        bound: Of the problem's objective, to 1e-9.
        asked: What plans keep to besides: a number of stages, no replicas, no recomputation.
    """
    recompute = (False,) if problem.traits.splits_backward or asked.recompute is False else (
        False, True
    )  # fmt: skip
    known = problem.traits.order if problem.minimises == "step_seconds" else "alternating"
    if (
        problem.solved != "flat"
        or problem.stage_cost == "published"
        or problem.cut_rule != "edges"
        or not problem.count_boundaries
        or known == "own"
    ):
        return False
    kinds = prod(pool.num_devices + 1 for pool in problem.pools)
    moves = sum(pool.num_devices for pool in problem.pools)
    cuts = _cuts(problem, sqrt(MOST_WORK / (kinds * moves)))
    if cuts is None:
        return False
    return all(
        _holds(_Model(problem, cuts, asked, recomputes), bound * (1 - 1e-9))
        for recomputes in recompute
    )


def _cuts(problem: PipelineProblem, most: float) -> NDArray[np.bool_] | None:
    """[cut, layer] the layers before each cut, from none to all; None if there are more cuts."""
    # Cuts with fewer layers before them come first.
    number = len(problem.layers)
    # [layers] the layers that each one needs, as bits.
    needs = [sum(1 << a for a, b in problem.links if b == layer) for layer in range(number)]
    found = fresh = {0}
    # Breadth first: each cut grows by a layer that needs nothing behind it.
    while fresh and len(found) <= most:
        fresh = {
            before | 1 << layer
            for before in fresh
            for layer in range(number)
            if not before >> layer & 1 and needs[layer] & before == needs[layer]
        } - found
        found = found | fresh
    if len(found) > most:
        return None
    found_in_order = sorted(found, key=int.bit_count)
    return np.array([[bool(cut >> at & 1) for at in range(number)] for cut in found_in_order])


def _holds(model: "_Model", bound: float) -> bool:
    if model.problem.minimises != "step_seconds":
        return model.least_sum(bound, inf) == inf
    # Every rest is at most the bound itself: the first cap allows all plans that matter.
    cap = bound = bound - min(pool.fixed_seconds for pool in model.problem.pools)
    for _ in range(_MOST_CAPS):
        least = model.least_sum(cap, bound)
        if least >= bound:
            return True
        # The cap no longer falls: nothing more can be shown.
        if bound - least >= cap * (1 - 1e-12):
            return False
        cap = bound - least
    return False


class _Model:
    """The stages of one problem, with or without recomputation."""

    def __init__(
        self,
        problem: PipelineProblem,
        cuts: NDArray[np.bool_],
        asked: Restrictions,
        recompute: bool,
    ) -> None:
        self.problem, self.cuts, self.recompute = problem, cuts, recompute
        self.num_stages = asked.num_stages or problem.num_stages
        self.replication = problem.replication and asked.replication is not False
        self.size = len(cuts)
        # [first, end] whether all layers before the first cut are before the other, and more
        member = cuts.astype(np.float32)  # a product of matrices counts the layers in common
        inside = member @ member.T == member.sum(axis=1)[:, None]
        self.is_stage = inside & ~np.eye(self.size, dtype=bool)
        self.copied, self.split = self._tied()
        if not problem.traits.flushes:
            self.is_stage &= self.split == 0
        self.weights = self._sums([layer.weight_bytes for layer in problem.layers])
        sent = np.array([layer.activation_bytes for layer in problem.layers], np.float64)
        self.inputs = (self._senders() @ sent)[:, None]  # [first, 1]
        # [first] forward seconds of the layers before a stage, each on its fastest device
        ahead = zip(*(pool.forward_seconds for pool in problem.pools), strict=True)
        self.before = self._sums([min(seconds) for seconds in ahead])[0]
        self.devices = [pool.num_devices for pool in problem.pools]
        self.stages: dict[tuple[int, int, int], _Stage] = {}
        self.bytes = [self._bytes(pool) for pool in problem.pools]

    def _sums(self, values: Sequence[float]) -> Table:
        """[first, end] sums over the layers of a stage."""
        before = self.cuts @ np.array(values, np.float64)
        found: Table = before[None, :] - before[:, None]
        return found

    def _senders(self) -> NDArray[np.bool_]:
        """[cut, layer] the layers before a cut whose outputs a layer behind it needs."""
        found = np.zeros_like(self.cuts)
        for source, target in self.problem.links:
            found[:, source] |= self.cuts[:, source] & ~self.cuts[:, target]
        return found

    def _tied(self) -> tuple[Table, Table]:
        """[first, end] bytes of tied weights: copies of others' that a stage keeps, and shared."""
        copied = split = np.zeros((self.size, self.size))
        for tied in definitions.tied_weights(self.problem.layers):
            sharers, holders, everybody = (
                self._sums([layer.id in names for layer in self.problem.layers])
                for names in (tied.sharers, tied.holders, tied.sharers | tied.holders)
            )
            alone = (sharers > 0) & (holders < len(tied.holders))
            parted = (everybody > 0) & (everybody < len(tied.sharers | tied.holders))
            copied, split = copied + alone * tied.num_bytes, split + parted * tied.num_bytes
        return copied, split

    def least_sum(self, cap: float, step_seconds: float) -> float:
        """The least sum of any plan whose stages all keep to the cap; infinite if none does."""
        # Stages are added from the last one on. A state is how many devices of each type they use,
        # how many they are, if that is asked for, and the type of the foremost.
        wanted, none = self.num_stages, (0,) * len(self.devices)
        start = np.full(self.size, inf)
        start[-1] = 0.0
        tables: dict[tuple[tuple[int, ...], int], dict[int | None, Table]] = {
            (none, 0): {None: start}
        }
        least = self._single(cap, step_seconds) if wanted in (None, 1) else inf
        # Moves use devices, so every state is complete before its turn.
        for state in sorted(product(*(range(n + 1) for n in self.devices)), key=sum):
            for number in range(wanted or 1):
                behind = tables.pop((state, number), {})
                for pool, replicas in self._moves(state) if behind else ():
                    stage = self._stage(pool, replicas, sum(state) + replicas)
                    # Stages that alone make a longer step necessary are in no plan.
                    allowed = (stage.figure <= cap) & (stage.alone <= step_seconds)
                    # [cut] what follows, by the type of the stage behind: its link decides the
                    # message.
                    rest = np.minimum.reduce(
                        [
                            table + self._message_seconds(pool, replicas, kind)
                            for kind, table in behind.items()
                        ]
                    )
                    whole = np.where(allowed, stage.seconds, inf) + rest[None, :]
                    if wanted in (None, number + 1):
                        least = min(least, float((whole[0] + stage.closing).min()))
                    used = tuple(n + replicas * (at == pool) for at, n in enumerate(state))
                    target = tables.setdefault((used, number + (wanted is not None)), {})
                    after = whole.min(axis=1)
                    if np.isfinite(after).any():
                        target[pool] = np.minimum(after, target.get(pool, inf))
        return least

    def _message_seconds(self, pool: int, replicas: int, behind: int | None) -> Any:
        """[cut] seconds of a microbatch's messages between a stage and one of a type behind it."""
        if behind is None or self.problem.minimises != "step_seconds":
            return 0.0
        kind = self.problem.pools[pool]
        if behind == pool:
            # At best the stage's devices and one of the next share the smallest component that
            # holds them.
            rate = _fastest(kind, replicas + 1)
        else:
            rate = min(_fastest(kind, replicas), self.problem.inter_bytes_per_second or inf)
        return 2 * (definitions.message_seconds(self.problem) + self.inputs[:, 0] / rate)

    def _moves(self, state: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        for pool, used in enumerate(state):
            for replicas in range(1, self.devices[pool] - used + 1):
                if self.problem.may_replicate(replicas) and (replicas == 1 or self.replication):
                    yield pool, replicas

    def _single(self, cap: float, step_seconds: float) -> float:
        """The least sum of one stage of all layers, whose passes may cost less."""
        least = inf
        for pool, replicas in self._moves((0,) * len(self.devices)):
            stage = self._counted(pool, replicas, replicas, 1)
            if stage.figure[0, -1] <= cap and stage.alone[0, -1] <= step_seconds:
                least = min(least, float(stage.seconds[0, -1] + stage.closing[-1]))
        return least

    def _stage(self, pool: int, replicas: int, workers: int) -> _Stage:
        key = (pool, replicas, workers)
        if key not in self.stages:
            self.stages[key] = self._counted(*key, 2)
        return self.stages[key]

    def _counted(self, number: int, replicas: int, workers: int, num_stages: int) -> _Stage:
        problem, pool = self.problem, self.problem.pools[number]
        own_forward, own_backward = definitions.own_seconds(problem, pool, num_stages)
        forward = self._sums(pool.forward_seconds)
        again = forward if self.recompute else 0.0
        backward = self._sums(pool.backward_seconds) + again + own_backward
        forward = forward + own_forward
        link = _fastest(pool, replicas)
        total = max(sum(layer.weight_bytes for layer in problem.layers), 1)
        update: Any = pool.update_seconds * self.weights / total
        shared: Any = self.split
        tied: Any = np.zeros_like(self.split)
        if shared.any():
            slowest = definitions.slowest_link(problem)
            tied = definitions.ring_seconds(shared, replicas + 1, slowest)
        weights: Any = self.weights  # arrays go where numbers do
        rings: Any = definitions.reduce_seconds(problem, pool, weights, replicas, link)
        count = problem.num_microbatches
        figure: Any
        if problem.minimises == "step_seconds":
            left_forward, left_backward = self._left(replicas, workers)
            figure = left_forward * forward + left_backward * backward
        else:
            compute: Any = forward + backward
            if problem.stage_cost == "thesis":
                figure = definitions.thesis_seconds(compute, weights, replicas, link)
            else:
                figure = definitions.stage_seconds(problem, compute, update, replicas, rings)
            message = definitions.message_seconds(problem)
            before = 2 * (message + self.inputs / self._fastest_pair())
            # Nothing is sent into the first stage.
            before[0] = 0.0
            flushes = problem.traits.flushes and problem.stage_cost == "ring"
            figure = np.maximum(figure, before * (count - 1) / count if flushes else before)
        held = definitions.in_flight(problem.schedule, workers, replicas, count)
        # A stage of layers in their own order may count more, never less.
        _, used = definitions.replica_bytes(
            problem,
            pool,
            self.bytes[number],
            definitions.weight_versions(problem.schedule, held),
            definitions.moments(problem.schedule, held, replicas, count),
            replicas,
            recompute=self.recompute,
        )
        beside = pool.workspace_bytes + (pool.base_memory_bytes or 0)
        fits = self.is_stage.copy()
        if pool.memory_bytes is not None:
            # A byte for rounding.
            fits &= used + beside <= pool.memory_bytes + 1
        seconds = forward + backward
        # For the slowest stage the cap says all: what remains of the sum is whether a path exists.
        if problem.minimises != "step_seconds":
            seconds, update, rings, tied = 0.0 * seconds, 0.0 * update, 0.0 * rings, 0.0 * tied
        mine = definitions.microbatches_of_busiest(count, replicas)
        # Its first microbatch waits for the stages before; then all of its own passes, and its
        # end.
        alone = self.before[:, None] + mine * (forward + backward) + rings + update + tied
        return _Stage(np.where(fits, seconds, inf), figure, (rings + update + tied)[0], alone)

    def _inside(self, number: int) -> Any:
        """[begins, ends] whether a stage between two cuts holds a layer."""
        return self.cuts[None, :, number] & ~self.cuts[:, None, number]

    def _bytes(self, pool: DevicePool) -> definitions.StageContents:
        """What the stages between all cuts consist of, on devices of a pool."""
        none = np.zeros((self.size, self.size))
        kept, summed, most, with_all = none, none, none, none - inf
        savers: dict[int, list[tuple[int, int]]] = {}
        for number, layer in enumerate(self.problem.layers):
            for saver, size in layer.saved_later:
                savers.setdefault(saver, []).append((number, size))
        for number, layer in enumerate(self.problem.layers):
            mine = self._inside(number)
            aside = pool.layer_workspace_bytes[number] if pool.layer_workspace_bytes else 0
            kept, summed = kept + mine * layer.kept_bytes, summed + mine * layer.weight_bytes
            # Outputs that a later layer saves first are kept from there on, by stages of both.
            kept = kept - mine * sum(size for _, size in layer.saved_later)
            for maker, size in savers.get(number, ()):
                kept = kept + (mine & self._inside(maker)) * size
            if layer.kept_bytes or layer.weight_bytes or layer.activation_bytes:
                most = np.where(mine, np.maximum(most, kept + aside), most)
                with_all = np.where(mine, np.maximum(with_all, kept + aside - summed), with_all)
        with_all = np.where(self.is_stage, np.maximum(with_all, -summed) + summed, 0.0)
        sent: Any = self.inputs.T
        return definitions.StageContents(
            self.weights + self.copied, self.split, kept, most, with_all, none, self.inputs, sent
        )

    def _left(self, replicas: int, workers: int) -> tuple[int, int]:
        """Passes that a stage has left at least when its first gradient arrives."""
        problem = self.problem
        mine = definitions.microbatches_of_busiest(problem.num_microbatches, replicas)
        # GPipe's last stage first makes all its forward passes; of its other stages only backward
        # passes are counted.
        if problem.traits.order == "forward-first":
            return (mine - 1 if workers == replicas else 0), mine - 1
        # 1F1B has admitted as many microbatches as it holds.
        held = definitions.in_flight(problem.schedule, workers, replicas, problem.num_microbatches)
        return max(mine - held, 0), mine - 1

    def _fastest_pair(self) -> float:
        """Bytes per second of the fastest link that two stages may have between them."""
        several = [pool for pool in self.problem.pools if pool.num_devices > 1]
        inside = max((_fastest(pool, 2) for pool in several), default=0.0)
        return max(inside, self.problem.inter_bytes_per_second or 0.0) or inf


def _fastest(pool: DevicePool, num_devices: int) -> float:
    """Bytes per second of the slowest link among so many devices, placed as near as can be."""
    inside, rate = 1, inf
    for level in pool.levels:
        if inside >= num_devices:
            break
        rate = min(rate, level.bytes_per_second)
        inside *= level.num_components
    return rate
