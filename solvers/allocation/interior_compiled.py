"""The steps of ``interior``, compiled by numba: the same digits, without an array for each term.

For what the simulator asks thousands of times: programs that maximise z, where each column uses
one resource of its own and every row has a demand. Whatever else comes, and steps that go less
well than hoped, are left to ``interior.walk``. Names are those of ``interior``; a program, a point
and what is worked out on the way are tuples of arrays ([columns, rows], [rows], [columns]).
"""

from typing import Any

import numpy as np

from ..compiling import compiled
from . import interior
from .interior import _SHORT, _STEP, _TINY, _WORSE, SMALL, Point, Scaled
from .interior import eliminate as eliminate_plain

# Sums and small equations, compiled, to the digits of ``np.add.reduce`` and of ``interior``.

eliminate = compiled(eliminate_plain)


@compiled
def block_sum(values: Any, first: Any, number: Any) -> Any:
    """Of at most 128 values, eight sums at a time."""
    if number < 8:
        total = 0.0
        for i in range(first, first + number):
            total += values[i]
        return total
    a, b, c, d = values[first], values[first + 1], values[first + 2], values[first + 3]
    e, f, g, h = values[first + 4], values[first + 5], values[first + 6], values[first + 7]
    whole = number - number % 8
    for i in range(first + 8, first + whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(first + whole, first + number):
        total += values[i]
    return total


@compiled
def summed(values: Any, number: Any) -> Any:
    """Add as ``np.add.reduce`` does: halves of more than 128 values apart."""
    # With a stack, as numba's cache does not keep functions that call themselves.
    if number <= 128:
        return block_sum(values, 0, number)
    firsts, numbers = np.empty(128, np.int64), np.empty(128, np.int64)
    sums = np.empty(128)
    firsts[0], numbers[0] = 0, number
    waiting, known = 1, 0
    while waiting:
        waiting -= 1
        first, size = firsts[waiting], numbers[waiting]
        if size == 0:  # both halves are known
            known -= 1
            sums[known - 1] += sums[known]
        elif size <= 128:
            sums[known] = block_sum(values, first, size)
            known += 1
        else:
            half = size // 2
            # As numpy splits: the first half is a multiple of 8.
            half -= half % 8
            # 0 marks a sum whose halves are on the stack above it.
            numbers[waiting] = 0
            firsts[waiting + 1], numbers[waiting + 1] = first + half, size - half
            firsts[waiting + 2], numbers[waiting + 2] = first, half
            waiting += 3
    return sums[0]


_LIMITS = (_TINY, _STEP, _SHORT, _WORSE)  # given to compiled functions, see ``compiled``


def walk(p: Scaled, at: Point, most: int) -> tuple[int, Point | None]:
    """Go on until the true gap is worth a look: how many steps, and where to."""
    if not _is_simple(p):
        return interior.walk(p, at, most)
    program = (
        p.count, p.rate, p.usage, p.resources.diagonal().copy(), p.capacity, p.level_capacity,
        p.gain, p.level, p.floor, p.runs, p.level_counts,
    )  # fmt: skip
    primal, dual = at.primal.copy(), at.dual.copy()
    steps, z = _walk(program, p.number, p.least_value, _LIMITS, primal, dual, at.z, most)
    if not steps:
        return interior.walk(p, at, most)
    return steps, Point(*at.rows, primal, dual, z)


def _is_simple(p: Scaled) -> bool:
    size, columns = p.resources.shape
    return (
        p.has_level
        and p.idle is None
        and p.own
        and size == columns < SMALL
        and len(p.count) > 1  # a single row is summed in another order
    )


@compiled
def _mean_product(count: Any, number: Any, columns: Any, product: Any, term: Any) -> Any:
    rows = len(count)
    for m in range(rows):
        each = 0.0
        for c in range(columns + 2):
            each += product[c * rows + m]
        term[m] = count[m] * each
    last = (columns + 2) * rows
    return (summed(term, rows) + block_sum(product, last, len(product) - last)) / number


@compiled
def _length(step: Any, at: Any, keep: Any, tiny: Any) -> Any:
    """The part of a step that ``keep`` everything positive; -1 where numbers gave out."""
    least = np.inf
    for i in range(len(step)):
        part = step[i] / (at[i] if at[i] > 0.0 else 1.0)
        if np.isnan(part):
            return -1.0
        least = min(least, part)
    return min(1.0, keep / max(-least, tiny))


@compiled
def _parts(vector: Any, columns: Any, rows: Any) -> Any:
    """The letters of a primal or dual vector, as in ``Point``."""
    cells = columns * rows
    return (
        vector[:cells].reshape(columns, rows), vector[cells : cells + rows],
        vector[cells + rows : cells + 2 * rows], vector[cells + 2 * rows :],
    )  # fmt: skip


@compiled
def _factor(program: Any, point: Any, tiny: Any, system: Any) -> None:
    """The Newton equations row by row (``_System.__init__``)."""
    count, rate, usage, unit_of, capacity, level_capacity, gain, level, floor, runs, lc = program
    x, s, v, w, r, u, y, price = point
    d, apart, q, k, alpha_l, beta_l, mean, safe_y, vy, ia, ib, ic, alpha_z, beta_z = system
    columns, rows = rate.shape
    for m in range(rows):
        total = weighted = slack = 0.0
        for c in range(columns):
            d[c, m] = x[c, m] / r[c, m]
            total += d[c, m]
            weighted += d[c, m] * rate[c, m]
        mean[m] = weighted / max(total, tiny)
        safe_y[m] = max(y[m], tiny)
        vy[m] = v[m] / safe_y[m]
        for c in range(columns):
            apart[c, m] = rate[c, m] - mean[m]
            slack += d[c, m] * (apart[c, m] * apart[c, m])
        slack += vy[m]
        su = s[m] / u[m]
        a, sm = total + su, su * (mean[m] * mean[m])
        det = a * slack + sm * total
        ia[m], ib[m], ic[m] = (slack + sm) / det, -su * mean[m] / det, a / det
        for c in range(columns):
            ds = d[c, m] * usage[c, m]
            q[c, m] = unit_of[c] * ds
            k[c, m] = unit_of[c] * (ds * apart[c, m])
            alpha_l[c, m] = -ia[m] * q[c, m] + ib[m] * k[c, m]
            beta_l[c, m] = -ib[m] * q[c, m] + ic[m] * k[c, m]
        alpha_z[m], beta_z[m] = ib[m] * level[m], ic[m] * level[m]


@compiled
def _assemble(program: Any, point: Any, system: Any, matrix: Any, term: Any) -> None:
    """The equations of the prices and z (``_System._assemble``)."""
    count, rate, usage, unit_of, capacity, level_capacity, gain, level, floor, runs, lc = program
    x, s, v, w, r, u, y, price = point
    d, apart, q, k, alpha_l, beta_l, mean, safe_y, vy, ia, ib, ic, alpha_z, beta_z = system
    size, rows = rate.shape
    matrix[:] = 0.0
    for i in range(size):
        for m in range(rows):
            term[m] = d[i, m] * usage[i, m] * usage[i, m] * count[m]
        matrix[i, i] = -(unit_of[i] * summed(term, rows)) * unit_of[i] - w[i] / price[i]
        for j in range(size):
            for m in range(rows):
                term[m] = q[i, m] * count[m] * alpha_l[j, m]
            matrix[i, j] -= summed(term, rows)
            for m in range(rows):
                term[m] = k[i, m] * count[m] * beta_l[j, m]
            matrix[i, j] += summed(term, rows)
        for m in range(rows):
            term[m] = k[i, m] * (count[m] * beta_z[m]) - q[i, m] * (count[m] * alpha_z[m])
        matrix[i, size] = summed(term, rows) - level_capacity[i]
        for m in range(rows):
            term[m] = beta_l[i, m] * lc[m]
        matrix[size, i] = summed(term, rows) - level_capacity[i]
    for m in range(rows):
        term[m] = count[m] * (level[m] * beta_z[m])
    matrix[size, size] = summed(term, rows)


@compiled
def _miss(program: Any, point: Any, z: Any, system: Any, lack: Any, term: Any) -> Any:
    """By how much the point is infeasible (``_System._mend``)."""
    count, rate, usage, unit_of, capacity, level_capacity, gain, level, floor, runs, lc = program
    x, s, v, w, r, u, y, price = point
    fd, dfd, f1, f2, f3 = lack
    d, mean = system[0], system[6]
    columns, rows = rate.shape
    for i in range(columns):
        for m in range(rows):
            term[m] = x[i, m] * usage[i, m] * count[m]
        f3[i] = capacity[i] + level_capacity[i] * z - unit_of[i] * summed(term, rows) - w[i]
    for m in range(rows):
        used = reached = 0.0
        for c in range(columns):
            fd[c, m] = 0.0
            if runs[c, m]:
                rent = usage[c, m] * (unit_of[c] * price[c])
                fd[c, m] = u[m] - y[m] * rate[c, m] + rent - gain[c, m] - r[c, m]
            dfd[c, m] = d[c, m] * fd[c, m]
            used += x[c, m]
            reached += rate[c, m] * x[c, m]
        f1[m] = 1.0 - used - s[m]
        f2[m] = floor[m] + level[m] * z - reached + v[m] - mean[m] * f1[m]
        term[m] = count[m] * (level[m] * y[m])
    return summed(term, rows) - summed(level_capacity * price, columns)


@compiled
def _reduce(program: Any, point: Any, spent: Any, change: Any, system: Any, lack: Any,
            half: Any, right: Any, term: Any) -> None:  # fmt: skip
    """The right side for products that change by ``change`` (``_System.direction``, above)."""
    count, rate, usage, unit_of, capacity, level_capacity, gain, level, floor, runs, lc = program
    x, s, v, w, r, u, y, price = point
    d, apart, q, k, alpha_l, beta_l, mean, safe_y, vy, ia, ib, ic, alpha_z, beta_z = system
    fd, dfd, f1, f2, f3 = lack
    e, alpha, beta, vy_change = half
    columns, rows = rate.shape
    xi_x, xi_s, xi_v, xi_w = _parts(change, columns, rows)
    for m in range(rows):
        sum_e = sum_apart = 0.0
        for c in range(columns):
            first = xi_x[c, m] / r[c, m] if runs[c, m] else 0.0
            e[c, m] = first - dfd[c, m]
            sum_e += e[c, m]
            sum_apart += apart[c, m] * e[c, m]
        su = xi_s[m] / u[m]
        vy_change[m] = xi_v[m] / safe_y[m]
        h = f1[m] - sum_e - su
        g = f2[m] - sum_apart + vy_change[m] + mean[m] * su
        alpha[m] = -ia[m] * h + ib[m] * g
        beta[m] = -ib[m] * h + ic[m] * g
    for i in range(columns):
        for m in range(rows):
            term[m] = e[i, m] * usage[i, m] * count[m]
        right[i] = f3[i] - unit_of[i] * summed(term, rows) - xi_w[i] / price[i]
        for m in range(rows):
            term[m] = q[i, m] * (count[m] * alpha[m]) - k[i, m] * (count[m] * beta[m])
        right[i] += summed(term, rows)
    for m in range(rows):
        term[m] = count[m] * (level[m] * beta[m])
    right[columns] = 1.0 - spent - summed(term, rows)


@compiled
def _expand(program: Any, point: Any, change: Any, system: Any, lack: Any, half: Any,
            answer: Any, step_primal: Any, step_dual: Any) -> None:  # fmt: skip
    """The step that belongs to prices and z (``_System.direction``, below)."""
    count, rate, usage, unit_of, capacity, level_capacity, gain, level, floor, runs, lc = program
    x, s, v, w, r, u, y, price = point
    d, apart, q, k, alpha_l, beta_l, mean, safe_y, vy, ia, ib, ic, alpha_z, beta_z = system
    fd, alpha, beta, vy_change = lack[0], half[1], half[2], half[3]
    columns, rows = rate.shape
    xi_x, xi_s, xi_v, xi_w = _parts(change, columns, rows)
    step_x, step_s, step_v, step_w = _parts(step_primal, columns, rows)
    step_r, step_u, step_y, step_price = _parts(step_dual, columns, rows)
    dz = answer[columns]
    for m in range(rows):
        more_alpha = more_beta = 0.0
        for i in range(columns):
            more_alpha += answer[i] * alpha_l[i, m]
            more_beta += answer[i] * beta_l[i, m]
        a = alpha[m] + more_alpha + alpha_z[m] * dz
        b = beta[m] + more_beta + beta_z[m] * dz
        for c in range(columns):
            step_r[c, m] = step_x[c, m] = 0.0
            if runs[c, m]:
                lent = usage[c, m] * (unit_of[c] * answer[c])
                step_r[c, m] = fd[c, m] + (a - b * apart[c, m] + lent)
                step_x[c, m] = (xi_x[c, m] - x[c, m] * step_r[c, m]) / r[c, m]
        step_u[m], step_y[m] = a + mean[m] * b, b
        step_s[m] = (xi_s[m] - s[m] * step_u[m]) / u[m]
        step_v[m] = vy_change[m] - vy[m] * b
    for i in range(columns):
        step_price[i] = answer[i]
        step_w[i] = (xi_w[i] - w[i] * answer[i]) / price[i]


@compiled
def _solved(matrix: Any, right: Any, tiny: Any, balanced: Any) -> Any:
    """Solve the equations in place, balanced; whether they could be."""
    size = len(right)
    unit = np.empty(size)
    for i in range(size):
        unit[i] = 1.0 / np.sqrt(max(abs(matrix[i, i]), tiny))
    for i in range(size):
        right[i] *= unit[i]
        for j in range(size):
            balanced[i, j] = matrix[i, j] * unit[i] * unit[j]
    sound = eliminate(balanced, right)
    right *= unit
    return sound and np.isfinite(right).all()


@compiled
def _room(columns: Any, rows: Any) -> Any:
    """What a walk writes its intermediate results to: system, lack, half."""
    cells, lines = np.empty((9, columns, rows)), np.empty((13, rows))
    system = (
        cells[0], cells[1], cells[2], cells[3], cells[4], cells[5], lines[0], lines[1], lines[2],
        lines[3], lines[4], lines[5], lines[6], lines[7],
    )  # fmt: skip
    lack = (cells[6], cells[7], lines[8], lines[9], np.empty(columns))
    return system, lack, (cells[8], lines[10], lines[11], lines[12])


@compiled
def _walk(
    program: Any,
    number: Any,
    least_value: Any,
    limits: Any,
    primal: Any,
    dual: Any,
    z: Any,
    most: Any,
) -> tuple[Any, Any]:
    """Move a point (primal, dual) in place; the steps made, and z. See ``interior._advance``."""
    count, (columns, rows) = program[0], program[1].shape
    tiny, nearly_all, short, worse = limits
    point = _parts(primal, columns, rows) + _parts(dual, columns, rows)
    system, lack, half = _room(columns, rows)
    term, right = np.empty(rows), np.empty(columns + 1)
    matrix, balanced = np.empty((columns + 1, columns + 1)), np.empty((columns + 1, columns + 1))
    step_primal, step_dual = np.zeros_like(primal), np.zeros_like(dual)
    for steps in range(most):
        product = primal * dual
        _factor(program, point, tiny, system)
        _assemble(program, point, system, matrix, term)
        if not np.isfinite(matrix).all():
            return steps, z
        spent = _miss(program, point, z, system, lack, term)
        mu = _mean_product(count, number, columns, product, term)
        target = far = dual_far = 0.0
        for corrected in range(2):
            change = -product
            if corrected:
                change = target - product - step_primal * step_dual
            _reduce(program, point, spent, change, system, lack, half, right, term)
            if not _solved(matrix, right, tiny, balanced):
                return steps, z
            _expand(program, point, change, system, lack, half, right, step_primal, step_dual)
            keep = nearly_all if corrected else 1.0
            far = _length(step_primal, primal, keep, tiny)
            dual_far = _length(step_dual, dual, keep, tiny)
            if far < 0.0 or dual_far < 0.0:
                return steps, z
            if not corrected:
                ahead = (primal + far * step_primal) * (dual + dual_far * step_dual)
                after = _mean_product(count, number, columns, ahead, term)
                part = min(max(after, 0.0) / max(mu, tiny), worse)
                target = mu * (part * part * part)
        if far * dual_far < short:
            return steps, z
        primal += far * step_primal
        dual += dual_far * step_dual
        z += far * right[columns]
        near = _mean_product(count, number, columns, primal * dual, term) * number
        if near < 1e-6 * max(abs(z), least_value):
            return steps + 1, z
    return most, z
