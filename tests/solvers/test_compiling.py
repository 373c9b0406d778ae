"""A function goes over to its compiled twin when it is called often, never before."""

import pytest

from hetflow.solvers import compiling


@pytest.mark.parametrize("has_numba", [True, False])
def test_the_twin_is_loaded_where_calls_are_many(
    has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "can_compile", lambda: has_numba)
    monkeypatch.setattr(compiling, "OFTEN", 3)
    loaded = []

    def load() -> object:
        loaded.append(True)
        return lambda value: ("compiled", value)

    function = compiling.compiled_if_often(lambda value: ("numpy", value), load)
    said = [function(value)[0] for value in range(6)]
    assert said == ["numpy"] * 3 + (["compiled"] * 3 if has_numba else ["numpy"] * 3)
    assert loaded == ([True] if has_numba else [])
