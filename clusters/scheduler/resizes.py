"""Resizes of running leases: a launch is asked for other devices, and nobody waits for its answer.

The request's name follows from the lease's record, so a scheduler that goes on after a crash asks
for the same thing once more, or finds the answer. The answer stays until the record tells of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...runtime.protocol import control
from ...runtime.protocol.lower import lower
from ...schema.errors import HetflowError, ProblemError
from ...schema.launch import LaunchConfig
from ...schema.plan import Plan
from .leases import Lease, folder_of
from .store import RUN, ClusterStore

LONGEST_SECONDS = 600.0
"""A launch that has not answered for so long is asked to stop instead.

Joining workers first run the script up to its first batch, so a resize may take as long as a start.
"""


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """What became of a resize.

    ``moved``: the launch is on the new devices alone. ``stayed``: it holds those before alone.
    ``unknown``: it may hold both.
    """

    state: Literal["moved", "stayed", "unknown"]
    detail: str


def mapping(store: ClusterStore, lease: Lease, plan: Plan) -> LaunchConfig:
    """What a lease's launch is asked for: a plan, at the seed and level that it runs with.

    Raises:
        HetflowError: The launch has not begun to train, is over, or takes no requests; or plans of
            this kind cannot be changed while they run, as for ``hetflow resize``.
    """
    if plan.kind == "parallel":
        raise ProblemError(f"a {plan.kind} plan is not changed while it runs")
    now = control.current(_run(store, lease))
    return lower(plan, now.seed, now.determinism)


def ask(store: ClusterStore, lease: Lease, config: LaunchConfig) -> None:
    """Ask a lease's launch to go over, unless it was asked before.

    Raises:
        FileError: The request cannot be written.
    """
    control.ask(_run(store, lease), config, name=_name(lease))


def is_asked(store: ClusterStore, lease: Lease) -> bool:
    """Whether the request is there: a scheduler may have been killed before it had written it."""
    return _request(store, lease).exists()


def outcome(store: ClusterStore, lease: Lease, now: float) -> ResizeOutcome | None:
    """What became of a resize that was asked for; None while that is open.

    Args:
        store: The state.
        lease: It has ``resizing_to`` and ``resize_asked``.
        now: Seconds since the epoch.
    """
    try:
        answer = control.answered(_request(store, lease))
    except HetflowError as error:
        return ResizeOutcome("unknown", error.message)
    if answer is not None:
        return ResizeOutcome("moved" if answer.status == "done" else "stayed", answer.detail)
    assert lease.resize_asked is not None
    if now - lease.resize_asked <= LONGEST_SECONDS:
        return None
    return ResizeOutcome("unknown", f"its launch did not answer for {LONGEST_SECONDS:.0f} s")


def forget(store: ClusterStore, lease: Lease) -> None:
    """Take the request and its answer away, once the record tells of it."""
    control.take_away(_run(store, lease), _request(store, lease))


def _run(store: ClusterStore, lease: Lease) -> Path:
    return folder_of(store, lease) / RUN


def _request(store: ClusterStore, lease: Lease) -> Path:
    return control.request_named(_run(store, lease), _name(lease))


def _name(lease: Lease) -> str:
    """Of the time that it was asked at; it sorts as the names of others do."""
    assert lease.resize_asked is not None
    return f"{int(lease.resize_asked * 1e9):020d}-lease-{lease.number}"


# What is due between two decisions: which leases begin, are resized, or have to stop instead.
#
# A pure function of the open leases. A job goes over to its next devices in one of three ways. One
# that holds none starts on them. One that is stopping leaves its devices first. One that runs, and
# may be resized, keeps its devices until its launch has taken the new ones up. Each needs the new
# devices to be free, but for its own. So jobs that are to exchange devices while they run may wait
# for each other in a circle: then one of them stops, which frees its devices.


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
