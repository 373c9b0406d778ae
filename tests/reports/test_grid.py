"""The common format of tables."""

import pytest

from hetflow.reports.grid import grid


@pytest.mark.parametrize("mark", ["off", ""])
def test_a_column_without_a_name_has_no_rule(mark: str) -> None:
    lines = grid(("term", "", "n"), [("a", mark, "1"), ("longer", "", "2")]).splitlines()
    assert lines[0].split() == ["term", "n"]
    assert lines[1].split() == ["------", "---"]
    assert lines[1].rindex("---") == lines[0].index("n")
    assert lines[2].split() == ["a", mark, "1"] if mark else ["a", "1"]
    assert grid(("term", ""), [("a", mark)]).splitlines()[1] == "------"
