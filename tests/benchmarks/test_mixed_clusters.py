"""The rules of benchmarks/mixed_clusters.py, which stand for two papers' planners."""

from itertools import product

import pytest
from mixed_clusters import by_rounds, by_speed, ways

from hetflow.schema.profile import BatchPoint


def options(seconds: float, sizes: tuple[int, ...], batch: int) -> list[tuple[int, BatchPoint]]:
    return [
        (passes, BatchPoint(batch_size=size, step_seconds=seconds * size, peak_memory_bytes=1))
        for size in sizes
        for passes in range(1, batch // size + 1)
    ]


@pytest.mark.parametrize("batch", [5, 6, 9])
def test_ways_are_the_fastest_for_each_sum_of_microbatch_sizes(batch: int) -> None:
    devices = [options(0.1, (1, 2, 3), batch), options(0.25, (1, 2), batch)]
    best: dict[int, float] = {}
    for chosen in product(*devices):
        if sum(passes * point.batch_size for passes, point in chosen) == batch:
            total = sum(point.batch_size for _, point in chosen)
            seconds = max(passes * point.step_seconds for passes, point in chosen)
            best[total] = min(seconds, best.get(total, seconds))
    found = list(ways(devices, batch))
    assert [seconds for seconds, _ in found] == [best[total] for total in sorted(best)]
    for seconds, chosen in found:
        assert sum(passes * point.batch_size for passes, point in chosen) == batch
        assert max(passes * point.step_seconds for passes, point in chosen) == seconds


CURVES = [{1: 1.0, 2: 1.9, 4: 3.5}, {1: 2.0, 2: 3.9}]


def test_rounds_give_devices_that_exchange_in_passes_equally_many() -> None:
    plans = list(by_rounds(CURVES, 12))
    assert all(len({rounds for rounds, _ in plan}) == 1 for plan in plans)
    assert all(sum(rounds * size for rounds, size in plan) == 12 for plan in plans)
    assert [(3, 2), (3, 2)] not in plans  # a bound of 3.5 s lets the faster device take more
    assert [(4, 2), (4, 1)] in plans


def test_speeds_share_samples_where_devices_pass_by_themselves() -> None:
    (plan,) = by_speed(CURVES, 12)
    assert plan == [(2, 4), (2, 2)]
