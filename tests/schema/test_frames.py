"""Every plan, profile, allocation, run and simulation is a line of text and a table of pandas."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

import hetflow
from hetflow.api import files
from hetflow.schema.files import RECORDS, record_class
from hetflow.schema.frames import Shown
from hetflow.tests import handmade
from hetflow.tests.parallel_plans import parallel_plan

PROFILES = [handmade.profile("V100", 1.0, model="m"), handmade.profile("P100", 2.0, model="m")]
RATES, POOL = "sample:throughputs.csv", "2xV100,2xP100"
JOBS = hetflow.Jobs(jobs=(hetflow.Job(id="<a>", model="m", steps=3),))
ALONE = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})


@cache
def run() -> hetflow.SimulationRun:
    return hetflow.simulate("static-single", RATES, "2xV100", num_jobs=3)


SHOWN: list[tuple[Any, str, int, str]] = [
    (partial(hetflow.solve, PROFILES, "2xV100,1xP100", batch_size=64),
     "<Plan m, batch 64 on 2xV100: 0.058 s a step, optimal>", 1, "virtual_nodes"),
    (handmade.two_stages(("A", "B")),
     "<Plan small, batch 8 on 1xA, 1xB: 0.1 s a step, feasible>", 2, "layers"),
    (parallel_plan([(("a",), (1, 2)), (("b",), (2,))]),
     "<Plan m, batch 8 on 5xcpu:x: 0.1 s a step, feasible>", 3, "tensor_parallel_size"),
    (PROFILES[0], "<Profile m on V100, batches 8 to 64>", 4, "peak_memory_bytes"),
    (hetflow.Cluster.parse("2x(4xV100)"), "<Cluster 8xV100 on 2 servers>", 1, "num_devices"),
    (JOBS, "<Jobs 1 jobs of 1 models>", 1, "steps"),
    (hetflow.Throughputs(models=(ALONE,)), "<Throughputs 1 models on 1 device types, 0 pairs>",
     1, "steps_per_second"),
    (partial(hetflow.allocate, JOBS, hetflow.Throughputs(models=(ALONE,)), "V100"),
     "<Allocation las for 1 jobs: optimal>", 1, "V100"),
    (run, "<SimulationRun static-single on 2xV100, las by rounds: 3 jobs, ", 3, "violates_slo"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "text", "num_rows", "column"), SHOWN)
def test_a_record_is_one_line_and_a_table(
    record: Any, text: str, num_rows: int, column: str
) -> None:
    record = record() if callable(record) else record  # not computed while tests are collected
    assert repr(record).startswith(text)
    assert len(repr(record)) < 120
    frame = record.to_frame()
    assert len(frame) == num_rows
    assert column in frame.columns
    page = record._repr_html_()
    assert page.count("<tr>") == num_rows + 1
    assert f"<th>{column}</th>" in page
    assert "<a>" not in page


def test_tables_of_jobs_and_throughputs_are_taken_back() -> None:
    rates = files.throughputs_of("sample:throughputs.csv", pairs=True)
    jobs = files.jobs_of("sample:jobs.csv")
    assert files.throughputs_of(rates.to_frame(), pairs=True) == rates
    assert files.jobs_of(jobs.to_frame()) == jobs


def test_a_long_table_is_cut_and_one_without_parts_is_its_line() -> None:
    many = hetflow.Jobs(jobs=[replace(JOBS.jobs[0], id=str(i)) for i in range(80)])
    page = many._repr_html_()
    assert page.count("<tr>") == 51
    assert "and 30 more rows, in to_frame()" in page
    assert "<table>" not in replace(run(), jobs=())._repr_html_()


def test_reprs_of_records_that_files_hold_are_short_where_they_have_tables() -> None:
    shown = {kind for kind in _classes() if issubclass(kind, Shown)}
    names = {kind.__name__ for kind in shown}
    assert {"Plan", "RunRecord", "SimulationRun", "Allocation", "Profile"} <= names
    for kind in shown:
        assert kind.__repr__ is Shown.__repr__


def _classes() -> list[type]:
    return list(dict.fromkeys(map(record_class, RECORDS)))
