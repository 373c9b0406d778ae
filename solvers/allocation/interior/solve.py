"""The interior point method from start to proof: steps until the gap is closed."""

from collections.abc import Callable
from functools import cache

import numpy as np

from ....schema.errors import BackendError
from ...compiling import can_compile
from ..program import Program, Solution
from . import method
from .method import MAX_ITERATIONS, Point, Scaled, first_point, is_near, read_back

TOLERANCE = 1e-10
ACCEPTED_GAP = 1e-7
_PATIENCE = 4

Walk = Callable[[Scaled, Point, int], tuple[int, Point | None]]


def solve(
    program: Program, accepted_gap: float = ACCEPTED_GAP, walk: Walk | None = None
) -> Solution:
    """Solve a program without pairs to a relative gap of about 1e-10.

    Args:
        program: The program.
        accepted_gap: A larger gap counts as a breakdown.
        walk: How steps are taken: compiled where that is possible, or as given.

    Raises:
        BackendError: The iterations broke down; the program may have no feasible point.
    """
    # Numbers may run out at the very end; the proof of the best point so far decides then.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        best = _iterate(program, walk or _fastest_walk())
    if best is None or not best.gap < accepted_gap:
        raise BackendError("the interior point method stopped without a proof")
    return best


def _iterate(program: Program, walk: Walk) -> Solution | None:
    scaled = Scaled(program)
    point = first_point(scaled)
    best: Solution | None = None
    iteration = idle = 0
    while iteration < MAX_ITERATIONS:
        if iteration and is_near(scaled, point):
            found = read_back(program, scaled, point, iteration)
            idle = 0 if best is None or found.gap < 0.5 * best.gap else idle + 1
            best = found if best is None or found.gap < best.gap else best
            if best.gap < TOLERANCE or idle >= _PATIENCE:
                break
        steps, after = walk(scaled, point, MAX_ITERATIONS - iteration)
        if after is None:
            break
        point, iteration = after, iteration + steps
    return best


@cache
def _fastest_walk() -> Walk:
    if not can_compile():
        return method.walk
    from .method_compiled import walk as compiled_walk

    return compiled_walk
