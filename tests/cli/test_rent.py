"""``hetflow rent``: the report, and what is wrong with an input in one line."""

import json
from pathlib import Path

import pytest

from hetflow import rent
from hetflow.api.rent import by_deadline
from hetflow.formats.reports.market_tables import rent_table
from hetflow.schema.market import Availability

PRICELESS = ("--work-hours", 1, "--deadline-hours", 2, "--on-demand", 3, "--restart-seconds", 600)
OPTIONS = (*PRICELESS, "--spot", 1)


def window(path: Path, ticks: list, **others: object) -> Path:
    of = {"original_trace": "trace.json", "metadata": {"gap_seconds": 600}, "data": ticks}
    path.write_text(json.dumps({**of, **others}))
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


def test_dollars_are_drawn_against_the_deadline(hetflow, good: Path, tmp_path: Path) -> None:
    picture = tmp_path / "cost.svg"
    asked = ("rent", good, "--history", good, *OPTIONS)
    answer = hetflow(*asked, "--plot", picture)
    assert answer.code == 0, answer.stderr
    text = picture.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("greedy", "dynamic_program", "on_demand"))
    assert "<!-- (known in advance) -->" in text
    assert "FillBetweenPolyCollection" in text or "PolyCollection" in text
    assert "must end in .png or .svg" in hetflow(*asked, "--plot", "cost.pdf").stderr
    rate = ("--rate", "V100=1", "--work-hours", 1, "--plot", tmp_path / "none.svg")
    assert "--plot says nothing with --rate" in hetflow("rent", good, *rate).stderr


def test_a_later_deadline_is_never_dearer_where_all_is_known(good: Path) -> None:
    reports = by_deadline(
        offers=[good], work_seconds=3600, deadline_seconds=7200, restart_seconds=600,
        on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
    )  # fmt: skip
    hours = [report.deadline_seconds / 600 for report in reports]
    assert hours == [7, 8, 9, 10, 11, 12]  # an hour and a restart take seven ticks
    least = [report.bound_dollars[0] for report in reports]
    assert least == sorted(least, reverse=True)
    assert least[0] > least[-1]


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
        ([0] * 12, (*PRICELESS, "--spot", "nan"), 2, "--spot must be"),
        ([0] * 12, (*PRICELESS, "--spot", "inf"), 2, "--spot must be"),
        ([0] * 12, (*OPTIONS, "--deadline-hours", 0), 2, "--deadline-hours must be > 0"),
        ([0] * 12, (*OPTIONS, "--work-hours", "inf"), 2, "--work-hours must be > 0 and finite"),
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


def test_published_traces_count_instances_and_are_never_inverted(hetflow, tmp_path: Path) -> None:
    """Their values are numbers of instances: 79.3 % available was read as 20.7 %."""
    trace, market = tmp_path / "zone.json", tmp_path / "market.json"
    metadata = {"gap_seconds": 600}
    to_market = ("import", trace, "--format", "cant-be-late", "-o", market, "--force")
    trace.write_text(json.dumps({"metadata": metadata, "data": [4, 0, 2, 4, 1]}))
    assert hetflow(*to_market).code == 0
    read = json.loads(market.read_text())
    assert read["availability"][0]["available"] == [1, 0, 1, 1, 1]
    assert read["capacity"][0]["num_machines"] == [4, 0, 2, 4, 1]
    assert hetflow(*to_market, "--values", "preempted").code == 2
    trace.write_text(json.dumps({"metadata": metadata, "data": [1, 0, 1, 1, 1]}))
    for command in (to_market, ("rent", trace, *OPTIONS)):
        refused = hetflow(*command)
        assert refused.code == 2
        assert "1 may mean that an instance was there" in refused.stderr
        assert "--values instances" in refused.stderr
    for values, available in (("instances", [1, 0, 1, 1, 1]), ("preempted", [0, 1, 0, 0, 0])):
        assert hetflow(*to_market, "--values", values).code == 0
        read = json.loads(market.read_text())
        assert read["availability"][0]["available"] == available


def test_a_job_in_time_is_not_refused_for_when_one_looked(hetflow, tmp_path: Path) -> None:
    """Ten hours and three minutes were said to need 10.17 h, in looks ten minutes apart."""
    there = window(tmp_path / "w.json", [0] * 61)
    job = ("--work-hours", 10, "--restart-seconds", 180, "--on-demand", 3, "--spot", 1)
    answer = hetflow("rent", there, *job, "--deadline-hours", 10.05, "--json")
    assert answer.code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["bound_dollars"] == [pytest.approx(10.05, rel=1e-4)]
    assert all(entry["missed_deadlines"] == 0 for entry in report["policies"])
    assert hetflow("rent", there, *job, "--deadline-hours", 10.04).code == 3


def test_all_of_a_long_window_is_used(hetflow, tmp_path: Path) -> None:
    """Of 45 days it took the first 52 hours, without a word."""
    long = window(tmp_path / "w.json", [0] * 12 + [1] * 12 + [0] * 7)
    report = json.loads(hetflow("rent", long, *OPTIONS, "--json").stdout)
    assert report["windows"] == ["w +0 h", "w +2 h"]
    assert report["unused_seconds"] == 7 * 600
    assert "1.167 h that were given are in no window" in hetflow("rent", long, *OPTIONS).stdout
    (greedy,) = (entry for entry in report["policies"] if entry["policy"] == "greedy")
    assert greedy["dollars"] == [pytest.approx(7 / 6), pytest.approx(7 * 0.5)]


def test_short_ticks_keep_to_the_memory_and_say_how_often_one_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """34-second ticks asked for 18 GiB, and their failure was called a bug of hetflow."""
    windows = [Availability(zone="a", tick_seconds=34.0, available=((1,) * 40 + (0,) * 25) * 20)]
    monkeypatch.setattr("hetflow.solvers.market.dynamic_program.MOST_BYTES", 10_000_000)
    report = rent.deadline(
        windows, work_seconds=20_000.5, deadline_seconds=36_000, restart_seconds=305,
        on_demand_dollars_per_hour=3, spot_dollars_per_hour=1, history=windows,
        policies=["dynamic_program", "greedy", "on_demand"],
    )  # fmt: skip
    assert report.decision_seconds is not None
    assert report.decision_seconds % 34 == 0
    program, _, alone = report.policies
    assert [entry.missed_deadlines for entry in report.policies] == [0, 0, 0]
    assert program.mean_dollars < 0.8 * alone.mean_dollars
    assert "decides each" in rent_table(report)


STATE = {"schema": "hetflow.rent_state/1", "elapsed_seconds": 1200, "work_left_seconds": 3000,
         "available": {"good": 1}}  # fmt: skip


def test_next_says_what_to_hold_and_why(hetflow, good: Path, tmp_path: Path) -> None:
    state, kept = tmp_path / "state.json", tmp_path / "advice.json"
    state.write_text(json.dumps(STATE))
    answer = hetflow("rent", good, *OPTIONS, "--next", state, "-o", kept)
    assert answer.code == 0, answer.stderr
    assert "now hold 1 spot in good, 1 $/h (dynamic_program): spot machines are" in answer.stdout
    assert "on_demand would hold 1 on demand in good" in answer.stdout
    advice = json.loads(kept.read_text())
    # Of 12 ticks two have passed; 50 minutes and a restart take six.
    assert (advice["spare_seconds"], advice["is_change"]) == (4 * 600, True)
    assert hetflow("show", kept).stdout == answer.stdout
    assert "holds nothing, 0.8333 h of work left" in hetflow("show", state).stdout
    late = {**STATE, "elapsed_seconds": 3600, "available": {"good": 0}}
    state.write_text(json.dumps(late))
    answer = hetflow("rent", good, *OPTIONS, "--next", state, "--policy", "greedy")
    assert "now hold 1 on demand in good, 3 $/h (greedy): there is no time left" in answer.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"available": {"god": 1}}, "did you mean 'good'?"),
        ({"elapsed_seconds": 7200}, "the state is 7200 s after the start, the deadline 7200 s"),
        ({"num_spot": 1}, "the state holds 1 machines in zone None"),
        ({"num_on_demand": 2, "zone": "good"}, "the job can use 1"),
    ],
)
def test_states_that_cannot_be_are_refused(
    hetflow, good: Path, tmp_path: Path, changed: dict, said: str
) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({**STATE, **changed}))
    answer = hetflow("rent", good, *OPTIONS, "--next", state)
    assert answer.code == 2
    assert said in answer.stderr


def _priced(path: Path, **changes: object) -> Path:
    """Three hours of a zone with ticks of ten minutes, and what a machine costs then."""
    start = "2024-01-01T00:00:00Z"
    zone = {"zone": "a", "start": start, "tick_seconds": 600.0, "available": [1] * 18}
    history = {
        "cloud": "aws", "zone": "a", "instance_type": "p3.2xlarge", "known_until": changes.pop(
            "known_until", "2024-01-01T03:00:00Z"),
        "times": [start, "2024-01-01T01:00:00Z", "2024-01-01T02:00:00Z"],
        "dollars_per_hour": [2.0, 0.5, 1.0], **changes,
    }  # fmt: skip
    path.write_text(
        json.dumps({"schema": "hetflow.market/1", "availability": [zone], "prices": [history]})
    )
    return path


def test_prices_that_move_are_those_of_the_offers(hetflow, tmp_path: Path) -> None:
    market = _priced(tmp_path / "m.json")
    asked = ("rent", market, "--work-hours", 1, "--deadline-hours", 3, "--on-demand", 3,
             "--restart-seconds", 0)  # fmt: skip
    moving = json.loads(hetflow(*asked, "--json").stdout)
    dollars = {entry["policy"]: entry["dollars"][0] for entry in moving["policies"]}
    # Greedy takes the dear first hour; who knew waited for the second.
    assert dollars["greedy"] == pytest.approx(2.0)
    assert moving["bound_dollars"] == [pytest.approx(0.5)]
    assert moving["has_moving_prices"]
    assert moving["spot_dollars_per_hour"] == pytest.approx(3.5 / 3)
    assert "spot prices that move" in hetflow(*asked).stdout
    still = json.loads(hetflow(*asked, "--spot", 1, "--json").stdout)
    assert still["bound_dollars"] == [pytest.approx(1.0)]
    assert not still["has_moving_prices"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zone": "b"}, "zone 'a' has no price history"),
        ({"dollars_per_hour": [None, None, None]}, "there is no spot price of zone 'a'"),
        ({"known_until": "2024-01-01T02:30:00Z"}, "the price in tick 15 is unknown"),
    ],
)
def test_a_price_that_is_missing_is_said(hetflow, tmp_path: Path, changes: dict, said: str) -> None:
    market = _priced(tmp_path / "m.json", **changes)
    answer = hetflow("rent", market, "--work-hours", 1, "--deadline-hours", 3, "--on-demand", 3)
    assert (answer.code, answer.stdout) == (2, "")
    assert said in answer.stderr


def test_advice_is_at_the_prices_of_now(hetflow, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    asked = ("rent", _priced(tmp_path / "m.json"), "--work-hours", 1, "--deadline-hours", 2,
             "--on-demand", 3, "--next", state, "--json")  # fmt: skip
    holds = []
    for price in (0.5, 9.0):
        now = {"schema": "hetflow.rent_state/1", "elapsed_seconds": 600, "work_left_seconds": 3600,
               "available": {"a": 1}, "spot_dollars_per_hour": {"a": price}}  # fmt: skip
        state.write_text(json.dumps(now))
        answer = hetflow(*asked)
        assert answer.code == 0, answer.stderr
        holds.append(json.loads(answer.stdout)["num_spot"])
    assert holds == [1, 0]
