"""Layers that take their smaller choice, against every set of layers."""

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piper_parts.solve import exact, greedy

from hetflow.tests.profiles import examples

LAYERS = st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=examples(200))
@given(LAYERS, st.integers(1, 30))
def test_no_set_of_layers_takes_less(layers: list[tuple[int, int]], missing: int) -> None:
    saved, spent = (np.array(each, dtype=float) for each in zip(*layers, strict=True))
    places = range(len(layers))
    sets = chain.from_iterable(combinations(places, n) for n in range(len(layers) + 1))
    enough = [list(each) for each in sets if saved[list(each)].sum() >= missing]
    found = greedy(saved, spent, float(missing))
    if not enough:
        assert found is None
        return
    assert found is not None
    least = min(spent[each].sum() for each in enough)
    assert found.least_more_seconds <= least + 1e-9
    assert least <= found.more_seconds + 1e-9
    best = exact(saved, spent, float(missing), found)
    assert best.is_exact
    assert best.more_seconds == best.least_more_seconds == least
    assert spent[list(best.slower)].sum() == least
    assert saved[list(best.slower)].sum() >= missing


def test_many_equal_layers_and_many_unlike_ones() -> None:
    """Choices among equal layers count once; of 200 unlike ones few are left to compare."""
    equal = np.full(64, 3.0), np.full(64, 1.0)
    found = greedy(*equal, 100.0)
    assert found is not None
    assert (found.least_more_seconds, found.more_seconds) == (pytest.approx(100 / 3), 34.0)
    assert exact(*equal, 100.0, found).more_seconds == 34.0
    drawn = np.random.default_rng(1)
    saved, spent = drawn.uniform(1, 9, 200), drawn.uniform(1, 9, 200)
    found = greedy(saved, spent, 500.0)
    assert found is not None
    best = exact(saved, spent, 500.0, found)
    assert best.is_exact
    assert found.least_more_seconds <= best.more_seconds < found.more_seconds
