"""The interval of a rent report's expected dollars holds what is paid later, nine times in ten."""

from dataclasses import replace

import pytest

import hetflow
from hetflow.formats.importers.availability import read_availability
from hetflow.schema.market import Availability, RentReport
from hetflow.solvers.market.windows import joined
from hetflow.tests.data import reference

HOUR = 3600.0


def halves(zone: str) -> list[tuple[Availability, Availability]]:
    """The past and what comes after it, and the other way round."""
    folder = reference.availability() / "cant_be_late" / f"us-west-2{zone}_v100_1" / "overhead_0.02"
    (trace,) = joined(read_availability(folder, trace_start="2023-01-01T00:00:00Z"))
    middle = len(trace.available) // 2
    first = replace(trace, available=trace.available[:middle])
    last = replace(trace, start=None, available=trace.available[middle:])
    return [(first, last), (last, first)]


def report(past: Availability, later: Availability, hours: float, part: float) -> RentReport:
    length = int(hours * HOUR / later.tick_seconds)
    starts = range(0, len(later.available) - length + 1, length // 4)
    return hetflow.rent.deadline(
        [replace(later, available=later.available[at : at + length]) for at in starts],
        history=[past],
        work_seconds=part * hours * HOUR,
        deadline_seconds=hours * HOUR,
        restart_seconds=72,
        on_demand_dollars_per_hour=3.06,
        spot_dollars_per_hour=0.9731,
        policies=["dynamic_program"],
    )


@pytest.mark.slow
def test_nine_in_ten_jobs_of_the_other_half_cost_what_the_interval_says() -> None:
    inside, widths = [], []
    for zone in "ab":
        for past, later in halves(zone):
            for hours, part in ((3, 0.6), (5, 0.9), (8, 0.8), (14, 0.6), (14, 0.9)):
                found = report(past, later, hours, part)
                assert found.expected_dollars_90 is not None
                low, high = found.expected_dollars_90
                dollars = found.policies[0].dollars
                inside.append(sum(low <= one <= high for one in dollars) / len(dollars))
                widths.append((high - low) / (3.06 * hours))
    said = f"{sum(inside) / len(inside):.3f} inside, {sum(widths) / len(widths):.2f} of on demand"
    assert 0.86 <= sum(inside) / len(inside) <= 0.98, said
    assert sum(widths) / len(widths) < 0.6, said  # and does not say everything


def test_a_past_in_which_all_cost_the_same_says_so() -> None:
    past = Availability(zone="a", tick_seconds=600, available=(1,) * 600)
    later = replace(past, available=(1, 0, 1, 1) * 100)
    found = report(past, later, 5, 0.8)
    assert found.expected_dollars_90 == pytest.approx((25 * 0.9731 / 6,) * 2)


def test_a_past_of_few_windows_says_only_what_a_job_can_cost() -> None:
    past, later = halves("a")[0]
    short = replace(past, available=past.available[:40])
    found = report(short, later, 5, 0.8)
    ticks = 4 * 6 + 1  # of 10 minutes, the restart in one more
    assert found.expected_dollars_90 == pytest.approx((ticks * 0.9731 / 6, 30 * 3.06 / 6))
