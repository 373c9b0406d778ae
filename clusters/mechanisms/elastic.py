"""Devices of elastic jobs by weighted fair sharing, decided at every event (VirtualFlow 4.2).

``fair_share`` says how many devices each job gets, and here it is told which. As in the simulator
of the same mechanism: jobs that were let in share in the order in which that happened, and the
queue is ordered by weight, then arrival.

VirtualFlow counts the devices of a cluster; a live job has all of its devices on one server. So
each server shares its own devices among the jobs on it, and the queue's head joins the server on
which it gets most; of equals that on which more of these idle, so that others keep theirs, then
that with the least weight per device. A job that runs leaves its
server, which costs a restart, only for idle devices that at least double what it has. On one server
this is algorithm 1, and what the simulator does.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .cluster.seats import Device, Placement, Seat, Sizes, seat
from .fair_share import Claim, share_elastically
from .rounds.state import RoundState

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

    A job that keeps its number keeps its devices; one that shrinks keeps some of them. The state is
    left as the next decision needs it: ``started`` tells since when a job is no longer in the
    queue, and ``share`` how much of its scale factor it has.

    Args:
        state: The jobs present, on one device type.
        numbers: Of devices that each job can run on, in order; one that is not named runs on any
            number up to its scale factor.
        now_seconds: The time.
        sizes: Devices of the type on each server that has it [1][servers].
        down: Devices that do not work.
        held: The devices of jobs that run now.
        kept: Jobs that stay where they are, whatever is down there.
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
