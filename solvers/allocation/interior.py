"""A primal-dual interior point method for few columns: Mehrotra's, with the structure used.

Each row touches only its own two constraints (time, demand) and the few shared ones (one per
device type, and z). Eliminating the rows leaves normal equations of that few unknowns, so an
iteration costs O(rows x columns x types). The central path ends in the analytic centre of the
optimal face: of many optima this method returns that one, always the same.
"""

from dataclasses import dataclass

import numpy as np

from ...schema.errors import BackendError
from .program import (
    Bools,
    Floats,
    Program,
    Solution,
    dual_bound,
    fit,
    gap_between,
    level_of,
    shortfall,
)

MAX_ITERATIONS = 100
TOLERANCE = 1e-10
ACCEPTED_GAP = 1e-7
_PATIENCE = 4
_STEP = 0.9995
_SHORT = 0.3
_TINY = 1e-300


@dataclass(slots=True)
class _Point:
    """Primal (x, s, v, w, z) and dual (r, u, y, price): products of like letters go to zero.

    Arrays stand columns first ([columns, rows]), which numpy sums fastest.
    """

    x: Floats
    r: Floats
    s: Floats
    u: Floats
    v: Floats
    y: Floats
    w: Floats
    price: Floats
    z: float


class _Scaled:
    """A program with its rows scaled to rate <= 1, z to about 1, gains to at most 1."""

    def __init__(self, program: Program) -> None:
        self.count = program.count
        self.row = np.maximum(program.rate.max(axis=1), _TINY)
        self.rate = np.ascontiguousarray((program.rate / self.row[:, None]).T)
        self.usage = np.ascontiguousarray(program.usage.T)
        self.resources = program.resources
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


def solve(program: Program, accepted_gap: float = ACCEPTED_GAP) -> Solution:
    """Solve a program without pairs to a relative gap of about 1e-10.

    Args:
        program: The program.
        accepted_gap: A larger gap counts as a breakdown.

    Raises:
        BackendError: The iterations broke down; the program may have no feasible point.
    """
    # Numbers may run out at the very end; the proof of the best point so far decides then.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        best = _iterate(program)
    if best is None or not best.gap < accepted_gap:
        raise BackendError("the interior point method stopped without a proof")
    return best


def _iterate(program: Program) -> Solution | None:
    scaled = _Scaled(program)
    point = _start(scaled)
    best: Solution | None = None
    idle = 0
    for iteration in range(MAX_ITERATIONS):
        if iteration and _is_near(scaled, point):
            found = _read(program, scaled, point, iteration)
            idle = 0 if best is None or found.gap < 0.5 * best.gap else idle + 1
            best = found if best is None or found.gap < best.gap else best
            if best.gap < TOLERANCE or idle >= _PATIENCE:
                break
        if not _advance(scaled, point):
            break
    return best


def _start(p: _Scaled) -> _Point:
    allowed = np.maximum(p.runs.sum(axis=0), 1)
    x = np.where(p.runs, 0.5 / allowed, 0.0)
    used = p.resources @ ((x * p.usage) @ p.count)
    tight = np.where(p.capacity > 0, used / np.where(p.capacity > 0, p.capacity, 1.0), 0.0).max()
    x /= max(1.0, 2.0 * tight)
    reached = (p.rate * x).sum(axis=0) - p.floor
    levelled = p.demands & (p.level > 0)
    z = 0.0
    if p.has_level:
        z = 0.5 * float((reached[levelled] / p.level[levelled]).min())
    used = p.resources @ ((x * p.usage) @ p.count)
    v = np.maximum(reached - p.level * z, 1e-2 * np.abs(reached).max())
    w = np.maximum(p.capacity + p.level_capacity * z - used, 0.05)
    total = float(p.count @ p.level) if p.has_level else float(p.count.sum())
    y = np.where(p.demands, 1.0 / max(total, _TINY), 0.0)
    weight = float(p.count @ (y + p.gain.max(axis=0))) / len(p.capacity)
    price = np.full(len(p.capacity), weight)
    worth = p.gain + y * p.rate - p.usage * (p.resources.T @ price)[:, None]
    unit = max(float(y.max()), float(np.abs(p.gain).max()))
    u = np.full(len(p.count), max(float(worth.max()), 0.0) + unit)
    r = np.where(p.runs, np.maximum(u - worth, 0.1 * unit), 1.0)
    return _Point(x, r, 1.0 - x.sum(axis=0), u, np.where(p.demands, v, 1.0), y, w, price, z)


def _mean_product(p: _Scaled, at: _Point) -> float:
    rows = (at.x * at.r).sum(axis=0) + at.s * at.u + at.v * at.y
    number = p.count @ (p.runs.sum(axis=0) + 1.0 + p.demands) + len(p.capacity)
    return float((p.count @ rows + at.w @ at.price) / number)


def _advance(p: _Scaled, at: _Point) -> bool:
    """One predictor-corrector step in place; False where the numbers gave out."""
    system = _System(p, at)
    if not system.sound:
        return False
    mu = _mean_product(p, at)
    step = system.direction(-at.x * at.r, -at.s * at.u, -at.v * at.y, -at.w * at.price)
    primal, dual = _lengths(p, at, step, 1.0)
    after = _moved(at, step, primal, dual)
    target = mu * (max(_mean_product(p, after), 0.0) / max(mu, _TINY)) ** 3
    centred = (
        target - at.x * at.r, target - at.s * at.u, target - at.v * at.y, target - at.w * at.price
    )  # fmt: skip
    second = (step.x * step.r, step.s * step.u, step.v * step.y, step.w * step.price)
    step = system.direction(*(a - b for a, b in zip(centred, second, strict=True)))
    if not np.isfinite(step.z) or not np.isfinite(step.price).all():
        return False
    primal, dual = _lengths(p, at, step, _STEP)
    if primal * dual < _SHORT:
        # One row's second-order term may block all others: take the part of it that serves.
        plain = system.direction(*centred)
        choices = [_between(plain, step, part) for part in (0.5, 0.2, 0.05, 0.0)]
        lengths = [(primal, dual), *(_lengths(p, at, each, _STEP) for each in choices)]
        best = max(range(len(lengths)), key=lambda i: lengths[i][0] * lengths[i][1])
        step, (primal, dual) = [step, *choices][best], lengths[best]
    moved = _moved(at, step, primal, dual)
    at.x, at.r, at.s, at.u = moved.x, moved.r, moved.s, moved.u
    at.v, at.y, at.w, at.price, at.z = moved.v, moved.y, moved.w, moved.price, moved.z
    return True


class _System:
    """The Newton equations at a point, factored once for predictor and corrector.

    A row's unknowns are alpha = du - t dy and beta = dy, with t the row's mean rate weighted by
    d = x / r. In (du, dy) itself a row whose time and demand are both tight on one column would
    lose every digit; in (alpha, beta) nothing cancels.
    """

    def __init__(self, p: _Scaled, at: _Point) -> None:
        self.p, self.at = p, at
        self.d = np.where(p.runs, at.x / at.r, 0.0)
        total = self.d.sum(axis=0)
        self.mean = (self.d * p.rate).sum(axis=0) / np.maximum(total, _TINY) * p.demands
        self.apart = p.rate - self.mean
        spread = (self.d * self.apart**2).sum(axis=0)
        su = at.s / at.u
        self.vy = np.where(p.demands, at.v / np.maximum(at.y, _TINY), 0.0)
        slack = spread + self.vy
        a, c = total + su, slack + su * self.mean**2
        det = np.where(p.demands, a * slack + su * self.mean**2 * total, 1.0)
        self.ia = np.where(p.demands, c / det, 1.0 / a)
        self.ib = np.where(p.demands, -su * self.mean / det, 0.0)
        self.ic = np.where(p.demands, a / det, 0.0)
        ds = self.d * p.usage
        self.q = p.resources @ ds
        self.k = p.resources @ (ds * self.apart) * p.demands
        self._assemble(ds)

    def _assemble(self, ds: Floats) -> None:
        p, n = self.p, self.p.count
        self.alpha_l = -self.ia * self.q + self.ib * self.k
        self.beta_l = -self.ib * self.q + self.ic * self.k
        self.alpha_z, self.beta_z = self.ib * p.level, self.ic * p.level
        size = len(p.capacity)
        matrix = np.zeros((size + 1, size + 1))
        matrix[:size, :size] = (
            -(p.resources * ((ds * p.usage) @ n)) @ p.resources.T
            - np.diag(self.at.w / self.at.price)
            - (self.q * n) @ self.alpha_l.T
            + (self.k * n) @ self.beta_l.T
        )
        if p.has_level:
            matrix[:size, size] = (
                -self.q @ (n * self.alpha_z) + self.k @ (n * self.beta_z) - p.level_capacity
            )
            matrix[size, :size] = self.beta_l @ (n * p.level) - p.level_capacity
            matrix[size, size] = n @ (p.level * self.beta_z)
        else:
            matrix[size, size] = 1.0
        self.matrix = matrix
        self.sound = bool(np.isfinite(matrix).all())

    def direction(self, xi_x: Floats, xi_s: Floats, xi_v: Floats, xi_w: Floats) -> _Point:
        """The step whose products change by the given amounts and that mends infeasibility."""
        p, at, n = self.p, self.at, self.p.count
        reduced = at.u - at.y * p.rate + p.usage * (p.resources.T @ at.price)[:, None] - p.gain
        fd = np.where(p.runs, reduced - at.r, 0.0)
        e = np.where(p.runs, xi_x / at.r, 0.0) - self.d * fd
        f1 = 1.0 - at.x.sum(axis=0) - at.s
        f2 = p.floor + p.level * at.z - (p.rate * at.x).sum(axis=0) + at.v
        su, vy = xi_s / at.u, np.where(p.demands, xi_v / np.maximum(at.y, _TINY), 0.0)
        h = f1 - e.sum(axis=0) - su
        k = f2 - self.mean * f1 - (self.apart * e).sum(axis=0) + vy + self.mean * su
        f3 = p.capacity + p.level_capacity * at.z - p.resources @ ((at.x * p.usage) @ n) - at.w
        alpha = -self.ia * h + self.ib * k
        beta = -self.ib * h + self.ic * k
        size = len(p.capacity)
        right = np.zeros(size + 1)
        right[:size] = f3 - p.resources @ ((e * p.usage) @ n) - xi_w / at.price
        right[:size] += self.q @ (n * alpha) - self.k @ (n * beta)
        if p.has_level:
            spent = n @ (p.level * at.y) - p.level_capacity @ at.price
            right[size] = 1.0 - spent - n @ (p.level * beta)
        answer = _solved(self.matrix, right)
        dl, dz = answer[:size], float(answer[size])
        alpha = alpha + dl @ self.alpha_l + self.alpha_z * dz
        beta = beta + dl @ self.beta_l + self.beta_z * dz
        change = alpha - beta * self.apart + p.usage * (p.resources.T @ dl)[:, None]
        dr = np.where(p.runs, fd + change, 0.0)
        dx = np.where(p.runs, (xi_x - at.x * dr) / at.r, 0.0)
        du = alpha + self.mean * beta
        ds = (xi_s - at.s * du) / at.u
        dv = np.where(p.demands, vy - self.vy * beta, 0.0)
        dw = (xi_w - at.w * dl) / at.price
        return _Point(dx, dr, ds, du, dv, beta, dw, dl, dz)


def _solved(matrix: Floats, right: Floats) -> Floats:
    unit = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(matrix)), _TINY))
    balanced = matrix * unit[:, None] * unit
    try:
        answer = np.linalg.solve(balanced, right * unit)
    except np.linalg.LinAlgError:
        answer = np.linalg.lstsq(balanced, right * unit, rcond=None)[0]
    result: Floats = answer * unit
    return result


def _lengths(p: _Scaled, at: _Point, step: _Point, keep: float) -> tuple[float, float]:
    primal = max(
        _shrink(at.x, step.x), _shrink(at.s, step.s), _shrink(at.v, step.v), _shrink(at.w, step.w)
    )
    dual = max(
        _shrink(at.r, step.r),
        _shrink(at.u, step.u),
        _shrink(at.y, step.y, p.demands),
        _shrink(at.price, step.price),
    )
    return min(1.0, keep / max(primal, _TINY)), min(1.0, keep / max(dual, _TINY))


def _shrink(value: Floats, change: Floats, where: Bools | None = None) -> float:
    """How many times its own size the most reduced entry would lose."""
    ratio = -change / np.where(value > 0, value, 1.0)
    return float(ratio.max() if where is None else np.where(where, ratio, 0.0).max())


def _between(first: _Point, second: _Point, part: float) -> _Point:
    mixed = (
        (1.0 - part) * getattr(first, name) + part * getattr(second, name)
        for name in ("x", "r", "s", "u", "v", "y", "w", "price", "z")
    )
    return _Point(*mixed)


def _moved(at: _Point, step: _Point, primal: float, dual: float) -> _Point:
    return _Point(
        at.x + primal * step.x,
        at.r + dual * step.r,
        at.s + primal * step.s,
        at.u + dual * step.u,
        at.v + primal * step.v,
        at.y + dual * step.y,
        at.w + primal * step.w,
        at.price + dual * step.price,
        at.z + primal * step.z,
    )


def _is_near(p: _Scaled, at: _Point) -> bool:
    """Whether a look at the true gap is worth its time."""
    number = float(p.count @ (p.runs.sum(axis=0) + 1.0 + p.demands)) + len(p.capacity)
    value = abs(at.z) if p.has_level else float((p.gain * at.x).sum(axis=0) @ p.count)
    return bool(_mean_product(p, at) * number < 1e-6 * max(abs(value), p.least_value))


def _read(program: Program, p: _Scaled, at: _Point, iteration: int) -> Solution:
    unit = p.level_unit if p.has_level else p.gain_unit
    bound, y, price = dual_bound(program, at.y / p.row * unit, at.price / p.unit * unit)
    x = fit(program, at.x.T)
    z = level_of(program, x) if p.has_level else 0.0
    broken = shortfall(program, x, z)
    objective = program.objective(x, z)
    return Solution(
        x=x,
        z=z,
        objective=objective,
        bound=bound,
        gap=max(gap_between(program, objective, bound), broken),
        job_prices=y,
        resource_prices=price,
        method=f"structured interior point, {iteration} iterations",
    )
