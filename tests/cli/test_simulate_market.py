"""``hetflow simulate --market``: dollars, deadlines missed and moves in the report."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.schema.market import Availability, InstanceType, Market, PriceHistory


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
    assert (answer.code, "--preemption-hours is for a market" in answer.stderr) == (2, True)
    answer = hetflow(*asked, "--market", tmp_path / "market.json", "--failure-hours", "3")
    assert (answer.code, "--preemption-hours instead" in answer.stderr) == (2, True)
    answer = hetflow(*asked, "--scheduler", "market")
    assert (answer.code, "add --market FILE" in answer.stderr) == (2, True)


DAY = "2020-03-01T0{}:00:00Z".format


def simulated(hetflow, folder: Path, deadline_hours: float, window: Availability):
    """An hour of work on a machine: 16 $ on demand, 10 $ where spot is there."""
    job = Job(id="a", model="m", steps=3600.0, slo_seconds=deadline_hours * 3600)
    files.write(folder / "jobs.json", Jobs(jobs=(job,)), force=True)
    models = (ModelThroughput(model="m", steps_per_second={"V100": 1.0}),)
    files.write(folder / "t.json", Throughputs(models=models), force=True)
    spot = PriceHistory(
        cloud="aws", zone="a", instance_type="p3", times=(DAY(0),), dollars_per_hour=(10.0,),
        known_until=DAY(9),
    )  # fmt: skip
    machine = InstanceType(name="p3", device_type="V100", on_demand_dollars_per_hour=16.0)
    market = Market(instance_types=(machine,), prices=(spot,), availability=(window,))
    files.write(folder / "market.json", market, force=True)
    return hetflow(
        "simulate", folder / "jobs.json", "--throughputs", folder / "t.json", "--gpus", "1xV100",
        "--market", folder / "market.json", "--start", DAY(0), "--json",
    )  # fmt: skip


def hours(*there: int, zone: str = "a", start: str | None = DAY(0)) -> Availability:
    return Availability(zone=zone, start=start, tick_seconds=3600.0, available=there)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deadline_hours", "there", "dollars", "violations"),
    [
        (4.0, (0, 1, 1, 1), 10.0, 0),  # waits: it went on demand at once, for 16 $
        (1.5, (0, 1, 1, 1), 16.0, 0),  # waiting for long would be too late
        (4.0, (0, 0, 0, 0), 16.0, 0),  # waits in vain, and is in time all the same
        (0.5, (1, 1, 1, 1), 10.0, 1),  # unreachable: it went on demand for all of it
    ],
)
def test_it_waits_where_that_is_cheaper_and_in_time(
    hetflow, tmp_path: Path, deadline_hours: float, there: tuple[int, ...], dollars: float,
    violations: int,
) -> None:  # fmt: skip
    answer = simulated(hetflow, tmp_path, deadline_hours, hours(*there))
    assert answer.code == 0, answer.stderr
    metrics = json.loads(answer.stdout)["metrics"]
    assert metrics["dollars"] == pytest.approx(dollars)
    assert metrics["num_slo_violations"] == violations


def test_availability_that_cannot_be_used_is_refused(hetflow, tmp_path: Path) -> None:
    """Both were ignored without a word."""
    elsewhere = simulated(hetflow, tmp_path, 4, hours(0, 1, zone="us-east-1f"))
    assert elsewhere.code == 2
    assert "us-east-1f, which has no spot price; spot prices are of a" in elsewhere.stderr
    timeless = simulated(hetflow, tmp_path, 4, hours(0, 1, start=None))
    assert timeless.code == 2
    assert "availability of 'a' does not say when it begins" in timeless.stderr


def test_prices_after_the_last_record_are_refused(hetflow, tmp_path: Path) -> None:
    """A time after the last spot price gave prices on demand, in silence."""
    simulated(hetflow, tmp_path, 4, hours(1))
    asked = ("rent", "machines", tmp_path / "market.json", "--throughputs", tmp_path / "t.json",
             "--model", "m", "--steps", 3600)  # fmt: skip
    assert hetflow(*asked, "--at", DAY(9)).code == 0
    late = hetflow(*asked, "--at", "2020-03-02T00:00:00Z")
    assert late.code == 2
    assert "known from 2020-03-01T00:00:00Z to 2020-03-01T09:00:00Z" in late.stderr
