"""The steps of ``interior``, compiled by numba: the same digits, without an array for each term.

For what the simulator asks thousands of times: programs that maximise z, where each column uses
one resource of its own and every row has a demand. Whatever else comes, and steps that go less
well than hoped, are left to ``interior.walk``.
"""

from typing import Any

import numpy as np

from ..compiling import compiled
from . import interior
from .interior import _SHORT, _SMALL, _STEP, _TINY, _WORSE, _Point, _Scaled

_eliminate = compiled(interior.eliminate)


def walk(p: _Scaled, at: _Point, most: int) -> tuple[int, _Point | None]:
    """Go on until the true gap is worth a look: how many steps, and where to."""
    if not _is_simple(p):
        return interior.walk(p, at, most)
    primal, dual = at.primal.copy(), at.dual.copy()
    steps, z = _walk(
        p.count, p.rate, p.usage, p.resources.diagonal().copy(), p.capacity, p.level_capacity,
        p.gain, p.level, p.floor, p.runs, p.level_counts, p.number, p.least_value,
        primal, dual, at.z, most,
    )  # fmt: skip
    if not steps:
        return interior.walk(p, at, most)
    return steps, _Point(*at.rows, primal, dual, z)


def _is_simple(p: _Scaled) -> bool:
    size, columns = p.resources.shape
    return (
        p.has_level
        and p.idle is None
        and size == columns < _SMALL
        and len(p.count) > 1  # a single row is summed in another order
        and np.count_nonzero(p.resources) == np.count_nonzero(p.resources.diagonal())
    )


@compiled
def _sum(values: Any, first: Any, number: Any) -> Any:
    """As ``np.add.reduce`` adds: eight sums at a time, halves of more than 128 apart."""
    if number < 8:
        total = 0.0
        for i in range(first, first + number):
            total += values[i]
        return total
    if number <= 128:
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
    half = number // 2
    half -= half % 8
    return _sum(values, first, half) + _sum(values, first + half, number - half)


@compiled
def _mean_product(count: Any, number: Any, columns: Any, product: Any, term: Any) -> Any:
    rows = len(count)
    for m in range(rows):
        each = 0.0
        for c in range(columns + 2):
            each += product[c * rows + m]
        term[m] = count[m] * each
    last = (columns + 2) * rows
    return (_sum(term, 0, rows) + _sum(product, last, len(product) - last)) / number


@compiled
def _length(step: Any, at: Any, keep: Any) -> Any:
    """The part of a step that ``keep`` everything positive; -1 where numbers gave out."""
    least = np.inf
    for i in range(len(step)):
        part = step[i] / (at[i] if at[i] > 0.0 else 1.0)
        if np.isnan(part):
            return -1.0
        least = min(least, part)
    return min(1.0, keep / max(-least, _TINY))


@compiled
def _walk(
    count: Any, rate: Any, usage: Any, unit_of: Any, capacity: Any, level_capacity: Any,
    gain: Any, level: Any, floor: Any, runs: Any, level_counts: Any, number: Any,
    least_value: Any, primal: Any, dual: Any, z: Any, most: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Move a point (primal, dual) in place; the steps made, and z. See ``interior._advance``."""
    columns, rows = rate.shape
    cells, size = columns * rows, columns
    x, r = primal[:cells].reshape(columns, rows), dual[:cells].reshape(columns, rows)
    s, u = primal[cells : cells + rows], dual[cells : cells + rows]
    v, y = primal[cells + rows : cells + 2 * rows], dual[cells + rows : cells + 2 * rows]
    w, price = primal[cells + 2 * rows :], dual[cells + 2 * rows :]
    d, apart = np.empty((columns, rows)), np.empty((columns, rows))
    q, k, dfd = np.empty((columns, rows)), np.empty((columns, rows)), np.empty((columns, rows))
    fd = np.empty((columns, rows))
    alpha_l, beta_l = np.empty((columns, rows)), np.empty((columns, rows))
    mean, vy, vy_floor = np.empty(rows), np.empty(rows), np.empty(rows)
    ia, ib, ic = np.empty(rows), np.empty(rows), np.empty(rows)
    alpha_z, beta_z, f1, f2 = np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows)
    f3, term = np.empty(size), np.empty(rows)
    alpha, beta, su2, vy2 = np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows)
    matrix, balanced = np.empty((size + 1, size + 1)), np.empty((size + 1, size + 1))
    unit, right = np.empty(size + 1), np.empty(size + 1)
    product, change = np.empty_like(primal), np.empty_like(primal)
    step_primal, step_dual = np.empty_like(primal), np.empty_like(dual)
    for steps in range(most):
        product[:] = primal * dual
        # The Newton equations at the point (``_System``).
        for m in range(rows):
            total = 0.0
            weighted = 0.0
            for c in range(columns):
                d[c, m] = x[c, m] / r[c, m]
                total += d[c, m]
                weighted += d[c, m] * rate[c, m]
            mean[m] = weighted / max(total, _TINY)
            vy_floor[m] = max(y[m], _TINY)
            vy[m] = v[m] / vy_floor[m]
            slack = 0.0
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
        for i in range(size):
            for j in range(size):
                matrix[i, j] = 0.0
            for m in range(rows):
                term[m] = d[i, m] * usage[i, m] * usage[i, m] * count[m]
            matrix[i, i] = -(unit_of[i] * _sum(term, 0, rows)) * unit_of[i]
            matrix[i, i] -= w[i] / price[i]
            for j in range(size):
                for m in range(rows):
                    term[m] = q[i, m] * count[m] * alpha_l[j, m]
                matrix[i, j] -= _sum(term, 0, rows)
            for j in range(size):
                for m in range(rows):
                    term[m] = k[i, m] * count[m] * beta_l[j, m]
                matrix[i, j] += _sum(term, 0, rows)
            for m in range(rows):
                term[m] = k[i, m] * (count[m] * beta_z[m]) - q[i, m] * (count[m] * alpha_z[m])
            matrix[i, size] = _sum(term, 0, rows) - level_capacity[i]
            for m in range(rows):
                term[m] = beta_l[i, m] * level_counts[m]
            matrix[size, i] = _sum(term, 0, rows) - level_capacity[i]
        for m in range(rows):
            term[m] = count[m] * (level[m] * beta_z[m])
        matrix[size, size] = _sum(term, 0, rows)
        if not np.isfinite(matrix).all():
            return steps, z
        for i in range(size + 1):
            unit[i] = 1.0 / np.sqrt(max(abs(matrix[i, i]), _TINY))
        # By how much the point is infeasible.
        for m in range(rows):
            used = 0.0
            reached = 0.0
            for c in range(columns):
                if runs[c, m]:
                    rent = usage[c, m] * (unit_of[c] * price[c])
                    fd[c, m] = u[m] - y[m] * rate[c, m] + rent - gain[c, m] - r[c, m]
                else:
                    fd[c, m] = 0.0
                dfd[c, m] = d[c, m] * fd[c, m]
                used += x[c, m]
                reached += rate[c, m] * x[c, m]
            f1[m] = 1.0 - used - s[m]
            f2[m] = floor[m] + level[m] * z - reached + v[m] - mean[m] * f1[m]
            term[m] = count[m] * (level[m] * y[m])
        spent = _sum(term, 0, rows)
        for i in range(size):
            right[i] = level_capacity[i] * price[i]
        spent -= _sum(right, 0, size)
        for i in range(size):
            for m in range(rows):
                term[m] = x[i, m] * usage[i, m] * count[m]
            f3[i] = capacity[i] + level_capacity[i] * z - unit_of[i] * _sum(term, 0, rows) - w[i]
        mu = _mean_product(count, number, columns, product, term)
        target = 0.0
        for corrected in range(2):
            if corrected:
                for i in range(len(primal)):
                    change[i] = target - product[i] - step_primal[i] * step_dual[i]
            else:
                change[:] = -product
            # The step whose products change so (``_System.direction``).
            for m in range(rows):
                sum_e = 0.0
                sum_apart = 0.0
                for c in range(columns):
                    first = change[c * rows + m] / r[c, m] if runs[c, m] else 0.0
                    e = first - dfd[c, m]
                    step_primal[c * rows + m] = e
                    sum_e += e
                    sum_apart += apart[c, m] * e
                su2[m] = change[cells + m] / u[m]
                vy2[m] = change[cells + rows + m] / vy_floor[m]
                h = f1[m] - sum_e - su2[m]
                g = f2[m] - sum_apart + vy2[m] + mean[m] * su2[m]
                alpha[m] = -ia[m] * h + ib[m] * g
                beta[m] = -ib[m] * h + ic[m] * g
            for i in range(size):
                for m in range(rows):
                    term[m] = step_primal[i * rows + m] * usage[i, m] * count[m]
                lent = f3[i] - unit_of[i] * _sum(term, 0, rows)
                right[i] = lent - change[cells + 2 * rows + i] / price[i]
                for m in range(rows):
                    term[m] = q[i, m] * (count[m] * alpha[m]) - k[i, m] * (count[m] * beta[m])
                right[i] += _sum(term, 0, rows)
            for m in range(rows):
                term[m] = count[m] * (level[m] * beta[m])
            right[size] = 1.0 - spent - _sum(term, 0, rows)
            for i in range(size + 1):
                right[i] *= unit[i]
                for j in range(size + 1):
                    balanced[i, j] = matrix[i, j] * unit[i] * unit[j]
            if not _eliminate(balanced, right):
                return steps, z
            for i in range(size + 1):
                right[i] *= unit[i]
            dz = right[size]
            for m in range(rows):
                more_alpha = 0.0
                more_beta = 0.0
                for i in range(size):
                    more_alpha += right[i] * alpha_l[i, m]
                    more_beta += right[i] * beta_l[i, m]
                alpha[m] = alpha[m] + more_alpha + alpha_z[m] * dz
                beta[m] = beta[m] + more_beta + beta_z[m] * dz
                for c in range(columns):
                    at = c * rows + m
                    if runs[c, m]:
                        rent = usage[c, m] * (unit_of[c] * right[c])
                        moved = fd[c, m] + (alpha[m] - beta[m] * apart[c, m] + rent)
                        step_dual[at] = moved
                        step_primal[at] = (change[at] - x[c, m] * moved) / r[c, m]
                    else:
                        step_dual[at] = step_primal[at] = 0.0
                at = cells + m
                step_dual[at] = alpha[m] + mean[m] * beta[m]
                step_primal[at] = (change[at] - s[m] * step_dual[at]) / u[m]
                at += rows
                step_dual[at] = beta[m]
                step_primal[at] = vy2[m] - vy[m] * beta[m]
            for i in range(size):
                at = cells + 2 * rows + i
                step_dual[at] = right[i]
                step_primal[at] = (change[at] - w[i] * right[i]) / price[i]
            keep = _STEP if corrected else 1.0
            far = _length(step_primal, primal, keep)
            dual_far = _length(step_dual, dual, keep)
            if far < 0.0 or dual_far < 0.0 or not np.isfinite(right).all():
                return steps, z
            if not corrected:
                for i in range(len(primal)):
                    ahead = primal[i] + far * step_primal[i]
                    change[i] = ahead * (dual[i] + dual_far * step_dual[i])
                after = _mean_product(count, number, columns, change, term)
                part = min(max(after, 0.0) / max(mu, _TINY), _WORSE)
                target = mu * (part * part * part)
        if far * dual_far < _SHORT:
            return steps, z
        for i in range(len(primal)):
            primal[i] += far * step_primal[i]
            dual[i] += dual_far * step_dual[i]
            product[i] = primal[i] * dual[i]
        z += far * dz
        near = _mean_product(count, number, columns, product, term) * number
        if near < 1e-6 * max(abs(z), least_value):
            return steps + 1, z
    return most, z
