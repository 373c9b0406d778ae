"""Elastic weighted fair sharing, and static priority beside it (VirtualFlow 4.2, 6.4).

First how many devices each job gets, then (``next_shares``) which.

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

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .round_state import RoundState
from .seats import Device, Placement, Seat, Sizes, seat

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

    ``waiting`` is the queue, its head first.
    """
    claims = list(running)
    wanted = _shares(claims, free)
    for head in waiting:
        fair = _shares([*claims, head], free)
        # Nobody of more weight may lose devices to who joins.
        hurt = any(
            share < claim.held and claim.weight > head.weight
            for claim, share in zip(claims, fair, strict=False)
        )
        # The head holds up all behind it.
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
    # Down to the next number that the job can run on.
    for i in order:
        while shares[i] not in (0, *_numbers(claims[i])):
            shares[i] -= 1
    # What that leaves goes to next higher numbers, by weight.
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
    """Fair shares, each at least the job's least number, or 0 where that does not fit."""
    # ``order`` lists places, those that come first where not all fit.
    shares, left, reserved = [0] * len(claims), free, 0
    open_ = set[int]()
    # Least numbers are reserved in order, as far as they fit.
    for i in order:
        if claims[i].least <= 1 or reserved + claims[i].least <= free:
            reserved += claims[i].least
            open_.add(i)
    while open_:
        places = sorted(open_)
        found = _by_weight([claims[i] for i in places], left)
        # Who would fall short of its least gets just that, and the others share the rest.
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
    """Static priority: how many jobs from the queue's head get all devices that they ask for."""
    for number, demand in enumerate(demands):
        if demand > free:
            return number
        free -= demand
    return len(demands)


def fair_shares(weights: Sequence[float], demands: Sequence[int], free: int) -> list[int]:
    """Whole devices by weight, each job at most its demand (weighted max-min with water filling).

    Each job gets at least one device where there are enough of them.
    """
    exact = _filled(weights, demands, free)
    with_one = set[int]()
    # Jobs below one device get one, and the rest is shared again without these.
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
        # Until the devices are gone, or the first job has its demand.
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
    # One device each before anybody's remainder.
    for i in sorted(range(len(exact)), key=lambda i: (-weights[i], i)):
        if shares[i] == 0 and sum(shares) < free:
            shares[i] = 1
    for i in order:
        if sum(shares) < free and shares[i] < exact[i] - _NEAR:
            shares[i] += 1
    return shares


NAME = "elastic"
"""What users call it, of the simulator and of a live cluster."""


def next_shares(
    state: RoundState,
    numbers: Mapping[str, tuple[int, ...]],
    now_seconds: float,
    *,
    sizes: Sizes,
    down: Collection[Device] = (),
    held: Mapping[str, Seat] | None = None,
    kept: Mapping[str, Seat] | None = None,
) -> dict[str, Seat]:
    """The devices of each job from now on; a job that is not named waits.

    Decided at every event. Jobs that were let in share in the order in which that happened, and
    the queue is ordered by weight, then arrival.

    VirtualFlow counts the devices of a cluster; a live job has all of its devices on one server.
    So each server shares its own devices among the jobs on it, and the queue's head joins the
    server on which it gets most; of equals that on which more of these idle, so that others keep
    theirs, then that with the least weight per device. A job that runs leaves its server, which
    costs a restart, only for idle devices that at least double what it has. On one server this is
    algorithm 1, and what the simulator does.

    A job that keeps its number keeps its devices; one that shrinks keeps some of them. The state
    is left as the next decision needs it: ``started`` tells since when a job is no longer in the
    queue, and ``share`` how much of its scale factor it has.

    ``numbers`` are of devices that each job can run on, in order; one that is not named runs on
    any number up to its scale factor. ``sizes`` [1][servers] are devices of the type; jobs in
    ``kept`` stay where they are, whatever is down there.
    """
    active, held, kept = state.active, held or {}, kept or {}
    lost = frozenset(down)
    missing = Counter(place for _, place, _ in lost)
    servers = [_Server(size - missing[place]) for place, size in enumerate(sizes[0])]
    state.see(np.array([sum(server.free for server in servers)], dtype=np.int64))
    since = active.started.tolist()
    queue = sorted(
        (i for i, job in enumerate(active.jobs) if job.id not in kept),
        key=lambda i: (-active.jobs[i].priority_weight, active.jobs[i].arrival_seconds, i),
    )
    running = sorted((i for i in queue if since[i] >= 0), key=since.__getitem__)  # a stable sort
    waiting = [i for i in queue if since[i] < 0]
    before = np.rint(active.share.sum(axis=0) * active.scale).astype(int).tolist()

    def claim(i: int) -> Claim:
        job = active.jobs[i]
        known = numbers.get(job.id)
        demand = job.scale_factor if known is None else known[-1]
        return Claim(job.priority_weight, demand, before[i] if since[i] >= 0 else 0, known)

    homeless = list[int]()
    for i in running:
        own = Counter(device[1] for device in held.get(active.jobs[i].id, ()) if device not in lost)
        if own or len(servers) == 1:
            servers[max(own, key=own.__getitem__, default=0)].take(i, claim(i))
        else:  # its server is down, or it was stopped
            homeless.append(i)
    # The queue's head holds up all behind it; who ran before does not.
    for i in [*homeless, *waiting]:
        if not _join(servers, i, claim(i)) and since[i] < 0:
            break
    _spread(servers)
    joined = [i for server in servers for i in server.jobs if since[i] < 0]
    active.started[joined] = now_seconds
    active.share[:] = 0.0
    placements = list[Placement]()
    for place, server in enumerate(servers):
        for i, number in zip(server.jobs, server.shares(), strict=True):
            active.share[0, i] = number / active.scale[i]
            if number:
                at = Placement((active.jobs[i].id,), ((0, number),), {place: number})
                placements.append(at)
    for i, job in enumerate(active.jobs):
        if job.id in kept:
            active.share[0, i] = len(kept[job.id]) / active.scale[i]
    state.last_reset, state.changed = now_seconds, False
    found = seat(sizes, placements, {**held, **kept}, lost)
    given = {one.jobs[0]: its for one, its in zip(placements, found, strict=True)}
    return {**given, **kept}


@dataclass(slots=True)
class _Server:
    """Devices that are up, and the jobs that share them, in the order in which they came."""

    free: int
    jobs: list[int] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def take(self, job: int, claim: Claim) -> None:
        self.jobs.append(job)
        self.claims.append(claim)

    def share_with(self, head: Claim) -> int:
        """Devices of one more job; 0 where it cannot join."""
        found = share_elastically(self.claims, [head], self.free)
        return found[-1] if len(found) > len(self.claims) else 0

    def shares(self) -> list[int]:
        return share_elastically(self.claims, [], self.free)

    def leave(self, job: int) -> Claim:
        place = self.jobs.index(job)
        del self.jobs[place]
        return self.claims.pop(place)

    @property
    def idle(self) -> int:
        """Devices that no job here has, by its share."""
        return self.free - sum(self.shares())

    @property
    def load(self) -> float:
        """Weight per device."""
        return sum(claim.weight for claim in self.claims) / max(self.free, 1)


def _join(servers: Sequence[_Server], job: int, claim: Claim) -> bool:
    """Let a job join the server on which it gets most; whether there is one."""
    offers = [
        (most := server.share_with(claim), min(most, server.idle), -server.load, -k)
        for k, server in enumerate(servers)
    ]
    most, *_, place = max(offers)
    if most:
        servers[-place].take(job, claim)
    return most > 0


def _spread(servers: Sequence[_Server]) -> None:
    """Let jobs go over to idle devices of other servers, who gains most first, each once."""
    moved = set[int]()
    # Each job once, so this ends.
    while any(server.idle for server in servers):
        gains = [
            (offer - share, -job, -k, -there)
            for k, server in enumerate(servers)
            for job, claim, share in zip(
                server.jobs, server.claims, server.shares(), strict=True
            )
            if job not in moved
            for there, other in enumerate(servers)
            if other is not server
            and 2 * share <= (offer := min(other.share_with(claim), other.idle))
            and offer > share
        ]  # fmt: skip
        if not gains:
            return
        _, job, k, there = max(gains)
        servers[-there].take(-job, servers[-k].leave(-job))
        moved.add(-job)
