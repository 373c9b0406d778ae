"""What is due between two decisions: which leases begin, are resized, or have to stop instead.

A pure function of the open leases. A job goes over to its next devices in one of three ways. One
that holds none starts on them. One that is stopping leaves its devices first. One that runs, and
may be resized, keeps its devices until its launch has taken the new ones up. Each needs the new
devices to be free, but for its own. So jobs that are to exchange devices while they run may wait
for each other in a circle: then one of them stops, which frees its devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .leases import Lease


@dataclass(frozen=True, slots=True)
class Due:
    """What can be done now, with no device given to two jobs.

    Attributes:
        begin: Planned leases whose devices and jobs are free.
        resize: Running leases, each with the planned lease whose devices it can take up now.
        stop: Running leases that would wait for each other for ever.
    """

    begin: tuple[Lease, ...]
    resize: tuple[tuple[Lease, Lease], ...]
    stop: tuple[Lease, ...]


def due(open_leases: Sequence[Lease]) -> Due:
    """What is due.

    Args:
        open_leases: All that are not over; a job has at most one that holds devices, and one that
            is planned. A running one beside a planned one is to be resized.
    """
    holders = {lease.job: lease for lease in open_leases if lease.holds_devices}
    holder = {name: lease.job for lease in holders.values() for name in lease.held}
    begin, resize = [], []
    waiting: dict[int, set[int]] = {}
    for planned in open_leases:
        own = holders.get(planned.job)
        if planned.holds_devices or (own is not None and not own.may_be_asked):
            continue
        blocking = {holder[name] for name in planned.devices if name in holder} - {planned.job}
        if blocking:
            if own is not None:
                waiting[planned.job] = blocking
            continue
        holder.update(dict.fromkeys(planned.devices, planned.job))
        if own is None:
            begin.append(planned)
        else:
            resize.append((own, planned))
    stop = tuple(holders[job] for job in _in_circles(waiting))
    return Due(tuple(begin), tuple(resize), stop)


def _in_circles(waiting: Mapping[int, set[int]]) -> list[int]:
    """One job of each circle of jobs that wait for each other: the last submitted.

    Args:
        waiting: The jobs that each one waits for. Those that are not named wait for nobody.
    """
    left, found = dict(waiting), list[int]()
    while left:
        in_turn = [job for job, others in left.items() if not others & left.keys()]
        for job in in_turn:
            del left[job]
        if in_turn or not left:
            continue
        path = [min(left)]  # everybody left waits for somebody left
        while (after := min(left[path[-1]] & left.keys())) not in path:
            path.append(after)
        found.append(max(path[path.index(after) :]))
        del left[found[-1]]
    return found
