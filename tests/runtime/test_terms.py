"""A step's terms: they add up to the measured step, whatever each step of the run took."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetflow.runtime.measurements import (
    StagePass,
    StepClock,
    StepTimes,
    half_width,
    stage_runs,
    step_terms,
)

seconds = st.floats(min_value=1e-4, max_value=10.0)


def step_of(loads: list[float], passes: list[float], sync: float, update: float) -> StepTimes:
    marks, now = [], 0.0
    for load, one in zip(loads, passes, strict=True):
        marks.append((now + load, now + load + one))
        now += load + one
    return StepTimes(
        asked_seconds=0.0,
        passes=tuple(marks),
        computed=now,
        synchronised=now + sync,
        ended=now + sync + update,
    )


def test_the_first_virtual_nodes_extra_is_fixed_cost() -> None:
    steps = [step_of([0.5, 0.25, 0.25], [3.0, 1.0, 1.5], 0.5, 0.25)] * 10
    terms = step_terms(steps)
    assert terms is not None
    assert terms.virtual_node is not None
    assert terms.load is not None
    assert terms.fixed is not None
    assert terms.virtual_node.seconds == 1.5
    assert terms.load.seconds == 0.25
    assert terms.fixed.seconds == pytest.approx(7.25 - 3 * 1.5 - 0.75)
    assert terms.step.interval_seconds == 0.0
    assert terms.num_steps == 10


def test_one_virtual_node_is_not_told_from_the_fixed_cost() -> None:
    terms = step_terms([step_of([0.5], [3.0], 0.5, 0.25)])
    assert terms is not None
    assert terms.virtual_node is None
    assert terms.fixed is None
    assert terms.step.interval_seconds is None
    assert step_terms([]) is None


@given(
    st.lists(
        st.tuples(seconds, seconds, seconds, seconds, seconds, seconds), min_size=1, max_size=30
    )
)
def test_terms_add_up_to_the_median_step(
    drawn: list[tuple[float, float, float, float, float, float]],
) -> None:
    steps = [step_of([a, b], [c, d], e, f) for a, b, c, d, e, f in drawn]
    terms = step_terms(steps)
    assert terms is not None
    assert terms.virtual_node is not None
    assert terms.fixed is not None
    others = 2 * terms.virtual_node.seconds + terms.sync.seconds + terms.update.seconds
    assert terms.fixed.seconds >= 0
    if terms.fixed.seconds > 0:
        assert others + terms.fixed.seconds == pytest.approx(terms.step.seconds)
    else:
        assert others >= terms.step.seconds * (1 - 1e-9)


def test_halves_of_backward_passes_add_up() -> None:
    entries = (
        StagePass(1, False, 1.0), StagePass(1, True, 0.5), StagePass(1, True, 0.75),
        StagePass(1, False, 2.0), StagePass(1, True, 0.5), StagePass(1, True, 0.75),
        StagePass(3, False, 4.0), StagePass(3, True, 8.0),
    )  # fmt: skip
    step = StepTimes(
        asked_seconds=0.0, passes=(), computed=1.0, synchronised=1.0, ended=1.0, stages=entries
    )
    first, second = stage_runs([step])
    assert (first.stage, first.forward.seconds, first.backward.seconds) == (1, 1.5, 1.25)
    assert (second.stage, second.forward.seconds, second.backward.seconds) == (3, 4.0, 8.0)


def test_the_interval_of_a_median_narrows_with_the_steps() -> None:
    assert half_width([1.0] * 5) is None
    few, many = half_width(list(range(9))), half_width([n / 100 for n in range(900)])
    assert few is not None
    assert many is not None
    assert 0 < many < few <= 4


def test_a_clock_keeps_the_wait_before_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([0.0, 1.0, 3.0, 4.0, 6.0, 6.5, 6.5, 7.0, 8.0])
    monkeypatch.setattr("hetflow.devices.host.time.perf_counter", lambda: next(marks))
    clock = StepClock(torch.device("cpu"))
    clock.begin_step(is_full=True)
    for _ in range(2):
        clock.end_pass(clock.mark(), num_samples=4, is_full=True)
    clock.computed()
    clock.synchronised()
    clock.end_step()
    terms = clock.timings().terms
    assert terms is not None
    assert terms.virtual_node is not None
    assert terms.load is not None
    assert (terms.virtual_node.seconds, terms.load.seconds) == (3.0, 1.0)
    assert (terms.step.seconds, terms.sync.seconds, terms.update.seconds) == (7.0, 0.0, 0.5)


def test_a_step_in_progress_is_not_done_and_not_measured() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        clock.begin_step(is_full=True)
        clock.end_pass(clock.mark(), num_samples=4, is_full=True)
        clock.synchronised()
    assert clock.done == (2, 8)
    clock.begin_step(is_full=True)
    clock.end_pass(clock.mark(), num_samples=4, is_full=True)
    assert clock.done == (2, 8)
    terms = clock.timings(wait=False).terms
    assert terms is not None
    assert terms.num_steps == 1  # of two, the first is the warm-up
    clock.synchronised()
    assert clock.done == (3, 12)
