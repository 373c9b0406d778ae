"""Sets as bits, against Python's own sets."""

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from hetflow.solvers.split.feasible import Folds, members, multiples, repeated, sumset

small_sets = st.sets(st.integers(0, 200), min_size=1)


def bits(numbers: set[int]) -> int:
    return sum(1 << number for number in numbers)


@given(st.integers(1, 30), st.integers(0, 40))
def test_multiples(step: int, count: int) -> None:
    assert members(multiples(step, count)) == [step * k for k in range(count + 1)]


@given(st.sets(st.integers(0, 6), min_size=1), st.integers(1, 9), st.integers(0, 9))
def test_repeated(numbers: set[int], step: int, count: int) -> None:
    expected = {n + step * k for n in numbers for k in range(count + 1)}
    assert set(members(repeated(bits(numbers), step, count))) == expected


@given(small_sets, small_sets, st.integers(1, 5), st.integers(1, 900))
def test_sumset(left: set[int], right: set[int], stride: int, top: int) -> None:
    expected = {a + stride * b for a in left for b in right if a + stride * b < top}
    assert set(members(sumset(bits(left), bits(right), (1 << top) - 1, stride))) == expected


@given(st.sets(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 9))
def test_folds_are_sums_of_exactly_so_many(numbers: set[int], count: int) -> None:
    expected = {sum(chosen) for chosen in combinations_with_replacement(numbers, count)}
    found = Folds(bits(numbers), (1 << 60) - 1)[count]
    assert set(members(found)) == {total for total in expected if total < 60}
