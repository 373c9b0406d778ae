"""Time fractions at binding prices, where nearly every row has only one choice left.

At binding prices a row spends its time only where its throughput costs least. Where that is one
column, or two that its time and throughput determine, nothing is left to decide; only rows for
which several ways cost the same (about one for each price) go through the simplex method. The
answer is exact to the last digits, where an interior point method is not.
"""

from dataclasses import replace

import numpy as np

from ....schema.errors import BackendError
from .. import simplex
from ..program import Bools, Floats, Ints, Program, Solution
from .prices import least_cost, marginal_cost, rents

# Ways that cost the same but for this part of the row's cost are equal.
EQUAL = 1e-7
MOST_ROWS = 64


def at_prices(program: Program, prices: Floats) -> Solution | None:
    """Which part z of the demands ``program.level`` can be had at binding prices.

    Args:
        program: A max-min program without floors.
        prices: Of resources, at which the demands cost just what the pool is worth.

    Returns:
        A solution whose rows keep to their cheapest columns; where it falls short, with prices
        of the rows that had a choice, sharper than those given. None where too many had.
    """
    wanted = np.where(program.demands, program.level, 0.0)
    rent = rents(program, prices)
    kept, price, pays_time = cheapest(program.rate, rent, wanted)
    x, known = determined(program.rate, kept, pays_time, wanted)
    open_rows = np.flatnonzero(~known & (wanted > 0))
    if len(open_rows) > MOST_ROWS:
        return None
    z = 1.0
    if len(open_rows):
        left = program.capacity - program.resources @ (program.count @ (program.usage * x))
        rest = some_rows(program, open_rows, kept, np.maximum(left, 0.0))
        try:
            found = simplex.solve(rest)
        except BackendError:
            return None
        x[open_rows], z = found.x, min(found.z, 1.0)
        if z < 1.0 and found.resource_prices.any():
            prices = found.resource_prices
    used = program.resources @ (program.count @ (program.usage * x))
    z = min(z, float((program.capacity / np.maximum(used, program.capacity)).min()))
    return Solution(
        x=x * min(z, 1.0), z=z, objective=z, bound=1.0, job_prices=price, resource_prices=prices,
        gap=1.0 - z, method="prices and simplex",
    )  # fmt: skip


def cheapest(rate: Floats, rent: Floats, wanted: Floats) -> tuple[Bools, Floats, Bools]:
    """Whether a column is among a row's cheapest ways [rows, columns], its price, its time's."""
    cost = least_cost(rate, rent, wanted)
    less, more = marginal_cost(rate, rent, wanted, cost)
    # Any price between the two is right; one inside shows only what the row must use.
    floor = np.where(wanted > 0, cost / np.maximum(wanted, 1e-300), 0.0)
    unit = (float(rent.max()) or 1.0) / np.maximum(rate.max(axis=1), 1e-300)
    price = np.where(np.isfinite(more), 0.5 * (less + np.where(np.isfinite(more), more, 0.0)),
                     2.0 * np.maximum(less, floor) + unit)  # fmt: skip
    profit = np.where(rate > 0, price[:, None] * rate - rent, -np.inf)
    time = np.maximum(profit.max(axis=1), 0.0)
    scale = np.maximum(price * rate.max(axis=1), 1e-300)
    kept = time[:, None] - profit <= EQUAL * scale[:, None]
    return kept, price, time > EQUAL * scale


def determined(rate: Floats, kept: Bools, pays_time: Bools, wanted: Floats) -> tuple[Floats, Bools]:
    """Time fractions of rows without a choice [rows, columns], and which these are [rows]."""
    number = kept.sum(axis=1)
    fast = np.where(kept, rate, -np.inf).argmax(axis=1)
    slow = np.where(kept, rate, np.inf).argmin(axis=1)
    rows = np.arange(len(rate))
    top, low = rate[rows, fast], rate[rows, slow]
    x = np.zeros_like(rate)
    one = (number == 1) & (wanted > 0)
    x[rows[one], fast[one]] = np.minimum(wanted[one] / top[one], 1.0)
    two = (number == 2) & pays_time & (top > low) & (wanted > 0)
    part = np.clip((wanted[two] - low[two]) / (top[two] - low[two]), 0.0, 1.0)
    x[rows[two], fast[two]], x[rows[two], slow[two]] = part, 1.0 - part
    return x, one | two


def some_rows(program: Program, rows: Ints, kept: Bools, capacity: Floats) -> Program:
    """A program of some rows, on their ``kept`` columns [all rows, columns] and what is left."""
    return replace(
        program,
        count=program.count[rows],
        rate=np.where(kept[rows], program.rate[rows], 0.0),
        usage=program.usage[rows],
        gain=program.gain[rows],
        capacity=capacity,
        level=program.level[rows],
        floor=program.floor[rows],
        demands=program.demands[rows],
    )
