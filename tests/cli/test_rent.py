"""``hetflow rent``: the report, and what is wrong with an input in one line."""

import json
from pathlib import Path

import pytest

OPTIONS = ("--work-hours", 1, "--deadline-hours", 2, "--on-demand", 3, "--spot", 1,
           "--restart-seconds", 600)  # fmt: skip


def window(path: Path, ticks: list, **others: object) -> Path:
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": ticks, **others}))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return window(tmp_path / "good.json", [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0])


def test_it_compares_policies_and_says_which_to_take(hetflow, good: Path, tmp_path: Path) -> None:
    kept = tmp_path / "rent.json"
    answer = hetflow("rent", good, "--history", good, *OPTIONS, "-o", kept)
    assert answer.code == 0, answer.stderr
    assert "on_demand" in answer.stdout
    assert "the cheapest that was never late" in answer.stdout
    report = json.loads(kept.read_text())
    assert report["schema"] == "hetflow.rent/1"
    dollars = {entry["policy"]: entry["dollars"][0] for entry in report["policies"]}
    # An hour of work and ten minutes of restart are seven ticks of ten minutes.
    assert dollars["on_demand"] == pytest.approx(7 * 0.5)
    # Spot in ticks 3 to 6 and 8 to 11: eight ticks, two of them restarts.
    assert report["bound_dollars"][0] == pytest.approx(8 / 6)
    assert min(dollars.values()) >= report["bound_dollars"][0] - 1e-6
    shown = hetflow("show", kept)
    assert shown.code == 0
    assert "greedy" in shown.stdout


def test_a_market_file_is_read_and_shown(hetflow, tmp_path: Path) -> None:
    market = tmp_path / "market.json"
    zone = {"zone": "us-west-2a", "start": "2022-10-26T00:00:00Z", "tick_seconds": 600.0,
            "available": [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, None, 1]}  # fmt: skip
    machine = {"name": "p3.2xlarge", "device_type": "V100", "on_demand_dollars_per_hour": 3.06}
    types = [{**machine, "cloud": "aws", "region": "us-west-2"}, machine]
    market.write_text(json.dumps(
        {"schema": "hetflow.market/1", "instance_types": types, "availability": [zone]}
    ))  # fmt: skip
    shown = hetflow("show", market)
    assert shown.code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["instance", "type", "devices", "cloud", "region"] == rows[0][:5]
    assert ["p3.2xlarge", "1xV100", "aws", "us-west-2", "3.06", "-"] in rows
    assert ["p3.2xlarge", "1xV100", "-", "-", "3.06", "-"] in rows
    assert "us-west-2a" in shown.stdout
    refused = hetflow("rent", market, *OPTIONS)
    assert refused.code == 2
    assert "us-west-2a: tick 11 is unknown" in refused.stderr


@pytest.mark.parametrize(
    ("ticks", "options", "code", "said"),
    [
        ([0] * 3, OPTIONS, 2, "its 3 ticks end before the deadline"),
        ([0, 2] * 6, OPTIONS, 2, "$.available[1]"),
        ([0] * 12, (*OPTIONS, "--policy", "uniform"), 2, "did you mean 'uniform_progress'?"),
        ([0] * 12, (*OPTIONS, "--policy", "dynamic_program"), 2, "add --history FILE"),
        (
            [0] * 12,
            (*OPTIONS, "--deadline-hours", 1),
            3,
            "the soonest is 1.167 h, for 3.50 dollars",
        ),
        ([0] * 12, (*OPTIONS, "--spot", "nan"), 2, "--spot"),
        ([0] * 12, (*OPTIONS, "--spot", "inf"), 2, "'--spot': must be finite"),
        ([0] * 12, (*OPTIONS, "--deadline-hours", 0), 2, "'--deadline-hours': must be above 0"),
        ([0] * 12, (*OPTIONS, "--work-hours", "inf"), 2, "'--work-hours': must be above 0"),
    ],
)
def test_what_is_wrong_is_said(
    hetflow, tmp_path: Path, ticks: list, options: tuple, code: int, said: str
) -> None:
    answer = hetflow("rent", window(tmp_path / "w.json", ticks), *options)
    assert answer.code == code
    assert said in answer.stderr
    assert answer.stderr.count("\n") <= 2  # the fault, and a hint


def test_times_that_are_not_utc_are_refused(hetflow, tmp_path: Path) -> None:
    market = tmp_path / "market.json"
    zone = {"zone": "a", "start": "2022-10-26T00:00:00+02:00", "tick_seconds": 600.0,
            "available": [1]}  # fmt: skip
    market.write_text(json.dumps({"schema": "hetflow.market/1", "availability": [zone]}))
    answer = hetflow("rent", market, *OPTIONS)
    assert answer.code == 2
    assert "is not in UTC; end it with Z" in answer.stderr
