"""Stages placed from the last to the first, for one microbatch size and number of replicas.

``Search.roots`` and ``Search.expand`` give the nodes of a branch and bound; solve.py keeps all
searches' nodes in one heap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, permutations, product
from math import inf
from typing import NamedTuple

import numpy as np

from ...costs.parallel_stage import gather_seconds, transfer_seconds
from ...schema.parallel import ParallelProblem, first_devices, is_inside
from ..effort import DEFAULT, Effort
from .bound import Completions, Coverage, Prices, device_prices, stage_seconds, time_prices
from .counts import Group, deal
from .gradients import reduce_seconds, reduce_tables
from .space import Space, fitting

_HALVINGS = 4  # of the range of the slowest stage's time, for a bound
_LEVELS = 4  # of the longest all-reduce, each with a bound of its own
_SLACK = 1 + 1e-12  # for sums of prices that meet a budget exactly


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage of a plan that was found: options by number in the space, with their replicas."""

    start: int
    end: int
    mix: tuple[int, ...]
    compute_seconds: float
    transfer_seconds: float
    reduce_seconds: float
    update_seconds: float
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A whole plan, stages from the first to the last."""

    step_seconds: float
    space: Space
    num_replicas: int
    num_microbatches: int
    stages: tuple[StageChoice, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Stages placed so far, the first of them last; layers 0 to ``end - 1`` are left.

    Messages of the stage placed last to the one before it are not known yet, so ``slowest`` and
    ``total`` are without that stage: ``pending_seconds`` is its compute, ``output_seconds`` its
    message onwards, ``mix`` its options.
    """

    least_seconds: float
    end: int
    slowest_seconds: float
    total_seconds: float
    update_seconds: float
    reduce_seconds: float
    pending_seconds: float
    output_seconds: float
    mix: tuple[int, ...]
    price: np.ndarray
    stages: tuple[StageChoice, ...]


class Child(NamedTuple):
    """A stage that may be placed next: its bound on the step, its mix by number, its start.

    ``share_of_devices`` is what the plan takes of the pool at least with it, by the dearest prices.
    """

    least_seconds: float
    mix: int
    start: int
    share_of_devices: float


class Search:
    """Plans of ``num_replicas`` replicas a stage at one microbatch size.

    Args:
        problem: Whose plans.
        space: The options at the microbatch size.
        num_replicas: d, of every stage.
        effort: Says when to stop. All but ``one_stage`` and ``balanced``, which take milliseconds,
            then raise OutOfTimeError.
    """

    def __init__(
        self, problem: ParallelProblem, space: Space, num_replicas: int, effort: Effort = DEFAULT
    ) -> None:
        self.problem, self.space, self.d, self.effort = problem, space, num_replicas, effort
        per_round = space.microbatch_size * num_replicas
        self.num_microbatches = -(-problem.global_batch_size // per_round)
        self.size = len(problem.layers)
        devices = sum(pool.num_devices for pool in problem.pools)
        self.most_stages = min(self.size, devices // num_replicas, problem.most_stages or self.size)
        self._devices = device_prices(problem.pools, num_replicas)
        self._mixes = [
            mix for mix in space.mixes if len(mix) <= num_replicas and self._is_affordable(mix)
        ]
        # For each level of the longest all-reduce: its least, and the slowest stage's under it.
        self._levels = np.zeros((2, 1))
        self._mix_prices = np.zeros((len(self._mixes), 0))  # none before ``root``

    @cached_property
    def least_by_capacity(self) -> float:
        """Seconds that no plan is faster than, by what the pool can compute; no search.

        Devices of type i are priced at one over the device seconds W_i that all layers take on
        them. A replica of all layers then takes at least the sum over layers of the least price,
        and the pool offers the sum of n_i / W_i a second.
        """
        if self.most_stages < 1 or not self._mixes:
            return inf
        slowest = self._slowest_by_capacity
        return (self.num_microbatches - 1) * slowest + max(self.space.least_seconds[-1], slowest)

    @cached_property
    def _slowest_by_capacity(self) -> float:
        return self.d * self.space.least_worth / self.space.worth_per_second

    def least_step(self, below: float) -> float:
        """Seconds that no plan under ``below`` is faster than; at least ``below`` where none is.

        Plans are told apart by their longest all-reduce, in levels. Under each level's end the
        slowest stage takes at least what the relaxation needs to cover all layers (bisection).
        """
        cap, m = self._cap(below), self.num_microbatches
        if cap <= 0 or not self._coverage.covers(np.array([cap]), np.array([inf]))[0]:
            return below
        floor = self._bisected(np.array([self._slowest_by_capacity]), cap, np.array([inf]))[0]
        starts = max(below - m * floor, 0.0) / _LEVELS * np.arange(_LEVELS)
        ends = np.append(starts[1:], inf)
        slowest = self._bisected(np.full(_LEVELS, floor), cap, ends)
        self._levels = np.array([starts, slowest])
        through = np.maximum(self.space.least_seconds[-1], slowest)
        return float(((m - 1) * slowest + through + starts).min())

    def _bisected(self, low: np.ndarray, cap_seconds: float, reduce: np.ndarray) -> np.ndarray:
        """The longest caps found under which layers are not covered [cases].

        Args:
            low: [cases] such caps.
            cap_seconds: A longer one.
            reduce: [cases] the longest all-reduce that is allowed.
        """
        high = np.maximum(low, cap_seconds)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            is_covered = self._coverage.covers(middle, reduce)
            low, high = np.where(is_covered, low, middle), np.where(is_covered, middle, high)
        return low

    def one_stage(self, below: float) -> Iterator[Found]:
        """The plans of a single stage that fit and take less than ``below`` seconds."""
        root = self._root(np.zeros(0))
        for number, mix in enumerate(self._mixes):
            if all(self.space.options[o].fits(0, self.size, 1) for o in mix):
                compute = max(self.space.options[o].seconds[-1] for o in mix)
                found = self._finish(root, number, compute, below)
                if found is not None:
                    yield found

    def balanced(self, below: float) -> Iterator[Found]:
        """Plans of one type and degree whose stages take about as long; under ``below`` seconds.

        For a limit early: what a person would try first. Each stage recomputes only if it must.
        """
        options = self.space.options
        alike: dict[tuple[int, int], list[int]] = {}
        for number, mix in enumerate(self._mixes):
            if len(mix) == 1:
                option = options[mix[0]]
                alike.setdefault((option.pool, option.tensor_parallel_size), []).append(number)
        for (pool, degree), numbers in alike.items():
            numbers.sort(key=lambda number: options[self._mixes[number][0]].seconds[-1])
            devices = self.problem.pools[pool].num_devices
            most = min(self.most_stages, devices // (self.d * degree))
            for num_stages in sorted({most, *(2**i for i in range(most.bit_length()))} - {0}):
                if num_stages <= most:
                    found = self._balanced(numbers, num_stages, below)
                    if found is not None:
                        below = found.step_seconds
                        yield found

    def _balanced(self, numbers: list[int], num_stages: int, below: float) -> Found | None:
        """That plan, where each stage fits one of the mixes of these numbers."""
        seconds = np.array(self.space.options[self._mixes[numbers[0]][0]].seconds)
        targets = seconds[-1] * np.arange(1, num_stages) / num_stages
        cuts = np.abs(seconds[None, :] - targets[:, None]).argmin(axis=1)
        bounds = sorted({0, self.size, *cuts.tolist()})
        longest = float(np.diff(seconds[bounds]).max())
        if (self.num_microbatches - 1) * longest + float(seconds[-1]) >= below:
            return None
        node = self._root(np.zeros(self._mix_prices.shape[1]))
        for placed, (start, end) in enumerate(reversed(list(pairwise(bounds)))):
            in_flight = min(placed + 1, self.num_microbatches)
            number = next((n for n in numbers if self._has_room(n, start, end, in_flight)), None)
            if number is None:
                return None
            if start == 0:
                option = self.space.options[self._mixes[number][0]]
                return self._finish(node, number, option.seconds[end] - option.seconds[0], below)
            node = self.placed(node, Child(0.0, number, start, 0.0))
        return None

    def _has_room(self, number: int, start: int, end: int, in_flight: int) -> bool:
        return all(self.space.options[o].fits(start, end, in_flight) for o in self._mixes[number])

    def of_two_types(self, below: float) -> Iterator[Found]:
        """Plans whose first stages are of one type and degree and the others of another.

        As many stages of both as the pool has room for, or half of that. For each
        such line of stages the cut whose slowest stage is the fastest; under ``below`` seconds.
        """
        kinds: dict[tuple[int, int], list[int]] = {}
        for number, mix in enumerate(self._mixes):
            if len(mix) == 1:
                option = self.space.options[mix[0]]
                kinds.setdefault((option.pool, option.tensor_parallel_size), []).append(number)
        for first, second in permutations(kinds, 2):
            if first[0] == second[0]:
                continue
            for counts in product(self._stage_counts(*first), self._stage_counts(*second)):
                line = [kinds[first]] * counts[0] + [kinds[second]] * counts[1]
                if len(line) <= self.most_stages and self._may_take(line) < below:
                    found = self._lined_up(line, below)
                    if found is not None:
                        below = found.step_seconds
                        yield found

    def _stage_counts(self, pool: int, degree: int) -> list[int]:
        most = self.problem.pools[pool].num_devices // (self.d * degree)
        return [most >> i for i in range(min(2, most.bit_length()))]

    def _may_take(self, line: list[list[int]]) -> float:
        """Seconds that no cut of a line of stages is faster than."""
        whole = [
            min(self.space.options[self._mixes[number][0]].seconds[-1] for number in numbers)
            for numbers in line
        ]
        slowest = 1.0 / sum(1.0 / seconds for seconds in whole) if min(whole) > 0 else 0.0
        return (self.num_microbatches - 1) * slowest + self.space.least_seconds[-1]

    def _lined_up(self, line: list[list[int]], below: float) -> Found | None:
        """The plan of a line of stages, each of the fastest fitting mix of these numbers."""
        least = np.where(np.arange(self.size + 1) == 0, 0.0, inf)
        parents = []
        for place, numbers in enumerate(line):
            self.effort.check()
            in_flight = min(len(line) - place, self.num_microbatches)
            reached = np.maximum(least[:, None], self._line_seconds(tuple(numbers), in_flight))
            parents.append(reached.argmin(axis=0))
            least = reached.min(axis=0)
        if self.num_microbatches * least[-1] >= below:
            return None
        node, end = self._root(np.zeros(self._mix_prices.shape[1])), self.size
        for placed, (numbers, parent) in enumerate(
            zip(reversed(line), reversed(parents), strict=True)
        ):
            start, in_flight = int(parent[end]), min(placed + 1, self.num_microbatches)
            fitting = [n for n in numbers if self._has_room(n, start, end, in_flight)]
            if not fitting:
                return None
            options = {n: self.space.options[self._mixes[n][0]] for n in fitting}
            number = min(fitting, key=lambda n: options[n].seconds[-1])
            if start == 0:
                option = options[number]
                return self._finish(node, number, option.seconds[end] - option.seconds[0], below)
            node, end = self.placed(node, Child(0.0, number, start, 0.0)), start
        return None

    def _line_seconds(self, numbers: tuple[int, ...], in_flight: int) -> np.ndarray:
        """What stages take on the fastest of these mixes that they fit [starts, ends]."""
        key = numbers, in_flight
        if key not in self._lines:
            options = [self.space.options[self._mixes[number][0]] for number in numbers]
            each = [np.where(fitting(o, in_flight), stage_seconds(o), inf) for o in options]
            self._lines[key] = np.min(each, axis=0)
        return self._lines[key]

    @cached_property
    def _lines(self) -> dict[tuple[tuple[int, ...], int], np.ndarray]:
        return {}

    def root(self, below: float) -> Node:
        """The node with no stage placed, its bound, and tables for plans under ``below``.

        The rows that count seconds bound one microbatch's pass through all stages.
        """
        self._prices = time_prices(self.problem.pools, self.d, self.space.least_seconds[-1])
        self._table = Completions(
            self.space,
            self._prices,
            self._cap(below),
            self.most_stages,
            self.num_microbatches,
            self.effort,
        )
        self._mix_prices = np.array([self._price(mix, self._prices) for mix in self._mixes])
        root = self._root(np.zeros(len(self._prices.budget)))
        through = float(self._through(root.price, self.size, 0))
        starts, slowest = self._levels
        least = (self.num_microbatches - 1) * slowest + np.maximum(through, slowest) + starts
        return replace(root, least_seconds=float(least.min()))

    def expand(self, node: Node, limit: float) -> tuple[list[Child], Found | None]:
        """Stages that could come next and still lead below ``limit``.

        Also the best plan under ``limit`` whose first stage is all that is left.
        """
        placed, cap = len(node.stages), self._cap(limit)
        self.effort.check()
        rows, best = self._prices.of_devices, None
        allowed = self._allowed(min(placed + 1, self.num_microbatches), node.end)
        compute = self._compute[:, : node.end, node.end]
        allowed = allowed & (compute <= cap * _SLACK)
        price = node.price + self._mix_prices
        for number in np.flatnonzero(allowed[:, 0]):
            found = self._finish(node, int(number), float(compute[number, 0]), limit)
            if found is not None:
                best, limit = found, found.step_seconds
        if placed + 1 >= self.most_stages or node.end < 2:
            return [], best
        left = price[:, :, None] + self._table.least[placed + 1][None, :, : node.end]
        over = left - self._prices.budget[None, :, None]  # [mixes, rows, starts]
        covered = (over[:, rows] <= 1e-9 * self._prices.budget[rows][None, :, None]).all(axis=1)
        known, output = self._known(node)
        seconds = compute + output[:, None] + self._gradients[:, : node.end]
        slowest = np.maximum(seconds, max(known, node.slowest_seconds))
        reduced = np.maximum(self._reduced[:, : node.end, node.end], node.reduce_seconds)
        least = self._least_of_levels(slowest, reduced) + node.total_seconds + known + seconds
        least += np.maximum(over[:, ~rows].max(axis=1), 0.0) + node.update_seconds
        keep = allowed & covered & (least < limit)
        keep[:, 0] = False
        chosen = np.argwhere(keep)
        bounds = np.maximum(least[keep], node.least_seconds)
        shares = (1.0 + over[:, rows] / self._prices.budget[rows][:, None]).max(axis=1)[keep]
        children = zip(bounds.tolist(), chosen.tolist(), shares.tolist(), strict=True)
        return [Child(bound, i, start, share) for bound, (i, start), share in children], best

    def _least_of_levels(self, slowest: np.ndarray, reduced: np.ndarray) -> np.ndarray:
        """All passes of the slowest stage but one, and the all-reduce, at least as given."""
        least = np.full_like(slowest, np.inf)
        for start, floor in self._levels.T:
            passes = (self.num_microbatches - 1) * np.maximum(slowest, floor)
            np.minimum(least, passes + np.maximum(reduced, start), out=least)
        return least

    def _known(self, node: Node) -> tuple[float, np.ndarray]:
        """Least seconds of the stage placed last, and of sending a microbatch on to it [mixes]."""
        if not node.mix:
            return 0.0, np.zeros(len(self._mixes))
        options, end = self.space.options, node.end
        own = max(options[o].gradient_seconds[end] for o in node.mix)
        onwards = max(options[o].output_seconds[end] for o in node.mix)
        outputs = np.maximum(self._outputs[:, end], onwards)
        if self.space.between is not None:
            crossing = self.space.between[:, list(node.mix), end].max(axis=1)
            outputs = np.maximum(outputs, [crossing[list(mix)].max() for mix in self._mixes])
        return node.pending_seconds + node.output_seconds + own, outputs

    @cached_property
    def _compute(self) -> np.ndarray:
        """Forward and backward of a stage on its slowest replicas [mixes, starts, ends]."""
        seconds = [np.array(option.seconds) for option in self.space.options]
        each = [s[None, :] - s[:, None] for s in seconds]
        return np.array([np.max([each[o] for o in mix], axis=0) for mix in self._mixes])

    @cached_property
    def _outputs(self) -> np.ndarray:
        """Sending a microbatch on across each boundary [mixes, ends]."""
        return self._slowest_of([np.array(o.output_seconds) for o in self.space.options])

    @cached_property
    def _gradients(self) -> np.ndarray:
        """Sending its gradient back across each boundary [mixes, starts]."""
        return self._slowest_of([np.array(o.gradient_seconds) for o in self.space.options])

    def _slowest_of(self, tables: list[np.ndarray]) -> np.ndarray:
        return np.array([np.max([tables[o] for o in mix], axis=0) for mix in self._mixes])

    def _allowed(self, in_flight: int, end: int) -> np.ndarray:
        """Whether stages up to ``end`` fit the memory [mixes, starts]."""
        key = in_flight, end
        if key not in self._fitting:
            by_option = np.array(
                [fitting(option, in_flight)[:end, end] for option in self.space.options]
            )
            self._fitting[key] = np.array([by_option[list(mix)].all(axis=0) for mix in self._mixes])
        return self._fitting[key]

    @cached_property
    def _fitting(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def _cap(self, seconds: float) -> float:
        """The longest time of a stage, in seconds, that a step under ``seconds`` allows."""
        m = self.num_microbatches
        left = seconds - self.space.least_seconds[-1]
        return min(seconds / m, left / (m - 1)) if m > 1 else seconds

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        return reduce_tables(self.problem, self.space, self.d, self.effort)

    def _reduce(self, number: int, start: int, end: int) -> float:
        """All-reduce of one stage on the mix of that number, before there are tables too."""
        return reduce_seconds(self.problem, self.space, self.d, self._mixes[number], start, end)

    @cached_property
    def _reduced(self) -> np.ndarray:
        """All-reduce of a stage [mixes, starts, ends]."""
        number = {mix: i for i, mix in enumerate(self.space.mixes)}
        reduced: np.ndarray = self._tables[0][[number[mix] for mix in self._mixes]]
        return reduced

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage(
            self.space,
            self._devices,
            self._tables[1],
            self.most_stages,
            self.num_microbatches,
            self.effort,
        )

    def _is_affordable(self, mix: tuple[int, ...]) -> bool:
        return bool((self._price(mix, self._devices) <= self._devices.budget).all())

    def _price(self, mix: tuple[int, ...], prices: Prices) -> np.ndarray:
        """The least price of one replica of a stage [rows]."""
        options = [self.space.options[o] for o in mix]
        each = [prices.by_pool[:, o.pool] * o.tensor_parallel_size for o in options]
        least: np.ndarray = np.min(each, axis=0)
        return least

    def _through(self, price: np.ndarray, end: int, placed: int) -> float:
        left = price + self._table.least[placed][:, end] - self._prices.budget
        return float(left[~self._prices.of_devices].max(initial=0.0))

    def _root(self, price: np.ndarray) -> Node:
        return Node(0.0, self.size, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), price, ())

    def placed(self, node: Node, child: Child) -> Node:
        """The node with one more stage."""
        mix, start = self._mixes[child.mix], child.start
        settled, output = self._settled(node, mix)
        options, end = self.space.options, node.end
        compute = max(options[o].seconds[end] - options[o].seconds[start] for o in mix)
        stage = StageChoice(
            start=start,
            end=end,
            mix=mix,
            compute_seconds=compute,
            transfer_seconds=0.0,
            reduce_seconds=self._reduce(child.mix, start, end),
            update_seconds=self._update(start, end, child.mix),
        )
        return replace(
            settled,
            least_seconds=child.least_seconds,
            end=start,
            update_seconds=max(node.update_seconds, stage.update_seconds),
            reduce_seconds=max(node.reduce_seconds, stage.reduce_seconds),
            pending_seconds=compute,
            output_seconds=output,
            mix=mix,
            price=node.price + self._mix_prices[child.mix],
            stages=(stage, *settled.stages),
        )

    def _settled(self, node: Node, mix: tuple[int, ...]) -> tuple[Node, float]:
        """The node with the stage placed last counted, now that ``mix`` is before it.

        Also what the stage before takes to send a microbatch on.
        """
        if not node.mix:
            return node, 0.0
        options, end = self.space.options, node.end
        both = (*mix, *node.mix)
        crossing = 0.0
        if self.space.between is not None:
            crossing = float(self.space.between[np.ix_(mix, node.mix)][..., end].max())
        gradient = max(crossing, *(options[o].gradient_seconds[end] for o in both))
        last = node.stages[0]
        transfer = transfer_seconds(
            self.problem.cost_rule,
            output_seconds=node.output_seconds,
            gradient_seconds=gradient,
            is_first=False,
            is_last=len(node.stages) == 1,
            num_stages=len(node.stages) + 1,
        )
        seconds = node.pending_seconds + transfer
        counted = replace(
            node,
            slowest_seconds=max(node.slowest_seconds, seconds),
            total_seconds=node.total_seconds + seconds,
            stages=(replace(last, transfer_seconds=transfer), *node.stages[1:]),
        )
        return counted, max(crossing, *(options[o].output_seconds[end] for o in both))

    def _finish(self, node: Node, number: int, compute: float, below: float) -> Found | None:
        """The plan whose first stage, of the mix of that number, is all that is left.

        None where it takes ``below`` seconds or more, or devices do not suffice.
        """
        if self.num_microbatches * compute >= below:
            return None
        mix = self._mixes[number]
        settled, output = self._settled(node, mix)
        transfer = transfer_seconds(
            self.problem.cost_rule,
            output_seconds=output,
            gradient_seconds=0.0,
            is_first=True,
            is_last=not node.mix,
            num_stages=len(settled.stages) + 1,
        )
        first = StageChoice(
            start=0,
            end=node.end,
            mix=mix,
            compute_seconds=compute,
            transfer_seconds=transfer,
            reduce_seconds=self._reduce(number, 0, node.end),
            update_seconds=self._update(0, node.end, number),
        )
        stages = (first, *settled.stages)
        seconds = compute + transfer
        slowest = max(settled.slowest_seconds, seconds)
        total = (self.num_microbatches - 1) * slowest + settled.total_seconds + seconds
        total += max(stage.update_seconds for stage in stages)
        total += max(stage.reduce_seconds for stage in stages)
        if total >= below:
            return None
        options = self.space.options
        groups = [
            tuple((options[o].pool, options[o].tensor_parallel_size) for o in stage.mix)
            for stage in stages
        ]
        counts = deal(groups, self.d, [pool.num_devices for pool in self.problem.pools])
        if counts is None or not self._has_places(groups, counts):
            return None
        dealt = tuple(
            replace(stage, replicas=replicas)
            for stage, replicas in zip(stages, counts, strict=True)
        )
        return Found(total, self.space, self.d, self.num_microbatches, dealt)

    def _has_places(
        self, groups: Sequence[Sequence[Group]], counts: Sequence[Sequence[int]]
    ) -> bool:
        """Whether servers hold the stages that are counted inside one, beside other groups."""
        for number, pool in enumerate(self.problem.pools):
            sizes: list[int] = []
            for stage, dealt in zip(groups, counts, strict=True):
                for (of_pool, degree), replicas in zip(stage, dealt, strict=True):
                    if of_pool == number and pool.inside is not None:
                        width, whole = pool.devices_per_server, degree * replicas
                        as_one = len(stage) == 1 and is_inside(whole, width)
                        sizes += [whole] if as_one else [degree] * replicas
            different = sorted({pool.devices_per_server, *sizes}, reverse=True)
            if all(large % small == 0 for large, small in pairwise(different)):
                continue  # each fills what larger ones leave
            if first_devices(sizes, pool.num_devices, pool.devices_per_server) is None:
                return False
        return True

    def _update(self, start: int, end: int, number: int) -> float:
        """The optimizer update of a stage on the mix of that number, with what it exchanges."""
        options = [self.space.options[o] for o in self._mixes[number]]
        gathers = 0.0
        if self.problem.shard_optimizer:
            gathers = gather_seconds(self._reduce(number, start, end))
        if self.problem.cost_rule == "sailor":
            return max(option.update_at[start] for option in options) + gathers
        return max(option.updates[end] - option.updates[start] for option in options) + gathers
