"""Choose the jobs of the next round, and their device types (thesis 5.5, algorithm 2).

Arrays stand types first: [types, jobs].
"""

import numpy as np

from ..arrays import NOWHERE, Floats, Ints

NEVER_RAN = 1e9  # times its allocation: the priority of a job that has had no time yet


def priorities(allocation: Floats, received_seconds: Floats, worker_seconds: Floats) -> Floats:
    """X / f with f_mj = t_mj / sum over m' of t_m'j: the distance from the intended allocation.

    Args:
        allocation: X, fractions of time [types, jobs].
        received_seconds: t, time had since the allocation was computed [types, jobs].
        worker_seconds: Sum of t over all jobs, those that left included [types].

    Returns:
        Priorities [types, jobs]; ``NEVER_RAN`` times X where t is 0.
    """
    if received_seconds.min(initial=1.0) > 0:
        return allocation * worker_seconds[:, None] / received_seconds
    had = received_seconds > 0
    ratio = allocation * worker_seconds[:, None] / np.where(had, received_seconds, 1.0)
    answer: Floats = np.where(had, ratio, NEVER_RAN * allocation)
    return answer


def fill_idle(priority: Floats, relative: Floats) -> Floats:
    """Rank pairs without a share behind all others, by speed relative to the job's best.

    Devices that would stay idle are then given away all the same; pairs that cannot run get
    minus infinity.

    Args:
        priority: Priorities [types, jobs].
        relative: Rates relative to each job's best, 0 where it cannot run [types, jobs].
    """
    answer: Floats = np.where(priority > 0, priority, relative - 2.0)
    answer[relative <= 0] = -np.inf
    return answer


def choose(priority: Floats, scale: Ints, free: Ints) -> Ints:
    """Algorithm 2: the highest priority of all types first; a job that does not fit is passed.

    Ties go to the type, then the job, that stands first.

    Args:
        priority: [types, jobs]; minus infinity where a job must not run.
        scale: Devices that each job asks for [jobs].
        free: Devices of each type [types].

    Returns:
        The type each job runs on, ``NOWHERE`` for the others [jobs].
    """
    jobs = priority.shape[1]
    flat = priority.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: np.count_nonzero(flat > -np.inf)]
    left, idle = free.tolist(), int(free.sum())
    chosen = [NOWHERE] * jobs
    scales = scale.tolist()
    least, waiting = min(scales, default=1), jobs
    for kind, job in zip((order // jobs).tolist(), (order % jobs).tolist(), strict=True):
        need = scales[job]
        if chosen[job] == NOWHERE and need <= left[kind]:
            chosen[job] = kind
            left[kind] -= need
            idle -= need
            waiting -= 1
            if idle < least or not waiting:
                break
    return np.array(chosen, dtype=np.int64)


def choose_by_type(
    priority: Floats, ties: Floats | None, scale: Ints, free: Ints, order: list[int]
) -> Ints:
    """One type after another, in the order given: each to the jobs of highest priority there.

    Returns the type of each job [jobs].

    Args:
        priority: As for ``choose``.
        ties: Of equal priorities the larger of these goes first [types, jobs]; then, and
            where this is None at once, the job that stands first.
        scale: As for ``choose``.
        free: As for ``choose``.
        order: The order in which types are served.
    """
    chosen = np.full(len(scale), NOWHERE, dtype=np.int64)
    may_run = priority > -np.inf
    alike = bool((scale == 1).all())
    for kind in order:
        open_ = ((chosen == NOWHERE) & may_run[kind]).nonzero()[0]
        if (len(open_) if alike else int(scale[open_].sum())) <= free[kind]:
            chosen[open_] = kind
            continue
        urgency = -priority[kind][open_]
        if ties is None:
            ranked = open_[urgency.argsort(kind="stable")]
        else:
            ranked = open_[np.lexsort((-ties[kind][open_], urgency))]
        taken = ranked[: free[kind]] if alike else take(ranked, scale, int(free[kind]))
        chosen[taken] = kind
    return chosen


def take(ranked: Ints, scale: Ints, free: int) -> Ints:
    """Of ranked jobs, each in turn that still fits on ``free`` devices."""
    needs = scale[ranked]
    total = needs.cumsum()
    fits = int(total.searchsorted(free, side="right"))
    if fits == len(ranked):
        return ranked
    if fits:
        free -= int(total[fits - 1])
    more = []
    for place, need in enumerate(needs[fits + 1 :].tolist(), start=fits + 1):
        if free <= 0:
            break
        if need <= free:
            more.append(place)
            free -= need
    return np.concatenate((ranked[:fits], ranked[more])) if more else ranked[:fits]
