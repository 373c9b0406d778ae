"""Assign devices to the jobs of the next round (thesis 5.5)."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ....schema.errors import ProblemError
from ..allocators.shares import Allocator
from ..arrays import NOWHERE, Bools, Ints
from ..cluster.seats import Device, Placement, Seat, Sizes, seat
from .decide import choose_alone, choose_together, is_due, seat_on_servers, share_anew
from .state import RoundRules, RoundState


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
    if is_due(state, now_seconds, rules):
        share_anew(state, allocator, now_seconds, rules)
    away = frozenset((*down, *taken))
    standing = _standing(sizes, away)
    free = np.array([sum(row) for row in standing], dtype=np.int64)
    active = state.active
    stay = np.array([job.id in kept for job in active.jobs], dtype=bool)
    places, column = _chosen(state, allocator, rules, free, stay)
    active.last_type[~stay] = NOWHERE
    active.last_type[places] = column
    before = {} if state.servers is None else dict(state.servers.held)
    ids = [(active.jobs[place].id,) for place in places.tolist()]
    if state.servers is not None:
        seat_on_servers(state, ids, column, active.scale[places], standing)
        state.servers.held |= {job: at for job, at in before.items() if job in kept}
    counts = (state.pool.resources[:, column] * _often(state, places, column)).T.tolist()
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


def _often(state: RoundState, places: Ints, column: Ints) -> Ints:
    """How often each job holds its column's devices: a mix once [jobs]."""
    answer: Ints = np.where(state.pool.is_mix[column] == 1, 1, state.active.scale[places])
    return answer


def _standing(sizes: Sizes, down: Collection[Device]) -> Sequence[Sequence[int]]:
    standing = [list(row) for row in sizes]
    for kind, place, _ in frozenset(down):
        standing[kind][place] -= 1
    return standing
