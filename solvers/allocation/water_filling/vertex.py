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
from ..program import Bools, Floats, FractionProgram, Ints, Solution

# Least and marginal costs of a row's throughput at given prices of resources.
#
# At prices a column costs rent; time may be split over columns, so the least cost of a
# throughput d is the lower convex hull of the points (rate, rent) and the origin. A row can rise
# for nothing where the hull is flat to the right of d.

# Rates closer than this (relative) are one rate.
SAME = 1e-11
# A column below a line by a smaller part of what it costs is on it.
LAST_BITS = 4e-16


def rents(program: FractionProgram, prices: Floats) -> Floats:
    """The price of all of a row member's time on a column [rows, columns]."""
    paid: Floats = program.usage * (prices @ program.resources)
    return paid


def least_cost(rate: Floats, rent: Floats, throughput: Floats) -> Floats:
    """The least cost of a throughput that the row can reach [rows]; infinite where it cannot.

    The edge of the hull above the throughput is found as the simplex method would: the column
    farthest below the line through a slower and a faster one takes the place of one of them, until
    none is below. O(rows x columns) a step, with about log2(columns) steps.

    Args:
        rate: Steps per second [rows, columns]; 0 where the row does not run.
        rent: What all the time on a column costs [rows, columns].
        throughput: Steps per second asked for [rows].
    """
    least = np.where(throughput > 0, np.inf, 0.0)
    fast = (rate > 0) & (rate >= throughput[:, None] * (1.0 - SAME))
    left = np.flatnonzero((throughput > 0) & fast.any(axis=1))
    rate, wanted, fast = rate[left], throughput[left], fast[left]
    rent = np.where(rate > 0, rent[left], np.inf)
    rows = np.arange(len(left))
    top = np.where(fast, rent / np.where(fast, rate, 1.0), np.inf).argmin(axis=1)
    high, high_paid = rate[rows, top], rent[rows, top]
    low, low_paid = np.zeros(len(left)), np.zeros(len(left))
    for _ in range(2 * rate.shape[1] + 2):
        part = (wanted - low) / (high - low)
        cost = np.where(part < 1.0, low_paid + part * (high_paid - low_paid), high_paid)
        least[left] = np.minimum(least[left], cost)
        slope = (high_paid - low_paid) / (high - low)
        lowest = (rent - slope[:, None] * rate).argmin(axis=1)
        new, paid, over = rate[rows, lowest], rent[rows, lowest], fast[rows, lowest]
        below = low_paid + slope * (new - low) - paid
        go = np.flatnonzero(below > LAST_BITS * (paid + low_paid + slope * np.maximum(new, high)))
        if not len(go):
            break
        high, high_paid = np.where(over, new, high), np.where(over, paid, high_paid)
        low, low_paid = np.where(over, low, new), np.where(over, low_paid, paid)
        if len(go) < len(left):
            left, wanted, rate, rent, fast = left[go], wanted[go], rate[go], rent[go], fast[go]
            high, high_paid, low, low_paid = high[go], high_paid[go], low[go], low_paid[go]
            rows = np.arange(len(left))
    return least


def marginal_cost(
    rate: Floats, rent: Floats, throughput: Floats, cost: Floats
) -> tuple[Floats, Floats]:
    """The saving of one step less and the cost of one step more, at the least cost [rows] each.

    More is infinite where the row cannot be faster.
    """
    gap = rate - throughput[:, None]
    close = SAME * throughput[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (rent - cost[:, None]) / gap
        origin = np.where(throughput > 0, cost / throughput, 0.0)
    less = np.where((rate > 0) & (gap < -close), slope, -np.inf).max(axis=1)
    more = np.where((rate > 0) & (gap > close), slope, np.inf).min(axis=1)
    return np.maximum(np.maximum(less, origin), 0.0), np.maximum(more, 0.0)


# Ways that cost the same but for this part of the row's cost are equal.
EQUAL = 1e-7
MOST_ROWS = 64


def at_prices(program: FractionProgram, prices: Floats) -> Solution | None:
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


def some_rows(
    program: FractionProgram, rows: Ints, kept: Bools, capacity: Floats
) -> FractionProgram:
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
