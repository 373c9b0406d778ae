"""Prove the bound of a pipeline of a chain of layers, by a table of caps of the judge's own.

For the slowest stage: no cut of the chain has all stages and boundaries below the bound. For a step
with a flush, each stage s shows that the step takes at least a sum and a rest,

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
from math import inf, prod
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
    """All stages of one kind, by the layers [first, end) that they hold.

    Attributes:
        seconds: [first, end] a microbatch's passes and the messages before the stage.
        figure: [first, end] what a cap limits: the rest, or the seconds per input.
        closing: [end] all-reduce and update, if it is the first stage.
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
    chain = {(at, at + 1) for at in range(len(problem.layers) - 1)}
    known = problem.traits.order if problem.minimises == "step_seconds" else "alternating"
    if (
        problem.solved != "flat"
        or problem.stage_cost == "published"
        or problem.cut_rule != "edges"
        or not problem.count_boundaries
        or {*problem.links} != chain
        or any(layer.shared_with for layer in problem.layers)
        or known == "own"
    ):
        return False
    kinds = prod(pool.num_devices + 1 for pool in problem.pools)
    moves = sum(pool.num_devices for pool in problem.pools)
    if kinds * moves * len(problem.layers) ** 2 > MOST_WORK:
        return False
    return all(
        _holds(_Model(problem, asked, recomputes), bound * (1 - 1e-9)) for recomputes in recompute
    )


def _holds(model: "_Model", bound: float) -> bool:
    if model.problem.minimises != "step_seconds":
        return model.least_sum(bound, inf) == inf
    cap = bound = bound - min(pool.fixed_seconds for pool in model.problem.pools)
    for _ in range(_MOST_CAPS):
        least = model.least_sum(cap, bound)
        if least >= bound:
            return True
        if bound - least >= cap * (1 - 1e-12):
            return False
        cap = bound - least
    return False


class _Model:
    """The stages of one problem, with or without recomputation."""

    def __init__(self, problem: PipelineProblem, asked: Restrictions, recompute: bool) -> None:
        self.problem, self.recompute = problem, recompute
        self.num_stages = asked.num_stages or problem.num_stages
        self.replication = problem.replication and asked.replication is not False
        self.size = len(problem.layers) + 1
        self.weights = self._sums([layer.weight_bytes for layer in problem.layers])
        self.kept = self._sums([layer.kept_bytes for layer in problem.layers])
        sent = [0.0, *(layer.activation_bytes for layer in problem.layers)]
        self.inputs = np.array(sent)[:, None]  # [first, 1]
        # [first] forward seconds of the layers before a stage, each on its fastest device
        ahead = zip(*(pool.forward_seconds for pool in problem.pools), strict=True)
        self.before = self._sums([min(seconds) for seconds in ahead])[0]
        self.devices = [pool.num_devices for pool in problem.pools]
        self.stages: dict[tuple[int, int, int], _Stage] = {}

    def _sums(self, values: Sequence[float]) -> Table:
        """[first, end] sums over the layers of a stage."""
        ends = np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])
        found: Table = ends[None, :] - ends[:, None]
        return found

    def least_sum(self, cap: float, step_seconds: float) -> float:
        """The least sum of any plan whose stages all keep to the cap; infinite if none does.

        Stages that make a longer step necessary by themselves are in no plan.

        Stages are added from the last one on. A state is how many devices of each type they use.
        """
        wanted, none = self.num_stages, (0,) * len(self.devices)
        start = np.full(self.size, inf)
        start[-1] = 0.0
        tables = {(none, 0): start}  # (devices used, stages if their number is asked for)
        least = self._single(cap, step_seconds) if wanted in (None, 1) else inf
        for state in sorted(product(*(range(n + 1) for n in self.devices)), key=sum):
            for number in range(wanted or 1):
                behind = tables.pop((state, number), None)
                if behind is None or not np.isfinite(behind).any():
                    continue
                for pool, replicas in self._moves(state):
                    stage = self._stage(pool, replicas, sum(state) + replicas)
                    allowed = (stage.figure <= cap) & (stage.alone <= step_seconds)
                    within = np.where(allowed, stage.seconds, inf)
                    if wanted in (None, number + 1):
                        least = min(least, float((within[0] + stage.closing + behind).min()))
                    after = (within + behind[None, :]).min(axis=1)
                    used = tuple(n + replicas * (at == pool) for at, n in enumerate(state))
                    target = (used, number + (wanted is not None))
                    known = tables.setdefault(target, np.full(self.size, inf))
                    np.minimum(known, after, out=known)
        return least

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
        message = definitions.message_seconds(problem)
        before = 2 * (message + self.inputs / self._fastest_pair())
        before[0] = 0.0
        link = _fastest(pool, replicas)
        total = max(sum(layer.weight_bytes for layer in problem.layers), 1)
        update = pool.update_seconds * self.weights / total
        rings = np.array(
            [
                [definitions.reduce_seconds(problem, pool, w, replicas, link) for w in row]
                for row in self.weights.tolist()
            ]
        )
        count = problem.num_microbatches
        if problem.minimises == "step_seconds":
            left_forward, left_backward = self._left(replicas, workers)
            figure = left_forward * forward + left_backward * backward
        else:
            compute = forward + backward
            per_input = np.vectorize(self._per_input)
            figure = per_input(compute, self.weights, update, rings, replicas, link)
            flushes = problem.traits.flushes and problem.stage_cost == "ring"
            figure = np.maximum(figure, before * (count - 1) / count if flushes else before)
        held = definitions.in_flight(problem.schedule, workers, replicas, count)
        own: Any = self.weights  # arrays go where numbers do
        kept: Any = self.kept
        inputs: Any = self.inputs
        versions = definitions.weight_versions(problem.schedule, held)
        state = problem.optimizer.state_bytes_per_weight_byte
        used = definitions.replica_bytes(
            own, kept, inputs, (held, versions), state, recompute=self.recompute
        )
        beside = pool.workspace_bytes + (pool.base_memory_bytes or 0)
        fits = np.arange(self.size)[:, None] < np.arange(self.size)[None, :]
        if pool.memory_bytes is not None:
            fits &= used + beside <= pool.memory_bytes + 1
        seconds = forward + backward + before
        if problem.minimises != "step_seconds":
            seconds, update, rings = 0.0 * seconds, 0.0 * update, 0.0 * rings
        mine = definitions.microbatches_of_busiest(count, replicas)
        alone = self.before[:, None] + mine * (forward + backward) + rings + update
        return _Stage(np.where(fits, seconds, inf), figure, (rings + update)[0], alone)

    def _per_input(
        self, compute: float, weights: float, update: float, ring: float, replicas: int, link: float
    ) -> float:
        if self.problem.stage_cost == "thesis":
            return definitions.thesis_seconds(compute, weights, replicas, link)
        return definitions.stage_seconds(self.problem, compute, update, replicas, ring)

    def _left(self, replicas: int, workers: int) -> tuple[int, int]:
        """Passes that a stage has left at least when its first gradient arrives.

        1F1B has admitted as many microbatches as it holds. GPipe's last stage first makes all its
        forward passes; of its other stages only the backward passes are counted.
        """
        problem = self.problem
        mine = definitions.microbatches_of_busiest(problem.num_microbatches, replicas)
        if problem.traits.order == "forward-first":
            return (mine - 1 if workers == replicas else 0), mine - 1
        held = definitions.in_flight(problem.schedule, workers, replicas, problem.num_microbatches)
        return max(mine - held, 0), mine - 1

    def _fastest_pair(self) -> float:
        """Bytes per second of the fastest link that two stages may have between them."""
        inside = max(_fastest(pool, 2) for pool in self.problem.pools)
        return max(inside, self.problem.inter_bytes_per_second or 0.0)


def _fastest(pool: DevicePool, num_devices: int) -> float:
    """Bytes per second of the slowest link among so many devices, placed as near as can be."""
    inside, rate = 1, inf
    for level in pool.levels:
        if inside >= num_devices:
            break
        rate = min(rate, level.bytes_per_second)
        inside *= level.num_components
    return rate
