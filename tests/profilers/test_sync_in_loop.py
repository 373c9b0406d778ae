"""Synchronisation in the loop: what two kinds of steps differ by once both have settled."""

import random
from typing import Any

import pytest

from hetflow.profilers.busy import SyncInLoop, measure_sync_in_loop, slowest
from hetflow.profilers.several_devices import GroupPeak
from hetflow.runtime.measurements import StepTimes
from hetflow.schema.launch import LaunchConfig

PASS = {4: 0.002, 16: 0.006, 64: 0.02}
SYNC = {4: 0.007, 16: 0.005, 64: 0.001}  # more of it hides behind longer passes


def step(seconds: float) -> StepTimes:
    return StepTimes(
        asked_seconds=0.0, passes=(), computed=seconds, synchronised=seconds, ended=seconds
    )


class Workers:
    """Two workers; the first steps after they have met are longer."""

    num_workers = 2
    is_of_script = False

    def __init__(self, seed: int, settling_seconds: float = 0.0) -> None:
        self.draw, self.settling_seconds = random.Random(seed), settling_seconds
        self.asked_for_peaks: list[int] = []

    def steps(self, size: int, extra: float, num_steps: int) -> list[list[StepTimes]]:
        whole = (2 * PASS[size] + extra) * self.draw.uniform(0.98, 1.02)
        late = self.settling_seconds if extra else 0.0
        one = [step(whole + (late if number < 3 else 0.0)) for number in range(num_steps)]
        return [one, one]

    def beside(self, sizes: list[int], *, num_steps: int) -> list[list[StepTimes]]:
        return self.steps(sizes[0], 0.0, num_steps)

    def together(self, config: LaunchConfig, *, num_steps: int) -> list[list[StepTimes]]:
        size = config.workers[0].virtual_nodes[0].batch_size
        return self.steps(size, SYNC[size], num_steps)

    def peak_together(self, config: LaunchConfig, *, num_steps: int) -> GroupPeak:
        size = config.workers[0].virtual_nodes[0].batch_size
        self.asked_for_peaks.append(size)
        return GroupPeak(peak_bytes=1000 + size, beside_bytes=size)


def measured(crew: Any, budget_seconds: float = 6.0) -> SyncInLoop:
    now = iter(range(10_000))
    return measure_sync_in_loop(
        crew, PASS, budget_seconds=budget_seconds, clock=lambda: float(next(now))
    )


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_have_not_settled_do_not_count(seed: int) -> None:
    """Of the largest size a rehearsal has few steps, which once were mostly such ones."""
    found = measured(Workers(seed, settling_seconds=0.03))
    assert found.timing.median_seconds == pytest.approx(SYNC[16], abs=0.001)
    for size, timing in found.by_size.items():
        assert timing.median_seconds == pytest.approx(SYNC[size], abs=0.05 * PASS[size] + 0.0002)


def test_peaks_are_measured_once_a_size_and_apart_from_times() -> None:
    crew = Workers(0)
    found = measured(crew)
    assert sorted(crew.asked_for_peaks) == [4, 16, 64]
    assert found.peak_bytes == {4: 1004, 16: 1016, 64: 1064}
    assert found.beside_bytes == 64


def test_the_first_steps_settle_and_the_slower_worker_counts() -> None:
    workers = [[step(9.0), step(8.0), step(7.0), step(1.0), step(2.0)], [step(3.0)] * 5]
    assert slowest(workers) == 3.0
    assert slowest([[step(9.0), step(1.0), step(2.0)]]) == 1.5


def test_sizes_are_told_apart_where_their_intervals_are() -> None:
    sync = measured(Workers(0), budget_seconds=2000.0).sync(2)
    points = {point.batch_size: point for point in sync.by_batch_size}
    assert set(points) == {4, 16, 64}
    assert points[4].sync_seconds == pytest.approx(SYNC[4], abs=0.0005)
    assert points[4].counted_seconds > points[64].counted_seconds >= 0.0


def test_what_cannot_be_told_from_zero_is_unknown_and_has_a_bound() -> None:
    """It was stored as exactly 0, and plans took communication for free."""

    class Free(Workers):
        def steps(self, size: int, extra: float, num_steps: int) -> list[list[StepTimes]]:
            noise = self.draw.uniform(-0.002, 0.001) if extra else 0.0
            return super().steps(size, noise, num_steps)

    for seed in range(4):
        sync = measured(Free(seed), budget_seconds=100.0).sync(2)
        assert sync.sync_seconds is None
        assert sync.at_most_seconds is not None
        assert 0 < sync.counted_seconds == sync.at_most_seconds < 0.01


def test_sizes_that_noise_is_larger_than_share_one_median() -> None:
    class Noisy(Workers):
        def steps(self, size: int, extra: float, num_steps: int) -> list[list[StepTimes]]:
            late = self.draw.uniform(0.0, 0.02) if extra else 0.0
            return super().steps(size, extra + late, num_steps)

    assert measured(Noisy(1)).sync(2).by_batch_size == ()


def test_rounds_go_on_until_each_size_is_known_to_a_part_of_its_step() -> None:
    """Two rounds were all that a small model got, and its synchronisation was 2 ms off."""

    class Counted(Workers):
        num_rounds = 0

        def together(self, config: LaunchConfig, *, num_steps: int) -> list[list[StepTimes]]:
            self.num_rounds += 1
            return super().together(config, num_steps=num_steps)

    quiet, hurried = Counted(0), Counted(0)
    measured(quiet, budget_seconds=2000.0)
    assert quiet.num_rounds == 6 * 3
    measured(hurried, budget_seconds=0.0)
    assert hurried.num_rounds == 2 * 3
