"""Lower bounds, in devices and in seconds, on covering the layers that are not placed yet.

A Lagrangian relaxation of how replicas are dealt to stages. With a price on each device type, a
stage whose replicas are of two types costs at least the cheaper of the two for every replica. What
is left is a shortest path over cuts: the least sum of stages' prices (and, in rows that count them,
seconds), over stages that fit the memory and stay under a cap on their time.

Rows that count no seconds bound devices: a choice is refused where its stages' price exceeds the
price of the whole pool. Rows that count seconds bound the time of one microbatch through all stages
from below, by the path's sum minus the price of the whole pool.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from ...schema.parallel import ParallelPool
from ..effort import DEFAULT, Effort
from .space import Option, Space, fitting

_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # between two types' prices
_WORTHS = (2.0,)  # of the pool, in fastest passes through the model


@lru_cache(maxsize=4096)
def _first_by_memory(option: Option, in_flight: int) -> np.ndarray:
    """For each end the first layer from which a stage fits; the end where none does [ends]."""
    has_room = fitting(option, in_flight)
    first: np.ndarray = np.where(
        has_room.any(axis=0), has_room.argmax(axis=0), np.arange(len(has_room))
    )
    return first


@dataclass(frozen=True, slots=True)
class Prices:
    """Rows of prices for a search; those that count no seconds of stages' time come first.

    Attributes:
        by_pool: [rows, pools], of one device.
        budget: [rows], what the whole pool is worth to one replica of each stage.
        num_of_devices: Rows that count no seconds.
    """

    by_pool: np.ndarray
    budget: np.ndarray
    num_of_devices: int

    @property
    def of_devices(self) -> np.ndarray:
        """Which rows count no seconds [rows]."""
        of_devices: np.ndarray = np.arange(len(self.budget)) < self.num_of_devices
        return of_devices


def device_prices(pools: tuple[ParallelPool, ...], num_replicas: int) -> Prices:
    """Rows that bound devices: each type alone, all alike, and ratios of each pair."""
    rows = _price_rows(len(pools))
    return Prices(rows, _worth(rows, pools) / num_replicas * (1 + 1e-12), len(rows))


def time_prices(pools: tuple[ParallelPool, ...], num_replicas: int, seconds: float) -> Prices:
    """Those, and rows that bound seconds.

    Args:
        pools: Whose devices.
        num_replicas: d.
        seconds: The fastest pass through all layers, to scale prices by.
    """
    devices = device_prices(pools, num_replicas)
    rows = devices.by_pool / devices.budget[:, None]
    scaled = np.concatenate([rows * worth * seconds for worth in _WORTHS])
    scaled = np.concatenate([np.zeros((1, len(pools))), scaled])
    return Prices(
        np.concatenate([devices.by_pool, scaled]),
        np.concatenate([devices.budget, _worth(scaled, pools) / num_replicas]),
        devices.num_of_devices,
    )


def _price_rows(num_pools: int) -> np.ndarray:
    rows = [[1.0] * num_pools]
    rows += [[float(i == j) for j in range(num_pools)] for i in range(num_pools)]
    for first, second in combinations(range(num_pools), 2):
        for ratio in _RATIOS:
            row = [0.0] * num_pools
            row[first], row[second] = 1.0, ratio
            rows.append(row)
    return np.array(rows)


def _worth(rows: np.ndarray, pools: tuple[ParallelPool, ...]) -> np.ndarray:
    worth: np.ndarray = rows @ np.array([float(pool.num_devices) for pool in pools])
    return worth


class Completions:
    """The least cost of covering the first layers, by layers and stages behind them.

    Args:
        space: The options, at one microbatch size.
        prices: The rows.
        cap_seconds: Longest time of a stage for a microbatch.
        most_stages: Stages that there may be.
        num_microbatches: m: no stage has more in flight.
        effort: Says when to stop.

    Raises:
        OutOfTimeError: The effort's limit came first.
    """

    def __init__(
        self,
        space: Space,
        prices: Prices,
        cap_seconds: float,
        most_stages: int,
        num_microbatches: int,
        effort: Effort,
    ) -> None:
        size, rows = len(space.least_seconds), len(prices.budget)
        nothing = np.where(np.arange(size) == 0, 0.0, np.inf)
        later = np.tile(nothing, (rows, 1))
        self.least = [later]  # by stages already placed, the most first
        devices = slice(0, prices.num_of_devices)
        counting = slice(prices.num_of_devices, rows)
        costs = []
        for option in space.options:
            seconds = stage_seconds(option)
            priced = _priced(option, prices)
            too_long = seconds > cap_seconds * (1 + 1e-12)
            costs.append((option, np.where(too_long, np.inf, seconds), priced))
        for placed in range(most_stages - 1, -1, -1):
            in_flight = min(placed + 1, num_microbatches)
            least = np.tile(nothing, (rows, 1))
            # From a later start on no fewer layers are left: the first allowed start is the least.
            onwards = np.minimum.accumulate(later[devices][:, ::-1], axis=1)[:, ::-1]
            for option, seconds, priced in costs:
                effort.check()
                allowed = np.where(fitting(option, in_flight), seconds, np.inf)
                is_allowed = np.isfinite(allowed)
                first, has_any = is_allowed.argmax(axis=0), is_allowed.any(axis=0)
                reached = np.where(has_any, onwards[:, first], np.inf) + priced[devices][:, None]
                np.minimum(least[devices], reached, out=least[devices])
                timed = (later[counting][:, :, None] + allowed[None]).min(axis=1)
                timed += priced[counting][:, None]
                np.minimum(least[counting], timed, out=least[counting])
            self.least.append(least)
            later = least
        self.least.reverse()

    def of(self, end: int, placed: int) -> np.ndarray:
        """The least costs [rows] of layers 0 to ``end - 1`` before ``placed`` stages."""
        answer: np.ndarray = self.least[placed][:, end]
        return answer


class Coverage:
    """Whether the pool might suffice for stages under caps on their time and their all-reduce.

    As ``Completions`` with rows that count no seconds, for many pairs of caps at once.

    Args:
        space: The options, at one microbatch size.
        prices: Rows that count no seconds.
        reduce_seconds: [options, layers + 1, layers + 1] what the all-reduce of a stage of
            layers ``start`` to ``end - 1`` takes at least.
        most_stages: Stages that there may be.
        num_microbatches: m: no stage has more in flight.
        effort: Says when to stop.
    """

    def __init__(
        self,
        space: Space,
        prices: Prices,
        reduce_seconds: np.ndarray,
        most_stages: int,
        num_microbatches: int,
        effort: Effort = DEFAULT,
    ) -> None:
        self._seconds = _space_seconds(space)
        self._reduce = reduce_seconds
        self._budget = prices.budget
        self._priced = np.stack([_priced(option, prices) for option in space.options], axis=1)
        self._in_flight = [min(n + 1, num_microbatches) for n in range(most_stages)]
        self._space, self._effort = space, effort

    def covers(self, cap_seconds: np.ndarray, cap_reduce_seconds: np.ndarray) -> np.ndarray:
        """For each pair of caps [cases] whether the relaxation covers all layers.

        Raises:
            OutOfTimeError: The effort's limit came first.
        """
        self._effort.check()
        size, cases, rows = self._seconds.shape[-1], len(cap_seconds), len(self._budget)
        allowed = self._seconds <= cap_seconds[:, None, None, None] * (1 + 1e-12)
        allowed &= self._reduce <= cap_reduce_seconds[:, None, None, None] * (1 + 1e-12)
        # From a later start on no fewer layers are left: the first allowed start is the least.
        by_time = np.where(allowed.any(axis=2), allowed.argmax(axis=2), size)  # [cases, options, e]
        ends = np.arange(size)
        nothing = np.where(ends == 0, 0.0, np.inf)
        beyond = np.full((cases, rows, 1), np.inf)  # where no start is allowed
        later = np.broadcast_to(nothing, (cases, rows, size))
        place = (size + 1) * np.arange(cases * rows).reshape(cases, rows, 1, 1)  # in onwards
        priced = self._priced[None, :, :, None]
        num_before, first = 0, by_time
        for in_flight in reversed(self._in_flight):
            if in_flight != num_before:
                self._effort.check()
                by_memory = _space_first_by_memory(self._space, in_flight)
                first = np.maximum(by_time, by_memory)
                first = np.where(first < ends, first, size)
                num_before = in_flight
            onwards = np.minimum.accumulate(later[:, :, ::-1], axis=2)[:, :, ::-1]
            onwards = np.concatenate([onwards, beyond], axis=2)
            reached = onwards.take(place + first[:, None]) + priced
            later = np.minimum(reached.min(axis=2), nothing)
        answer: np.ndarray = np.all(later[:, :, -1] <= self._budget, axis=1)
        return answer


@lru_cache(maxsize=64)
def _space_seconds(space: Space) -> np.ndarray:
    """``stage_seconds`` of every option [options, starts, ends]."""
    return np.stack([stage_seconds(option) for option in space.options])


@lru_cache(maxsize=4096)
def _space_first_by_memory(space: Space, in_flight: int) -> np.ndarray:
    """``_first_by_memory`` of every option [options, ends]."""
    return np.stack([_first_by_memory(option, in_flight) for option in space.options])


@lru_cache(maxsize=4096)
def stage_seconds(option: Option) -> np.ndarray:
    """What stages take at least [start, end]; infinite where the stage is empty.

    Messages are counted as if the neighbours' links were as fast.
    """
    seconds, places = np.array(option.seconds), np.arange(len(option.seconds))
    sent = np.array(option.output_seconds)
    sent[-1] = 0.0
    back = np.append(np.array(option.gradient_seconds), 0.0)
    back[0] = 0.0
    whole = seconds[None, :] - seconds[:, None] + sent[None, :] + back[:, None]
    stages: np.ndarray = np.where(places[None, :] > places[:, None], whole, np.inf)
    return stages


def _priced(option: Option, prices: Prices) -> np.ndarray:
    priced: np.ndarray = prices.by_pool[:, option.pool] * option.tensor_parallel_size
    return priced
