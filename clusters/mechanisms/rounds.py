"""Gavel's mechanism: each round runs the jobs that lack most of their shares (thesis 5.5).

Two conventions. ``text`` is the thesis: devices that no job has a share of are given to the jobs
that are relatively fastest there. ``published`` is what Gavel's simulator does: ties by
accumulated deficit. Both start a job's time at half a round after each allocation and count it once
for all its devices. Both serve device types one after another, fastest first (at random under
agnostic policies). ``selection="joint"`` ranks all pairs of job and type together, the other
reading of algorithm 2.

Every function takes the state that it decides from. Those that end a decision write it there.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...schema.errors import ProblemError
from .allocators import Allocator, Shares
from .pool import NOWHERE, Active, Bools, Floats, Ints
from .round_state import ANY_SHARE, Chosen, PairShares, RoundRules, RoundState, choose_combinations
from .seats import Device, Placement, Seat, Sizes, seat

_NEAR = 1e-6  # apart, so that sums kept from job to job tell types' order


def is_due(state: RoundState, now_seconds: float, rules: RoundRules) -> bool:
    """Whether a new allocation is due: jobs or devices changed, and the last one is old enough."""
    last = state.last_reset
    return state.changed and (last is None or now_seconds - last >= rules.reset_seconds)


def round_end(ends_seconds: float, *, free_seconds: float, news_seconds: float) -> float:
    """When a round that may end early does: as soon as nobody holds a device and there is news.

    Args:
        ends_seconds: When it ends at the latest.
        free_seconds: When nobody holds a device any more; infinite where that is not known.
        news_seconds: When a job came or ended since the round began, likewise.
    """
    return min(ends_seconds, max(free_seconds, news_seconds))


def share_anew(
    state: RoundState, allocator: Allocator, now_seconds: float, rules: RoundRules
) -> None:
    """Let a policy share what is up; what jobs received counts from now on."""
    active, head_start = state.active, rules.head_start_seconds
    if rules.convention == "published":  # by the text nobody asks for it
        passed = 0.0 if state.last_reset is None else now_seconds - state.last_reset
        # What the shares promised since the last time, less what was had.
        active.deficit[:] = active.deficit + active.share * passed - active.received + head_start
    shares = shares_of_fitting(allocator, active, now_seconds)
    active.share = shares.x
    pairs = shares.pairs
    if pairs is not None and len(pairs.a):
        state.pairs = PairShares.of(
            active, pairs.a, pairs.b, pairs.column, pairs.time, head_start
        )  # fmt: skip
    elif len(state.pairs):
        state.pairs = PairShares()
    active.received[:] = head_start
    state.worker_seconds[:] = active.received.sum(axis=1)
    state.last_reset, state.changed = now_seconds, False


def choose_alone(
    state: RoundState,
    allocator: Allocator,
    rules: RoundRules,
    *,
    free: Ints | None = None,
    stay: Bools | None = None,
) -> Ints:
    """Choose the jobs of the next round: each job's type, ``NOWHERE`` for waiting jobs [jobs].

    Chosen for ``free`` devices [types] (None: all that are up); jobs in ``stay`` [jobs] are not
    chosen.
    """
    active, free = state.active, state.up if free is None else free
    joint = rules.selection == "joint"
    # All of one type have the same sum of t, so it orders types among each other only.
    worked = state.worker_seconds if joint else np.ones(len(active.share))
    ranked = _ranked(state, worked, rules, stay)
    if joint:
        return choose(ranked, active.scale, free)
    ties = active.deficit if rules.convention == "published" else None
    return choose_by_type(ranked, ties, active.scale, free, type_order(state, allocator))


def choose_together(
    state: RoundState,
    allocator: Allocator,
    rules: RoundRules,
    *,
    free: Ints | None = None,
    stay: Bools | None = None,
) -> Chosen:
    """Choose as ``choose_alone`` among combinations: pairs of jobs, and several types at once."""
    active, received = state.active, state.worker_seconds
    ranked = _ranked(state, received, rules, stay)
    had = np.maximum(state.pairs.received, 1e-9)
    paired = state.pairs.share * received[state.pairs.column] / had
    joint = rules.selection == "joint" or state.pool.uses_mixes
    return choose_combinations(
        active,
        state.pairs,
        ranked,
        paired,
        state.up if free is None else free,
        None if joint else type_order(state, allocator),
        active.deficit if rules.convention == "published" else None,
    )


def _ranked(state: RoundState, worked: Floats, rules: RoundRules, stay: Bools | None) -> Floats:
    """Priorities, minus infinity where a job must not run [columns, jobs]."""
    active = state.active
    ranked = priorities(active.share, active.received, worked)
    if rules.fills_idle and rules.convention == "text":
        ranked = fill_idle(ranked, active.relative)
    else:
        least = 0.0 if rules.fills_idle else ANY_SHARE
        ranked = np.where((active.rate > 0) & (ranked >= least), ranked, -np.inf)
    return ranked if stay is None else np.where(stay, -np.inf, ranked)


def type_order(state: RoundState, allocator: Allocator) -> list[int]:
    """Fastest first, by the mean rate of the jobs present relative to each one's best."""
    types = len(state.pool.types)
    if allocator.agnostic:
        return _with_apart(state, state.random.permutation(types).tolist())
    if state.order is None:
        speed = state.active.speed[:types]
        ranked = sorted(range(len(speed)), key=speed.__getitem__, reverse=True)
        # Speeds are kept as running sums, job by job; where two are within their rounding they are
        # summed anew.
        if any(speed[a] - speed[b] < _NEAR for a, b in itertools.pairwise(ranked)):
            exact = state.active.exact_speed()[: len(speed)]
            ranked = np.argsort(-exact, kind="stable").tolist()
        state.order = _with_apart(state, ranked)
    return state.order


def _with_apart(state: RoundState, order: list[int]) -> list[int]:
    """Each type's unconsolidated column right after it."""
    if state.pool.consolidated is None:
        return order
    return [column for kind in order for column in (kind, kind + len(order))]


def seat_on_servers(
    state: RoundState,
    ids: Sequence[tuple[str, ...]],
    kind: Ints,
    scale: Ints,
    standing: Sizes | None,
    apart: Sequence[bool] = (),
) -> tuple[Bools, Bools]:
    """Place jobs on servers; whether each is consolidated, and whether it moved [placements].

    ``standing`` [types][servers] are devices that work (None: all); ``apart`` says who may be
    spread.
    """
    servers = state.servers
    if servers is None:
        raise ValueError("jobs are placed on the servers of a state that has some")
    close, kept = servers.place(
        ids, kind.tolist(), scale.tolist(), servers.sizes if standing is None else standing, apart
    )
    return np.array(close, dtype=bool), ~np.array(kept, dtype=bool)


def receive(state: RoundState, column: Ints, jobs: Ints, seconds: Floats) -> None:
    """Count the time that jobs had [jobs that ran]."""
    state.active.received[column, jobs] += seconds
    _count(state, column, seconds)


def receive_together(state: RoundState, chosen: Chosen, seconds: Floats) -> None:
    """Count the time that combinations had, each once [combinations]."""
    alone, two = chosen.second < 0, chosen.second >= 0
    state.active.received[chosen.column[alone], chosen.first[alone]] += seconds[alone]
    state.pairs.received[chosen.pair[two]] += seconds[two]
    _count(state, chosen.column, seconds)


def _count(state: RoundState, column: Ints, seconds: Floats) -> None:
    columns = len(state.worker_seconds)
    state.worker_seconds += np.bincount(column, weights=seconds, minlength=columns)


def shares_of_fitting(allocator: Allocator, active: Active, now_seconds: float) -> Shares:
    """Let a policy share what is up among the jobs that fit in it; the others wait."""
    if not len(active):
        return Shares(np.zeros_like(active.share))
    # By identity: everything is up.
    if active.capacity is active.pool.capacity:
        return allocator.allocate(active, now_seconds)
    fits = _fits(active)
    if fits.all():
        return allocator.allocate(active, now_seconds)
    x, places = np.zeros_like(active.share), fits.nonzero()[0]
    if not len(places):
        return Shares(x)
    part = active.only(places)
    shares = allocator.allocate(part, now_seconds)
    x[:, places] = shares.x
    # Policies count isolated time of jobs, in a copy here.
    active.isolated[places] = part.isolated
    pairs = shares.pairs
    if pairs is not None:
        pairs = replace(pairs, a=places[pairs.a], b=places[pairs.b])
    return Shares(x, pairs)


def _fits(active: Active) -> Bools:
    """Which jobs some column with what is up can hold [jobs]."""
    resources, room = active.pool.limits(active.capacity, active.consolidated)
    if active.pool.uses_mixes:
        often = np.array([active.usage(i) for i in range(len(active))]).T
    else:
        often = np.broadcast_to(active.scale, active.rate.shape)
    held = resources[:, :, None] * often
    fits: Bools = ((held <= room[:, None, None]).all(axis=0) & (active.rate > 0)).any(axis=0)
    return fits


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
    # The common case, without a mask.
    if received_seconds.min(initial=1.0) > 0:
        return allocation * worker_seconds[:, None] / received_seconds
    had = received_seconds > 0
    ratio = allocation * worker_seconds[:, None] / np.where(had, received_seconds, 1.0)
    answer: Floats = np.where(had, ratio, NEVER_RAN * allocation)
    return answer


def fill_idle(priority: Floats, relative: Floats) -> Floats:
    """Rank pairs without a share behind all others, by speed relative to the job's best.

    Devices that would stay idle are then given away all the same; pairs that cannot run get minus
    infinity.

    Both [types, jobs]; ``relative`` is 0 where a job cannot run.
    """
    # Shares are above 0 and relative speeds at most 1, so these come behind all shares.
    answer: Floats = np.where(priority > 0, priority, relative - 2.0)
    answer[relative <= 0] = -np.inf
    return answer


def choose(priority: Floats, scale: Ints, free: Ints) -> Ints:
    """Algorithm 2: the highest priority of all types first; a job that does not fit is passed.

    Ties go to the type, then the job, that stands first.

    ``priority`` [types, jobs] is minus infinity where a job must not run; ``scale`` [jobs] and
    ``free`` [types] are devices.

    Returns:
        The type each job runs on, ``NOWHERE`` for the others [jobs].
    """
    jobs = priority.shape[1]
    flat = priority.ravel()
    order = np.argsort(-flat, kind="stable")
    # Ruled-out pairs are at the end.
    order = order[: np.count_nonzero(flat > -np.inf)]
    left, idle = free.tolist(), int(free.sum())
    chosen = [NOWHERE] * jobs
    scales = scale.tolist()
    # No job asks for less than ``least``: with fewer devices left the rest cannot fit.
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

    ``priority``, ``scale`` and ``free`` are as for ``choose``. Of equal priorities the larger of
    ``ties`` [types, jobs] goes first, then the job that stands first.
    """
    chosen = np.full(len(scale), NOWHERE, dtype=np.int64)
    may_run = priority > -np.inf
    alike = bool((scale == 1).all())
    for kind in order:
        open_ = ((chosen == NOWHERE) & may_run[kind]).nonzero()[0]
        # All that want the type fit: no order is needed.
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
    # The first ones fit by running sums; behind the first that does not, each is tried.
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


def next_round(
    state: RoundState,
    allocator: Allocator,
    now_seconds: float,
    rules: RoundRules,
    *,
    sizes: Sizes,
    down: Collection[Device] = (),
    held: Mapping[str, Seat] | None = None,
    kept: Collection[str] = (),
    taken: Collection[Device] = (),
) -> dict[str, Seat]:
    """The devices of each job that runs in the next round; a job that is not named waits.

    Shares the pool anew first where that is due. A job keeps the devices that it holds, as far as
    the choice allows. Policies see what is up, and no device that is down is given away. The state
    is left as the next decision needs it.

    Args:
        state: The jobs present, and what they received.
        allocator: The policy; it may not put two jobs on a device.
        now_seconds: The time.
        rules: How rounds decide.
        sizes: Devices of each type on each server that has it [types][servers]; on a flat pool
            one server a type.
        down: Devices that do not work.
        held: The devices of jobs that run now.
        kept: Jobs that this decision is not about: they stay where they are.
        taken: Devices that it does not give, though they work.

    Raises:
        ProblemError: The policy puts two jobs on a device.
    """
    if allocator.shares_space:
        raise ProblemError(f"{allocator.name} puts two jobs on a device; take another policy")
    standing = _standing(sizes, down)
    state.see(np.array([sum(row) for row in standing], dtype=np.int64))
    # Policies see what is up, before devices are set aside for this decision.
    if is_due(state, now_seconds, rules):
        share_anew(state, allocator, now_seconds, rules)
    away = frozenset((*down, *taken))
    standing = _standing(sizes, away)
    free = np.array([sum(row) for row in standing], dtype=np.int64)
    active = state.active
    stay = np.array([job.id in kept for job in active.jobs], dtype=bool)
    places, column = _chosen(state, allocator, rules, free, stay)
    # Jobs that the decision is not about keep theirs.
    active.last_type[~stay] = NOWHERE
    active.last_type[places] = column
    before = {} if state.servers is None else dict(state.servers.held)
    ids = [(active.jobs[place].id,) for place in places.tolist()]
    if state.servers is not None:
        seat_on_servers(state, ids, column, active.scale[places], standing)
        # Those that stay keep their servers, whatever was placed meanwhile.
        state.servers.held |= {job: at for job, at in before.items() if job in kept}
    often = state.pool.times(column, active.scale[places])
    counts = (state.pool.resources[:, column] * often).T.tolist()
    placements = [
        Placement(
            names,
            tuple((kind, number) for kind, number in enumerate(each) if number),
            None if state.servers is None else state.servers.held[names[0]][1],
        )
        for names, each in zip(ids, counts, strict=True)
    ]
    seats = seat(sizes, placements, held or {}, away)
    return {names[0]: devices for names, devices in zip(ids, seats, strict=True)}


def _chosen(
    state: RoundState, allocator: Allocator, rules: RoundRules, free: Ints, stay: Bools
) -> tuple[Ints, Ints]:
    """Places of the jobs that run on ``free`` devices, and the column of each."""
    if len(state.pool.columns) > len(state.pool.types):
        together = choose_together(state, allocator, rules, free=free, stay=stay)
        return together.first, together.placed
    chosen = choose_alone(state, allocator, rules, free=free, stay=stay)
    places = (chosen != NOWHERE).nonzero()[0]
    return places, chosen[places]


def _standing(sizes: Sizes, down: Collection[Device]) -> Sequence[Sequence[int]]:
    standing = [list(row) for row in sizes]
    for kind, place, _ in frozenset(down):
        standing[kind][place] -= 1
    return standing
