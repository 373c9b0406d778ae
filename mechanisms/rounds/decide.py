"""Gavel's mechanism: each round runs the jobs that lack most of their shares (thesis 5.5).

Two conventions. ``text`` is the thesis: devices that no job has a share of are given to the jobs
that are relatively fastest there. ``published`` is what Gavel's simulator does: ties by
accumulated deficit. Both start a job's time at half a round after each allocation, count it once
for all its devices, and serve device types one after another, fastest first (at random under
agnostic policies); ``selection="joint"`` ranks all pairs of job and type together, the other
reading of algorithm 2.

Every function takes the state that it decides from. Those that end a decision write it there.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ..allocators.shares import Allocator
from ..arrays import Bools, Floats, Ints
from ..cluster.layout import Sizes
from .fitting import shares_of_fitting
from .pairs import Chosen, PairShares, choose_combinations
from .priorities import choose, choose_by_type, fill_idle, priorities
from .rules import ANY_SHARE, RoundRules
from .state import RoundState

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

    Args:
        state: The jobs.
        allocator: The policy.
        rules: How rounds decide.
        free: Devices of each type to choose for [types]; None: all that are up.
        stay: Jobs that are not to be chosen [jobs]; None: all may be.
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
    """As ``choose_alone``, among combinations: pairs of jobs, and several types at once."""
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

    Args:
        state: Its servers remember who sat where.
        ids: The jobs of each placement.
        kind: Device type of each.
        scale: Devices of each.
        standing: Devices that work, by type and server [types][servers]; None: all.
        apart: Whether each may be spread.
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
