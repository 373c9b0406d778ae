"""Good plans of problems too large for tables of every cut and every run of devices.

First only some cuts, spread over the model, and runs of a multiple of some number of devices are
tried; then the cuts near those of the best plan so far, with finer runs, as long as that improves
the plan. Every plan found is a plan of the whole problem; no bound is proved here.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ....schema.pipeline import PipelineProblem
from ...effort import Effort, OutOfTimeError
from ..cuts import Cuts
from ..packing import Seats
from ..placements import Move, Moves, PlacedStage, Space, final_states
from ..stage_costs import StageCosts
from .bound import Ints, StepModel
from .branch_and_bound import EXACT, Incumbent
from .tables import Tables

Sweep = Callable[[Tables, Incumbent], object]
"""Times the plans that one set of tables finds."""
_FEW_CUTS, _NEAREST = 48, 3
_ROUNDS = 4


def improve(
    problem: PipelineProblem,
    costs: StageCosts,
    space: Space,
    best: Incumbent,
    sweep: Sweep,
    entries: float,
    effort: Effort,
) -> None:
    """Look for plans better than the best one, by tables of at most so many entries.

    Args:
        problem: What is asked.
        costs: Of all cuts, which are in one line.
        space: All runs of devices.
        best: Gets what is found.
        sweep: Times the plans of tables over some cuts and runs.
        entries: Moves times cuts of one table.
        effort: Says when to stop.

    Raises:
        OutOfTimeError: The effort's limit came first; ``best`` has what was found until then.
    """
    thinned = []
    for step in _steps(problem):
        effort.check()
        thinned.append((step, *_thinned(space, step)))
    # Without replicas whole steps of several devices may leave no run at all.
    kept = [entry for entry in thinned if entry[1]]
    chosen = _spread(costs, entries, kept)
    for _ in range(_ROUNDS):
        step_seconds = best.seconds
        cuts = _subset(costs.cuts, chosen)
        own = StageCosts(problem, cuts, costs.bandwidths, recompute=costs.recompute)
        some = _finest(kept, len(chosen), entries)
        found = Incumbent()
        for pessimistic in (True, False):
            model = StepModel(problem, own, pessimistic=pessimistic)
            with suppress(OutOfTimeError):  # what was found until then is offered below
                sweep(Tables(model, some, final_states(problem, some), effort), found)
        if found.seats is not None:
            best.offer_seated(problem, costs, _in_full(found.seats, chosen))
        effort.check()
        if best.placed is None or best.seconds > step_seconds * (1 - 1e3 * EXACT):
            break
        chosen = _near(costs, best.placed, entries, kept)


def _steps(problem: PipelineProblem) -> Iterator[int]:
    """Runs of any number of devices, of every second, every fourth, ..."""
    step = 1
    while step <= max(pool.num_devices for pool in problem.pools):
        yield step
        step *= 2


def _thinned(space: Space, step: int) -> tuple[int, Space]:
    """Moves between states that use whole steps of each pool, or all of it; how many."""
    used = np.array([state.used for state in space.states])
    whole = ((used % step == 0) | (used == used.max(axis=0))).all(axis=1)
    moves = space.moves
    part = np.flatnonzero(whole[moves.source] & whole[moves.target])
    columns = {name: getattr(moves, name)[part] for name in Move._fields}
    return len(part), replace(space, moves=Moves(**columns))


def _finest(kept: list[tuple[int, int, Space]], num_cuts: int, entries: float) -> Space:
    fitting = (space for _, moves, space in kept if moves * num_cuts <= entries)
    return next(fitting, kept[-1][2])


def _spread(costs: StageCosts, entries: float, kept: list[tuple[int, int, Space]]) -> Ints:
    """Cuts about equally far apart in work, each where the least crosses it."""
    size = costs.cuts.size
    few = min(_FEW_CUTS, size)
    moves = next((moves for _, moves, _ in kept if moves * few <= entries), kept[-1][1])
    count = int(np.clip(entries / max(moves, 1), few, size))
    work = costs.compute_seconds.mean(axis=0)
    part = np.searchsorted(np.linspace(0.0, work[-1], count)[1:-1], work, side="right")
    crossing = costs.cuts.crossing_bytes
    order = np.lexsort((crossing, part))
    heads = order[np.unique(part[order], return_index=True)[1]]
    return np.unique([0, *heads.tolist(), size - 1])


def _near(
    costs: StageCosts, placed: list[PlacedStage], entries: float, kept: list[tuple[int, int, Space]]
) -> Ints:
    """Cuts near the boundaries of a plan: as many as leave all runs of devices, else a few."""
    size, boundaries = costs.cuts.size, [first for first, _, _ in placed[1:]]
    room = entries / max(kept[0][1], 1) / max(len(boundaries), 1)
    reach = max(int(room / 2), _NEAREST)
    near = {cut + by for cut in boundaries for by in range(-reach, reach + 1)}
    return np.array(sorted({0, size - 1} | {cut for cut in near if 0 < cut < size - 1}))


def _subset(cuts: Cuts, chosen: Ints) -> Cuts:
    return replace(
        cuts,
        layer_sets=tuple(cuts.layer_sets[cut] for cut in chosen.tolist()),
        forward_seconds=cuts.forward_seconds[:, chosen],
        backward_seconds=cuts.backward_seconds[:, chosen],
        weight_bytes=cuts.weight_bytes[chosen],
        activation_bytes=cuts.activation_bytes[chosen],
        crossing_bytes=cuts.crossing_bytes[chosen],
    )


def _in_full(seats: Seats, chosen: Ints) -> Seats:
    placed = [(int(chosen[first]), int(chosen[last]), move) for first, last, move in seats.placed]
    return Seats(placed, seats.devices)
