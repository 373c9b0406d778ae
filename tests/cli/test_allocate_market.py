"""``hetflow allocate --market``: cost and deadline policies at the prices of a market."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.schema.market import InstanceType, Market, PriceHistory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rates = {"V100": 4.0, "K80": 1.0}
    jobs = tuple(Job(id=name, model="m", steps=3600.0) for name in "ab")
    files.write(tmp_path / "jobs.json", Jobs(jobs=jobs))
    models = (ModelThroughput(model="m", steps_per_second=rates),)
    files.write(tmp_path / "t.json", Throughputs(models=models))
    market = Market(
        instance_types=(
            InstanceType(name="p3", device_type="V100"),
            InstanceType(name="p2", device_type="K80", on_demand_dollars_per_hour=0.5),
        ),
        prices=(
            PriceHistory(
                cloud="aws",
                zone="a",
                instance_type="p3",
                times=("2020-03-01T00:00:00Z", "2020-03-02T00:00:00Z"),
                dollars_per_hour=(1.0, 3.0),
                known_until="2020-03-03T00:00:00Z",
            ),
        ),
    )
    files.write(tmp_path / "market.json", market)
    return tmp_path


def test_prices_decide_where_jobs_run(hetflow, folder: Path) -> None:
    given = ("--throughputs", folder / "t.json", "--gpus", "2xV100,2xK80")
    asked = ("allocate", folder / "jobs.json", *given, "--policy", "min_cost_per_job")
    market = ("--market", folder / "market.json")
    early = hetflow(*asked, *market, "--at", "2020-03-01T12:00:00Z")
    assert early.code == 0, early.stderr
    assert json.loads(early.stdout)["x"]["a"] == pytest.approx({"V100": 1.0})
    late = hetflow(*asked, *market, "-o", folder / "late.json")
    assert late.code == 0, late.stderr
    assert json.loads((folder / "late.json").read_text())["x"]["a"] == pytest.approx({"K80": 1.0})
    judged = ("check", folder / "late.json", "--jobs", folder / "jobs.json", *given)
    assert hetflow(*judged, *market).code == 0
    wrong = hetflow(*judged, *market, "--at", "2020-03-01T12:00:00Z")
    assert wrong.code == 2
    assert "the prices prove" in wrong.stderr
    unpriced = hetflow(*judged)
    assert "counts dollars, and 'K80' has no price" in unpriced.stderr


def test_a_time_needs_a_market(hetflow, folder: Path) -> None:
    answer = hetflow("allocate", folder / "jobs.json", "--throughputs", folder / "t.json",
                     "--gpus", "V100", "--at", "2020-03-01T12:00:00Z")  # fmt: skip
    assert answer.code == 2
    assert answer.stderr.startswith("hetflow: a time of prices is given, and no market")
