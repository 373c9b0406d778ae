"""Decide whether devices can share out a batch exactly, each within a given time.

This is the core of the batch split. Within T seconds a device of type i can do the
amounts ``{v s : v t_i(s) + rest <= T}`` of samples; the question is whether one amount of each
device adds up to B. The answer is exact, by subset sums on bitsets. Near the optimum the devices
are almost full, so the sums are taken over the samples that each device could still do: a few bits
in place of B bits.

    B = 12, T = 4 s: A does {0, 2, 4, 6, 8}, B {0, 2, 4}; both full do 12, so nothing is undone
    B = 10: 2 of 12 stay undone; undone sets up to 2 are {0, 2} of A and {0, 2} of B
    as bits 0b101 each; their sum 0b10101 has bit 2, so 10 can be done: 6 + 4 or 8 + 2

A sum of n equal devices takes O(log n) sums of two sets, by halves; a sum of two sets takes a shift
of B bits, or of what may be undone, for each run of members.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from ...planning.costs.comm import Wire, exposed_seconds, hides, ring_wire, unhidden_seconds
from ...planning.costs.split import closing_seconds
from ...schema.plan import ReplicaGroup, device_group
from ...schema.problem import DeviceOption, SplitProblem
from ...schema.profile import BatchPoint

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SplitPool:
    """Sizes and times of plans on two or more devices, as flat arrays, type after type.

    A plan on one device is none of these: what it costs may be measured apart (levels.py).

    Attributes:
        batch: B, samples to share out.
        counts: Devices of each type.
        sizes: [entries] samples per pass, s.
        seconds: [entries] time per pass, t_i(s).
        rests: [entries] what a device takes once, however many passes it makes: what
            synchronisation adds at that size beyond the least, e_i(s), its update and fixed cost;
            at least, where e_i(s) depends on the level (``at``).
        hides: Whether it does: profiles tell when gradients come.
        limits: [entries] most passes of one of several devices, floor((B - 1) / s).
        starts: [types] first entry of each type.
    """

    def __init__(self, problem: SplitProblem) -> None:
        self.options = [
            (option, points) for option in problem.devices if (points := problem.points(option))
        ]
        flat = [point for _, points in self.options for point in points]
        self.batch = problem.global_batch_size
        self.counts = tuple(option.num_devices for option, _ in self.options)
        self.sizes = np.array([point.batch_size for point in flat], dtype=np.int64)
        self.seconds = np.array([point.step_seconds for point in flat], dtype=np.float64)
        self._flat = [
            (option, point, ring_wire(option) if hides(option) else None)
            for option, points in self.options
            for point in points
        ]
        self.hides = any(wire for _, _, wire in self._flat)
        self._known: dict[tuple[Wire | None, bytes], Floats] = {}
        self.rests: Floats = self.rests_with(None, np.array([2], dtype=np.int64))[:, 0]
        # B - 1: another device does a sample at least.
        self.limits = (self.batch - 1) // np.maximum(self.sizes, 1)
        lengths = [len(points) for _, points in self.options]
        self.starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
        self.ends = np.cumsum(lengths).astype(np.int64)

    def rests_with(self, wire: Wire | None, numbers: Ints) -> Floats:
        """[entries, columns] the rests where so many devices are in use, and a ring has this link.

        Without one each type has its own: no plan has less.
        """
        key = wire, numbers.tobytes()
        if key not in self._known:
            found = np.zeros((len(self._flat), len(numbers)))
            for row, (option, point, own) in zip(found, self._flat, strict=True):
                row += closing_seconds(option)
                if own is None:
                    row += exposed_seconds(option.sync, point.batch_size) or 0.0
                else:
                    row += unhidden_seconds(point, numbers, wire or own)
            self._known[key] = found
        return self._known[key]

    def at(self, rests: Floats) -> "SplitPool":
        """The pool with other rests."""
        found = copy(self)
        found.rests = rests
        return found

    def passes(self, seconds: float) -> Ints:
        """[entries] the most passes of each size within ``seconds``, with what comes once."""
        left = np.maximum(seconds - self.rests, 0.0)
        capped = np.minimum(left / self.seconds, self.limits)
        fit: Ints = capped.astype(np.int64)
        # Division may round across a whole number either way, so the times themselves decide.
        fit += self.device_seconds(fit + 1) <= seconds
        fit -= (fit > 0) & (self.device_seconds(fit) > seconds)
        capped_fit: Ints = np.minimum(fit, self.limits)
        return capped_fit

    def device_seconds(self, passes: Ints) -> npt.NDArray[np.float64]:
        """[entries] how long a device takes for ``passes`` of each size: v t_i(s) + rest."""
        found: npt.NDArray[np.float64] = passes * self.seconds + self.rests
        return found

    def tops(self, passes: Ints) -> list[int]:
        """[types] the most samples one device of each type can do with ``passes``."""
        most: list[int] = np.maximum.reduceat(passes * self.sizes, self.starts).tolist()
        return most

    def entries(self, passes: Ints, kind: int) -> list[tuple[int, int]]:
        """(size, passes) of one type, those with at least one pass."""
        span = slice(self.starts[kind], self.ends[kind])
        pairs = zip(self.sizes[span].tolist(), passes[span].tolist(), strict=True)
        return [(size, count) for size, count in pairs if count]


def group_on(
    option: DeviceOption, num_devices: int, passes: int, point: BatchPoint
) -> ReplicaGroup:
    """Devices of a type, among several, that each make so many passes of a measured size.

    What they wait for sums depends on all groups (``costs.split.with_exposed``).
    """
    return device_group(
        device_type=option.device_type,
        num_devices=num_devices,
        virtual_nodes=passes,
        virtual_node_batch_size=point.batch_size,
        memory_bytes=point.peak_memory_bytes,
        pass_seconds=point.step_seconds,
        interpolated=point.batch_size in option.interpolated_sizes,
        measured_busy=option.alone is not None,
    )


# Sets of whole numbers as the bits of one big integer: exact subset sums, fast.
#
# Bit ``k`` set means that ``k`` is a member. Shifting a set adds a constant to its members, so a
# sum of two sets takes one or two shifts per run of members, whatever the runs' lengths.

_RUNS_BETWEEN_LOOKS = 64


def multiples(step: int, count: int) -> int:
    """The set {0, step, 2 step, ..., count step}."""
    return repeated(1, step, count)


def repeated(bits: int, step: int, count: int) -> int:
    """A set and its copies moved up by step, 2 step, ..., count step."""
    # Doubling, and a last shift for what is left: O(log count) operations on the whole set.
    copies = 1
    while 2 * copies <= count + 1:
        bits |= bits << (copies * step)
        copies *= 2
    return bits | bits << ((count + 1 - copies) * step)


def members(bits: int) -> list[int]:
    """The members of a set, ascending."""
    size = (bits.bit_length() + 7) // 8
    packed = np.frombuffer(bits.to_bytes(size, "little"), dtype=np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found


def sumset(left: int, right: int, mask: int, stride: int = 1) -> int:
    """The set {a + stride b} over members a of ``left``, b of ``right``, cut by ``mask``."""
    # A shift for each run of the right set, so the one with fewer runs stands there.
    if stride == 1 and _num_runs(left) < _num_runs(right):
        left, right = right, left
    smears = [left]  # smears[p] = left + stride {0, 1, ..., 2^p - 1}
    total = 0
    for index, (start, length) in enumerate(_runs(right)):
        if index % _RUNS_BETWEEN_LOOKS == _RUNS_BETWEEN_LOOKS - 1 and total & mask == mask:
            break  # nothing is missing any more
        power = length.bit_length() - 1
        while len(smears) <= power:
            last = smears[-1]
            smears.append((last | last << (stride << (len(smears) - 1))) & mask)
        # Two smears of a power of two cover a run of any length.
        total |= smears[power] << (stride * start)
        if length & (length - 1):
            total |= smears[power] << (stride * (start + length - (1 << power)))
    return total & mask


def _num_runs(bits: int) -> int:
    return (bits & ~(bits << 1)).bit_count()


def _runs(bits: int) -> list[tuple[int, int]]:
    starts = members(bits & ~(bits << 1))
    ends = members(bits & ~(bits >> 1))
    return [(start, end - start + 1) for start, end in zip(starts, ends, strict=True)]


class Folds:
    """Sums of exactly k members of one base set, for any k; of at most k if 0 is a member."""

    def __init__(self, base: int, mask: int) -> None:
        self.mask = mask
        self._folds = {0: 1, 1: base & mask}
        self._grows = bool(base & 1)
        self._closed_at: int | None = None

    def __getitem__(self, count: int) -> int:
        if self._closed_at is not None and count > self._closed_at:
            return self._folds[self._closed_at]
        if count not in self._folds:
            self._folds[count] = self._sum(count)
        return self._folds[count]

    def _sum(self, count: int) -> int:
        low, high = self[count // 2], self[count - count // 2]
        total = sumset(low, high, self.mask)
        if self._grows and total == low and self._closed_at is None:
            self._closed_at = count // 2  # one more member adds nothing, nor will any
            self._folds[count // 2] = low
        return total


@dataclass(frozen=True, slots=True)
class TypeSums:
    """The samples that the devices of one type can do together, in units of ``stride`` samples.

    ``folds[k]`` are the contributions of at most k devices: samples done, or left undone.
    """

    kind: int
    count: int
    top: int
    stride: int
    entries: list[tuple[int, int]]
    folds: Folds


@dataclass(frozen=True, slots=True)
class FeasibleSums:
    """Proof that the batch can be shared out; ``suffixes[j]`` are the sums of types[j:].

    ``undone`` says that contributions count the samples that devices leave undone, against
    all of them doing their most; else they count samples done. They add up to ``target``.
    """

    undone: bool
    target: int
    types: list[TypeSums]
    suffixes: list[int]


def feasible_sums(pool: SplitPool, counts: tuple[int, ...], seconds: float) -> FeasibleSums | None:
    """Decide whether ``counts`` devices can do exactly B samples within ``seconds``.

    ``counts`` is 0 for types that are left out.
    """
    passes = pool.passes(seconds)
    tops = pool.tops(passes)
    over = sum(count * top for count, top in zip(counts, tops, strict=True)) - pool.batch
    if over < 0:
        return None
    # The fewer samples are undone, the shorter the sets: near the optimum a few bits.
    undone = over <= pool.batch
    target = over if undone else pool.batch
    types = [
        _type_sums(pool, passes, kind, count, tops[kind], undone, target)
        # The types that can do most come first, as ``choose`` deals by them.
        for kind, count in sorted(enumerate(counts), key=lambda pair: (-tops[pair[0]], pair[0]))
        if count and tops[kind]
    ]
    suffixes = _suffixes(types, target)
    return FeasibleSums(undone, target, types, suffixes) if suffixes[0] >> target & 1 else None


def _type_sums(
    pool: SplitPool, passes: Ints, kind: int, count: int, top: int, undone: bool, target: int
) -> TypeSums:
    entries = pool.entries(passes, kind)
    # All amounts of a type are multiples of it, so sets are that much shorter.
    stride = gcd(*(size for size, _ in entries))
    width = target // stride
    base = 0
    for size, most in entries:
        first = (top - most * size) // stride if undone else 0
        step = size // stride
        if first <= width:
            base |= multiples(step, min(most, (width - first) // step)) << first
    if undone and top // stride <= width:
        base |= 1 << (top // stride)  # an unused device
    # One bit more than the largest member, as 0 is one.
    return TypeSums(kind, count, top, stride, entries, Folds(base, (2 << width) - 1))


def _suffixes(types: list[TypeSums], target: int) -> list[int]:
    mask = (2 << target) - 1
    sums = [1]
    for one in reversed(types):
        sums.append(sumset(sums[-1], one.folds[one.count], mask, one.stride))
    return sums[::-1]


def feasible_batches(pool: SplitPool, width: int) -> int:
    """The set of all batches up to ``width`` that some plan on two or more devices adds up to."""
    mask = (2 << width) - 1
    found = 0
    for kind in range(len(pool.counts)):
        one = [int(other == kind) for other in range(len(pool.counts))]
        others = [count - taken for count, taken in zip(pool.counts, one, strict=True)]
        # Neither the one nor the others stand idle: 0 is not among their sums.
        found |= sumset(_sums_of(pool, one, width) & ~1, _sums_of(pool, others, width) & ~1, mask)
    return found


def _sums_of(pool: SplitPool, counts: Sequence[int], width: int) -> int:
    """The samples that ``counts`` devices of each type can do together, whatever the time."""
    sums = 1
    for kind, count in enumerate(counts):
        sizes = pool.sizes[pool.starts[kind] : pool.ends[kind]].tolist()
        stride = gcd(*sizes)
        base = 0
        for size in sizes:
            base |= multiples(size // stride, width // size)
        fold = Folds(base, (2 << (width // stride)) - 1)[count]
        sums = sumset(sums, fold, (2 << width) - 1, stride)
    return sums


def greedy_counts(tops: list[int], counts: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The ``limit`` devices that can do most, as counts per type."""
    left, taken = limit, [0] * len(counts)
    for kind in sorted(range(len(counts)), key=lambda kind: (-tops[kind], kind)):
        taken[kind] = min(left, counts[kind]) if tops[kind] else 0
        left -= taken[kind]
    return tuple(taken)


def counts_within(
    pool: SplitPool, counts: tuple[int, ...], limit: int, seconds: float
) -> tuple[int, ...] | None:
    """Counts of at most ``limit`` devices in all that can do exactly B within ``seconds``."""
    # The devices that can do most are tried first. Where they cannot add up to B, all choices are
    # judged at once by sums over pairs (devices used, samples short of the ideal). The ideal is
    # that the devices which can do most are full.
    passes = pool.passes(seconds)
    tops = pool.tops(passes)
    first = greedy_counts(tops, counts, limit)
    if sum(n * top for n, top in zip(first, tops, strict=True)) < pool.batch:
        return None
    if feasible_sums(pool, first, seconds):
        return first
    if limit >= sum(counts) or not feasible_sums(pool, counts, seconds):
        return None
    return _counts_by_pairs(pool, passes, tops, counts, limit)


def _counts_by_pairs(
    pool: SplitPool, passes: Ints, tops: list[int], counts: tuple[int, ...], limit: int
) -> tuple[int, ...] | None:
    kinds = [kind for kind, n in enumerate(counts) if n and tops[kind]]
    if len(kinds) == 1:
        return None  # the first choice was the only one
    chosen = greedy_counts(tops, counts, limit)
    pivot = min(tops[kind] for kind, n in enumerate(chosen) if n)
    # A device beyond the best ones is worth ``pivot`` at most; what better types do beyond that is
    # the ideal.
    ideal = sum(n * max(0, top - pivot) for n, top in zip(counts, tops, strict=True))
    short = pivot * limit + ideal - pool.batch  # at `limit` devices; `pivot` less for each fewer
    goals = [(limit - i, short - pivot * i) for i in range(min(limit, short // pivot + 1))]
    # Rows of length 0 forget the number of devices: cheap, and most often enough to refuse.
    for row in (0, 2 * (short + 1)):
        mask = repeated((2 << short) - 1, row, limit if row else 0)
        folds = [
            Folds(_pairs(pool.entries(passes, kind), tops[kind], pivot, short, row), mask)
            for kind in kinds
        ]
        sums = [1]
        for kind, fold in zip(reversed(kinds), reversed(folds), strict=True):
            sums.append(sumset(sums[-1], fold[counts[kind]], mask))
        goals = [(used, loss) for used, loss in goals if sums[-1] >> (used * row + loss) & 1]
        if not goals:
            return None
    return _unpick(kinds, folds, sums[::-1], counts, goals[0], row)


def _pairs(entries: list[tuple[int, int]], top: int, pivot: int, short: int, row: int) -> int:
    """One device's choices as members ``used * row + loss``, losses up to ``short``."""
    best = max(top, pivot)  # full devices of the better types are the ideal, else unused ones
    bits = 1 << (best - pivot) if best - pivot <= short else 0
    for size, most in entries:
        first = best - most * size
        if first <= short:
            count = min(most - 1, (short - first) // size)
            bits |= multiples(size, count) << (row + first)
    return bits


def _unpick(
    kinds: list[int],
    folds: list[Folds],
    sums: list[int],
    counts: tuple[int, ...],
    target: tuple[int, int],
    row: int,
) -> tuple[int, ...]:
    member = target[0] * row + target[1]
    used = [0] * len(counts)
    for index, kind in enumerate(kinds):
        # The first choice whose rest can still be had: there is one, as the sums say so.
        for choice in members(folds[index][counts[kind]]):
            rest = member - choice
            if rest >= 0 and sums[index + 1] >> rest & 1:
                used[kind], member = choice // row, rest
                break
    return tuple(used)
