"""Policies share the devices that are up among the jobs that fit; the others wait."""

from dataclasses import replace

import numpy as np

from ..allocators.shares import Allocator, Shares
from ..arrays import Bools
from ..cluster.active import Active


def shares_of_fitting(allocator: Allocator, active: Active, now_seconds: float) -> Shares:
    """Let a policy share what is up among the jobs that fit in it; the others wait."""
    if not len(active):
        return Shares(np.zeros_like(active.share))
    if active.capacity is active.pool.capacity:
        return allocator.allocate(active, now_seconds)
    fits = _fits(active)
    if fits.all():
        return allocator.allocate(active, now_seconds)
    x, places = np.zeros_like(active.share), fits.nonzero()[0]
    if not len(places):
        return Shares(x)
    part = active.only(places)
    shares = allocator.allocate(part, now_seconds)
    x[:, places] = shares.x
    active.isolated[places] = part.isolated
    pairs = shares.pairs
    if pairs is not None:
        pairs = replace(pairs, a=places[pairs.a], b=places[pairs.b])
    return Shares(x, pairs)


def _fits(active: Active) -> Bools:
    """Which jobs some column with what is up can hold [jobs]."""
    resources, room = active.pool.limits(active.capacity, active.consolidated)
    if active.pool.uses_mixes:
        often = np.array([active.usage(i) for i in range(len(active))]).T
    else:
        often = np.broadcast_to(active.scale, active.rate.shape)
    held = resources[:, :, None] * often
    fits: Bools = ((held <= room[:, None, None]).all(axis=0) & (active.rate > 0)).any(axis=0)
    return fits
