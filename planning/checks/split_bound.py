"""Replay the certificate of a split's bound, or refute a bound: by sums of samples.

For a time, each device of some types can do certain numbers of samples, as whole passes of one
size. The sums of such numbers over the devices are the bits of an integer: adding a device shifts
them. If the whole batch is among the sums for a time below the bound, the bound is wrong. If it is
among those of no set of splits, and the sets hold all splits, the bound is proved.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from math import gcd, inf

from ...schema.plan import RefutedSplits
from ...schema.problem import DeviceOption, SplitProblem
from . import definitions

MOST_STEPS = 4e5
"""Shifts of 10,000 bits that a refutation may take, about 0.1 s; larger problems are not searched.

Then only simple splits are compared (``batch_split``).
"""
_BELOW = 1 - 1e-9


def faster(problem: SplitProblem, seconds: float) -> str | None:
    """Describe the devices of a split whose step is shorter than ``seconds``.

    Returns:
        None if no split is shorter, or the problem is too large to search (``MOST_STEPS``).
    """
    limit, batch = seconds * _BELOW, problem.global_batch_size
    share = batch // problem.virtual_nodes if problem.virtual_nodes else None
    if (alone := _alone_within(problem, limit, share)) is not None:
        return alone
    options = {option.device_type: option for option in problem.devices}
    total = sum(option.num_devices for option in problem.devices)
    worst = {
        name: max(definitions.split_sync_seconds(kind, n) for n in range(1, total + 1))
        for name, kind in options.items()
    }
    try:
        for used in {used for _, used, _ in _all_splits(problem)}:
            kinds = [options[name] for name in sorted(used)]
            # The most that any of its splits pays beside devices: if the batch fits into the time
            # that is then left, one of them is faster for certain.
            left = limit - max(worst[name] for name in used)
            if left > 0 and _can_do(kinds, total, left, batch, share, _once(kinds, total)):
                return f"several of {', '.join(sorted(used))}"
    except TooLargeError:
        pass
    return None


def _alone_within(problem: SplitProblem, limit: float, share: int | None) -> str | None:
    """Describe one device that does the batch within a time; None if there is none."""
    for option in problem.devices:
        costs = definitions.terms(option, 1)
        for point in costs.batch_curve:
            passes, rest = divmod(problem.global_batch_size, point.batch_size)
            step = passes * point.step_seconds + costs.update_seconds + costs.fixed_seconds
            if rest == 0 and share in (None, point.batch_size) and step <= limit:
                return f"1 {option.device_type} alone"
    return None


class TooLargeError(Exception):
    """A certificate takes more work to replay than a judge does (``MOST_STEPS``)."""


def replay_faults(
    problem: SplitProblem, seconds: float, refuted: Sequence[RefutedSplits]
) -> list[str]:
    """Replay a certificate: its sets hold every split, and no split of a set is that fast.

    ``seconds`` is the bound, which every step takes at least, to 1e-9. Returns one sentence per
    fault; none if the bound is proved.

    Raises:
        TooLargeError: A set takes too much work.
    """
    limit, batch = seconds * _BELOW, problem.global_batch_size
    share = batch // problem.virtual_nodes if problem.virtual_nodes else None
    if (alone := _alone_within(problem, limit, share)) is not None:
        return [f"proof.certificate: {alone} takes less than {seconds} s"]
    options = {option.device_type: option for option in problem.devices}
    # Of each set the least that a device takes beside its passes, in any of its splits.
    beside: list[_Once] = [{} for _ in refuted]
    # The smallest set that holds a split leaves the larger ones the fewest to refute.
    by_size = sorted(enumerate(refuted), key=lambda entry: len(entry[1].device_types))
    holding: dict[frozenset[str], list[tuple[int, RefutedSplits]]] = {}
    seen: set[tuple[int, frozenset[str]]] = set()
    for number, used, overhead in _all_splits(problem):
        if used not in holding:
            holding[used] = [entry for entry in by_size if used <= {*entry[1].device_types}]
        for place, one in holding[used]:
            if one.least_devices <= number <= one.most_devices:
                # More of the same devices, or slower links, take no less.
                if (place, used) not in seen:
                    seen.add((place, used))
                    for key, more in _once([options[name] for name in used], number).items():
                        beside[place][key] = min(beside[place].get(key, inf), overhead + more)
                break
        else:
            types = ", ".join(sorted(used))
            return [f"proof.certificate: leaves out splits on {number} devices of {types}"]
    return [
        f"proof.certificate: refuted[{place}] holds splits that are not refuted"
        for place, (one, once) in enumerate(zip(refuted, beside, strict=True))
        if once
        and _can_do(
            [options[name] for name in one.device_types if name in options],
            one.most_devices, limit, batch, share, once,
        )
    ]  # fmt: skip


def _all_splits(problem: SplitProblem) -> Iterator[tuple[int, frozenset[str], float]]:
    """Yield (devices, types, seconds beside devices) of sets of all splits on two or more."""
    batch = problem.global_batch_size
    sizes = range(1, batch + 1)
    if problem.virtual_nodes:
        sizes = range(batch // problem.virtual_nodes, batch // problem.virtual_nodes + 1)
    options = {
        option.device_type: option
        for option in problem.devices
        if any(point.batch_size in sizes for point in option.batch_curve)
    }
    links = {name: _link(option) for name, option in options.items()}
    late, slow = {a for a, _ in links.values()}, {b for _, b in links.values()}
    # The slowest synchronisation of a split tells which types it may use, and its slowest links.
    for number in range(2, sum(option.num_devices for option in options.values()) + 1):
        sync = {name: definitions.split_sync_seconds(o, number) for name, o in options.items()}
        for slowest, most, least in product({*sync.values()}, late, slow):
            used = frozenset(
                name
                for name, (latency, rate) in links.items()
                if sync[name] <= slowest and latency <= most and rate >= least
            )
            if sum(options[name].num_devices for name in used) >= number:
                yield number, used, slowest


_Once = dict[tuple[str, int], float]
"""Seconds that a device takes beside its passes, by its type and their size."""


def _link(option: DeviceOption) -> tuple[float, float]:
    """Latency and rate of its ring; all alike where they do not tell what passes hide."""
    link = definitions.ring_link([option])
    if link is None or not definitions.tells_sums(option):
        return 0.0, inf
    return link.latency_seconds, link.bytes_per_second


def _once(options: Collection[DeviceOption], num_devices: int) -> _Once:
    link = definitions.ring_link(options)
    return {
        (option.device_type, point.batch_size): option.update_seconds
        + option.fixed_seconds
        + (definitions.exposed_seconds(option, num_devices, point.batch_size, link) or 0.0)
        for option in options
        for point in option.batch_curve
    }


def whole_sets(problem: SplitProblem) -> tuple[RefutedSplits, ...]:
    """Sets that hold every split on two or more devices, for a bound without a certificate."""
    total = sum(option.num_devices for option in problem.devices)
    return tuple(
        RefutedSplits(device_types=tuple(sorted(used)), least_devices=2, most_devices=total)
        for used in {used for _, used, _ in _all_splits(problem)}
    )


def _can_do(
    options: list[DeviceOption],
    most_devices: int,
    seconds: float,
    batch: int,
    share: int | None,
    beside: _Once,
) -> bool:
    """Whether at most so many devices can do exactly the batch, each within a time."""
    # Of each type: devices, most samples of one of them, (size, most passes).
    kinds: list[tuple[int, int, list[tuple[int, int]]]] = []
    for option in options:
        passes = []
        for point in option.batch_curve:
            once = beside.get((option.device_type, point.batch_size), inf)
            if once > seconds:
                continue
            most = int(max(0.0, seconds - once) / point.step_seconds)
            most += (most + 1) * point.step_seconds + once <= seconds  # division rounds
            most = min(most, (batch - 1) // point.batch_size)  # another device does a sample
            if most and share in (None, point.batch_size):
                passes.append((point.batch_size, most))
        kinds.append((option.num_devices, max((s * n for s, n in passes), default=0), passes))
    # Not even at full speed: no exact sums are needed.
    room, reached = most_devices, 0
    for count, top, _ in sorted(kinds, key=lambda kind: -kind[1]):
        reached += min(room, count) * top
        room -= min(room, count)
    if reached < batch:
        return False
    # Devices are counted by what each leaves undone of the most that it can do: close to the
    # optimum that is little, so the sums are few bits.
    surplus = sum(count * top for count, top, _ in kinds) - batch
    stride = gcd(batch, *(size for _, _, passes in kinds for size, _ in passes))
    work = _Work()
    undone = 1
    for count, top, passes in kinds:
        if top:
            amounts = {0, *(n * size for size, most in passes for n in range(1, most + 1))}
            one = sum(1 << (top - a) // stride for a in amounts if top - a <= surplus)
            together = work.multiple(one, count, surplus // stride)
            undone = work.summed(undone, together, surplus // stride)
    if not undone >> surplus // stride & 1:
        return False
    if most_devices >= sum(count for count, _, _ in kinds):
        return True
    # The sums hold for all devices together; fewer are allowed, so sums are taken for each number
    # of them.
    by_devices = [1] + [0] * most_devices  # [devices] sums of samples
    for count, _, passes in kinds:
        one = sum({1 << n * size // stride for size, most in passes for n in range(1, most + 1)})
        for _ in range(count):
            # From the largest number down, so that a device is added once.
            for number in range(most_devices, 0, -1):
                by_devices[number] |= work.summed(by_devices[number - 1], one, batch // stride)
    return any(sums >> batch // stride & 1 for sums in by_devices)


class _Work:
    """Sums of sets of numbers, as bits, with a limit on all shifts together."""

    def __init__(self) -> None:
        self.steps = 0.0

    def summed(self, left: int, right: int, most: int) -> int:
        """All sums of a member of each set, up to ``most``."""
        few, many = sorted((left, right), key=int.bit_count)
        self.steps += few.bit_count() * (1 + most / 1e4)
        if self.steps > MOST_STEPS:
            raise TooLargeError
        found = 0
        while few:
            # A shift for each member of the smaller set.
            lowest = few & -few
            found |= many << (lowest.bit_length() - 1)
            few ^= lowest
        return found & ((2 << most) - 1)

    def multiple(self, one: int, count: int, most: int) -> int:
        """All sums of ``count`` members of a set."""
        # By the binary digits of ``count``: O(log count) sums.
        found = 1
        while count:
            if count & 1:
                found = self.summed(found, one, most)
            count >>= 1
            if count:
                one = self.summed(one, one, most)
        return found
