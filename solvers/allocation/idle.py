"""Devices that an allocation leaves idle, and how many of them jobs could use."""

import numpy as np

from .engine import Outcome
from .instance import Instance
from .program import Floats

# Smaller parts of a job's time, and smaller parts of a type's devices, are rounding.
NEGLIGIBLE_TIME = 1e-5
NEGLIGIBLE_PART = 1e-6
NEGLIGIBLE_RATE = 1e-6  # of the best rate: slower columns are of no use to the job


def idle_devices(instance: Instance, outcome: Outcome) -> tuple[Floats, Floats]:
    """Devices of each type that stand idle, and those of them that jobs could use [types].

    A job could use an idle column for the time that it has left, and for the time it spends on
    slower ones. Types are looked at one at a time, everything else staying as it is. A job that
    shares could also leave for an idle column that is faster for it than its company, where its
    partner loses nothing by that.

    Args:
        instance: The jobs and the pool, as the policy sees them.
        outcome: Time fractions of these jobs.
    """
    idle = np.maximum(instance.capacity - _used(instance, outcome), 0.0)
    idle = np.where(idle > NEGLIGIBLE_PART * instance.capacity, idle, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where(instance.resources > 0, idle[:, None] / instance.resources, np.inf)
    movable = _movable(instance, outcome)
    each = np.minimum(instance.usage * movable, room.min(axis=0))  # units of columns
    uses = instance.resources[: instance.num_types]
    wanted = np.array([(row[row > 0] * each[:, row > 0]).max(axis=1).sum() for row in uses])
    idle = idle[: instance.num_types]
    return idle, np.minimum(idle, wanted)


def _used(instance: Instance, outcome: Outcome) -> Floats:
    """Of each resource [resources]."""
    used: Floats = instance.resources @ (instance.usage * outcome.x).sum(axis=0)
    if outcome.pairs is not None:
        p = outcome.pairs
        held = instance.usage[p.a, p.column] * p.time
        used = used + instance.resources[:, p.column] @ held
    return used


def _movable(instance: Instance, outcome: Outcome) -> Floats:
    """The part of its time that a job would rather spend on a column [jobs, columns]."""
    rate, x = instance.rate, outcome.x
    order = np.argsort(rate, axis=1, kind="stable")
    sorted_rate, before = np.take_along_axis(rate, order, 1), np.zeros_like(x)
    before[:, 1:] = np.cumsum(np.take_along_axis(x, order, 1), axis=1)[:, :-1]
    # Of equal columns none is slower than another: each counts what the first of them has below.
    first = np.where(np.diff(sorted_rate, axis=1, prepend=-1.0) > 0, np.arange(x.shape[1]), 0)
    below = np.take_along_axis(before, np.maximum.accumulate(first, axis=1), 1)
    time = np.zeros_like(x)
    np.put_along_axis(time, order, np.where(sorted_rate > 0, below, 0.0), 1)
    spent = x.sum(axis=1)
    if outcome.pairs is not None and instance.pair_rate is not None:
        p, kind = outcome.pairs, instance.kind
        for one, two in ((p.a, p.b), (p.b, p.a)):
            spent = spent + np.bincount(one, weights=p.time, minlength=len(spent))
            own = instance.pair_rate[kind[one], kind[two], p.column]
            beside = instance.pair_rate[kind[two], kind[one], p.column]
            stays = rate[two, p.column] >= beside
            leaves = (rate[one] > own[:, None]) & stays[:, None]
            np.add.at(time, one, leaves * p.time[:, None])
    time = time + np.where(rate > 0, np.maximum(1.0 - spent, 0.0)[:, None], 0.0)
    useful = rate > NEGLIGIBLE_RATE * rate.max(axis=1, keepdims=True)
    return np.where((time > NEGLIGIBLE_TIME) & useful, time, 0.0)
