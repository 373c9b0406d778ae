"""Machines with known prices, and a job that may move among them.

The model: the job uses one device of one machine at a time, and pays that device's share of the
machine's price (who packs a machine full pays no more). It runs from start to end without a pause.
The first launch and every move take ``restart_seconds``, in which the device is paid for and no
work is done; a move between clouds also costs ``cloud_move_dollars``. A strategy decides at the
times at which a price changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import Market, utc_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingJob:
    """A job for one device, and what moving it costs.

    Attributes:
        work: What is to be done, in any unit.
        work_per_second: By device type, in that unit; types that are not named cannot be used.
        restart_seconds: From a launch until work goes on.
        cloud_move_dollars: Of a move from one cloud to another: egress of the checkpoint.
    """

    work: float
    work_per_second: Mapping[str, float]
    restart_seconds: float = 0.0
    cloud_move_dollars: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.work) and self.work > 0):
            raise ProblemError(f"work must be finite and > 0, got {self.work:g}")
        for name, rate in self.work_per_second.items():
            if not (isfinite(rate) and rate > 0):
                raise ProblemError(f"work per second on {name} must be > 0, got {rate:g}")
        if not (isfinite(self.restart_seconds) and self.restart_seconds >= 0):
            raise ProblemError(f"restart seconds must be >= 0, got {self.restart_seconds:g}")
        if not (isfinite(self.cloud_move_dollars) and self.cloud_move_dollars >= 0):
            raise ProblemError(f"move dollars must be >= 0, got {self.cloud_move_dollars:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A device of a machine in one place."""

    cloud: str
    place: str
    instance_type: str
    device_type: str
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Offers over time.

    Attributes:
        offers: [offers].
        edges: [stretches + 1] seconds since 1970 in UTC; prices are constant in between.
        dollars_per_second: [stretches, offers] of one device; NaN where nobody knows it.
    """

    offers: tuple[Offer, ...]
    edges: NDArray[np.float64]
    dollars_per_second: NDArray[np.float64]

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """[stretches] how long each is."""
        return np.diff(self.edges)

    def all_known_seconds(self) -> float:
        """The first time at which the number of offers with a known price is at its maximum."""
        known = np.isfinite(self.dollars_per_second).sum(axis=1)
        return float(self.edges[int(np.argmax(known))])

    def since(self, start_seconds: float) -> "Prices":
        """These prices from ``start_seconds`` on.

        Raises:
            ProblemError: The prices begin later, or end before.
        """
        if not self.edges[0] <= start_seconds < self.edges[-1]:
            raise ProblemError(f"there are no prices at {utc_text(start_seconds)}")
        first = int(np.searchsorted(self.edges, start_seconds, side="right")) - 1
        return Prices(
            offers=self.offers,
            edges=np.concatenate([[start_seconds], self.edges[first + 1 :]]),
            dollars_per_second=self.dollars_per_second[first:],
        )


def prices_of(markets: Sequence[Market], device_types: Mapping[str, float]) -> Prices:
    """Collect the offers of some device types from markets, on common stretches of time.

    Raises:
        ProblemError: A machine's devices are not known, or no machine has such devices.
    """
    offers: list[Offer] = []
    steps: list[list[tuple[float, float, float | None]]] = []
    for market in markets:
        for history in market.prices:
            machine = market.instance_type_of(history)
            if machine is None:
                raise ProblemError(
                    f"{history.title}: the market does not say what devices it has",
                    hint="import the prices again with --instance-types FILE",
                )
            if machine.device_type in device_types:
                offers.append(
                    Offer(
                        cloud=history.cloud,
                        place=history.place,
                        instance_type=history.instance_type,
                        device_type=machine.device_type,
                        num_devices=machine.num_devices,
                    )
                )
                steps.append(history.stretches())
    if not offers:
        raise ProblemError(f"no machine with prices has one of {', '.join(device_types)}")
    edges = np.unique([time for step in steps for start, end, _ in step for time in (start, end)])
    dollars = np.full((len(edges) - 1, len(offers)), nan)
    for column, (offer, step) in enumerate(zip(offers, steps, strict=True)):
        starts = [start for start, _, _ in step]
        row = np.searchsorted(starts, edges[:-1], side="right") - 1
        told = np.array([nan if price is None else price for _, _, price in step])
        known = (row >= 0) & (edges[:-1] < step[-1][1])
        dollars[known, column] = told[row[known]] / offer.num_devices / 3600
    return Prices(offers=tuple(offers), edges=edges, dollars_per_second=dollars)
