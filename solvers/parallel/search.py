"""Plans of one microbatch size and number of replicas: what they cost, and those tried first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from ...planning.costs.parallel_stage import gather_ratio, transfer_seconds
from ...planning.schedules.closed_forms import one_f_one_b_seconds
from ...schema.options import Shard
from ...schema.parallel import ParallelProblem
from ..effort import DEFAULT, Effort
from .bound import Path, Relaxation
from .counts import UndecidedError, deal_to_places
from .gradients import Rings
from .labels import Stages
from .space import ROOM, OptionSpace, StageOption, unlike_of


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage of a plan that was found: options by number in the space, with their replicas."""

    start: int
    end: int
    mix: tuple[int, ...]
    compute_seconds: float
    transfer_seconds: float
    gather_seconds: float
    reduce_seconds: float
    update_seconds: float
    shares: tuple[int, ...]
    """Bytes of weights whose state a replica of each option keeps; empty where shares are equal."""
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A whole plan, stages from the first to the last."""

    step_seconds: float
    shard: Shard | None
    space: OptionSpace
    num_replicas: int
    num_microbatches: int
    stages: tuple[StageChoice, ...]


class ReplicaSearch:
    """Plans of ``num_replicas`` replicas a stage at one microbatch size."""

    def __init__(
        self,
        problem: ParallelProblem,
        space: OptionSpace,
        num_replicas: int,
        effort: Effort = DEFAULT,
    ) -> None:
        self.problem, self.space, self.d, self.effort = problem, space, num_replicas, effort
        per_round = space.microbatch_size * num_replicas
        self.num_microbatches = -(-problem.global_batch_size // per_round)
        self.size = len(problem.layers)
        self.devices = [pool.num_devices for pool in problem.pools]
        self.most_stages = min(
            self.size, sum(self.devices) // num_replicas, problem.most_stages or self.size
        )
        self.mixes = [
            mix for mix in space.mixes if len(mix) <= num_replicas and self._is_affordable(mix)
        ]

    def _is_affordable(self, mix: tuple[int, ...]) -> bool:
        """Whether the pool has the devices of one stage."""
        options = [self.space.options[o] for o in mix]
        # A pair has one replica of each type at least.
        fewest = self.d if len(mix) == 1 else 1
        room = all(fewest * o.tensor_parallel_size <= self.devices[o.pool] for o in options)
        return room and sum(self.devices[o.pool] // o.tensor_parallel_size for o in options) >= (
            self.d
        )

    @cached_property
    def least_by_capacity(self) -> float:
        """Seconds that no plan is faster than, by what the pool can compute; no search."""
        if self.most_stages < 1 or not self.mixes:
            return inf
        rooms = [
            inf if p.memory_bytes is None else p.num_devices * p.memory_bytes * ROOM
            for p in self.problem.pools
        ]
        # Not even spread over all memory does one copy of everything fit.
        if self.d * self.space.least_bytes > sum(rooms):
            return inf
        slowest = self.least_slowest
        passes = (self.num_microbatches - 1) * self.d / self.space.worth_per_second
        # Of all m - 1 further microbatches each layer is priced at what it takes from the whole
        # pool.
        through = self.space.least_priced(passes)
        return max(through, (self.num_microbatches - 1) * slowest + slowest)

    @property
    def least_slowest(self) -> float:
        """Seconds that the slowest stage takes at least, by what the pool can compute."""
        return self.d * self.space.least_worth / self.space.worth_per_second

    @cached_property
    def relaxation(self) -> Relaxation:
        """What bounds its plans."""
        return Relaxation(
            self.problem,
            self.space,
            self.d,
            self.num_microbatches,
            self.most_stages,
            self.effort,
        )

    def one_stage(self, below: float) -> Iterator[FoundPlan]:
        """The plans of a single stage that fit and take less than ``below`` seconds."""
        for mix in self.mixes:
            if all(self.space.options[o].fits(0, self.size, 1) for o in mix):
                found = self.found(((0, self.size, mix, 0),), below)
                if found is not None:
                    yield found

    def balanced(self, below: float) -> Iterator[FoundPlan]:
        """Plans of one type and degree whose stages take about as long; under ``below`` seconds."""
        # For a limit early: what a person would try first. Each stage recomputes only if it must.
        options = self.space.options
        alike: dict[tuple[int, int], list[int]] = {}
        for mix in self.mixes:
            if len(mix) == 1:
                option = options[mix[0]]
                alike.setdefault((option.pool, option.tensor_parallel_size), []).append(mix[0])
        for (pool, degree), numbers in alike.items():
            # The fastest kind of recomputation first; slower ones save memory.
            numbers.sort(key=lambda number: options[number].seconds[-1])
            most = min(self.most_stages, self.devices[pool] // (self.d * degree))
            # As many stages as there may be, and powers of two below.
            for num_stages in sorted({most, *(2**i for i in range(most.bit_length()))} - {0}):
                if num_stages <= most:
                    found = self._balanced(numbers, num_stages, below)
                    if found is not None:
                        below = found.step_seconds
                        yield found

    def _balanced(self, numbers: list[int], num_stages: int, below: float) -> FoundPlan | None:
        """That plan, where each stage fits one of these options."""
        seconds = np.array(self.space.options[numbers[0]].seconds)
        whole = float(seconds[-1])
        # Perfect balance would not be faster than what is known.
        if (self.num_microbatches - 1) * whole / num_stages + whole >= below:
            return None
        targets = whole * np.arange(1, num_stages) / num_stages
        cuts = np.abs(seconds[None, :] - targets[:, None]).argmin(axis=1)
        bounds = sorted({0, self.size, *cuts.tolist()})
        longest = float(np.diff(seconds[bounds]).max())
        # Nor is this cut, before anything of it is timed.
        if (self.num_microbatches - 1) * longest + whole >= below:
            return None
        return self.of_path(tuple((numbers[0], *stage) for stage in pairwise(bounds)), below)

    def of_path(self, path: Path, below: float) -> FoundPlan | None:
        """The plan of a path, whose stages recompute only if they must; None for too many stages.

        Bounds of many regions at once do not count a path's stages.
        """
        if len(path) > self.most_stages:
            return None
        stages: list[tuple[int, int, tuple[int, ...], int]] = []
        for number, (option, start, end) in enumerate(path):
            in_flight = min(len(path) - number, self.num_microbatches)
            alike = self._alike[option]
            fitting = next(
                (n for n in alike if self.space.options[n].fits(start, end, in_flight)), None
            )
            # None of this type fits, with or without recomputation.
            if fitting is None:
                return None
            stages.append((start, end, (fitting,), 0))
        return self.found(tuple(stages), below)

    @cached_property
    def _alike(self) -> list[list[int]]:
        """[options] those that differ by recomputation alone, the fastest first."""
        kinds: dict[tuple[int, int], list[int]] = {}
        keys = [(o.pool, o.tensor_parallel_size) for o in self.space.options]
        order = sorted(range(len(keys)), key=lambda n: self.space.options[n].seconds[-1])
        for number in order:
            kinds.setdefault(keys[number], []).append(number)
        return [kinds[key] for key in keys]

    def found(self, stages: Stages, below: float) -> FoundPlan | None:
        """The plan of these stages, which fit; None where it takes ``below`` seconds or more."""
        # Also where its replicas cannot be dealt within the pool.
        options, p = self.space.options, len(stages)
        between = self.space.between
        outputs, gradients = [], [0.0]
        # A message is as slow as the slowest link of either side.
        for (_, end, before, _), (_, _, after, _) in pairwise(stages):
            both = [options[o] for o in (*before, *after)]
            crossing = 0.0 if between is None else between[np.ix_(before, after)][..., end].max()
            outputs.append(max(float(crossing), *(o.output_seconds[end] for o in both)))
            gradients.append(max(float(crossing), *(o.gradient_seconds[end] for o in both)))
        chosen = []
        for number, (start, end, mix, first) in enumerate(stages):
            own = [options[o] for o in mix]
            shares: tuple[int, ...] = ()
            if first:
                in_flight = min(p - number, self.num_microbatches)
                shares = unlike_of(self.space, mix, first, (start, end), in_flight)
            reduce = self._rings.of_mix(self.space, mix, start, end)
            chosen.append(
                StageChoice(
                    start=start,
                    end=end,
                    mix=mix,
                    compute_seconds=(
                        compute := max(o.seconds[end] - o.seconds[start] for o in own)
                    ),
                    gather_seconds=self._with_transfers(start, end, own) - compute,
                    transfer_seconds=transfer_seconds(
                        self.problem.cost_rule,
                        output_seconds=[*outputs, 0.0][number],
                        gradient_seconds=gradients[number],
                        is_first=number == 0,
                        is_last=number == p - 1,
                        num_stages=p,
                    ),
                    reduce_seconds=reduce,
                    update_seconds=self._update(start, end, mix, shares, reduce),
                    shares=shares,
                )
            )
        waits = 0.0 if self.problem.hides_messages else 1.0
        passes = one_f_one_b_seconds(
            [
                one.compute_seconds + one.gather_seconds + waits * one.transfer_seconds
                for one in chosen
            ],
            [(1.0 - waits) * seconds for seconds in outputs],
            self.num_microbatches,
        )
        ends = [
            max(one.update_seconds for one in chosen),
            max(one.reduce_seconds for one in chosen),
        ]
        total = passes + sum(ends)
        # Too slow, so whether its replicas have places is not asked.
        if total >= below:
            return None
        groups = [
            tuple((options[o].pool, options[o].tensor_parallel_size) for o in mix)
            for _, _, mix, _ in stages
        ]
        fixed = [first for *_, first in stages]
        try:
            counts = deal_to_places(groups, fixed, self.d, self.problem.pools)
        except UndecidedError:
            # Undecided is no plan here; the labels keep its bound.
            return None
        if counts is None:
            return None
        dealt = tuple(
            replace(one, replicas=replicas) for one, replicas in zip(chosen, counts, strict=True)
        )
        return FoundPlan(
            total, self.problem.shard, self.space, self.d, self.num_microbatches, dealt
        )

    @cached_property
    def _rings(self) -> Rings:
        return Rings(self.problem, self.d, self.effort)

    def _with_transfers(self, start: int, end: int, options: list[StageOption]) -> float:
        """Passes of a stage of these options, with what transfers of shared weights add to them."""
        pools = tuple(option.pool for option in options)
        return max(
            option.seconds[end] - option.seconds[start]
            + (0.0 if option.units is None else float(self._rings.waits(option, pools)[start, end]))
            for option in options
        )  # fmt: skip

    def _update(
        self, start: int, end: int, mix: tuple[int, ...], shares: tuple[int, ...], reduce: float
    ) -> float:
        """The optimizer update of a stage on that mix, with what it exchanges."""
        options = [self.space.options[o] for o in mix]
        gathers = gather_ratio(self.problem) * reduce
        if self.problem.cost_rule == "sailor":
            each = [option.update_at[start] for option in options]
        else:
            each = [option.updates[end] - option.updates[start] for option in options]
        if shares:
            parts = zip(options, shares, each, strict=True)
            each = [whole * float(o.times_equal(own, (start, end))) for o, own, whole in parts]
        return max(each) + gathers
