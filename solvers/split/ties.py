"""Choose one plan among the equally fast ones: the tie rule of the batch split.

Types are taken by how much one of their devices can do within the optimal time, most first.
1. If some plan gives every device of each used type the same work, with all of the type's
   devices in use, take one: each type in turn does as much as it can.
2. Otherwise each type in turn does as much as it can with equal work on each of its used devices.
If
   that is impossible it does as much as it can at all; its devices are halved again and again, and
   each half gets a part as equal as possible.
Of equal amounts: the fewest devices, then the fewest virtual nodes.
"""

from collections import Counter
from collections.abc import Mapping

from ...schema.plan import ReplicaGroup
from .feasible import FeasibleSums, TypeSums, members, sumset
from .pool import SplitPool, group_on

Work = Counter[int]  # samples per device -> number of devices


def choose(feasible: FeasibleSums) -> dict[int, Work]:
    """Choose the devices' work: type -> (samples a device -> number of devices)."""
    totals = _all_alike(feasible)
    if totals is not None:
        return {
            one.kind: Counter({done // one.count: one.count})
            for one, done in zip(feasible.types, totals, strict=True)
            if done
        }
    left, work = feasible.target, {}
    for index, one in enumerate(feasible.types):
        share, alike = _best_share(feasible, index, left)
        left -= share * one.stride
        work[one.kind] = alike or _halved(feasible, one, share)
    return {kind: amounts for kind, amounts in work.items() if amounts}


def _all_alike(feasible: FeasibleSums) -> list[int] | None:
    """Samples done by each type in rule 1, or None."""
    choices = [_alike_sums(feasible, one) for one in feasible.types]
    mask = (2 << feasible.target) - 1
    suffixes = [1]
    for bits in reversed(choices):
        suffixes.append(sumset(suffixes[-1], bits, mask))
    suffixes.reverse()
    if not suffixes[0] >> feasible.target & 1:
        return None
    left, totals = feasible.target, []
    for one, bits, after in zip(feasible.types, choices, suffixes[1:], strict=True):
        found = members(bits)
        order = found if feasible.undone else found[::-1]
        share = next(m for m in order if m <= left and after >> (left - m) & 1)
        left -= share
        totals.append(one.count * one.top - share if feasible.undone else share)
    return totals


def _alike_sums(feasible: FeasibleSums, one: TypeSums) -> int:
    bits = 0
    for share in members(one.folds[1]):
        total = share * one.stride * one.count
        if total <= feasible.target:
            bits |= 1 << total
    return bits


def _best_share(feasible: FeasibleSums, index: int, left: int) -> tuple[int, Work | None]:
    """A type's contribution, in strides, and its devices' work if they are alike."""
    one, after = feasible.types[index], feasible.suffixes[index + 1]
    found = members(one.folds[one.count])
    order = found if feasible.undone else found[::-1]
    possible = [m for m in order if (rest := left - m * one.stride) >= 0 and after >> rest & 1]
    for share in possible:
        alike = _alike(one, _done(feasible, one, one.count, share))
        if alike is not None:
            return share, alike
    return possible[0], None


def _done(feasible: FeasibleSums, one: TypeSums, num_devices: int, share: int) -> int:
    samples = share * one.stride
    return num_devices * one.top - samples if feasible.undone else samples


def _alike(one: TypeSums, done: int) -> Work | None:
    if done == 0:
        return Counter()
    for num_devices in range(-(-done // one.top), one.count + 1):
        each, rest = divmod(done, num_devices)
        if rest == 0 and fewest_passes(one.entries, each):
            return Counter({each: num_devices})
    return None


def fewest_passes(entries: list[tuple[int, int]], samples: int) -> tuple[int, int] | None:
    """(size, passes) that do exactly ``samples`` in the fewest passes, or None."""
    fitting = [size for size, most in entries if samples % size == 0 and samples // size <= most]
    return (max(fitting), samples // max(fitting)) if fitting else None


def _halved(feasible: FeasibleSums, one: TypeSums, share: int) -> Work:
    """Share out a contribution among all devices of a type, half against half."""
    work: Work = Counter()
    tasks = [(one.count, share)]
    while tasks:
        num_devices, part = tasks.pop()
        if num_devices == 1:
            work[_done(feasible, one, 1, part)] += 1
            continue
        small = num_devices // 2
        large = num_devices - small
        fold, other = one.folds[small], one.folds[large]
        fitting = [m for m in members(fold) if m <= part and other >> (part - m) & 1]
        half = min(fitting, key=lambda m: (abs(m * num_devices - part * small), m))
        tasks += [(small, half), (large, part - half)]
    del work[0]
    return work


def groups_of(pool: SplitPool, work: Mapping[int, Work], bound: float) -> tuple[ReplicaGroup, ...]:
    """The plan's groups: each device's work in the fewest passes of at most ``bound`` seconds."""
    passes = pool.passes(bound)
    groups = []
    for kind, amounts in sorted(work.items()):
        option, points = pool.options[kind]
        at = {point.batch_size: point for point in points}
        for samples, num_devices in sorted(amounts.items(), reverse=True):
            size, count = fewest_passes(pool.entries(passes, kind), samples) or (0, 0)
            groups.append(group_on(option, num_devices, count, at[size]))
    return tuple(groups)
