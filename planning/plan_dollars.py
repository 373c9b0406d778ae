"""What a plan's devices cost, at the prices of the pool that it was solved for."""

from collections.abc import Mapping
from dataclasses import replace

from ..schema.cluster import Cluster
from ..schema.plan import Prediction


def priced(predicted: Prediction, devices: Mapping[str, int], pool: Cluster) -> Prediction:
    """Add dollars per hour and per million samples; nothing if a price is unknown."""
    kinds = pool.spelled_as(devices).device_types
    hourly = 0.0
    for name, number in devices.items():
        price = kinds[name].dollars_per_hour if name in kinds else None
        if price is None:
            return predicted
        hourly += price * number
    rate = predicted.samples_per_second
    return replace(
        predicted,
        dollars_per_hour=hourly,
        dollars_per_million_samples=dollars_per_million_samples(hourly, rate) if rate > 0 else None,
    )


def dollars_per_million_samples(dollars_per_hour: float, samples_per_second: float) -> float:
    """Return the price of a million samples of a training on devices of a price per hour."""
    return dollars_per_hour / 3600 / samples_per_second * 1e6
