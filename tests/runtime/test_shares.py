"""Cutting a global batch: exact, contiguous, in proportion, blind to the devices."""

from hypothesis import given
from hypothesis import strategies as st

from hetflow.runtime.virtual_nodes import share_out, slices

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def test_a_full_batch_gives_each_its_own_size() -> None:
    assert share_out(14, [8, 4, 2]) == [8, 4, 2]


def test_a_short_batch_goes_by_largest_remainder() -> None:
    # 7 * 8/14 = 4, 7 * 4/14 = 2, 7 * 2/14 = 1; 5: 2.86, 1.43, 0.71; 1: 0.57, 0.29, 0.14
    assert share_out(7, [8, 4, 2]) == [4, 2, 1]
    assert share_out(5, [8, 4, 2]) == [3, 1, 1]
    assert share_out(1, [8, 4, 2]) == [1, 0, 0]


def test_ties_go_to_the_lower_index() -> None:
    assert share_out(2, [5, 5, 5, 5]) == [1, 1, 0, 0]


@given(SIZES, st.data())
def test_every_sample_has_one_place_near_its_quota(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    num_samples = data.draw(st.integers(0, total))
    shares = share_out(num_samples, sizes)
    assert sum(shares) == num_samples
    for share, size in zip(shares, sizes, strict=True):
        assert abs(share - num_samples * size / total) < 1
        assert share <= size
    covered = [i for start, end in slices(num_samples, sizes) for i in range(start, end)]
    assert covered == list(range(num_samples))
