"""``hetflow rent fleet``, and the traces and pictures that go with it."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.market import Availability, Capacity, InstanceType, Market, PriceHistory

COUNTS = "0,0\n0,2\n1,2\n1,0\n1.5,0\n1.5,2\n4,2\n4,1\n"
ASKED = ("--machines", 2, "--work-hours", 4, "--deadline-hours", 4, "--on-demand", 3, "--spot", 1,
         "--resize-seconds", 0)  # fmt: skip


@pytest.fixture
def market(hetflow, tmp_path: Path) -> Path:
    (tmp_path / "counts.csv").write_text(COUNTS)
    target = tmp_path / "market.json"
    answer = hetflow("import", tmp_path / "counts.csv", "--format", "bamboo-trace", "--time-unit",
                     "hours", "--tick-seconds", 1800, "-o", target)  # fmt: skip
    assert answer.code == 0, answer.stderr
    return target


def test_a_trace_is_imported_replayed_and_shown(hetflow, market: Path, tmp_path: Path) -> None:
    (trace,) = json.loads(market.read_text())["capacity"]
    # The least number in each half hour; of two lines with one time, the first holds for none.
    assert trace["num_machines"] == [2, 2, 0, 2, 2, 2, 2, 2]
    kept = tmp_path / "fleet.json"
    answer = hetflow("rent", "fleet", market, "--history", market, *ASKED, "-o", kept)
    assert answer.code == 0, answer.stderr
    assert "the cheapest that was never late" in answer.stdout
    same = hetflow("rent", market, "--history", market, *ASKED[:-2], "--restart-seconds", 0)
    assert same.stdout == answer.stdout
    report = json.loads(kept.read_text())
    assert report["schema"] == "hetflow.rent/1"
    dollars = {entry["policy"]: entry["dollars"][0] for entry in report["policies"]}
    assert dollars["on_demand"] == pytest.approx(12)
    assert dollars["greedy"] == dollars["dynamic_program"] == pytest.approx(4)
    assert report["bound_dollars"][0] == pytest.approx(4)
    # One window of history is too few: what a job can cost at all.
    assert report["expected_dollars_90"] == pytest.approx([4, 24])
    assert "9 in 10 jobs to cost" in answer.stdout
    shown = hetflow("show", kept)
    assert "(known in advance)" in shown.stdout
    assert "least machines" in hetflow("show", market).stdout


def test_markets_are_drawn_by_cloud_and_by_presence(hetflow, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    histories = tuple(
        PriceHistory(cloud="aws", zone=zone, instance_type="v", times=("2020-01-01T00:00:00Z",),
                     dollars_per_hour=(price,), known_until="2020-01-02T00:00:00Z")
        for zone, price in (("a", 1.0), ("b", 2.0))
    )  # fmt: skip
    market = Market(
        instance_types=(InstanceType(name="v", device_type="V100", num_devices=4),),
        prices=histories,
        availability=(Availability(zone="a", tick_seconds=60.0, available=(1, 0, None, 1)),),
        capacity=(Capacity(zone="counted", tick_seconds=60.0, num_machines=(1, None, 3)),),
    )
    files.write(tmp_path / "market.json", market)
    for flag, said in (("--by-cloud", "4x V100"), ("--presence", "counted")):
        target = tmp_path / f"{flag}.svg"
        answer = hetflow("show", tmp_path / "market.json", "--plot", target, flag)
        assert answer.code == 0, answer.stderr
        assert f"<!-- {said} -->" in target.read_text()
    both = hetflow("show", tmp_path / "market.json", "--plot", tmp_path / "x.svg", "--by-cloud",
                   "--per-device")  # fmt: skip
    assert both.code == 2
    assert "--per-device and --by-cloud are different pictures" in both.stderr


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("0,2\n1", (), "line 2: must be a time and a number of machines"),
        ("0,2\nnan,1\n", (), "line 2: time and machines must be finite"),
        ("0,-1\n9,2\n", (), "line 1: time and machines must be finite and >= 0"),
        ("5,2\n1,2\n", (), "line 2: its time is before that of the line above"),
        ("0,2\n100,2\n", (), "are less than a tick of 300 s"),
        ("0,2\n900,2\n", ("--time-unit", "days"), "--time-unit must be seconds or hours"),
        ("0,2\n900,2\n", ("--tick-seconds", 0), "tick_seconds must be > 0"),
        ("{}\n", ("--format", "parcae-trace"), "line 1: must be [milliseconds, kind"),
        (
            '[0, "remove", {"nodes": ["a"], "duration": 60000}]\n',
            ("--format", "parcae-trace"),
            "line 1: removes a machine that is not there",
        ),
        ("0,2\n", ("--format", "bamboo-traces"), "did you mean 'bamboo-trace'?"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(
    hetflow, tmp_path: Path, text: str, options: tuple, said: str
) -> None:
    (tmp_path / "trace").write_text(text)
    answer = hetflow("import", tmp_path / "trace", "--format", "bamboo-trace", *options)
    assert answer.code == 2
    assert said in answer.stderr
    assert answer.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--work-hours", 9), 3, "the soonest is 4.5 h, for 27.00 dollars"),
        (("--policy", "greed"), 2, "did you mean 'greedy'?"),
        (("--policy", "dynamic_program"), 2, "add --history FILE"),
        (("--deadline-hours", 5), 2, "its 8 ticks end before the deadline"),
        (("--every-hours", 0.1), 2, "must be at least a tick"),
        (("--speed", 1.0), 2, "give --machines or --speed, not both"),
    ],
)
def test_what_is_wrong_is_said(hetflow, market: Path, options: tuple, code: int, said: str) -> None:
    answer = hetflow("rent", "fleet", market, *ASKED, *options)
    assert answer.code == code
    assert said in answer.stderr


def test_a_market_without_capacity_says_how_to_get_some(hetflow, tmp_path: Path) -> None:
    files.write(tmp_path / "market.json", Market())
    answer = hetflow("rent", "fleet", tmp_path / "market.json", *ASKED)
    assert answer.code == 2
    assert "holds no counts of spot machines" in answer.stderr


def test_short_ticks_keep_to_the_tables_room_and_a_job_in_time_is_not_refused(
    hetflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = tmp_path / "market.json"
    counts = (2, 2, 1, 2, 0, 2, 2, 2, 1, 2) * 12
    fleet = Capacity(zone="a", tick_seconds=600.0, num_machines=counts)
    files.write(market, Market(capacity=(fleet,)))
    # 4.05 h and 60 s of pause end within 4.1 h, though not within 24 whole ticks of 10 minutes.
    asked = ("rent", "fleet", market, "--machines", 2, "--work-hours", 8.1, "--deadline-hours", 4.1,
             "--resize-seconds", 60, "--on-demand", 3, "--spot", 1, "--json")  # fmt: skip
    answer = hetflow(*asked)
    assert answer.code == 0, answer.stderr
    asked = ("rent", "fleet", market, "--history", market, "--machines", 2, "--work-hours", 4,
             "--deadline-hours", 4, "--resize-seconds", 700, "--on-demand", 3,
             "--spot", 1)  # fmt: skip
    assert "decision_seconds" not in json.loads(hetflow(*asked, "--json").stdout)
    monkeypatch.setattr("hetflow.solvers.market.dynamic_program.MOST_BYTES", 8_000)
    answer = hetflow(*asked, "--json")
    assert answer.code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["decision_seconds"] > 600
    assert all(entry["missed_deadlines"] == 0 for entry in report["policies"])
    assert "dynamic_program decides each" in hetflow(*asked).stdout
