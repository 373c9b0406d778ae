"""Least and marginal costs of a row's throughput at given prices of resources.

At prices a column costs rent; time may be split over columns, so the least cost of a
throughput d is the lower convex hull of the points (rate, rent) and the origin. A row can rise
for nothing where the hull is flat to the right of d.
"""

import numpy as np

from ..program import Floats, Program

# Rates closer than this (relative) are one rate.
SAME = 1e-11
# A column below a line by a smaller part of what it costs is on it.
LAST_BITS = 4e-16


def rents(program: Program, prices: Floats) -> Floats:
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
