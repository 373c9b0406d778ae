"""Least and marginal costs of a row's throughput at given prices of resources.

At prices a column costs rent; time may be split over columns, so the least cost of a
throughput d is the lower convex hull of the points (rate, rent) and the origin. A row can rise
for nothing where the hull is flat to the right of d.
"""

import numpy as np

from ..program import Floats, Program

# Rates closer than this (relative) are one rate.
SAME = 1e-11


def rents(program: Program, prices: Floats) -> Floats:
    """The price of all of a row member's time on a column [rows, columns]."""
    paid: Floats = program.usage * (prices @ program.resources)
    return paid


def least_cost(rate: Floats, rent: Floats, throughput: Floats) -> Floats:
    """The least cost of a throughput that the row can reach [rows]; O(rows x columns^2).

    Args:
        rate: Steps per second [rows, columns]; 0 where the row does not run.
        rent: What all the time on a column costs [rows, columns].
        throughput: Steps per second asked for [rows].
    """
    wanted = throughput[:, None]
    slow = np.hstack((np.zeros_like(wanted), np.where(rate > 0, rate, np.inf)))
    paid = np.hstack((np.zeros_like(wanted), rent))
    fast = rate >= wanted * (1.0 - SAME)
    least = np.where(throughput > 0, np.inf, 0.0)
    for c in range(rate.shape[1]):
        reach = rate[:, c, None] - slow
        below = fast[:, c, None] & (slow < wanted) & (reach > 0)
        part = np.minimum((wanted - slow) / np.where(below, reach, 1.0), 1.0, where=below,
                          out=np.zeros_like(slow))  # fmt: skip
        cost = paid + part * (rent[:, c, None] - paid)
        least = np.minimum(least, np.where(below, cost, np.inf).min(axis=1))
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
