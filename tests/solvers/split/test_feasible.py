"""Sharing out a batch on few devices: against every choice of how many of each type."""

from itertools import product

from hypothesis import event, given, settings
from hypothesis import strategies as st

from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint
from hetflow.solvers.split.feasible import SplitPool, counts_within, feasible_sums
from hetflow.tests.profiles import examples

types = st.tuples(
    st.integers(1, 4),
    st.dictionaries(st.integers(2, 9), st.sampled_from([1.0, 1.5, 2.0]), min_size=1, max_size=2),
)


def pool_of(batch: int, devices: list[tuple[int, dict[int, float]]]) -> SplitPool:
    options = [
        DeviceOption(
            device_type=f"T{index}",
            num_devices=number,
            batch_curve=tuple(
                BatchPoint(batch_size=s, step_seconds=t, peak_memory_bytes=1)
                for s, t in sorted(times.items())
            ),
            update_seconds=0.0,
            weight_bytes=1,
        )
        for index, (number, times) in enumerate(devices)
    ]
    return SplitPool(SplitProblem(model="m", global_batch_size=batch, devices=tuple(options)))


@settings(max_examples=examples(500))
@given(
    st.integers(9, 70),
    st.lists(types, min_size=2, max_size=3),
    st.integers(1, 8),
    st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.5, 6.0]),
)
def test_few_devices(
    batch: int, devices: list[tuple[int, dict[int, float]]], limit: int, seconds: float
) -> None:
    pool = pool_of(batch, devices)
    possible = [
        counts
        for counts in product(*(range(number + 1) for number in pool.counts))
        if sum(counts) <= limit and feasible_sums(pool, counts, seconds)
    ]
    found = counts_within(pool, pool.counts, limit, seconds)
    event(f"possible: {bool(possible)}")
    assert found in possible if possible else found is None
