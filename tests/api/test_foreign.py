"""Numbers of numpy, lists, dict pools and DataFrames are taken where Python's own values are."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hetflow
from hetflow.formats.importers.price_lists import read_instance_types
from hetflow.formats.importers.spot_prices import read_csv_spot_prices
from hetflow.schema.market import Availability
from hetflow.tests import handmade

PROFILES = [handmade.profile("V100", 1.0, model="m"), handmade.profile("P100", 2.0, model="m")]
POOL = "2xV100,1xP100"
JOBS = pd.DataFrame(
    {"model": ["m", "m"], "steps": np.array([100, 200]), "scale_factor": [1, np.nan]}
)
RATES = pd.DataFrame(
    {"model": "m", "device_type": ["V100", "P100"], "steps_per_second": np.float32([2, 1])}
)


def test_numbers_and_lists_of_numpy_are_pythons_own() -> None:
    plan = hetflow.solve(PROFILES, POOL, batch_size=64)
    given: Any = np.int64(64)
    assert hetflow.solve(np.array(PROFILES), POOL, batch_size=given) == plan
    job = hetflow.Job(id="a", model="m", steps=np.float32(3), scale_factor=np.int32(2))
    assert (job.steps, type(job.scale_factor)) == (3.0, int)
    there = Availability(zone="a", tick_seconds=np.int64(600), available=np.array([1, 0, 1]))
    assert there.available == (1, 0, 1)
    assert hetflow.Jobs(jobs=[job]) == hetflow.Jobs(jobs=(job,))
    with pytest.raises(
        hetflow.ProblemError, match=r"Jobs: \$.jobs\[1\]: input should be an instance of Job"
    ):
        hetflow.Jobs(jobs=[job, 3])
    with pytest.raises(hetflow.ProblemError, match="batch_size must be >= 1, got 0"):
        hetflow.solve(PROFILES, POOL, batch_size=np.int64(0))
    with pytest.raises(hetflow.ProblemError, match="batch_size must be a whole number, got True"):
        hetflow.solve(PROFILES, POOL, batch_size=np.bool_(True))


def test_a_pool_may_be_a_dict() -> None:
    plan = hetflow.solve(PROFILES, POOL, batch_size=64)
    pool = {"V100": 2, "P100": np.int64(1)}
    assert hetflow.solve(PROFILES, pool, batch_size=64) == plan
    assert hetflow.check(plan, PROFILES, pool) == []
    assert hetflow.Cluster.of({"V100": 2}) == hetflow.Cluster.parse("2xV100")
    for wrong, said in [
        ({"V100": "two"}, r"pool\['V100'\] must be a whole number, got 'two'"),
        ({"V100": 0}, r"pool\['V100'\] must be >= 1, got 0"),
        ({}, "a pool must hold at least one device"),
    ]:
        with pytest.raises(hetflow.ProblemError, match=said):
            hetflow.solve(PROFILES, wrong, batch_size=64)


def test_tables_of_pandas_are_what_their_files_are(tmp_path: Path) -> None:
    jobs, rates = tmp_path / "jobs.csv", tmp_path / "rates.csv"
    JOBS.to_csv(jobs)  # with the numbers of the rows first, as pandas does by default
    RATES.to_csv(rates)
    from_files = hetflow.allocate(jobs, rates, POOL)
    assert hetflow.allocate(JOBS, RATES, POOL) == from_files
    assert hetflow.check(from_files, pool=POOL, jobs=JOBS, throughputs=RATES) == []
    run = hetflow.simulate(JOBS, RATES, {"V100": 2})
    assert run.metrics.num_jobs == 2
    with pytest.raises(hetflow.FileError, match="the table: line 3: steps: must be a number"):
        hetflow.allocate(JOBS.assign(steps=["1", "many"]), RATES, POOL)
    with pytest.raises(hetflow.FileError, match="the table: line 1: unknown column 'rate'"):
        hetflow.allocate(JOBS, RATES.assign(rate=1), POOL)


def test_every_table_may_have_the_column_that_pandas_writes_first(tmp_path: Path) -> None:
    prices = {"Time": ["2026-03-01T00:00:00Z"], "Zone": "a", "Instance": "p3", "$/h": [1.5]}
    machines = {"Instance": ["p3"], "GPU type": "V100", "# GPUs": [1]}
    pd.DataFrame(prices).to_csv(tmp_path / "prices.csv")
    pd.DataFrame(machines).to_csv(tmp_path / "machines.csv")
    (history,) = read_csv_spot_prices(tmp_path / "prices.csv")
    assert history.dollars_per_hour == (1.5,)
    (machine,) = read_instance_types(tmp_path / "machines.csv")
    assert machine.device_type == "V100"


def test_an_index_of_pandas_is_taken_where_it_has_a_name_and_else_left_out(tmp_path: Path) -> None:
    named = JOBS.assign(id=["a", "b"])
    wanted = hetflow.allocate(named, RATES, POOL)
    by_two = RATES.set_index(["model", "device_type"])
    assert hetflow.allocate(named.set_index("id"), by_two, POOL) == wanted
    assert hetflow.allocate(named.set_index("id", drop=False), RATES, POOL) == wanted
    again = pd.read_csv(StringIO(pd.read_csv(StringIO(named.to_csv())).to_csv()))
    assert list(again.columns[:2]) == ["Unnamed: 0.1", "Unnamed: 0"]
    assert hetflow.allocate(again, RATES.reset_index(), POOL) == wanted
    again.to_csv(tmp_path / "jobs.csv")
    assert hetflow.allocate(tmp_path / "jobs.csv", RATES, POOL) == wanted
    assert hetflow.allocate(named.set_axis(["x", "y"]), RATES, POOL) == wanted
