"""``hetflow simulate --market``: dollars, deadlines missed and moves in the report."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.schema.market import InstanceType, Market, PriceHistory


@pytest.fixture
def asked(tmp_path: Path) -> tuple[object, ...]:
    jobs = (Job(id="a", model="m", steps=7200.0), Job(id="b", model="m", steps=3600.0,
                                                      slo_seconds=600.0))  # fmt: skip
    files.write(tmp_path / "jobs.json", Jobs(jobs=jobs))
    models = (ModelThroughput(model="m", steps_per_second={"V100": 1.0}),)
    files.write(tmp_path / "t.json", Throughputs(models=models))
    day = "2020-03-01T0{}:00:00Z".format
    zones = {"a": (1.0, 3.0), "b": (2.0, 1.5)}
    market = Market(
        instance_types=(InstanceType(name="p3", device_type="V100"),),
        prices=tuple(
            PriceHistory(
                cloud="aws", zone=zone, instance_type="p3", times=(day(0), day(1)),
                dollars_per_hour=dollars, known_until=day(9),
            )
            for zone, dollars in zones.items()
        ),
    )  # fmt: skip
    files.write(tmp_path / "market.json", market)
    return ("simulate", tmp_path / "jobs.json", "--throughputs", tmp_path / "t.json",
            "--gpus", "2xV100")  # fmt: skip


def test_the_report_has_dollars_deadlines_and_moves(hetflow, asked, tmp_path: Path) -> None:
    market = ("--market", tmp_path / "market.json")
    answer = hetflow(*asked, *market, "--json")
    assert answer.code == 0, answer.stderr
    run = json.loads(answer.stdout)
    assert run["market_start"] == "2020-03-01T00:00:00Z"
    assert run["scheduler"] == "market"
    assert run["metrics"]["dollars"] == pytest.approx(1.0 + 1.0 + 1.5)
    assert (run["metrics"]["num_slo_violations"], run["metrics"]["num_moves"]) == (1, 1)
    table = hetflow(*asked, *market).stdout.splitlines()
    assert table[0].split()[-3:] == ["moves", "taken", "away"]
    assert table[2].split()[-4:] == ["3.50", "1/1", "1", "0"]
    later = hetflow(*asked, *market, "--start", "2020-03-01T01:00:00Z", "-o", tmp_path / "run.json")
    assert later.code == 0, later.stderr
    assert json.loads((tmp_path / "run.json").read_text())["jobs"][0]["num_moves"] == 0


def test_what_goes_with_a_market_only(hetflow, asked, tmp_path: Path) -> None:
    answer = hetflow(*asked, "--preemption-hours", "3")
    assert (answer.code, "preemption_seconds is for a market" in answer.stderr) == (2, True)
    answer = hetflow(*asked, "--market", tmp_path / "market.json", "--failure-hours", "3")
    assert (answer.code, "--preemption-hours instead" in answer.stderr) == (2, True)
    answer = hetflow(*asked, "--scheduler", "market")
    assert (answer.code, "add --market FILE" in answer.stderr) == (2, True)
