"""The layout of tables is that of tabulate, which is too slow for a queue of thousands of jobs."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tabulate import tabulate

from hetflow.reports.grid import grid
from hetflow.tests.profiles import examples

TEXT = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), max_size=9)
CELL = st.one_of(TEXT, st.integers(-9, 9999), st.none())


@settings(max_examples=examples(60))
@given(st.integers(1, 4).flatmap(
    lambda n: st.tuples(st.lists(TEXT.filter(str.strip), min_size=n, max_size=n),
                        st.lists(st.lists(CELL, min_size=n, max_size=n), max_size=5))
))  # fmt: skip
def test_a_grid_is_laid_out_as_by_tabulate(table: tuple[list[str], list[list[object]]]) -> None:
    headers, rows = table
    by_tabulate = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    assert grid(headers, rows).splitlines() == [line.rstrip() for line in by_tabulate.splitlines()]
