"""Emulated passes: the table, and that a pass is held to it."""

import time

import pytest

from hetflow.runtime.emulation import PassHolder
from hetflow.schema.errors import ProblemError
from hetflow.schema.plan import PassTime


def table(*entries: tuple[int, float]) -> PassHolder:
    return PassHolder([PassTime(batch_size=b, step_seconds=s) for b, s in entries])


def test_times_between_and_beyond_the_table() -> None:
    holder = table((16, 0.3), (8, 0.1), (32, 0.7))
    assert holder.pass_seconds(8) == 0.1
    assert holder.pass_seconds(12) == pytest.approx(0.2)
    assert holder.pass_seconds(4) == pytest.approx(0.05)
    assert holder.pass_seconds(64) == pytest.approx(1.5)
    assert table((8, 0.1)).pass_seconds(24) == pytest.approx(0.3)
    with pytest.raises(ProblemError, match="at least one pass time"):
        PassHolder([])


def test_a_short_pass_is_held_and_a_long_one_counted() -> None:
    holder = table((1, 0.02))
    began = time.perf_counter()
    holder.begin_step()
    for _ in range(3):
        with holder.hold(1):
            pass
    assert time.perf_counter() - began >= 0.06
    assert (holder.num_passes, holder.num_overruns) == (3, 0)
    with holder.hold(1):
        time.sleep(0.03)
    assert (holder.num_passes, holder.num_overruns) == (4, 1)
    assert holder.worst_overrun_seconds >= 0.01
