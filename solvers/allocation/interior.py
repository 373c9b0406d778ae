"""A primal-dual interior point method for few columns: Mehrotra's, with the structure used.

Each row touches only its own two constraints (time, demand) and the few shared ones (one per
device type, and z). Eliminating the rows leaves normal equations of that few unknowns, so an
iteration costs O(rows x columns x types). Of many optima it returns one inside the optimal face,
always the same. That is not the face's analytic centre, where the central path ends: steps this
long leave the path, and the gap closes before they are back.

Sums over rows are numpy's own (``over_rows``), not a BLAS's: those add in an order that differs
from processor to processor, and a simulation shows the last digit. So ``walk`` can take the same
steps compiled.

    1,000 jobs on 3 types have 3,000 fractions and 2,000 constraints of their own
    once the jobs are eliminated, an iteration solves a system of 3 resources and z: 4 unknowns
    8 to 10 iterations closed the gap for 20 to 1,000 drawn jobs
"""

from collections.abc import Callable

import numpy as np

from ..effort import never
from .program import Floats, FractionProgram, Solution, fit, level_of, solution_of

MAX_ITERATIONS = 100
TOLERANCE = 1e-10
_PATIENCE = 4
_STEP = 0.9995
_SHORT = 0.3
_WORSE = 1e9  # where numbers gave out, so that they do not overflow as well
# Centrality correctors: how many, up to which step, how much further, how far apart, for how much.
_CORRECTORS, _LONG, _FURTHER, _APART, _GAIN = 3, 0.8, 0.3, 10.0, 0.01
_TINY = 1e-300
SMALL = 8  # up to this size equations are solved in plain Python


class Point:
    """A point, or a step: primal (x, s, v, w) and dual (r, u, y, price), and z.

    Products of like letters go to zero. The letters are views of two vectors, so that what
    happens to all of them is one operation. x and r stand columns first ([columns, rows]), which
    numpy sums fastest.
    """

    __slots__ = ("dual", "price", "primal", "r", "rows", "s", "u", "v", "w", "x", "y", "z")

    def __init__(self, columns: int, rows: int, primal: Floats, dual: Floats, z: float) -> None:
        self.primal, self.dual, self.z = primal, dual, z
        self.rows = (columns, rows)
        first, last = columns * rows, (columns + 2) * rows
        self.x, self.r = primal[:first].reshape(self.rows), dual[:first].reshape(self.rows)
        self.s, self.u = primal[first : first + rows], dual[first : first + rows]
        self.v, self.y = primal[first + rows : last], dual[first + rows : last]
        self.w, self.price = primal[last:], dual[last:]

    def empty_like(self) -> "Point":
        """A point of the same shape, nothing in it yet."""
        return Point(*self.rows, np.empty_like(self.primal), np.empty_like(self.dual), 0.0)

    def moved(self, step: "Point", primal: float, dual: float) -> "Point":
        """This point after parts of a step."""
        return Point(
            *self.rows,
            self.primal + primal * step.primal,
            self.dual + dual * step.dual,
            self.z + primal * step.z,
        )


class Scaled:
    """A program with its rows scaled to rate <= 1, z to about 1, gains to at most 1."""

    def __init__(self, program: FractionProgram) -> None:
        self.count = program.count
        self.row = np.maximum(program.rate.max(axis=1), _TINY)
        # Rates, resources, z and gains all to about 1: tolerances and start then suit every
        # program.
        self.rate = np.ascontiguousarray((program.rate / self.row[:, None]).T)
        self.usage = np.ascontiguousarray(program.usage.T)
        own = np.count_nonzero(program.resources.diagonal())
        # With one resource for each column the matrix products are sums in a fixed order.
        self.own = own == np.count_nonzero(program.resources)  # a column, a resource of its own
        self.unit = np.maximum(program.capacity, program.level_capacity)
        self.unit = np.where(self.unit > 0, self.unit, 1.0)
        self.resources = program.resources / self.unit[:, None]
        self.capacity = program.capacity / self.unit
        self.demands = program.demands
        self.runs = np.ascontiguousarray(program.rate.T > 0)
        self.gain_unit = max(float(np.abs(program.gain).max()), _TINY) * program.count.sum()
        self.gain = np.ascontiguousarray(program.gain.T) / self.gain_unit
        self.gain[~self.runs] = 0.0
        self.least_value = max(program.unit / self.gain_unit, 1e-12)
        level = np.where(program.demands, program.level / self.row, 0.0)
        self.floor = np.where(program.demands, program.floor / self.row, 0.0)
        self.has_level = bool(program.level_weight)
        self.level_unit = 1.0 / max(float(level.max()), _TINY) if self.has_level else 1.0
        self.level = level * self.level_unit
        self.level_capacity = program.level_capacity * self.level_unit / self.unit
        self.holes = None if self.runs.all() else ~self.runs
        self.idle = None if self.demands.all() else ~self.demands
        each = self.runs.sum(axis=0) + 1.0 + self.demands
        self.number = self.count @ each + len(self.capacity)
        # Complementary pairs: the gap is the sum of their products.
        self.level_counts = self.count * self.level


def walk(p: Scaled, at: Point, most: int) -> tuple[int, Point | None]:
    """Go on by some steps: how many (here one) and where to; None where the numbers gave out."""
    return 1, _advance(p, at)


def over_rows(values: Floats) -> Floats:
    """Sums over the last axis, added up in an order that depends on its length alone."""
    total: Floats = np.add.reduce(values, axis=-1)
    return total


def can_reach(program: FractionProgram, level: float) -> bool:
    """Whether time fractions turn up on the way to the largest z that support a z of ``level``.

    That takes a few iterations where there is room; False says nothing.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        scaled = Scaled(program)
        point: Point | None = first_point(scaled)
        for _ in range(MAX_ITERATIONS):
            if point is None or is_near(scaled, point):
                return False
            if point.z * scaled.level_unit > level:
                if level_of(program, fit(program, point.x.T)) > level:
                    return True
            point = _advance(scaled, point)
    return False


def first_point(p: Scaled) -> Point:
    """Where the iterations begin: well inside, not feasible."""
    # Half of the time that a row may use, spread evenly, and no more than half of any resource.
    allowed = np.maximum(p.runs.sum(axis=0), 1)
    x = np.where(p.runs, 0.5 / allowed, 0.0)
    used = p.resources @ ((x * p.usage) @ p.count)
    tight = np.where(p.capacity > 0, used / np.where(p.capacity > 0, p.capacity, 1.0), 0.0).max()
    x /= max(1.0, 2.0 * tight)
    reached = (p.rate * x).sum(axis=0) - p.floor
    levelled = p.demands & (p.level > 0)
    z = 0.0
    if p.has_level:
        # Half of the least level reached; demands then have a slack.
        z = 0.5 * float((reached[levelled] / p.level[levelled]).min())
    used = p.resources @ ((x * p.usage) @ p.count)
    # Slacks that would be negative are set apart from 0: the point is infeasible there, and steps
    # remove that.
    v = np.maximum(reached - p.level * z, 1e-2 * np.abs(reached).max())
    w = np.maximum(p.capacity + p.level_capacity * z - used, 0.05)
    u, r, y, price = _start_prices(p) if p.has_level else _start_prices_by_row(p)
    v = np.where(p.demands, v, 1.0)
    primal = np.concatenate((x.ravel(), 1.0 - x.sum(axis=0), v, w))
    dual = np.concatenate((r.ravel(), u, y, price))
    return Point(len(x), len(p.count), primal, dual, z)


def _start_prices(p: Scaled) -> tuple[Floats, Floats, Floats, Floats]:
    # Prices that sum to 1 over levels, and of which resources take an equal part.
    y = np.where(p.demands, 1.0 / max(float(p.count @ p.level), _TINY), 0.0)
    weight = float(p.count @ (y + p.gain.max(axis=0))) / len(p.capacity)
    price = np.full(len(p.capacity), weight)
    worth = p.gain + y * p.rate - p.usage * (p.resources.T @ price)[:, None]
    unit = max(float(y.max()), float(np.abs(p.gain).max()))
    u = np.full(len(p.count), max(float(worth.max()), 0.0) + unit)
    return u, np.where(p.runs, np.maximum(u - worth, 0.1 * unit), 1.0), y, price


def _start_prices_by_row(p: Scaled) -> tuple[Floats, Floats, Floats, Floats]:
    """Without z gains may lie decades apart: each row starts on its own scale."""
    # As above, on the scale of each row's own gains.
    gain = np.abs(p.gain).max(axis=0)
    price = np.full(len(p.capacity), max(float(p.count @ gain), _TINY) / len(p.capacity))
    rent = p.usage * (p.resources.T @ price)[:, None]
    unit = gain + rent.max(axis=0)
    y = np.where(p.demands, unit, 0.0)
    worth = p.gain + y * p.rate - rent
    u = np.maximum(worth.max(axis=0), 0.0) + unit
    return u, np.where(p.runs, np.maximum(u - worth, 0.1 * unit), 1.0), y, price


def _mean_product(p: Scaled, at: Point, product: Floats) -> float:
    columns, rows = at.rows
    last = (columns + 2) * rows
    each = np.add.reduce(product[:last].reshape(columns + 2, rows), axis=0)
    return float((over_rows(p.count * each) + over_rows(at.w * at.price)) / p.number)


def _advance(p: Scaled, at: Point) -> Point | None:
    """The point after one predictor-corrector step; None where the numbers gave out."""
    product = at.primal * at.dual
    system = _System(p, at)
    if not system.sound:
        return None
    reach = _Reach(p, at)
    mu = _mean_product(p, at, product)
    step = system.direction(-product)
    after = at.moved(step, *reach.lengths(step, 1.0))
    ahead = _mean_product(p, after, after.primal * after.dual)
    # Mehrotra's rule: how far the plain step alone would close the gap says how much centring is
    # needed, by its cube.
    part = min(max(ahead, 0.0) / max(mu, _TINY), _WORSE)
    target = mu * (part * part * part)
    centred = target - product
    first = step.primal * step.dual
    step = system.direction(centred - first)
    if not np.isfinite(step.z) or not np.isfinite(step.price).all():
        return None
    primal, dual = reach.lengths(step, _STEP)
    if not p.has_level:
        change = centred - first
        for _ in range(_CORRECTORS):
            if primal * dual > _LONG:
                break
            # Gondzio's corrector: a little further on, no product far from the target.
            ahead_of = at.moved(step, min(1.0, primal + _FURTHER), min(1.0, dual + _FURTHER))
            product = ahead_of.primal * ahead_of.dual
            pull = np.clip(product, target / _APART, target * _APART) - product
            change = change + np.maximum(pull, -_APART * target)
            other = system.direction(change)
            lengths = reach.lengths(other, _STEP)
            if sum(lengths) < primal + dual + _GAIN:
                break
            step, (primal, dual) = other, lengths
    elif primal * dual < _SHORT:
        # One row's second-order term may block all others: take the part of it that serves.
        plain = system.direction(centred)
        choices = [_between(plain, step, part) for part in (0.5, 0.2, 0.05, 0.0)]
        reached = [(primal, dual), *(reach.lengths(each, _STEP) for each in choices)]
        best = max(range(len(reached)), key=lambda i: reached[i][0] * reached[i][1])
        step, (primal, dual) = [step, *choices][best], reached[best]
    return at.moved(step, primal, dual)


class _System:
    """The Newton equations at a point, factored once for predictor and corrector.

    A row's unknowns are alpha = du - t dy and beta = dy, with t the row's mean rate weighted by
    d = x / r. In (du, dy) itself a row whose time and demand are both tight on one column would
    lose every digit; in (alpha, beta) nothing cancels.
    """

    def __init__(self, p: Scaled, at: Point) -> None:
        self.p, self.at = p, at
        self.d = at.x / at.r  # 0 where a row does not run
        total = np.add.reduce(self.d, axis=0)
        # t: the mean rate weighted by d, so that ``apart`` is orthogonal to it.
        self.mean = np.add.reduce(self.d * p.rate, axis=0) / np.maximum(total, _TINY)
        self.y = np.maximum(at.y, _TINY)
        self.vy = at.v / self.y
        if p.idle is not None:
            self.mean[p.idle] = self.vy[p.idle] = 0.0
        self.apart = p.rate - self.mean
        slack = np.add.reduce(self.d * np.square(self.apart), axis=0) + self.vy
        su = at.s / at.u
        # [rows] the 2 x 2 system of each row, inverted in closed form: det > 0, as all its terms
        # are.
        a, sm = total + su, su * np.square(self.mean)
        det = a * slack + sm * total
        if p.idle is not None:
            det[p.idle] = 1.0
        self.ia, self.ib, self.ic = (slack + sm) / det, -su * self.mean / det, a / det
        if p.idle is not None:
            self.ia[p.idle] = 1.0 / a[p.idle]
            self.ib[p.idle] = self.ic[p.idle] = 0.0
        ds = self.d * p.usage
        self.q = p.resources @ ds
        self.k = p.resources @ (ds * self.apart)
        if p.idle is not None:
            self.k[:, p.idle] = 0.0
        self._assemble(ds)
        if self.sound:
            self._mend()

    def _assemble(self, ds: Floats) -> None:
        p, n = self.p, self.p.count
        self.alpha_l = -self.ia * self.q + self.ib * self.k
        self.beta_l = -self.ib * self.q + self.ic * self.k
        self.alpha_z, self.beta_z = self.ib * p.level, self.ic * p.level
        size = len(p.capacity)
        # Resources and z alone: rows are eliminated, each by a 2 x 2 system of its own (ia, ib,
        # ic).
        matrix = np.zeros((size + 1, size + 1))
        block = -(p.resources * over_rows(ds * p.usage * n)) @ p.resources.T
        block.reshape(-1)[:: size + 1] -= self.at.w / self.at.price
        if size < SMALL:
            # Row by row in a fixed order, as the compiled steps add.
            for row in range(size):
                block[row] -= over_rows(self.q[row] * n * self.alpha_l)
                block[row] += over_rows(self.k[row] * n * self.beta_l)
        else:  # rows x types^2: at hundreds of types only a matrix product is fast enough
            block += (self.k * n) @ self.beta_l.T - (self.q * n) @ self.alpha_l.T
        matrix[:size, :size] = block
        if p.has_level:
            across = over_rows(self.k * (n * self.beta_z) - self.q * (n * self.alpha_z))
            matrix[:size, size] = across - p.level_capacity
            matrix[size, :size] = over_rows(self.beta_l * p.level_counts) - p.level_capacity
            matrix[size, size] = over_rows(n * (p.level * self.beta_z))
        else:
            matrix[size, size] = 1.0
        # NaN or infinity anywhere says that the numbers gave out.
        self.sound = bool(np.isfinite(matrix).all())
        # Scaled to a unit diagonal, as prices may lie decades apart.
        self.unit = 1.0 / np.sqrt(np.maximum(np.abs(matrix.diagonal()), _TINY))
        self.balanced = matrix * self.unit[:, None] * self.unit

    def _mend(self) -> None:
        """By how much the point is infeasible, the same for every direction from it."""
        p, at = self.p, self.at
        # Dual infeasibility: reduced costs that are not the slacks r.
        reduced = at.u - at.y * p.rate + p.usage * (p.resources.T @ at.price)[:, None] - p.gain
        self.fd = reduced - at.r
        if p.holes is not None:
            self.fd[p.holes] = 0.0
        self.dfd = self.d * self.fd
        self.f1 = 1.0 - np.add.reduce(at.x, axis=0) - at.s
        reached = np.add.reduce(p.rate * at.x, axis=0)
        f2 = p.floor + p.level * at.z - reached + at.v
        self.f2 = f2 - self.mean * self.f1
        used = p.resources @ over_rows(at.x * p.usage * p.count)
        self.f3 = p.capacity + p.level_capacity * at.z - used - at.w
        if p.has_level:
            self.spent = over_rows(p.count * (p.level * at.y))
            self.spent -= over_rows(p.level_capacity * at.price)

    def direction(self, change: Floats) -> Point:
        """The step whose products change by ``change`` (all) and that removes infeasibility."""
        p, at, n = self.p, self.at, self.p.count
        # A point only to name the parts of ``change``; its dual half is not used.
        xi = Point(*at.rows, change, at.dual, 0.0)
        step = at.empty_like()
        first = xi.x / at.r
        if p.holes is not None:
            first[p.holes] = 0.0
        e = first - self.dfd
        su, vy = xi.s / at.u, xi.v / self.y
        if p.idle is not None:
            vy[p.idle] = 0.0
        # h, k: what each row still lacks in time and demand, its own columns eliminated.
        h = self.f1 - np.add.reduce(e, axis=0) - su
        k = self.f2 - np.add.reduce(self.apart * e, axis=0) + vy + self.mean * su
        alpha = -self.ia * h + self.ib * k
        beta = -self.ib * h + self.ic * k
        size = len(p.capacity)
        right = np.zeros(size + 1)
        # Resources' right side, after the rows' part is taken off.
        right[:size] = self.f3 - p.resources @ over_rows(e * p.usage * n) - xi.w / at.price
        right[:size] += over_rows(self.q * (n * alpha) - self.k * (n * beta))
        if p.has_level:
            right[size] = 1.0 - self.spent - over_rows(n * (p.level * beta))
        answer = _solved(self.balanced, right * self.unit, ordered=p.own) * self.unit
        dl, dz = answer[:size], float(answer[size])
        # Back substitution: rows from resources and z, then columns from rows.
        alpha = alpha + np.add.reduce(dl[:, None] * self.alpha_l, axis=0) + self.alpha_z * dz
        beta = beta + np.add.reduce(dl[:, None] * self.beta_l, axis=0) + self.beta_z * dz
        lent = p.usage * (p.resources.T @ dl)[:, None]
        np.add(self.fd, alpha - beta * self.apart + lent, out=step.r)
        if p.holes is not None:
            step.r[p.holes] = 0.0
        np.divide(xi.x - at.x * step.r, at.r, out=step.x)
        if p.holes is not None:
            step.x[p.holes] = 0.0
        np.add(alpha, self.mean * beta, out=step.u)
        np.divide(xi.s - at.s * step.u, at.u, out=step.s)
        np.subtract(vy, self.vy * beta, out=step.v)
        step.y[:], step.price[:], step.z = beta, dl, dz
        np.divide(xi.w - at.w * dl, at.price, out=step.w)
        return step


def _solved(balanced: Floats, right: Floats, *, ordered: bool) -> Floats:
    """Solve equations, where ``ordered`` as the compiled steps do."""
    small = SMALL if ordered else 0
    answer = solved_small(balanced, right, small)
    if answer is None:
        answer = np.asarray(np.linalg.lstsq(balanced, right, rcond=None)[0], dtype=np.float64)
    return answer


def solved_small(matrix: Floats, right: Floats, small: int = SMALL) -> Floats | None:
    """Solve equations, small ones in the same order everywhere; None where they are singular."""
    if len(right) <= small:
        values: list[float] = right.tolist()
        if not eliminate(matrix.tolist(), values):
            return None
        return np.array(values)
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None


def eliminate(matrix: list[list[float]], right: list[float]) -> bool:
    """Solve equations in place, rows of the largest pivots first; False where they are singular."""
    size = len(right)
    for i in range(size):
        pivot = i
        for j in range(i + 1, size):
            if abs(matrix[j][i]) > abs(matrix[pivot][i]):
                pivot = j
        if matrix[pivot][i] == 0.0:
            return False
        if pivot != i:
            right[i], right[pivot] = right[pivot], right[i]
            for c in range(i, size):
                matrix[i][c], matrix[pivot][c] = matrix[pivot][c], matrix[i][c]
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            right[j] -= factor * right[i]
            for c in range(i + 1, size):
                matrix[j][c] -= factor * matrix[i][c]
    for i in range(size - 1, -1, -1):
        for c in range(i + 1, size):
            right[i] -= matrix[i][c] * right[c]
        right[i] /= matrix[i][i]
    return True


class _Reach:
    """How far a step may go from a point until something is 0."""

    # Where nothing runs both are 0, and a step there says nothing.
    def __init__(self, p: Scaled, at: Point) -> None:
        self.primal = at.primal if p.holes is None else np.where(at.primal > 0, at.primal, 1.0)
        self.dual = at.dual if p.idle is None else np.where(at.dual > 0, at.dual, 1.0)

    # The longest negative part decides; what grows is no limit.
    def lengths(self, step: Point, keep: float) -> tuple[float, float]:
        """Parts of the step, primal and dual, that ``keep`` everything positive; 1 at most."""
        primal = -float(np.minimum.reduce(step.primal / self.primal))
        dual = -float(np.minimum.reduce(step.dual / self.dual))
        return min(1.0, keep / max(primal, _TINY)), min(1.0, keep / max(dual, _TINY))


def _between(first: Point, second: Point, part: float) -> Point:
    return Point(
        *first.rows,
        (1.0 - part) * first.primal + part * second.primal,
        (1.0 - part) * first.dual + part * second.dual,
        (1.0 - part) * first.z + part * second.z,
    )


def is_near(p: Scaled, at: Point) -> bool:
    """Whether a look at the true gap is worth its time."""
    value = abs(at.z) if p.has_level else float((p.gain * at.x).sum(axis=0) @ p.count)
    near = _mean_product(p, at, at.primal * at.dual) * p.number
    return bool(near < 1e-6 * max(abs(value), p.least_value))


def read_back(program: FractionProgram, p: Scaled, at: Point, iteration: int) -> Solution:
    """A point as a feasible solution of the program as it was given, with its proof."""
    unit = p.level_unit if p.has_level else p.gain_unit
    y, price = at.y / p.row * unit, at.price / p.unit * unit
    method = f"structured interior point, {iteration} iterations"
    return solution_of(program, at.x.T, y, price, method)


Walk = Callable[[Scaled, Point, int], tuple[int, Point | None]]


def solve(
    program: FractionProgram, walk: Walk = walk, should_stop: Callable[[], bool] = never
) -> Solution | None:
    """Solve a program without pairs, to a relative gap of about 1e-10 where numbers suffice.

    ``walk`` takes the steps. ``should_stop`` is asked before each; True ends with the point
    reached.

    Returns:
        The point with the least gap; None if no point came near, as where none is feasible.
    """
    # Numbers may run out at the very end; the proof of the best point so far decides then.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        return _iterate(program, walk, should_stop)


def _iterate(
    program: FractionProgram, walk: Walk, should_stop: Callable[[], bool]
) -> Solution | None:
    scaled = Scaled(program)
    point = first_point(scaled)
    best: Solution | None = None
    iteration = idle = 0
    while iteration < MAX_ITERATIONS:
        # A look at the true gap costs as much as an iteration, so only near the end.
        stops = should_stop()
        if stops or (iteration and is_near(scaled, point)):
            found = read_back(program, scaled, point, iteration)
            # Numbers that get no better for some looks will not: the best point stays.
            idle = 0 if best is None or found.gap < 0.5 * best.gap else idle + 1
            best = found if best is None or found.gap < best.gap else best
            if stops or best.gap < TOLERANCE or idle >= _PATIENCE:
                break
        steps, after = walk(scaled, point, MAX_ITERATIONS - iteration)
        if after is None:
            break
        point, iteration = after, iteration + steps
    return best
