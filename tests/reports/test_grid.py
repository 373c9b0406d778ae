"""The common format of tables."""

import pytest

from hetflow.cli.main import run
from hetflow.formats.reports.grid import fitted_to, grid, milliseconds


@pytest.mark.parametrize("mark", ["off", ""])
def test_a_column_without_a_name_has_no_rule(mark: str) -> None:
    lines = grid(("term", "", "n"), [("a", mark, "1"), ("longer", "", "2")]).splitlines()
    assert lines[0].split() == ["term", "n"]
    assert lines[1].split() == ["------", "---"]
    assert lines[1].rindex("---") == lines[0].index("n")
    assert lines[2].split() == ["a", mark, "1"] if mark else ["a", "1"]
    assert grid(("term", ""), [("a", mark)]).splitlines()[1] == "------"


def test_long_times_have_no_exponents() -> None:
    found = [milliseconds(seconds) for seconds in (0.0, 0.00123456, 9.9994, 9.9996, 12.3456)]
    assert found == ["0 ms", "1.235 ms", "9999 ms", "10,000 ms", "12,346 ms"]
    assert milliseconds(None) == "-"


LONG = "model.decoder.layers.0.self_attn.weight .. model.decoder.layers.9.mlp.weight (40)"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_fits_its_terminal_and_loses_nothing(width: int) -> None:
    rows = [(str(i), LONG, "it waits because no device of its type is free " * 5) for i in range(3)]
    headers = ("stage", "layers", "why it waits")
    assert max(map(len, grid(headers, rows).splitlines())) > 300
    with fitted_to(width):
        lines = grid(headers, rows).splitlines()
        narrow = grid(("a", "b"), [("1", "2")])
    assert max(map(len, lines)) <= width
    assert narrow == grid(("a", "b"), [("1", "2")])
    wide = "".join(grid(headers, rows).split())
    assert sorted("".join(lines).replace(" ", "").replace("-", "")) == sorted(wide.replace("-", ""))


def test_numbers_are_not_broken_where_columns_can_be_closer() -> None:
    rows = [("las", "20.754", "146.37", "158.97", "0.993")]
    with fitted_to(38):
        lines = grid(("policy", "avg JCT h", "p99 h", "makespan h", "FTF"), rows).splitlines()
    assert max(map(len, lines)) <= 38
    assert lines[-1].split() == list(rows[0])


def test_names_of_layers_are_broken_at_their_dots() -> None:
    rows = [("0", "blocks.3.attention.project_out .. norm (20)", "10.32 ms")]
    with fitted_to(28):
        text = grid(("stage", "layers", "pass"), rows)
    assert max(map(len, text.splitlines())) <= 28
    assert all(word in text for word in ("attention.", "project_out", "norm", "10.32 ms"))


def test_every_command_fits_tables_to_its_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", "static-single", "--throughputs", "sample:throughputs.csv"]
    asked += ["--gpus", "2xV100", "--num-jobs", "3"]
    for columns, most in (("80", 80), ("", 200)):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(asked) == 0
        widest = max(map(len, capsys.readouterr().out.splitlines()))
        assert most - 120 < widest <= most
