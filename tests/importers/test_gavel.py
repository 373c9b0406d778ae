"""Gavel's tables and traces: read strictly, never evaluated."""

import json

import pytest

from hetflow.formats.importers.gavel import (
    parse_gavel_trace,
    read_gavel_throughputs,
    read_gavel_trace,
)
from hetflow.schema.errors import FileError
from hetflow.tests.data import reference

A, B = "('A', 1)", "('B (batch size 2)', 1)"
TABLE = {
    "v100": {A: {"null": 3.0, B: [2.0, 1.0], A: [1.5, 1.5]},
             B: {"null": 2.0, A: [1.0, 2.0]}, "('A', 4)": {"null": 8.0, B: [1.0, 1.0]}},
    "k80": {A: {"null": 1.0, B: [0.0, 0.0]}, "('A', 4)": {"null": 0.0}},
    "v100_unconsolidated": {A: {"null": 3.0}, "('A', 4)": {"null": 6.0}},
}  # fmt: skip


def written(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_table_is_read(tmp_path):
    found = read_gavel_throughputs(written(tmp_path, TABLE))
    models = {(m.model, m.scale_factor): m for m in found.models}
    assert models["A", 1].steps_per_second == {"v100": 3.0, "k80": 1.0}
    assert models["A", 1].unconsolidated_steps_per_second is None
    assert models["A", 4].steps_per_second == {"v100": 8.0, "k80": 0.0}
    assert models["A", 4].unconsolidated_steps_per_second == {"v100": 6.0}
    pairs = {(*p.models, p.scale_factor): p.steps_per_second for p in found.pairs}
    assert pairs == {("A", "B (batch size 2)", 1): {"v100": (2.0, 1.0)},
                     ("A", "A", 1): {"v100": (1.5, 1.5)}}  # fmt: skip
    assert read_gavel_throughputs(written(tmp_path, TABLE), pairs=False).pairs == ()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "not valid JSON"),
        ([1], "the table: must be an object"),
        ({"v100": {"__import__('os').system('true')": {"null": 1.0}}}, "is not .'job type'"),
        ({"v100": {"('A', 0)": {"null": 1.0}}}, "is not .'job type'"),
        ({"v100": {A: {}}}, "a rate must be a number, got None"),
        ({"v100": {A: {"null": -1.0}}}, "finite and >= 0, got -1.0"),
        ('{"v100": {"(\'A\', 1)": {"null": NaN}}}', "finite and >= 0, got nan"),
        ({"v100": {A: {"null": 10**400}}}, "finite and >= 0, got 1000"),
        ({"v100": {A: {"null": 1.0, B: [1.0]}}}, "must be two rates"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, content, fault):
    with pytest.raises(FileError, match=fault):
        read_gavel_throughputs(written(tmp_path, content))


LINE = "A\tpython3 x.py\tdir\t-n\t1\t{steps}\t2\t1\t{slo}\t{arrival}"


def test_a_trace_is_read():
    lines = [LINE.format(steps=100, slo=-1.0, arrival=0.0), LINE.format(steps=5, slo=9, arrival=2)]
    first, second = parse_gavel_trace(lines)
    assert (first.id, first.model, first.steps, first.scale_factor) == ("0", "A", 100.0, 2)
    assert first.slo_seconds is None
    assert (second.slo_seconds, second.arrival_seconds) == (9.0, 2.0)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("A\tpython3", "line 2: has 2 of 10 fields; the trace may be truncated"),
        (LINE.format(steps=1, slo=-1, arrival=-5), "line 2.*arrival_seconds: must be >= 0"),
        (LINE.format(steps=0, slo=-1, arrival=5), "line 2.*steps: must be > 0"),
        (LINE.format(steps="x", slo=-1, arrival=5), "line 2: steps: must be a number"),
        (LINE.format(steps="nan", slo=-1, arrival=5), "line 2.*steps: must be"),
        (LINE.format(steps=1, slo=-1, arrival=0.5), "line 2: arrives at 0.5 s, before"),
    ],
)
def test_a_broken_trace_is_refused(line, fault):
    with pytest.raises(FileError, match=fault):
        list(parse_gavel_trace([LINE.format(steps=1, slo=-1, arrival=1.0), line]))


def test_a_missing_trace_is_said(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        next(read_gavel_trace(tmp_path / "none.trace"))


def test_the_published_files_are_read():
    gavel = reference.folder() / "gavel"
    found = read_gavel_throughputs(gavel / "throughputs" / "simulation_throughputs.json")
    assert len(found.models) == 83
    for path in sorted((gavel / "traces").glob("*.trace")):
        known = {(m.model, m.scale_factor) for m in found.models}
        assert {(job.model, job.scale_factor) for job in read_gavel_trace(path)} <= known
