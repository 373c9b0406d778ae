"""The interior point method from start to proof: steps until the gap is closed."""

from collections.abc import Callable

import numpy as np

from ...compiling import compiled_if_often
from ...effort import never
from ..program import FractionProgram, Solution
from . import method
from .method import MAX_ITERATIONS, Point, Scaled, first_point, is_near, read_back

TOLERANCE = 1e-10
_PATIENCE = 4

Walk = Callable[[Scaled, Point, int], tuple[int, Point | None]]


def solve(
    program: FractionProgram, walk: Walk | None = None, should_stop: Callable[[], bool] = never
) -> Solution | None:
    """Solve a program without pairs, to a relative gap of about 1e-10 where numbers suffice.

    Args:
        program: The program.
        walk: How steps are taken: in numpy, compiled where many are taken, or as given.
        should_stop: Asked before each step; True ends with the point reached.

    Returns:
        The point with the least gap; None if no point came near, as where none is feasible.
    """
    # Numbers may run out at the very end; the proof of the best point so far decides then.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        return _iterate(program, walk or _FASTEST_WALK, should_stop)


def _iterate(
    program: FractionProgram, walk: Walk, should_stop: Callable[[], bool]
) -> Solution | None:
    scaled = Scaled(program)
    point = first_point(scaled)
    best: Solution | None = None
    iteration = idle = 0
    while iteration < MAX_ITERATIONS:
        stops = should_stop()
        if stops or (iteration and is_near(scaled, point)):
            found = read_back(program, scaled, point, iteration)
            idle = 0 if best is None or found.gap < 0.5 * best.gap else idle + 1
            best = found if best is None or found.gap < best.gap else best
            if stops or best.gap < TOLERANCE or idle >= _PATIENCE:
                break
        steps, after = walk(scaled, point, MAX_ITERATIONS - iteration)
        if after is None:
            break
        point, iteration = after, iteration + steps
    return best


def _compiled_walk() -> Walk:
    from .method_compiled import walk

    return walk


_FASTEST_WALK: Walk = compiled_if_often(method.walk, _compiled_walk)
