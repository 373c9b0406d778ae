"""Split a batch by speed and a model's states by memory, exactly and fast.

Cephalo and Poplar decouple the two for unlike devices, by heuristics. For a bound on time, each
device has a few choices: samples, and the most bytes of weights of which it can then keep the
states. So feasibility is a knapsack over the samples, whose worth is the room for states.

    6 samples on an A (2 a second, 10 bytes) and a B (1 a second, 20 bytes); a sample takes 1 byte
    within 2 s: A does up to 4 and has room for 10 - 4 = 6, B up to 2 and has room for 20 - 2 = 18
    all 6 are done and 24 bytes of states have room: a model with 24 fits, one with 25 does not
    at 3 s A 3, B 3 leaves 7 + 17 = 24 too; less work on A gives room where A's samples are larger

A step is passes and an end, the longest update of a share. A bound on the end is one more limit on
shares. The search halves blocks of times: with passes of its longest time, a block must leave an
end that is short enough beside its shortest time. O(devices x choices x batch) for one bound.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...planning.costs.memory import fewest_missing
from ...planning.costs.sharding import (
    copied_ratio,
    end_seconds,
    in_rounds,
    most_share_bytes,
    most_updated_bytes,
    peak_bytes,
    predict,
    step_seconds,
    transfers,
)
from ...schema.errors import InfeasibleError
from ...schema.options import Activations, Shard
from ...schema.plan import Plan, Proof, RefutedShares, ReplicaGroup, SharesCertificate, split_plan
from ...schema.problem import ShardedProblem
from ...schema.profile import CURVES, BatchPoint, curves_of
from .feasible import group_on

METHOD = "threshold search over times of passes, exact knapsack of samples and room for states"
_NEVER, _NO_LIMIT = -(1 << 62), 1 << 62
_BELOW = 1 - 1e-9

Worths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A size that devices of a type may take, and the room for states beside it."""

    kind: int
    point: BatchPoint
    room: int
    activations: Activations

    @property
    def size(self) -> int:
        return self.point.batch_size


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to share: what, and in how many rounds; None where devices pass by themselves."""

    problem: ShardedProblem
    shard: Shard
    rounds: int | None
    entries: tuple[_Entry, ...]

    @property
    def target(self) -> int:
        """Samples of a round."""
        return self.problem.global_batch_size // (self.rounds or 1)

    @property
    def counts(self) -> list[int]:
        return [kind.num_devices for kind in self.problem.devices]

    def step_seconds(self, compute_seconds: float, end: float) -> float:
        return step_seconds(self.problem, self.shard, self.rounds or 1, compute_seconds, end)

    @property
    def least_end(self) -> float:
        """The end of a step that no plan of the choice undercuts: all devices have shares."""
        rooms = [0] * len(self.counts)
        for one in self.entries:
            rooms[one.kind] = max(rooms[one.kind], one.room)
        return _least_end(self.problem, zip(range(len(rooms)), rooms, self.counts, strict=True))

    @property
    def least_seconds(self) -> float:
        """A step that no plan of the choice undercuts: every device at its best rate."""
        best = [0.0] * len(self.counts)
        for one in self.entries:
            # Samples a second of one device of each type at its best size.
            best[one.kind] = max(best[one.kind], one.size / one.point.step_seconds)
        rate = sum(n * one for n, one in zip(self.counts, best, strict=True))
        return self.step_seconds(self.target / rate, self.least_end) if rate else np.inf

    def options(self, seconds: float, end: float) -> list[tuple[_Entry, int, int]]:
        """Sizes that fit a time: the most passes, and the room for states within an end."""
        # A bound on the end bounds what a device may update, and so what share it may keep.
        caps = [
            _NO_LIMIT if np.isinf(end) else most_updated_bytes(self.problem, kind, end)
            for kind in self.problem.devices
        ]
        return [
            (one, most, min(one.room, cap))
            for one in self.entries
            if (cap := caps[one.kind]) is not None and (most := self.passes(one, seconds))
        ]

    def passes(self, one: _Entry, seconds: float) -> int:
        """The most passes of a size within a time."""
        each = one.point.step_seconds
        if self.rounds is not None:
            # No size can pass more often than the target divides.
            return int(each <= seconds)
        most = int(min(seconds / each, self.target // one.size))
        most += (most + 1) * each <= seconds  # division may round across a whole number
        return min(most - (most * each > seconds), self.target // one.size)

    def candidates(self) -> list[float]:
        """All times that a device may compute in a round, ascending."""
        # One pass a round, or any number.
        times: set[float] = set()
        for one in self.entries:
            most = 1 if self.rounds is not None else self.target // one.size
            times.update((np.arange(1, most + 1) * one.point.step_seconds).tolist())
        return sorted(times)

    def price(self, seconds: float, end: float) -> float | None:
        """Bytes per sample at which no devices are worth the batch and all weights."""
        # Such a price shows that no devices compute within ``seconds`` and end within ``end``, by
        # weak duality. None: there is none.
        found = self.options(seconds, end)
        kinds = np.array([one.kind for one, _, _ in found], dtype=np.int64)
        rooms = np.array([room for _, _, room in found], dtype=np.float64)
        ends = np.array([[one.size, n * one.size] for one, n, _ in found], dtype=np.float64)
        counts = np.array(self.counts, dtype=np.float64)
        weights, target = float(self.problem.weight_bytes), float(self.target)

        def excess(price: float) -> tuple[float, float]:
            """What devices are worth beyond the batch and all weights, and the slope of that."""
            most, samples = np.zeros(len(counts)), np.zeros(len(counts))
            if found:
                # At a price above 0 a size is worth most at its most passes, below 0 at a single
                # one.
                best = ends.argmax(axis=1) if price > 0 else ends.argmin(axis=1)
                taken = ends[np.arange(len(found)), best]
                for kind, worth, number in zip(kinds, rooms + price * taken, taken, strict=True):
                    if worth > most[kind]:
                        most[kind], samples[kind] = worth, number
            return float(counts @ most) - weights - price * target, float(counts @ samples) - target

        # The excess is convex and piecewise linear: the least point of two tangents comes next.
        # Beyond these prices samples alone decide: they weigh more than all weights of all
        # devices.
        ends_at = float(counts.sum() + 1) * weights + 1
        low, high = (-ends_at, *excess(-ends_at)), (ends_at, *excess(ends_at))
        # Even at the highest price, at which only samples count, the batch is not done.
        if high[1] < 0:
            return high[0]
        for _ in range(100):
            if high[2] <= low[2]:
                return None
            price = (low[1] - low[2] * low[0] - high[1] + high[2] * high[0]) / (high[2] - low[2])
            # Both tangents lie below the function, so where they meet is the least that it could
            # be.
            if low[1] + low[2] * (price - low[0]) > -1e-10 * weights:
                return None  # no price is lower than where the tangents meet
            middle = (price, *excess(price))
            if middle[1] < -1e-10 * weights:
                return price
            if middle[2] < 0:
                low = middle
            else:
                high = middle
        return None

    def rooms(self, seconds: float, end: float, *, keeps: bool = False) -> list[Worths]:
        """[devices + 1][samples + 1] the most room of the first devices for exactly so many."""
        # [samples + 1] bytes of room, negative without bound where the number cannot be reached.
        table = np.full(self.target + 1, _NEVER, dtype=np.int64)
        table[0] = 0
        tables = [table]
        options = self.options(seconds, end)
        for kind, count in enumerate(self.counts):
            own = [option for option in options if option[0].kind == kind]
            for _ in range(count if own else 0):
                best = table
                for one, most, room in own:
                    # A device takes one size; its room for states is the same for any number of
                    # passes of it.
                    best = np.maximum(best, _windows(table, one.size, most) + room)
                table = best
                tables = [*tables, table] if keeps else [table]
        return tables

    def fits(self, seconds: float, end: float) -> bool:
        """Whether the batch and the states fit devices that compute and end within these times."""
        # A price is found in a few steps where there is one, and spares the table, O(devices x
        # samples).
        if self.price(seconds, end) is not None:
            return False
        return bool(self.rooms(seconds, end)[-1][-1] >= self.problem.weight_bytes)

    def work(self, seconds: float, end: float) -> Counter[tuple[_Entry, int]]:
        """How many devices take each size and number of passes, with the most room in all."""
        tables, options = self.rooms(seconds, end, keeps=True), self.options(seconds, end)
        found: Counter[tuple[_Entry, int]] = Counter()
        left = self.target
        used = {one.kind for one, _, _ in options}
        kinds = [
            kind for kind, count in enumerate(self.counts) if kind in used for _ in range(count)
        ]
        for number in range(len(kinds), 0, -1):
            worth, before = tables[number][left], tables[number - 1]
            # An unused device adds no room here, so leaving it out keeps the plan's number of
            # devices low.
            if before[left] == worth:
                continue  # this device stays unused
            one, passes = next(
                (e, n)
                for e, most, room in options
                if e.kind == kinds[number - 1]
                for n in range(min(most, left // e.size), 0, -1)
                if before[left - n * e.size] + room == worth
            )
            found[one, passes if self.rounds is None else self.rounds] += 1
            left -= passes * one.size
        return found

    def shortest_end(self, seconds: float, end: float) -> float:
        """The least end of a step whose devices compute within a time, to a billionth of it."""
        low = self.least_end
        while True:
            # The plan found may end sooner than the limit asked for.
            work = self.work(seconds, end)
            used = [(one.kind, one.room, number) for (one, _), number in work.items()]
            fixed = (self.problem.devices[kind].fixed_seconds for kind, _, _ in used)
            end = _least_end(self.problem, used, max(fixed))
            # A billionth of the step sooner must be impossible; else halve.
            below = end - (1 - _BELOW) * self.step_seconds(seconds, end)
            if below < low or not self.fits(seconds, below):
                return end
            middle = (low + below) / 2
            low, end = (low, middle) if self.fits(seconds, middle) else (middle, below)


def _least_end(
    problem: ShardedProblem, devices: Iterable[tuple[int, int, int]], least: float = 0.0
) -> float:
    """The least end, not below ``least``, with which devices share all states; inf: none."""
    held = [(problem.devices[kind], room, number) for kind, room, number in devices]

    def fits(end: float) -> bool:
        caps = [most_updated_bytes(problem, kind, end) or 0 for kind, _, _ in held]
        parts = (min(one[1], cap) * one[2] for one, cap in zip(held, caps, strict=True))
        return sum(parts) >= problem.weight_bytes

    low = least
    high = max(end_seconds(problem, kind, problem.weight_bytes) for kind, _, _ in held)
    high /= _BELOW  # the difference of end and fixed cost is rounded
    if not fits(high):
        return np.inf
    if fits(low):
        return low
    # Until no number lies between: the end is then exact, and equal for equal inputs.
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _windows(table: Worths, size: int, most: int) -> Worths:
    """[samples + 1] the best entry of 1 to ``most`` passes of ``size`` before each."""
    # The window is doubled until it is long enough: O(log most) operations on whole tables.
    best, length = _shifted(table, size), 1
    while length < most:
        more = min(length, most - length)
        best = np.maximum(best, _shifted(best, more * size))
        length += more
    return best


def _shifted(table: Worths, by: int) -> Worths:
    found = np.full_like(table, _NEVER)
    if by < len(table):
        found[by:] = table[:-by]
    return found


def solve(problem: ShardedProblem) -> Plan:
    """Minimise the predicted step over shares of the batch and of the states.

    Exact. Devices may stay unused. Deterministic: of equally fast choices the first in the order of
    ``problem.shards``, then with the fewest rounds. Activations are kept where that takes no
    longer. Shares of states are as even as memory allows.

    Returns:
        A plan that ``checks.sharded_split.check`` accepts for ``problem``, proved optimal.

    Raises:
        InfeasibleError: Batch and states do not fit; says the fewest bytes that devices lack.
    """
    choices = list(_choices(problem))
    best: tuple[float, _Choice, float, float] | None = None
    # The choice that could be fastest comes first: its step refutes most of the others unseen.
    for choice in sorted(choices, key=lambda one: one.least_seconds):
        if not choice.entries or best and choice.least_seconds >= best[0] * _BELOW:
            continue
        found = _fastest(choice, best[0] if best else np.inf)
        best = best if found is None else (found[0], choice, *found[1:])
    if best is None:
        raise _does_not_fit(problem)
    step, choice, compute, end = best
    choice, compute = _simplest(choice, compute, end)
    groups = tuple(_groups(choice, choice.work(compute, end), end))
    predicted = predict(problem, choice.shard, groups)
    refuted = [one for choice in choices for one in _refuted(choice, step * _BELOW)]
    known = [how for how in CURVES if any(curves_of(kind)[how] for kind in problem.devices)]
    return split_plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        groups=groups,
        shard=choice.shard,
        copied_ratio=copied_ratio(problem, choice.shard),
        uniform_virtual_nodes=problem.virtual_nodes,
        optimizer=problem.optimizer,
        predicted=predicted,
        proof=Proof(
            termination="optimal",
            objective=predicted.step_seconds,
            lower_bound=predicted.step_seconds,
            gap=0.0,
            method=METHOD,
            certificate=SharesCertificate(refuted=tuple(refuted)),
            space=f"splits that share {' or '.join(problem.shards)} of the states"
            + (f", with activations {' or '.join(known)}" if len(known) > 1 else ""),
        ),
    )


def _choices(problem: ShardedProblem) -> Iterator[_Choice]:
    """All ways to share."""
    batch = problem.global_batch_size
    for shard in problem.shards:

        def entries(rounds: int | None, shard: Shard = shard) -> tuple[_Entry, ...]:
            return tuple(
                _Entry(number, point, room, how)
                for number, kind in enumerate(problem.devices)
                for how, curve in curves_of(kind).items()
                for point in problem.allowed(curve)
                if (room := most_share_bytes(problem, kind, point, shard, rounds)) is not None
            )

        if not in_rounds(shard):
            yield _Choice(problem, shard, None, entries(None))
            continue
        once, often = entries(1), entries(2)  # memory tells one round from several
        for rounds in range(1, batch + 1):
            if batch % rounds == 0:
                all_sizes = once if rounds == 1 else often
                fitting = tuple(e for e in all_sizes if e.size <= batch // rounds)
                yield _Choice(problem, shard, rounds, fitting)


def _fastest(choice: _Choice, cutoff: float) -> tuple[float, float, float] | None:
    """The least step below ``cutoff``, its compute in a round and its end."""
    times, least_end = choice.candidates(), choice.least_end
    found: tuple[float, float, float] | None = None
    blocks = [(0, len(times) - 1)] if times else []
    while blocks:
        # A stack, so the block of the shortest times comes next.
        first, last = blocks.pop()
        # A block holds only steps whose passes last at least its first time: that leaves so much
        # for the end. Passes are allowed its last time, so the test never refutes too much.
        end = cutoff * _BELOW - choice.step_seconds(times[first], 0.0)
        if end < least_end or not choice.fits(times[last], end):
            continue
        if first < last:
            middle = (first + last) // 2
            # The later half goes below the earlier one.
            blocks += [(middle + 1, last), (first, middle)]
            continue
        # One time of passes: its best end is a new limit.
        end = choice.shortest_end(times[last], end)
        cutoff = choice.step_seconds(times[last], end)
        found = cutoff, times[last], end
    return found


def _simplest(choice: _Choice, seconds: float, end: float) -> tuple[_Choice, float]:
    """A choice without recomputed or offloaded passes that save no time, and its passes' time."""
    # Passes may be as long as the transfers that they hide.
    longest = max(seconds, transfers(choice.problem, choice.shard)[0])
    for left_out in sorted({(one.activations, one.kind) for one in choice.entries}):
        entries = tuple(e for e in choice.entries if (e.activations, e.kind) != left_out)
        if left_out[0] != "kept" and (fewer := replace(choice, entries=entries)).fits(longest, end):
            choice, seconds = fewer, longest
    return choice, seconds


def _refuted(choice: _Choice, seconds: float) -> Iterator[RefutedShares]:
    """Blocks of times of passes in which no plan takes only so long, each with a price."""
    # Only steps under the limit need a proof: longer times of passes refute themselves.
    # A block begins where the one before ends, so its steps end within what its first time leaves.
    least = min(kind.fixed_seconds for kind in choice.problem.devices)
    longer = (t for t in choice.candidates() if choice.step_seconds(t, least) <= seconds)
    times = [0.0, *longer]
    blocks = [(0, len(times))]
    while blocks:
        first, last = blocks.pop()
        end = seconds - choice.step_seconds(times[first], 0.0)
        # One price for a whole block; where none exists it is halved, down to single times.
        price = choice.price(times[last - 1], end)
        if price is None and last - first > 1:
            middle = (first + last) // 2
            blocks += [(middle, last), (first, middle)]
            continue
        yield RefutedShares(
            shard=choice.shard,
            rounds=choice.rounds,
            bytes_per_sample=price,
            below_seconds=times[last] if last < len(times) else None,
        )


def _groups(
    choice: _Choice, work: Counter[tuple[_Entry, int]], end: float
) -> Iterator[ReplicaGroup]:
    """Equal devices as groups, in the order of types; states as even as memory and end allow."""
    problem = choice.problem
    caps = [most_updated_bytes(problem, kind, end) or 0 for kind in problem.devices]
    rooms = {one: min(one.room, caps[one.kind]) for one, _ in work}
    low, high = 0, problem.weight_bytes
    while low < high:  # the least limit on a share with which all shares hold all weights
        # Shares as even as they can be: all up to one limit.
        middle = (low + high) // 2
        held = sum(count * min(rooms[one], middle) for (one, _), count in work.items())
        low, high = (low, middle) if held >= problem.weight_bytes else (middle + 1, high)
    order = list(CURVES)
    for (one, passes), count in sorted(
        work.items(),
        key=lambda item: (
            item[0][0].kind,
            -item[0][1] * item[0][0].size,
            item[0][1],
            order.index(item[0][0].activations),
        ),
    ):
        kind, share = problem.devices[one.kind], min(rooms[one], low)
        is_kept = one.activations == "kept"
        yield replace(
            group_on(kind, count, passes, one.point),
            exposed_seconds=None,
            interpolated=is_kept and one.size in kind.interpolated_sizes,
            activations=None if is_kept else one.activations,
            pinned_bytes=one.point.pinned_bytes,
            state_share_bytes=share,
            memory_bytes=peak_bytes(problem, one.point, choice.shard, choice.rounds, share),
        )


def _does_not_fit(problem: ShardedProblem) -> InfeasibleError:
    """Say how many bytes are missing on every device."""
    batch, missing = problem.global_batch_size, missing_bytes(problem)
    if missing is None:
        kinds = (curve for kind in problem.devices for curve in curves_of(kind).values())
        sizes = sorted({p.batch_size for curve in kinds for p in problem.allowed(curve)})
        return InfeasibleError(
            f"no devices add up to a global batch of exactly {batch} in equally many passes of "
            f"profiled sizes ({', '.join(map(str, sizes))})",
            hint="profile more batch sizes, or choose a batch that these divide",
        )
    return InfeasibleError(
        f"a global batch of {batch} and the shared states ({' or '.join(problem.shards)}) do not "
        f"fit the {problem.num_devices} devices together; every device lacks at least "
        f"{missing:,} bytes",
        hint="add devices or memory, profile smaller batch sizes, or take an optimizer with less "
        "state",
    )


def missing_bytes(problem: ShardedProblem) -> int | None:
    """The fewest bytes that every device would need more, so that a plan fits.

    Returns:
        0 where one fits as it is; None where no memory helps: no devices add up to the batch.
    """
    own = [kind.memory_bytes for kind in problem.devices]
    return fewest_missing(lambda more_bytes: _fits(problem, more_bytes), own)


def _fits(problem: ShardedProblem, more_bytes: int) -> bool:
    """Whether any plan fits devices of so much more memory, whatever its step takes."""
    devices = tuple(
        replace(kind, memory_bytes=kind.memory_bytes + more_bytes) for kind in problem.devices
    )
    choices = _choices(replace(problem, devices=devices))
    return any(choice.entries and choice.fits(np.inf, np.inf) for choice in choices)
