"""LAS at the analytic centre of its optimal face; each call starts from the last answer."""

from dataclasses import replace

import numpy as np

from ...clusters.mechanisms.allocators.las import WarmLas
from ...clusters.mechanisms.allocators.shares import OPTIMA, Shares
from ...clusters.mechanisms.cluster.active import Active
from ...solvers.allocation.engine import solve_alone
from ...solvers.allocation.interior.method import over_rows
from ...solvers.allocation.program import Floats, FractionProgram, Ints
from .face import Face, FaceRows, climb, optimal_face, roomy_face

_ROOM = 0.005  # relative, of what a guess leaves none of


class CentreLas(WarmLas):
    """LAS over classes of equal jobs, in the centre of its optima.

    The warm simplex method gives prices, these tell what is tight in every optimum, and Newton's
    method finds the centre of the rest from the last one. It depends on how many jobs each class
    has and, but for rounding, on nothing else. While devices of every type are to spare, the level
    is what the slowest class has on its best type, and needs no program: Newton's method ends only
    where that is so.
    """

    def __init__(self, *, weighted: bool = False) -> None:
        """Start cold.

        Args:
            weighted: Whether priority weights count.
        """
        super().__init__(weighted=weighted)

    def _start(self, capacity: Ints | None) -> None:
        super()._start(capacity)
        self._centre: Floats = np.zeros((0, 0))  # [types, classes], 0 where none is known
        self._roomy = False  # whether the pool left something of every type the last time

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Find the centre for the jobs present; O(classes x types^2) an iteration.

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        program, of, counts = self.count(active)
        present = counts.nonzero()[0]
        numbers = counts[present].astype(float)
        known = self._centre.shape[1]
        if known < len(counts):
            more = np.zeros((len(program.capacity), len(counts) - known))
            self._centre = np.hstack((self._centre.reshape(len(more), known), more))
        found = None
        if self._roomy:
            found = self._from_last(roomy_face(program, present, numbers), present)
        if found is None:
            self.tell(program, counts)
            program.solve(with_prices=True)
            face = optimal_face(program, present, numbers)
            self._roomy = face.fixed and not face.full.any()
            found = self._from_last(face, present)
            if found is None:
                found = _near_centre(face, program.rates(present))
        self._centre[:, present] = found
        return Shares(self._centre[:, of])

    def _from_last(self, face: Face, present: Ints) -> Floats | None:
        open_ = (face.rate > 0).sum(axis=0)
        if not open_.all():  # rounded prices shut a class out of every column: no centre to find
            return None
        # A type without a device up runs nobody; a limit of 0 would leave no centre.
        face = replace(face, capacity=np.where(face.capacity > 0, face.capacity, 1.0))
        start = self._centre[:, present]
        return centre(face, np.where(start > 0, start, 0.5 / open_))


def _near_centre(face: Face, rate: Floats) -> Floats:
    """By the interior point method, which ends before the centre but never fails."""
    zero = np.zeros(len(face.count))
    found = solve_alone(
        FractionProgram(
            count=face.count,
            rate=rate.T,
            usage=np.repeat(face.scale[:, None], len(face.capacity), axis=1),
            gain=np.zeros_like(rate.T),
            resources=np.eye(len(face.capacity)),
            capacity=face.capacity,
            level=face.level,
            floor=zero,
            demands=np.ones(len(face.count), dtype=bool),
            level_weight=1.0,
            level_capacity=np.zeros_like(face.capacity),
        )
    )
    answer: Floats = found.x.T
    return answer


def centre(face: Face, start: Floats) -> Floats | None:
    """Time fractions [types, classes] of a job of each class at the centre of the face.

    O(classes x types^2) an iteration: some five from the centre of a similar problem, ten from
    anywhere.

    Args:
        face: The problem; every class has a type.
        start: A guess [types, classes], positive where ``rate`` is; need not be feasible.

    Returns:
        The fractions; None where the numbers gave out, as they do where more is tight than the
        face says.
    """
    types, classes = face.rate.shape
    size = (types + 2) * classes
    point = np.zeros(size + types)
    x, w = point[:size].reshape(types + 2, classes), point[size:]
    with np.errstate(all="ignore"):
        fixed = FaceRows(face)
        x[:types] = np.where(face.rate > 0, start, 0.0)
        reached = (face.rate * x[:types]).sum(axis=0)
        x[types] = np.maximum(1.0 - x[:types].sum(axis=0), _ROOM) * ~face.busy
        beyond = np.maximum(reached - face.level * face.z, _ROOM * reached)
        x[types + 1] = beyond * (face.asks & ~face.bound)
        spare = face.capacity - over_rows(x[:types] * fixed.each)
        w[:] = np.maximum(spare, _ROOM * face.capacity) * ~face.full
        return x[:types] if climb(face, fixed, point) else None


OPTIMA.add("centre", lambda weighted: CentreLas(weighted=weighted), __name__)
