"""Devices of elastic jobs by weighted fair sharing, decided at every event (VirtualFlow 4.2).

``fair_share`` says how many devices each job gets, and here it is told which. As in the simulator
of the same mechanism: jobs that were let in share in the order in which that happened, and the
queue is ordered by weight, then arrival.
"""

from collections.abc import Collection, Mapping

import numpy as np

from .cluster.layout import Sizes
from .cluster.seats import Device, Placement, Seat, seat
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
    """
    active = state.active
    lost = frozenset(down)
    free = sum(map(sum, sizes)) - len(lost)
    state.see(np.array([free], dtype=np.int64))
    since = active.started.tolist()
    queue = sorted(
        range(len(active.jobs)),
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

    wanted = share_elastically([claim(i) for i in running], [claim(i) for i in waiting], free)
    places = [*running, *waiting][: len(wanted)]
    active.started[places[len(running) :]] = now_seconds
    active.share[:] = 0.0
    active.share[0, places] = np.array(wanted) / active.scale[places]
    state.last_reset, state.changed = now_seconds, False
    given = {active.jobs[i].id: number for i, number in zip(places, wanted, strict=True) if number}
    placements = [Placement((name,), ((0, number),)) for name, number in given.items()]
    return dict(zip(given, seat(sizes, placements, held or {}, lost), strict=True))
