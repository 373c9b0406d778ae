"""LAS at the analytic centre of its optimal face, by Newton's method.

Gavel's published code solves its programs with an interior point method, which ends near there.

What is tight in every optimum is known beforehand, so the centre maximises the sum of the
logarithms of all other slacks: a smooth problem, with as many coupled unknowns as there are
resources, and z. Slacks stand beside the time fractions as columns of their own.
Sums over classes are numpy's own, as in ``interior``.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...clusters.mechanisms.allocators import OPTIMA, Shares, WarmLas
from ...clusters.mechanisms.pool import Active
from ...solvers.allocation.engine import solve_alone
from ...solvers.allocation.interior import over_rows, solved_small
from ...solvers.allocation.las import WarmMaxMin
from ...solvers.allocation.program import Bools, Floats, Ints, max_min_program

MAX_ITERATIONS = 40
_DONE = 1e-6  # relative change of the last step; the next one would be its square
_KEEP = 0.9
_RIDGE = 1e-13
_ROOM = 0.005  # relative, of what a guess leaves none of
PRICED = 1e-8  # prices, and what a column costs beyond its worth, count from this part on
_SIGNS = np.array([[1.0, -1.0], [-1.0, 1.0]])[:, :, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """Classes of equal jobs, types first, and what is tight in every optimum.

    ``count`` n, ``scale`` s and ``level`` p [classes]; ``rate`` r [types, classes], 0 where no
    optimum spends time; ``capacity`` C [types]. Where ``busy``, a class has all of its time; where
    ``bound``, it has p z and no more [classes]; ``full`` are types without a device to spare
    [types]. Classes that do not ``ask`` have enough in every optimum. ``z`` need be exact only
    where ``fixed``: otherwise what is bound tells it.
    """

    count: Floats
    scale: Floats
    level: Floats
    rate: Floats
    capacity: Floats
    busy: Bools
    bound: Bools
    full: Bools
    asks: Bools
    z: float
    fixed: bool


def optimal_face(program: WarmMaxMin, classes: Ints, counts: Floats) -> Face:
    """The optimal face of the program's last answer, without pairs, as its prices tell.

    A price says that something is tight in every optimum; that nothing else is, holds where
    the prices are the only ones.

    ``program`` is solved with prices; ``counts`` are the jobs of each of the classes present.
    """
    types, z = len(program.capacity), float(program.values[0])
    price = program.prices[:types]
    time, demand = program.prices[types::2][classes], -program.prices[types + 1 :: 2][classes]
    rate = program.rates(classes)
    scale, level = np.array(program.scales)[classes], np.array(program.level)[classes]
    cost = time + np.multiply.outer(price, scale)
    rate = np.where(cost - demand * rate <= PRICED * (cost + PRICED * z), rate, 0.0)
    slowest = level * z >= 1.0 - PRICED  # needs all its time on its best types
    rate = np.where(slowest & (rate < 1.0), 0.0, rate)
    busy = slowest | (time * counts > PRICED * z)
    bound = slowest | (demand * level * counts > PRICED)
    most = rate.max(axis=0)
    alike = busy & ((rate == most) | (rate == 0)).all(axis=0)
    stuck = alike & bound
    fixed = bool(stuck.any())
    return Face(
        count=counts, scale=scale, level=level, rate=rate, capacity=program.capacity,
        busy=busy, bound=bound, full=price * program.capacity > PRICED * z, asks=~alike,
        z=float((most[stuck] / level[stuck]).min()) if fixed else z, fixed=fixed,
    )  # fmt: skip


def roomy_face(program: WarmMaxMin, classes: Ints, counts: Floats) -> Face:
    """The optimal face where no type is full: the slowest class alone is tight.

    The program need not be solved; ``counts`` are the jobs of each of the classes present.
    """
    rate, level = program.rates(classes), np.array(program.level)[classes]
    most = float(level.max())
    slowest, nowhere = level == most, np.zeros(len(program.capacity), dtype=bool)
    return Face(
        count=counts, scale=np.array(program.scales)[classes], level=level,
        rate=np.where(slowest & (rate < 1.0), 0.0, rate), capacity=program.capacity,
        busy=slowest, bound=slowest, full=nowhere, asks=~slowest, z=1.0 / most, fixed=True,
    )  # fmt: skip


class FaceRows:
    """What does not change from step to step.

    Columns of a class are its types, its time to spare, what it has beyond p z; ``rows`` is what
    each adds to its time and its demand [2, columns, classes].
    """

    def __init__(self, f: Face) -> None:
        types, classes = f.rate.shape
        self.rows = np.zeros((2, types + 2, classes))
        self.rows[0, : types + 1] = 1.0
        self.rows[1, :types], self.rows[1, types + 1] = f.rate, -1.0
        self.rows[1] *= f.asks
        level = f.level * f.asks
        self.base = np.array((np.ones(classes), level * (f.z if f.fixed else 0.0)))
        self.coupled = np.zeros((types + (not f.fixed), 2, classes))
        self.coupled[types:, 1] = level
        self.each = f.count * f.scale
        self.idle = 1.0 - f.asks


def climb(f: Face, fixed: FaceRows, point: Floats) -> bool:
    """Move a point (columns, then spare devices) to the centre; whether it got there."""
    types, classes = f.rate.shape
    size = (types + 2) * classes
    x, w = point[:size].reshape(types + 2, classes), point[size:]
    hole = (point == 0).astype(float)
    for _ in range(MAX_ITERATIONS):
        step = _step(f, fixed, x, w)
        if step is None:
            return False
        ratio = step / (point + hole)
        least, most = float(np.minimum.reduce(ratio)), float(np.maximum.reduce(ratio))
        change = max(-least, most)
        if not change < np.inf:
            return False
        if least < -_KEEP:
            step *= -_KEEP / least
        point += step
        if change < _DONE:
            return True
    return False


def _step(f: Face, fixed: FaceRows, x: Floats, w: Floats) -> Floats | None:
    """Newton's step on 1/x = u + y rate + s price, 1/w = price, and the rows' and types' totals."""
    rows, coupled = fixed.rows, fixed.coupled
    types, number = len(w), len(coupled)
    square = x * x
    weighed = square * rows
    own = np.add.reduce(weighed[:, None] * rows, axis=2)
    own[1, 1] += fixed.idle
    det = own[0, 0] * own[1, 1] - own[0, 1] * own[0, 1]
    inverse = own[::-1, ::-1] / (_SIGNS * det)
    miss = 2.0 * np.add.reduce(x * rows, axis=1) - fixed.base
    coupled[:types] = weighed[:, :types].transpose(1, 0, 2) * f.scale
    alone = np.add.reduce(inverse * miss, axis=1)
    lent = np.add.reduce(inverse * coupled[:, None], axis=2).reshape(number, -1)
    counted = (coupled * f.count).reshape(number, -1)
    matrix = np.array([-over_rows(row * lent) for row in counted])
    right = -over_rows(counted * alone.reshape(-1))
    own_price = over_rows(coupled[:types, 0] * fixed.each) + w * w
    matrix.reshape(-1)[: types * number : number + 1] += own_price * (1.0 + _RIDGE)
    right[:types] += 2.0 * (over_rows(x[:types] * fixed.each) + w) - f.capacity
    answer = solved_small(matrix, right)
    if answer is None:
        return None
    price = answer[:types]
    prices = alone - np.add.reduce(answer[:, None] * lent, axis=0).reshape(alone.shape)
    push = np.add.reduce(prices[:, None] * rows, axis=0)
    push[:types] += price[:, None] * f.scale
    return np.concatenate(((x - square * push).reshape(-1), w - w * w * price))


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
                # By the interior point method, which ends before the centre but never fails.
                rate = program.rates(present).T
                found = solve_alone(
                    max_min_program(face.count, rate, face.scale, face.level, face.capacity)
                ).x.T
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
