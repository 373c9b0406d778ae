"""Elastic weighted fair sharing, and static priority beside it (VirtualFlow 4.2, 6.4).

On one device type. Where algorithm 1 is silent: "expand current allocations" gives free devices by
weighted fair share to running jobs below their demand. Fair shares are whole devices, at least one
a job where there are enough, at most the demand. The largest remainder comes first, then the higher
weight, then the earlier job. "No higher priority job allocations are affected" means that no
running job of a higher weight than the queue's head would hold fewer devices than now.

Jobs of a live cluster run on some numbers of devices only, from a least one on. That is ours: a
job whose fair share is less than its least number, of two or more, gets this number, in order of
weight as long as devices are left. All others get their fair shares of the rest. What a job cannot
use of its share goes to the next one that can take a step up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_NEAR = 1e-9  # of a device: rounding of its own additions


@dataclass(frozen=True, slots=True)
class Claim:
    """A job's weight, the devices it asks for, and those it holds.

    ``numbers`` of devices, in order, are those that it can run on, the last one its demand; None:
    any up to its demand.
    """

    weight: float
    demand: int
    held: int = 0
    numbers: tuple[int, ...] | None = None

    @property
    def least(self) -> int:
        """The fewest devices that it can run on."""
        return 1 if self.numbers is None else self.numbers[0]


def share_elastically(running: Sequence[Claim], waiting: Sequence[Claim], free: int) -> list[int]:
    """Algorithm 1: devices of the running jobs, then of those that join from the queue's head.

    Args:
        running: Jobs that hold devices.
        waiting: The queue, its head first.
        free: Devices that are up.
    """
    claims = list(running)
    wanted = _shares(claims, free)
    for head in waiting:
        fair = _shares([*claims, head], free)
        hurt = any(
            share < claim.held and claim.weight > head.weight
            for claim, share in zip(claims, fair, strict=False)
        )
        if hurt or fair[-1] == 0:
            break
        wanted = fair
        claims.append(head)
    return wanted


def _shares(claims: Sequence[Claim], free: int) -> list[int]:
    if all(one.numbers is None for one in claims):
        return _by_weight(claims, free)
    order = sorted(range(len(claims)), key=lambda i: (-claims[i].weight, i))
    shares = _above_least(claims, order, free)
    for i in order:
        while shares[i] not in (0, *_numbers(claims[i])):
            shares[i] -= 1
    spare = free - sum(shares)
    for i in order:
        for number in _numbers(claims[i]):
            if 0 < shares[i] < number <= shares[i] + spare:
                spare -= number - shares[i]
                shares[i] = number
    return shares


def _numbers(claim: Claim) -> Sequence[int]:
    return range(1, claim.demand + 1) if claim.numbers is None else claim.numbers


def _by_weight(claims: Sequence[Claim], free: int) -> list[int]:
    return fair_shares([one.weight for one in claims], [one.demand for one in claims], free)


def _above_least(claims: Sequence[Claim], order: Sequence[int], free: int) -> list[int]:
    """Fair shares, each at least the job's least number, or 0 where that does not fit.

    Args:
        claims: The jobs.
        order: Their places, those that come first where not all fit.
        free: Devices to share.
    """
    shares, left, reserved = [0] * len(claims), free, 0
    open_ = set[int]()
    for i in order:
        if claims[i].least <= 1 or reserved + claims[i].least <= free:
            reserved += claims[i].least
            open_.add(i)
    while open_:
        places = sorted(open_)
        found = _by_weight([claims[i] for i in places], left)
        short = [i for i, share in zip(places, found, strict=True)
                 if claims[i].least > 1 and share < claims[i].least]  # fmt: skip
        for i, share in zip(places, found, strict=True):
            shares[i] = claims[i].least if i in short else share
        if not short:
            break
        left -= sum(shares[i] for i in short)
        open_ -= set(short)
    return shares


def admit_whole(demands: Sequence[int], free: int) -> int:
    """Static priority: how many jobs from the queue's head get all devices that they ask for.

    Args:
        demands: Devices that each asks for, the queue's head first.
        free: Devices that no job holds.
    """
    for number, demand in enumerate(demands):
        if demand > free:
            return number
        free -= demand
    return len(demands)


def fair_shares(weights: Sequence[float], demands: Sequence[int], free: int) -> list[int]:
    """Whole devices by weight, each job at most its demand (weighted max-min with water filling).

    Each job gets at least one device where there are enough of them.

    Args:
        weights: Weight of each job.
        demands: Devices each asks for, at least one.
        free: Devices to share.
    """
    exact = _filled(weights, demands, free)
    with_one = set[int]()
    while len(weights) <= free and (
        short := {i for i, share in enumerate(exact) if share < 1.0 - _NEAR}
    ):
        with_one |= short
        above = [i for i in range(len(weights)) if i not in with_one]
        found = _filled(
            [weights[i] for i in above], [demands[i] for i in above], free - len(with_one)
        )
        exact = [1.0] * len(weights)
        for i, share in zip(above, found, strict=True):
            exact[i] = share
    return _whole(exact, weights, free)


def _filled(weights: Sequence[float], demands: Sequence[int], free: int) -> list[float]:
    """Fractions of devices: all rise in proportion to their weights, each up to its demand."""
    exact = [0.0] * len(weights)
    open_ = set(range(len(weights)))
    left = float(free)
    while open_ and left > 1e-12:
        level = min(
            left / sum(weights[i] for i in open_),
            min((demands[i] - exact[i]) / weights[i] for i in open_),
        )
        for i in open_:
            exact[i] += level * weights[i]
        left -= level * sum(weights[i] for i in open_)
        open_ = {i for i in open_ if demands[i] - exact[i] > _NEAR}
    return exact


def _whole(exact: Sequence[float], weights: Sequence[float], free: int) -> list[int]:
    """Whole devices: one for each by weight while there are some, then the largest remainders."""
    shares = [int(value + _NEAR) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: (-(exact[i] - shares[i]), -weights[i], i))
    for i in sorted(range(len(exact)), key=lambda i: (-weights[i], i)):
        if shares[i] == 0 and sum(shares) < free:
            shares[i] = 1
    for i in order:
        if sum(shares) < free and shares[i] < exact[i] - _NEAR:
            shares[i] += 1
    return shares
