"""Plan pipeline, tensor and data parallelism together, on unlike devices.

The thesis (4.1) leaves this search as future work and picks degrees by rules of thumb. Here it is
exact over a stated space. The step is that of 1F1B with unlike stages, whose passes hide messages
(``one_f_one_b_from``), equation 4.1 where stages are equal. Interleaved pipelines are
searched apart (interleaved.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from math import ceil, inf

import numpy as np

from ...planning.costs.memory import fewest_missing
from ...planning.costs.parallel_stage import bubble_fraction
from ...planning.costs.sharding import owners_seconds
from ...schema.errors import InfeasibleError, ProblemError, TooLittleTimeError
from ...schema.options import Shard, option
from ...schema.parallel import ParallelPool, ParallelProblem, parallel_schedule
from ...schema.plan import (
    ParallelCertificate,
    Plan,
    Prediction,
    PricedPlans,
    Proof,
    ReplicaGroup,
    Stage,
)
from ..effort import DEFAULT, Effort, OutOfTimeError
from . import interleaved
from .bound import CappedRegion, Relaxation
from .gradients import replica_counts, waits_over
from .interleaved import Interleaved
from .labels import Labels
from .search import FoundPlan, ReplicaSearch, StageChoice
from .space import (
    MOST_TYPES,
    OptionSpace,
    Spaces,
    StageOption,
    forget_tables,
    microbatch_sizes,
)

NUM_TRIED_FIRST = 32
"""Searches whose simple plans are tried at the start, so that a good one is known early."""
_FAR, _DEEPEST, _DEAR = 0.97, 40, (1.5, 2.5)
"""A bound is followed down while it is far below the best plan, at most so many parts deep and not
beyond so many times the least bound: the second where the best plan is twice that or longer."""
_MOST_PASSES = 2
_MOST_PRICED = 1000  # regions in a certificate: some hundred kilobytes
_AIM = 2.0
"""Without a plan, prices are looked for that prove so many times the bound."""
WIDTH = 128
"""Labels of each number of stages that are followed at a time."""
_CHUNKS = "interleaved: a dynamic program over cuts for each shape"
_METHOD = "branch and bound over stages; devices left are bounded by prices on their types"


def solve(
    problem: ParallelProblem, *, effort: Effort = DEFAULT, chunked: Effort | None = None
) -> Plan:
    """The plan of the shortest step.

    Exact over the space that the plan's proof states. For each microbatch size b and number of
    replicas d, stages are placed from the last to the first. A branch is left when its bound on the
    step reaches the best plan. It is also left when the layers left need more devices than there
    are, by a Lagrangian bound (``bound.py``). Bounds take O(p N) vector operations for N layers and
    p stages. In the worst case the search is exponential in p; it then ends after a fixed amount of
    work, ``feasible``, with the least bound of what it left open. Deterministic.

    Args:
        problem: Layers by type, degree and microbatch size; devices, memory and links.
        effort: When to stop, and the gap to accept.
        chunked: When to stop looking for interleaved pipelines, which comes first; None takes
            ``effort``.

    Raises:
        ProblemError: No type was timed at a microbatch size that the batch is large enough for.
        InfeasibleError: No plan fits the memory; says by how much, where replicas share the most.
        TooLittleTimeError: ``effort`` stopped the search before it had a plan.
    """
    try:
        return _solved(problem, effort, chunked)
    finally:
        forget_tables()


def _solved(problem: ParallelProblem, effort: Effort, chunked: Effort | None) -> Plan:
    spaces = Spaces(problem)
    if not spaces.microbatch_sizes:
        timed = sorted({t.microbatch_size for pool in problem.pools for t in pool.times})
        raise ProblemError(
            f"no microbatch size was timed that a batch of {problem.global_batch_size} can hold "
            f"(timed: {', '.join(map(str, timed))})",
            hint="profile smaller microbatches, or take a larger batch",
        )
    if not any(space.options for space in spaces.alone):
        raise _infeasible(problem, spaces)
    in_chunks, others = _in_chunks(problem, chunked or effort)
    best, bound, priced = None, inf, tuple[PricedPlans, ...]()
    if 1 in problem.num_model_chunks:
        limit = _ceiling(problem, spaces) if in_chunks is None else in_chunks[1].step_seconds
        best, bound, priced = _search(problem, effort, limit)
    taken = best or (in_chunks and in_chunks[1])
    if taken is not None:
        bound = min(bound, others(taken.step_seconds))
    if best is not None:
        own = replace(problem, shards=(best.shard,))
        return _certified(_plan(own, best, bound), priced, problem.shards)
    if in_chunks is not None:
        return _certified(_interleaved_plan(*in_chunks, bound), priced, problem.shards)
    if effort.should_stop():
        raise TooLittleTimeError(
            "the search was stopped before it had a plan", hint="give it more time"
        )
    if 1 in problem.num_model_chunks:
        raise _infeasible(problem, spaces)
    raise interleaved.refusal(problem, spaces)


def least_seconds(problem: ParallelProblem, num_devices: Mapping[str, int]) -> float:
    """Seconds that no plan's step on so many devices of each type is faster than; quick."""
    # By what they can compute alone, as ``OptionSpace.least_worth`` of any degrees.
    found = inf
    for size in microbatch_sizes(problem):
        offered, least = 0.0, np.full(len(problem.layers), inf)
        for pool in problem.pools:
            work = [
                t.tensor_parallel_size * (np.array(t.forward_seconds) + t.backward_seconds)
                for t in pool.times
                if t.microbatch_size == size
            ]
            number = num_devices.get(pool.device_type, 0)
            if work and number and (whole := float(np.min(work, axis=0).sum())) > 0:
                offered += number / whole
                least = np.minimum(least, np.min(work, axis=0) / whole)
        if offered:
            units = -(-problem.global_batch_size // size)
            found = min(found, units * float(least.sum()) / offered)
    return found


def _in_chunks(
    problem: ParallelProblem, effort: Effort
) -> "tuple[tuple[ParallelProblem, Interleaved] | None, Callable[[float], float]]":
    """The best interleaved plan, and what none is faster than that is to beat some seconds."""
    best, searched = None, list[tuple[ParallelProblem, list[interleaved.TriedShape], float]]()
    for number, own in enumerate(problem.by_shard):
        least_replicas = 2 if number else 1  # one replica shares nothing
        found, tried, untried = interleaved.search(own, Spaces(own), effort, least_replicas)
        searched.append((own, tried, untried))
        if found is not None and (best is None or found.step_seconds < best[1].step_seconds):
            best = own, found

    def least(below: float) -> float:
        each = [
            min(interleaved.least_seconds(own, tried, below), untried)
            for own, tried, untried in searched
        ]
        return min(each, default=inf)

    return best, least


def _search(
    problem: ParallelProblem, effort: Effort, limit: float
) -> tuple[FoundPlan | None, float, tuple[PricedPlans, ...]]:
    tree = _tree(problem, effort, limit)
    tree.try_first()
    tree.run()
    return tree.best, tree.bound, tree.priced()


def _tree(problem: ParallelProblem, effort: Effort, limit: float) -> "_Tree":
    devices = sum(pool.num_devices for pool in problem.pools)
    tree = _Tree(limit, effort)
    for number, own in enumerate(problem.by_shard):
        spaces = Spaces(own)
        for size in spaces.microbatch_sizes:
            for replicas in replica_counts(own, size, devices):
                if replicas > 1 or not number:  # one replica shares nothing
                    tree.open(ReplicaSearch(own, spaces.of(size, replicas), replicas, effort))
    return tree


_Part = tuple[float, ReplicaSearch, "CappedRegion | Labels | None"]
"""What is open, with its bound; None is a search whose regions were not looked at."""


class _Tree:
    """What is open: searches, regions of their caps, and labels; and the best plan.

    What has the least bound comes next: a search is made a region, a region is split until it is
    narrow, and then plans are built in it.
    """

    def __init__(self, limit: float, effort: Effort) -> None:
        self.best: FoundPlan | None = None
        self.limit = limit
        self._effort, self._accepted = effort, 1.0 - max(effort.gap, 0.0)
        self._heap: list[tuple[float, int, ReplicaSearch, CappedRegion | Labels | None]] = []
        self._order = count()
        self._work = 0.0
        self._closed: list[tuple[ReplicaSearch, PricedPlans]] = []
        self._undecided: list[tuple[float, ReplicaSearch, Labels]] = []

    def priced(self) -> tuple[PricedPlans, ...]:
        """What a judge needs of the regions that were closed, or are open still."""
        self._close((search, part) for _, _, search, part in self._heap)
        self._close((search, part) for _, search, part in self._undecided)
        bound = self.bound
        return tuple(node for search, node in self._closed if search.least_by_capacity < bound)

    def _close(self, parts: "Iterable[tuple[ReplicaSearch, CappedRegion | Labels | None]]") -> None:
        for search, part in parts:
            if part is not None:
                region = part.region if isinstance(part, Labels) else part
                node = PricedPlans(
                    microbatch_size=search.space.microbatch_size,
                    num_replicas=search.d,
                    least_stage_seconds=region.low_seconds,
                    most_stage_seconds=region.high_seconds,
                    most_exchange_seconds=region.high_exchange,
                    device_prices=tuple(map(float, np.maximum(region.prices, 0.0))),
                    shard=search.problem.shard,
                )
                self._closed.append((search, node))

    @property
    def bound(self) -> float:
        """A lower bound on the step of any plan, in seconds."""
        least = [self._heap[0][0]] if self._heap else []
        return min([self.limit, *least, *(least for least, _, _ in self._undecided)])

    def offer(self, plans: Iterable[FoundPlan | None]) -> None:
        """Keep the fastest of these plans and the best so far."""
        for found in plans:
            if found is not None and found.step_seconds < self.limit:
                self.best, self.limit = found, found.step_seconds

    def open(self, search: ReplicaSearch) -> None:
        """Add a search with its bound by capacity."""
        self._push([(search.least_by_capacity, search, None)])

    def _push(self, parts: "Iterable[_Part]") -> None:
        for least, search, part in parts:
            if least < self.limit:
                heappush(self._heap, (least, next(self._order), search, part))
            else:
                self._close([(search, part)])

    def try_first(self) -> None:
        """Find good plans early: those that a person would try. Until there is one, all of them."""
        searches = [search for _, _, search, _ in sorted(self._heap, key=lambda e: e[:2])]
        for number, search in enumerate(searches):
            if search.least_by_capacity >= self.limit:
                break
            if self.best is not None and (number >= NUM_TRIED_FIRST or self._effort.should_stop()):
                break
            try:
                self.offer(search.one_stage(self.limit))
                self.offer(search.balanced(self.limit))
            except OutOfTimeError:  # from a table of shared weights, which takes a while
                break

    def run(self) -> None:
        """Take what has the least bound until it meets the best plan, or the effort's limit."""
        # Now and then a dive follows the best part down to a plan: a better limit closes much of
        # the rest unseen.
        next_dive = 0
        for number in count():
            if not self._is_open:
                return
            is_far = number >= next_dive and self.bound < _FAR * self.limit
            least, _, search, part = self._next(is_far)
            left = _DEEPEST if is_far else 0
            chosen, known = [(least, search, part)], self.limit
            while chosen:
                ((least, search, part),) = chosen
                try:
                    parts = self._take(search, part)
                except OutOfTimeError:
                    # Nothing of the part is lost: it goes back with the bound that it had.
                    self._push(chosen)
                    return
                # A dive goes on with the best of what came; the rest goes to the heap.
                parts.sort(key=lambda each: each[0])
                left -= 1
                if left > 0 and isinstance(part, Labels):
                    # The later in the search, the rarer a dive: each waits for half as many turns
                    # again.
                    left = min(left, _MOST_PASSES)
                    next_dive = number + (2 if self.best is None else number // 2 + 6)
                # A better plan ends a dive: with the new limit another part may come first.
                may_go_on = left > 0 and self.limit == known and not self._effort.should_stop()
                chosen = parts[:1] if may_go_on else []
                # What is dear holds no plan near the bound; following it would only cost time.
                dear = _DEAR[self.bound < 0.5 * self.limit] * self.bound
                if chosen and chosen[0][0] >= min(dear, self.limit * self._accepted):
                    chosen = []
                self._push(parts[len(chosen) :])

    def _next(
        self, is_dive: bool
    ) -> "tuple[float, int, ReplicaSearch, CappedRegion | Labels | None]":
        """Take what has the least bound; for a dive, of what no plans were looked for in yet."""
        fresh = [entry for entry in self._heap if not isinstance(entry[3], Labels)]
        if not is_dive or not fresh:
            return heappop(self._heap)
        # O(open parts), which is little beside the dive that follows.
        entry = min(fresh, key=lambda each: each[:2])
        self._heap.remove(entry)
        heapify(self._heap)
        return entry

    @property
    def _is_open(self) -> bool:
        """Whether there may be a better plan than the accepted gap, and effort to find it."""
        if not self._heap or self._heap[0][0] >= self.limit * self._accepted:
            return False
        return self._work < self._effort.tree_work and not self._effort.should_stop()

    def _take(self, search: ReplicaSearch, part: "CappedRegion | Labels | None") -> "list[_Part]":
        """What a part is to be replaced by, each with its bound."""
        relaxation, work = search.relaxation, search.relaxation.work
        least = search.least_by_capacity if part is None else part.least_seconds
        # Without a plan the limit is far off; prices that prove twice the bound split the regions
        # as well.
        aim = min(self.limit * self._accepted, _AIM * least)
        try:
            if part is None:
                found = relaxation.regions(search.least_slowest, aim, self.limit)
                regions = [replace(r, least_seconds=max(least, r.least_seconds)) for r in found]
            elif isinstance(part, CappedRegion):
                regions = relaxation.split(part, aim)
                if not regions:
                    # Prices are as good as they get, so plans are built: those within a small step
                    # above the bound first.
                    aim = min(self.limit, (1 + part.step) * part.least_seconds)
                    return self._advanced(search, Labels(relaxation, part, search.mixes, aim))
            else:
                return self._advanced(search, part)
            return [(region.least_seconds, search, region) for region in regions]
        finally:
            self._work += relaxation.work - work
            # Paths found while pricing are plans as soon as their replicas have places.
            self.offer(search.of_path(path, self.limit) for path in relaxation.paths())

    def _advanced(self, search: ReplicaSearch, labels: Labels) -> "list[_Part]":
        limit = self.limit * self._accepted if self.best is not None else self.limit
        for _, stages in labels.advance(limit, WIDTH):
            self.offer([search.found(stages, self.limit)])
        self._work += labels.taken_work()
        least = labels.least_seconds
        if labels.is_over and labels.aim_seconds >= limit > least:
            # All was looked at; of some plans it is not known if their replicas have places.
            self._undecided.append((least, search, labels))
            return []
        # Where nothing is left under the aim, a higher one comes next.
        # The next aim is three times as far: what was refuted below this one costs little to see
        # again.
        wider = replace(labels.region, least_seconds=least, step=3 * labels.region.step)
        return [(least, search, wider if labels.is_over else labels)]


def _certified(
    plan: Plan, priced: tuple[PricedPlans, ...], shards: tuple[Shard | None, ...]
) -> Plan:
    """The plan with a certificate, unless that is larger than a judge replays."""
    if len(priced) > _MOST_PRICED:
        return plan
    are_free = len(shards) > 1
    if not are_free:
        priced = tuple(replace(node, shard=None) for node in priced)
    certificate = ParallelCertificate(priced=priced, shards=shards if are_free else ())
    return replace(plan, proof=replace(plan.proof, certificate=certificate))


def _ceiling(problem: ParallelProblem, spaces: Spaces) -> float:
    """Longer than any plan's step: every stage as slow as all layers on the slowest option."""
    options = [option for space in spaces.alone for option in space.options]
    slowest = max(option.seconds[-1] for option in options)
    messages = max(sum(o.output_seconds) + sum(o.gradient_seconds) for o in options)
    if "all" in problem.shards:
        links = [link.curve for pool in problem.pools for link in pool.links]
        links += [link.curve for link in problem.between]
        owners, weights = problem.global_batch_size, max(sum(s.weight_bytes) for s in problem.sizes)
        messages += 3 * sum(
            owners_seconds(
                weights, len(problem.layers), owners, link.latency_seconds, link.coefficients[0]
            )
            for link in links
        )
    # More passes of the slowest stage than any schedule has in a row; the factor covers what
    # replicas and links add.
    passes = problem.global_batch_size + 2 * len(problem.layers)
    return 1.0 + 1e3 * passes * (slowest + messages)


def _infeasible(problem: ParallelProblem, spaces: Spaces) -> InfeasibleError:
    if not any(space.options for space in spaces.alone):
        return InfeasibleError(
            "no tensor-parallel degree is both profiled and within a server",
            hint="profile degree 1, or degrees that divide the devices of a server",
        )
    size = len(problem.layers)
    options = [
        option for own in problem.by_shard for space in _most_replicas(own)
        for option in space.options
    ]  # fmt: skip
    worst, layer = max(
        (
            min(
                option.stage_memory(i, i + 1, 1) - (option.memory_bytes or float("inf"))
                for option in options
            ),
            i,
        )
        for i in range(size)
    )
    if worst > 0:
        most = max(pool.memory_bytes or 0 for pool in problem.pools)
        return InfeasibleError(
            f"layer {problem.layers[layer]} alone needs {ceil(worst):,} bytes more than any device "
            "has, so no number of these devices is enough",
            hint="profile higher tensor-parallel degrees, or take devices with more memory"
            + (f" than {most:,} bytes" if most else "")
            + _sharding_hint(problem),
        )
    memory = sum(pool.num_devices * (pool.memory_bytes or 0) for pool in problem.pools)
    alone = [option for space in spaces.alone for option in space.options]
    weights = min(option.weights[-1] * option.tensor_parallel_size for option in alone)
    aside = problem.reserved_bytes * sum(pool.num_devices for pool in problem.pools)
    missing, pools = missing_bytes(problem), smallest_pools(problem)
    enough = ", or ".join(f"{number} {name}" for name, number in pools.items())
    return InfeasibleError(
        f"no plan fits: weights, gradients and optimizer take {_gib(weights)} and activations come "
        f"on top, the pool has {_gib(memory)}"
        + (f", of which {_gib(aside)} are set aside for workers themselves" if aside else "")
        + ("" if missing is None else f"; every device lacks at least {missing:,} bytes"),
        hint=(f"take {enough} (the fewest that do)" if enough else "add devices")
        + ("" if "full" in problem.recompute else ", or allow recomputation")
        + _sharding_hint(problem),
    )


def _most_replicas(problem: ParallelProblem) -> Iterator[OptionSpace]:
    """The options of as many replicas as the batch is large enough for, at each microbatch size."""
    spaces = Spaces(problem)
    for size in spaces.microbatch_sizes:
        yield spaces.of(size, -(-problem.global_batch_size // size))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.{1 if num_bytes >= 2**30 else 3}f} GiB"


def _sharding_hint(problem: ParallelProblem) -> str:
    if "all" in problem.shards or problem.optimizer is None:
        return ""
    return f", or let replicas of a stage share states ({option('shard', 'auto')})"


def _plan(problem: ParallelProblem, found: FoundPlan, bound: float) -> Plan:
    waits = 0.0 if problem.hides_messages else 1.0
    # Where passes hide messages the slowest stage does not wait for its own.
    slowest = max(
        one.compute_seconds + one.gather_seconds + waits * one.transfer_seconds
        for one in found.stages
    )
    updated = max(one.update_seconds for one in found.stages)
    passes = found.step_seconds - updated - max(one.reduce_seconds for one in found.stages)
    stages = tuple(
        _stage(problem, found, choice, len(found.stages) - number)
        for number, choice in enumerate(found.stages)
    )
    busy = found.num_microbatches * slowest
    bubble = passes / busy - 1 if busy and len(stages) > 1 else 0.0  # to fill and drain it
    return _of_stages(
        problem, stages, found.space.microbatch_size, found.step_seconds, bound, max(0.0, bubble)
    )


def _interleaved_plan(problem: ParallelProblem, found: Interleaved, bound: float) -> Plan:
    shape = found.shape
    stages = tuple(_chunk(problem, found, number) for number in range(shape.num_chunks))
    bubble = bubble_fraction(shape.num_positions, shape.num_microbatches, shape.num_model_chunks)
    return _of_stages(
        problem,
        stages,
        shape.microbatch_size,
        found.step_seconds,
        bound,
        bubble,
        num_model_chunks=shape.num_model_chunks,
    )


def _of_stages(
    problem: ParallelProblem,
    stages: tuple[Stage, ...],
    microbatch_size: int,
    step_seconds: float,
    bound: float,
    bubble: float,
    num_model_chunks: int = 1,
) -> Plan:
    """The plan of these stages: reductions and updates of a position's chunks come together."""
    p = len(stages) // num_model_chunks
    return Plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=-(-problem.global_batch_size // microbatch_size),
        schedule=parallel_schedule(is_chunked=num_model_chunks > 1),
        num_model_chunks=num_model_chunks,
        stages=stages,
        predicted=Prediction(
            step_seconds=step_seconds,
            samples_per_second=problem.global_batch_size / step_seconds,
            sync_seconds=max(sum(s.reduce_seconds or 0.0 for s in stages[n::p]) for n in range(p)),
            update_seconds=max(
                sum(s.update_seconds or 0.0 for s in stages[n::p]) for n in range(p)
            ),
            bubble_fraction=bubble,
        ),
        proof=_proof(problem, step_seconds, bound),
        optimizer=problem.optimizer,
        shard_optimizer=problem.shard in ("optimizer", "gradients") or None,
        shard_gradients=problem.shard == "gradients" or None,
    )


def _proof(problem: ParallelProblem, step: float, bound: float) -> Proof:
    is_optimal = bound >= step * (1.0 - 1e-9)
    bound = step if is_optimal else bound
    return Proof(
        termination="optimal" if is_optimal else "feasible",
        objective=step,
        lower_bound=bound,
        gap=(step - bound) / step,
        method=_METHOD if max(problem.num_model_chunks) == 1 else f"{_METHOD}; {_CHUNKS}",
        space=_space_sentence(problem),
    )


def _stage(problem: ParallelProblem, found: FoundPlan, choice: StageChoice, from_end: int) -> Stage:
    options = [found.space.options[o] for o in choice.mix]
    held = choice.start, choice.end, min(from_end, found.num_microbatches)
    shares = shares_of(
        problem.global_batch_size,
        choice.replicas,
        found.num_microbatches * found.space.microbatch_size,
    )
    stated: tuple[int | None, ...] = choice.shares or (None,) * len(options)
    is_whole = options[0].units is None
    if not is_whole and not choice.shares:
        stated = (_equal_share(options[0], choice.start, choice.end),) * len(options)
    return Stage(
        layers=problem.layers[choice.start : choice.end],
        shard=None if is_whole else problem.shard,
        recompute=options[0].recompute,
        replicas=tuple(
            ReplicaGroup(
                device_type=problem.pools[option.pool].device_type,
                tensor_parallel_size=option.tensor_parallel_size,
                num_replicas=count,
                samples=samples,
                virtual_nodes=found.num_microbatches,
                virtual_node_batch_size=found.space.microbatch_size,
                memory_bytes=round(
                    option.memory_with(kept, *held)
                    if choice.shares and kept is not None
                    else option.stage_memory(*held)
                ),
                state_share_bytes=kept,
            )
            for option, count, samples, kept in zip(
                options, choice.replicas, shares, stated, strict=True
            )
        ),
        compute_seconds=choice.compute_seconds,
        gather_seconds=None if is_whole else choice.gather_seconds,
        transfer_seconds=choice.transfer_seconds,
        reduce_seconds=choice.reduce_seconds,
        update_seconds=choice.update_seconds,
    )


def _equal_share(option: StageOption, start: int, end: int) -> int:
    """Bytes of a stage's weights whose state each replica keeps, where all keep as many."""
    # Rounded up, as the largest share decides what fits.
    return -(-(option.shared[end] - option.shared[start]) // option.num_replicas)


def _chunk(problem: ParallelProblem, found: Interleaved, number: int) -> Stage:
    """A stage of an interleaved plan; the memory is that of all chunks of its device."""
    shape, option = found.shape, found.shape.option
    start, end = found.cuts[number : number + 2]
    sent = option.output_seconds[end] if number + 1 < shape.num_chunks else 0.0
    back = option.gradient_seconds[start] if number else 0.0
    is_whole = option.units is None
    return Stage(
        layers=problem.layers[start:end],
        shard=None if is_whole else problem.shard,
        recompute=option.recompute,
        replicas=(
            ReplicaGroup(
                device_type=problem.pools[option.pool].device_type,
                tensor_parallel_size=option.tensor_parallel_size,
                num_replicas=shape.num_replicas,
                samples=problem.global_batch_size,
                virtual_nodes=shape.num_microbatches,
                virtual_node_batch_size=shape.microbatch_size,
                memory_bytes=round(found.memory_bytes[number % shape.num_positions]),
                state_share_bytes=None if is_whole else _equal_share(option, start, end),
            ),
        ),
        compute_seconds=option.seconds[end] - option.seconds[start],
        gather_seconds=None if is_whole else float(waits_over(option, (shape.link,))[start, end]),
        transfer_seconds=sent + back,
        reduce_seconds=found.reduces[number],
        update_seconds=found.updates[number],
    )


def shares_of(batch: int, replicas: tuple[int, ...], most_of_one: int) -> list[int]:
    """Samples of each group of replicas: all run as many microbatches, the last may be smaller."""
    total = sum(replicas)
    # Ends are rounded, not shares: so shares add up to the batch, each within a sample of
    # its group's part.
    ends = [batch * sum(replicas[: i + 1]) // total for i in range(len(replicas))]
    shares = [end - start for start, end in pairwise([0, *ends])]
    assert all(s <= r * most_of_one for s, r in zip(shares, replicas, strict=True))
    return shares


def _space_sentence(problem: ParallelProblem) -> str:
    degrees = sorted({t.tensor_parallel_size for p in problem.pools for t in p.times})
    return (
        "1F1B pipelines of contiguous layers with equally many replicas in every stage; replicas "
        f"of a stage of at most {MOST_TYPES} device types, a tensor degree a type and stage (of "
        f"{', '.join(map(str, degrees))}); recomputation by stage (of "
        f"{', '.join(problem.recompute)}); microbatches of the profiled sizes; equal shares of "
        "the batch"
        + _placed_sentence(problem)
        + _sharded_sentence(problem)
        + _interleaved_sentence(problem)
    )


def _placed_sentence(problem: ParallelProblem) -> str:
    if all(pool.inside is None for pool in problem.pools):
        return ""
    return (
        "; stages of one type whose devices divide a server's inside one, others anywhere, with "
        "messages over the slowest link of their types"
    )


def _sharded_sentence(problem: ParallelProblem) -> str:
    if problem.shards == (None,):
        return ""
    names = {
        None: "nothing",
        "optimizer": "the optimizer's state",
        "gradients": "the optimizer's state and sums of gradients",
        "all": "weights, gradients and the optimizer's state",
    }
    return (
        "; the replicas of a stage, of one tensor degree where they share, have in common "
        f"{' or '.join(names[shard] for shard in problem.shards)} (all stages alike; weights only "
        "where all replicas run equally many microbatches), equally or, "
        "where that does not fit on both types, as evenly as memory allows"
    )


def _interleaved_sentence(problem: ParallelProblem) -> str:
    chunks = [str(v) for v in problem.num_model_chunks if v > 1]
    if not chunks or problem.cost_rule != "hetflow":
        return ""
    return (
        f"; and interleaved 1F1B with {', '.join(chunks)} chunks a device, on one device type, "
        "tensor degree and recomputation for all stages"
    )


def missing_bytes(problem: ParallelProblem) -> int | None:
    """The fewest bytes that every device would need more, so that a plan fits.

    Less is never enough for plans that are not interleaved. So much is, unless the search ends at
    its limit of work before it has a plan.

    Returns:
        None where no memory would help: there are too few devices for any group.
    """
    own = [pool.memory_bytes for pool in problem.pools if pool.memory_bytes is not None]
    # The relaxation that bounds devices is quick, and seldom says too little.
    least = fewest_missing(lambda more_bytes: _may_fit(_with_more(problem, more_bytes)), own)
    if least is None or _has_plan(_with_more(problem, least)):
        return least
    found = fewest_missing(
        lambda more_bytes: more_bytes > least and _has_plan(_with_more(problem, more_bytes)), own
    )
    return least if found is None else found


def smallest_pools(problem: ParallelProblem) -> dict[str, int]:
    """Count, for each device type alone, the fewest devices (whole servers) that hold the model."""
    found = {}
    for pool in problem.pools:
        each = [_fewest_devices(own, pool) for own in problem.by_shard]
        fewest = min((number for number in each if number is not None), default=None)
        if fewest is not None:
            found[pool.device_type] = -(-fewest // pool.devices_per_server) * (
                pool.devices_per_server
            )
    return found


def _with_more(problem: ParallelProblem, more_bytes: int) -> ParallelProblem:
    pools = tuple(
        pool
        if pool.memory_bytes is None
        else replace(pool, memory_bytes=pool.memory_bytes + more_bytes)
        for pool in problem.pools
    )
    return replace(problem, pools=pools)


def _has_plan(problem: ParallelProblem) -> bool:
    """Whether the search finds any plan, at which it stops."""
    tree: _Tree | None = None
    effort = replace(DEFAULT, should_stop=lambda: tree is not None and tree.best is not None)
    tree = _tree(problem, effort, _ceiling(problem, Spaces(problem)))
    tree.try_first()
    tree.run()
    return tree.best is not None


def _may_fit(problem: ParallelProblem) -> bool:
    """Whether a plan fits by bounds on devices, which plans that fit always meet."""
    return any(_meets_bounds(own) for own in problem.by_shard)


def _meets_bounds(problem: ParallelProblem) -> bool:
    devices, spaces = sum(pool.num_devices for pool in problem.pools), Spaces(problem)
    for size in spaces.microbatch_sizes:
        if not spaces.of(size).options:
            continue
        for replicas in replica_counts(problem, size, devices, is_timed=False):
            rounds = -(-problem.global_batch_size // (size * replicas))
            most = min(len(problem.layers), devices // replicas, problem.most_stages or devices)
            if replicas > 1 and rounds >= most and not problem.shard:
                continue  # as many in flight as with one replica, which takes fewer devices
            space = spaces.of(size, replicas)
            if Relaxation(problem, space, replicas, rounds, most, DEFAULT).covers():
                return True
    return False


def _fewest_devices(problem: ParallelProblem, pool: ParallelPool) -> int | None:
    size, best = len(problem.layers), None
    most_stages = min(size, problem.most_stages or size)
    most = max((t.tensor_parallel_size for t in pool.times), default=1)
    many = replace(pool, num_devices=most)
    alone = replace(problem, pools=(many,))
    spaces = Spaces(alone)
    for microbatch in spaces.microbatch_sizes:
        counts = list(
            replica_counts(problem, microbatch, problem.global_batch_size, is_timed=False)
        )

        def devices_of(replicas: int, microbatch: int = microbatch) -> float:
            """Of one replica of all stages."""
            space = spaces.of(microbatch, replicas)
            if not space.options:
                return inf
            rounds = -(-problem.global_batch_size // (microbatch * replicas))
            relaxation = Relaxation(alone, space, replicas, rounds, most_stages, DEFAULT)
            tables = relaxation.tables(np.ones((1, 1)), relaxation.firsts(inf, inf), is_timed=False)
            return float(tables[0, 0, -1])

        if devices_of(counts[-1]) == inf:  # the more replicas, the less each holds
            continue
        # Few replicas first: a plan of d replicas has d devices at least, so from the best count
        # on none is better.
        for replicas in counts:
            if best is not None and replicas >= best:
                break
            devices = devices_of(replicas)
            if devices < inf and (best is None or devices * replicas < best):
                best = int(devices) * replicas
    return best
