"""The analytic centre of a face: a feasible guess, and Newton's steps from it."""

from collections.abc import Callable

import numpy as np

from ...compiling import compiled_if_often
from ..program import Floats
from . import face
from .face import Face, Rows
from .method import over_rows

_ROOM = 0.005  # relative, of what a guess leaves none of

Climb = Callable[[Face, Rows, Floats], bool]


def centre(face: Face, start: Floats, climb: Climb | None = None) -> Floats | None:
    """Time fractions [types, classes] of a job of each class at the centre of the face.

    O(classes x types^2) an iteration: some five from the centre of a similar problem, ten from
    anywhere.

    Args:
        face: The problem; every class has a type.
        start: A guess [types, classes], positive where ``rate`` is; need not be feasible.
        climb: How steps are taken: in numpy, compiled where many are taken, or as given.

    Returns:
        The fractions; None where the numbers gave out, as they do where more is tight than the
        face says.
    """
    with np.errstate(all="ignore"):
        return _newton(face, start, climb or _FASTEST_CLIMB)


def _compiled_climb() -> Climb:
    from .face_compiled import climb

    return climb


_FASTEST_CLIMB: Climb = compiled_if_often(face.climb, _compiled_climb)


def _newton(f: Face, start: Floats, climb: Climb) -> Floats | None:
    types, classes = f.rate.shape
    size = (types + 2) * classes
    point = np.zeros(size + types)
    x, w = point[:size].reshape(types + 2, classes), point[size:]
    fixed = Rows(f)
    x[:types] = np.where(f.rate > 0, start, 0.0)
    reached = (f.rate * x[:types]).sum(axis=0)
    x[types] = np.maximum(1.0 - x[:types].sum(axis=0), _ROOM) * ~f.busy
    x[types + 1] = np.maximum(reached - f.level * f.z, _ROOM * reached) * (f.asks & ~f.bound)
    w[:] = np.maximum(f.capacity - over_rows(x[:types] * fixed.each), _ROOM * f.capacity) * ~f.full
    return x[:types] if climb(f, fixed, point) else None
