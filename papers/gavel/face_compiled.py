"""Newton's steps of ``face``, compiled by numba: the same digits. Names are those of ``face``."""

from typing import Any

import numpy as np

from ...solvers.allocation.interior.method import SMALL
from ...solvers.allocation.interior.method_compiled import eliminate, summed
from ...solvers.allocation.program import Floats
from ...solvers.compiling import compiled
from . import face
from .face import _DONE, _KEEP, _RIDGE, MAX_ITERATIONS, Face, Rows

_LIMITS = (MAX_ITERATIONS, _DONE, _KEEP, _RIDGE)


def climb(f: Face, fixed: Rows, point: Floats) -> bool:
    """Move a point to the centre of a face; whether it got there."""
    types, classes = f.rate.shape
    if len(fixed.coupled) > SMALL or classes < 2:  # a single class is summed in another order
        return face.climb(f, fixed, point)
    given = fixed.rows, fixed.base, fixed.each, fixed.idle, f.count, f.scale, f.capacity
    return bool(_climb(given, fixed.coupled, _LIMITS, point))


@compiled
def _climb(given: Any, coupled: Any, limits: Any, point: Any) -> Any:
    (types, classes), (steps, done, keep, ridge) = (len(given[6]), len(given[4])), limits
    size = (types + 2) * classes
    x, w = point[:size].reshape(types + 2, classes), point[size:]
    hole = np.where(point == 0.0, 1.0, 0.0)
    step, number = np.zeros_like(point), len(coupled)
    move, spare = step[:size].reshape(types + 2, classes), step[size:]
    inverse, alone = np.empty((2, 2, classes)), np.empty(2 * classes)
    lent, term = np.empty((number, 2 * classes)), np.empty(2 * classes)
    matrix, right = np.empty((number, number)), np.empty(number)
    for _ in range(steps):
        _eliminate_classes(given, coupled, x, inverse, alone, lent)
        _assemble(given, coupled, ridge, x, w, alone, lent, matrix, right, term)
        if not eliminate(matrix, right):
            return False
        _expand(given, x, w, alone, lent, right, move, spare)
        least, most = np.inf, -np.inf
        for i in range(len(point)):
            ratio = step[i] / (point[i] + hole[i])
            if np.isnan(ratio):
                return False
            least, most = min(least, ratio), max(most, ratio)
        change = max(-least, most)
        if not change < np.inf:
            return False
        if least < -keep:
            step *= -keep / least
        point += step
        if change < done:
            return True
    return False


@compiled
def _eliminate_classes(
    given: Any, coupled: Any, x: Any, inverse: Any, alone: Any, lent: Any
) -> None:
    """Each class's prices of time and demand, alone and per price of what is coupled."""
    rows, base, each, idle, count, scale, capacity = given
    types, classes, number = len(capacity), len(count), len(coupled)
    for m in range(classes):
        a = b = c = d = time = demand = 0.0
        for k in range(types + 2):
            square = x[k, m] * x[k, m]
            first, second = square * rows[0, k, m], square * rows[1, k, m]
            a += first * rows[0, k, m]
            b += first * rows[1, k, m]
            c += second * rows[0, k, m]
            d += second * rows[1, k, m]
            time += x[k, m] * rows[0, k, m]
            demand += x[k, m] * rows[1, k, m]
            if k < types:
                coupled[k, 0, m], coupled[k, 1, m] = first * scale[m], second * scale[m]
        d += idle[m]
        det = a * d - b * b
        inverse[0, 0, m], inverse[0, 1, m] = d / det, c / -det
        inverse[1, 0, m], inverse[1, 1, m] = b / -det, a / det
        miss, lack = 2.0 * time - base[0, m], 2.0 * demand - base[1, m]
        for i in range(2):
            alone[i * classes + m] = inverse[i, 0, m] * miss + inverse[i, 1, m] * lack
            for k in range(number):
                of_time, of_demand = coupled[k, 0, m], coupled[k, 1, m]
                lent[k, i * classes + m] = inverse[i, 0, m] * of_time + inverse[i, 1, m] * of_demand


@compiled
def _assemble(
    given: Any, coupled: Any, ridge: Any, x: Any, w: Any, alone: Any, lent: Any, matrix: Any,
    right: Any, term: Any,
) -> None:  # fmt: skip
    """The equations of what is coupled."""
    rows, base, each, idle, count, scale, capacity = given
    types, classes, number = len(capacity), len(count), len(coupled)
    counted = np.empty(2 * classes)
    for k in range(number):
        for i in range(2):
            for m in range(classes):
                counted[i * classes + m] = coupled[k, i, m] * count[m]
        for j in range(number):
            for n in range(2 * classes):
                term[n] = counted[n] * lent[j, n]
            matrix[k, j] = -summed(term, 2 * classes)
        for n in range(2 * classes):
            term[n] = counted[n] * alone[n]
        right[k] = -summed(term, 2 * classes)
        if k >= types:
            continue
        for m in range(classes):
            term[m] = coupled[k, 0, m] * each[m]
        matrix[k, k] += (summed(term, classes) + w[k] * w[k]) * (1.0 + ridge)
        for m in range(classes):
            term[m] = x[k, m] * each[m]
        right[k] += 2.0 * (summed(term, classes) + w[k]) - capacity[k]


@compiled
def _expand(
    given: Any, x: Any, w: Any, alone: Any, lent: Any, answer: Any, move: Any, spare: Any
) -> None:
    """The step that belongs to the prices of what is coupled."""
    rows, base, each, idle, count, scale, capacity = given
    types, classes = len(capacity), len(count)
    for m in range(classes):
        time = demand = 0.0
        for k in range(len(answer)):
            time += answer[k] * lent[k, m]
            demand += answer[k] * lent[k, classes + m]
        time, demand = alone[m] - time, alone[classes + m] - demand
        for k in range(types + 2):
            push = time * rows[0, k, m] + demand * rows[1, k, m]
            if k < types:
                push += answer[k] * scale[m]
            move[k, m] = x[k, m] - x[k, m] * x[k, m] * push
    for k in range(types):
        spare[k] = w[k] - w[k] * w[k] * answer[k]
