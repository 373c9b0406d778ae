"""What a step costs, from rehearsals whose every part is known here."""

from collections.abc import Sequence
from itertools import cycle

import pytest

from hetflow.profilers.busy import sizes_to_measure
from hetflow.profilers.loop_costs import LoopCosts, LoopPolicy, RehearsalRounds
from hetflow.runtime.measurements import StepTimes
from hetflow.schema.errors import TargetError

pytestmark = pytest.mark.measures

LOAD, OPEN, COLD, CLOSE, UPDATE, EMPTY = 0.001, 0.003, 0.002, 0.0005, 0.004, 0.0002
FIRST = 0.02  # what the first step of a rehearsal takes longer
POLICY = LoopPolicy(tolerance=0.02, most_passes=400, most_seconds=1e9, least_seconds=0.0)


class Device:
    """Trains by a formula, and moves its own clock on."""

    def __init__(self, noise: Sequence[float] = (1.0,), fits: int = 1 << 20) -> None:
        self.now, self.fits = 0.0, fits
        self.noise = cycle(noise)
        self.asked: list[tuple[int, int]] = []

    def pass_seconds(self, size: int) -> float:
        return 0.01 + 0.001 * size

    def rehearse(
        self, sizes: Sequence[int], *, num_steps: int, is_empty: bool = False
    ) -> list[list[StepTimes]]:
        if max(sizes) > self.fits:
            raise MemoryError
        if not is_empty:
            self.asked.append((sizes[0], len(sizes)))
        steps = [self.step(sizes, is_first=n == 0, is_empty=is_empty) for n in range(num_steps)]
        self.now += sum(step.ended for step in steps)
        return [steps]

    def step(self, sizes: Sequence[int], *, is_first: bool, is_empty: bool) -> StepTimes:
        noise, passes = next(self.noise), []
        at = OPEN + LOAD + (FIRST if is_first else 0.0)
        for number, size in enumerate(sizes):
            began = at + (LOAD if number else 0.0)
            at = began + (EMPTY if is_empty else self.pass_seconds(size) * noise)
            at += COLD if number == 0 else 0.0
            passes.append((began, at))
        return StepTimes(
            asked_seconds=0.0,
            passes=tuple(passes),
            computed=at + CLOSE,
            synchronised=at + CLOSE,
            ended=at + CLOSE + UPDATE,
        )

    def costs(self, sizes: Sequence[int], policy: LoopPolicy = POLICY) -> LoopCosts:
        known = {size: self.pass_seconds(size) for size in sizes}
        return RehearsalRounds(self.rehearse, known, policy, lambda: self.now).run()


def test_every_part_of_a_step_is_found_again() -> None:
    device = Device()
    costs = device.costs([1, 4, 16])
    for point in costs.points:
        assert point.step_seconds == pytest.approx(device.pass_seconds(point.batch_size) + LOAD)
        assert point.load_seconds == pytest.approx(LOAD)
        assert point.error == pytest.approx(0.0, abs=1e-9)
    assert costs.virtual_node_seconds == pytest.approx(EMPTY)
    assert costs.fixed_seconds == pytest.approx(OPEN + COLD + CLOSE)
    assert costs.update.median_seconds == pytest.approx(UPDATE)
    assert costs.checks
    assert costs.step_error == pytest.approx(0.0, abs=1e-9)
    assert costs.wide == ()


def test_steps_that_the_parts_do_not_explain_are_told() -> None:
    """A device that gets slower with many virtual nodes: only whole steps show it."""

    class Tiring(Device):
        def step(self, sizes: Sequence[int], *, is_first: bool, is_empty: bool) -> StepTimes:
            if len(sizes) == 6 and not is_empty:
                sizes = [*sizes, sizes[0]]
            return super().step(sizes, is_first=is_first, is_empty=is_empty)

    noise = [0.9, 1.1] * 10  # so that there are several rounds
    error = Tiring(noise).costs([1, 4, 16]).step_error
    assert error is not None
    assert error > 0.05


def test_sizes_take_turns_in_another_order_each_round() -> None:
    device = Device(noise=[0.8, 1.0, 1.2])
    costs = device.costs([1, 2, 4])
    assert costs.num_rounds > 3
    rounds = [size for size, number in device.asked if number == 3]
    assert rounds[:6] == [1, 2, 4, 2, 4, 1]
    assert rounds[6:9] == [4, 1, 2]


def test_a_size_is_done_when_it_is_narrow_and_else_the_budget_ends_it() -> None:
    quiet, noisy = Device(), Device(noise=[0.5, 1.5])
    assert quiet.costs([4]).num_rounds < noisy.costs([4]).num_rounds
    costs = noisy.costs([4])
    assert costs.wide == (4,)
    assert costs.points[0].error is not None
    assert costs.points[0].error > 0.02
    # A budget of next to nothing is one round, and that is enough for every part.
    short = noisy.costs([4, 8], LoopPolicy(most_passes=1, most_seconds=0.0, least_seconds=0.0))
    assert short.num_rounds == 1
    tight = noisy.costs([4, 8], LoopPolicy(most_passes=30, most_seconds=0.6, least_seconds=0.0))
    assert {check.num_nodes for check in tight.checks} == {1, 6}
    assert [point.batch_size for point in short.points] == [4, 8]


def test_the_budget_is_kept_but_for_one_rehearsal() -> None:
    device = Device(noise=[0.5, 1.5])
    policy = LoopPolicy(most_passes=1 << 30, most_seconds=30.0, least_seconds=0.0)
    device.costs([1, 4, 16], policy)
    assert device.now <= 3 * 30.0 + 10.0


def test_sizes_that_nobody_stated_share_a_budget() -> None:
    many, visits = [0.001, *[0.2] * 9], [0.08] * 10
    assert LoopPolicy(most_total_seconds=9.0).parts(many[:3], visits[:3]) == pytest.approx(
        [0.2, 4.0, 4.0]
    )
    assert LoopPolicy().parts(many, visits) == pytest.approx([0.2, *[3.8 / 9] * 9])
    assert LoopPolicy().parts(many, [0.08, *[2.0] * 9]) == pytest.approx([0.2, *[2.0] * 9])
    few = LoopPolicy(least_total_seconds=4.0)
    assert few.parts([0.001, 0.005], visits[:2]) == pytest.approx([1.6, 2.4])
    whole = LoopPolicy(most_total_seconds=None)
    assert whole.parts(many, visits) == pytest.approx([0.2, *[4.0] * 9])


def test_long_passes_leave_short_ones_their_part_of_the_budget() -> None:
    """Sizes of long passes took all of it, and short ones were visited once."""
    device = Device(noise=[0.5, 1.5, 0.9, 1.1, 0.7])
    costs = device.costs([1, 260, 280], LoopPolicy(most_total_seconds=9.0))
    repeats = {point.batch_size: point.timing.repeats for point in costs.points}
    assert repeats[1] >= 20
    assert repeats[260] >= 4


def test_the_most_samples_asked_for_end_a_size() -> None:
    device = Device(noise=[0.5, 1.5])
    few = LoopPolicy(most_seconds=1e9, most_passes=1000, most_samples=2)
    assert device.costs([4], few).num_rounds == 1


def test_long_passes_are_rehearsed_with_fewer() -> None:
    class Slow(Device):
        def pass_seconds(self, size: int) -> float:
            return 2.0 * size

    device = Slow()
    costs = device.costs([1], LoopPolicy(most_passes=4, most_seconds=4.0))
    assert device.asked[0] == (1, 2)
    assert costs.points[0].step_seconds == pytest.approx(2.0 + LOAD)
    assert costs.points[0].timing.repeats == 2  # also of the first step, where caches do not matter
    assert costs.fixed_seconds == pytest.approx(OPEN + COLD + CLOSE)
    assert costs.wide == (1,)  # too few for an interval, however alike


def test_a_size_that_a_launch_could_not_train_is_left_out_with_those_above() -> None:
    device = Device(noise=[0.8, 1.2], fits=4)
    costs = device.costs([1, 4, 16, 32])
    assert [point.batch_size for point in costs.points] == [1, 4]
    assert costs.out_of_memory_batch_size == 16
    with pytest.raises(TargetError, match="does not fit the device's memory at batch size 8"):
        Device(fits=4).costs([8])


def test_synchronisation_is_measured_at_small_middle_and_large_sizes() -> None:
    times = {size: size * 0.01 for size in (1, 2, 4, 8, 16, 32, 64, 128)}
    assert sizes_to_measure(times) == [1, 2, 4]
    assert sizes_to_measure({size: size * 0.04 for size in (1, 2, 3, 6)}) == [1, 2, 3]
    assert sizes_to_measure({size: size * 0.3 for size in (1, 2, 3)}) == [1]
    assert sizes_to_measure({8: 5.0, 16: 9.0}) == [8]
