"""``hetflow rent zones``, and the windows of Can't Be Late with their times."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.market import Availability, Market
from hetflow.tests.handmade import profile

START = "2024-01-01T00:00:00Z"
ASKED = ("--work-hours", 1, "--deadline-hours", 2, "--on-demand", 3, "--spot", 1,
         "--restart-seconds", 0)  # fmt: skip


@pytest.fixture
def market(tmp_path: Path) -> Path:
    """Two zones that take turns of an hour."""
    zones = {"a": (1,) * 6 + (0,) * 6, "b": (0,) * 6 + (1,) * 6}
    windows = tuple(
        Availability(zone=zone, start=START, tick_seconds=600.0, available=ticks * 4)  # type: ignore[arg-type]
        for zone, ticks in zones.items()
    )
    target = tmp_path / "market.json"
    files.write(target, Market(availability=windows))
    return target


def test_zones_are_replayed_and_shown(hetflow, market: Path, tmp_path: Path) -> None:
    kept = tmp_path / "zones.json"
    asked = ("--work-hours", 1.5, "--spot", "b=1", "--move-dollars", 0.1, "--learn-until",
             "2024-01-01T04:00:00Z", "-o", kept)  # fmt: skip
    answer = hetflow("rent", "zones", market, *ASKED, *asked)
    assert answer.code == 2
    assert "--spot must be one price for all zones, or ZONE=DOLLARS of each" in answer.stderr
    answer = hetflow("rent", "zones", market, "--deadline-hours", 2, "--on-demand", 3,
                     "--restart-seconds", 0, "--spot", "a=0.5", *asked)  # fmt: skip
    assert answer.code == 0, answer.stderr
    report = json.loads(kept.read_text())
    assert report["schema"] == "hetflow.rent/1"
    assert report["windows"] == ["2024-01-01T04:00:00Z", "2024-01-01T06:00:00Z"]
    # An hour in a, half an hour in b, and the move between them.
    assert report["bound_dollars"] == pytest.approx([1.1, 1.1])
    assert report["alone_dollars"]["a"] == pytest.approx([2.0, 2.0])
    dollars = {entry["policy"]: entry["dollars"] for entry in report["policies"]}
    assert dollars["greedy"] == pytest.approx([1.1, 1.1])
    assert [one["mean_moves"] for one in report["policies"] if one["policy"] == "greedy"] == [1]
    assert "take " in answer.stdout
    # The history has too few windows: 1.5 h at the lower price, 2 h on demand and a move a tick.
    assert report["expected_dollars_90"] == pytest.approx([0.75, 6 + 12 * 0.1])
    assert "9 in 10 jobs to cost" in answer.stdout
    assert "(only a)" in hetflow("show", kept).stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--deadline-hours", 0.5), 3, "the soonest is 1 h, for 3.00 dollars"),
        (("--policy", "dynamic_program"), 2, "--learn-until TIME"),
        (("--policy", "uniform"), 2, "did you mean 'uniform_progress'?"),
        (("--learn-until", "2030-01-01T00:00:00Z"), 2, "leaves nothing to replay on"),
        (("--learn-until", "2024-01-01T04:00:00"), 2, "is not in UTC"),
        (("--every-hours", 0.01), 2, "must be at least a tick"),
        (("--deadline-hours", 9), 2, "a, b: its 48 ticks end before the deadline"),
    ],
)
def test_what_is_wrong_is_said(hetflow, market: Path, options: tuple, code: int, said: str) -> None:
    answer = hetflow("rent", "zones", market, *ASKED, *options)
    assert answer.code == code, answer.stderr
    assert said in answer.stderr
    assert answer.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("spot", "said"),
    [
        ("us-1aa=1", "did you mean 'us-1a'?"),
        ("us-1a=1", "there is no spot price of zone 'us-1b'"),
        ("cheap", "--spot must be a price or such as us-west-2a=0.97, got 'cheap'"),
        ("nan", "must be >= 0 and finite"),
    ],
)
def test_prices_of_zones_are_checked(hetflow, tmp_path: Path, spot: str, said: str) -> None:
    windows = tuple(
        Availability(zone=zone, start=START, tick_seconds=600.0, available=(1,) * 12)
        for zone in ("us-1a", "us-1b")
    )
    files.write(tmp_path / "market.json", Market(availability=windows))
    answer = hetflow("rent", "zones", tmp_path / "market.json", "--work-hours", 1,
                     "--deadline-hours", 2, "--on-demand", 3, "--spot", spot)  # fmt: skip
    assert answer.code == 2
    assert said in answer.stderr


def test_published_windows_get_their_place_in_time(hetflow, tmp_path: Path) -> None:
    for name, offset, ticks in (("0", 3, [0, 1, 1]), ("1", 5, [1, 0, 0])):  # 1 is gone
        document = {
            "original_trace": "data/us-west-2a.json",
            "metadata": {"gap_seconds": 600, "start_time": offset}, "data": ticks,
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    target = tmp_path / "out" / "market.json"
    target.parent.mkdir()
    answer = hetflow("import", tmp_path, "--format", "cant-be-late", "--trace-start", START, "-o",
                     target)  # fmt: skip
    assert answer.code == 0, answer.stderr
    windows = files.read(target, Market).availability
    assert [(one.zone, one.start) for one in windows] == [
        ("us-west-2a", "2024-01-01T00:30:00Z"), ("us-west-2a", "2024-01-01T00:50:00Z"),
    ]  # fmt: skip
    # Joined, the tick that both windows have counts once: there, gone, gone, there, there.
    odds = hetflow("rent", "odds", target, "--json")
    (zone,) = json.loads(odds.stdout)["zones"]
    assert (zone["num_windows"], zone["available_share"]) == (2, pytest.approx(3 / 5))
    unplaced = hetflow("import", tmp_path, "--format", "cant-be-late", "-o", tmp_path / "out" / "m")
    assert unplaced.code == 0, unplaced.stderr
    answer = hetflow("rent", "zones", tmp_path / "out" / "m", *ASKED)
    assert answer.code == 2
    assert "a window does not say when it begins" in answer.stderr
    (tmp_path / "1.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1]}))
    answer = hetflow("import", tmp_path, "--format", "cant-be-late", "--trace-start", START,
                     "--values", "preempted")  # fmt: skip
    assert answer.code == 2
    assert "1.json: original_trace and metadata.start_time must say" in answer.stderr
    answer = hetflow("import", tmp_path, "--format", "cant-be-late", "--trace-start", "today")
    assert answer.code == 2
    assert "--trace-start: time must be a time such as" in answer.stderr


def test_more_zones_than_one_can_learn_are_still_compared(hetflow, tmp_path: Path) -> None:
    """Nine zones with --learn-until failed whole, though four of five policies learn nothing."""
    ticks = [1, 1, 0, 1, 1, 1] * 6
    windows = tuple(
        Availability(
            zone=f"z{shift}", start=START, tick_seconds=600.0,
            available=tuple(ticks[shift:] + ticks[:shift]),  # type: ignore[arg-type]
        )
        for shift in range(7)
    )  # fmt: skip
    market = tmp_path / "seven.json"
    files.write(market, Market(availability=windows))
    learning = ("--learn-until", "2024-01-01T02:00:00Z")
    short = ("--work-hours", 1.65, "--deadline-hours", 1.66, "--on-demand", 3, "--spot", 1,
             "--restart-seconds", 0)  # fmt: skip
    answer = hetflow("rent", "zones", market, *short, *learning)
    assert answer.code == 0, answer.stderr
    assert "greedy" in answer.stdout
    assert "dynamic_program was left out: it learns up to 6 zones" in answer.stdout
    asked = hetflow("rent", "zones", market, *short, *learning, "--policy", "dynamic_program")
    assert asked.code == 2
    assert "it takes 1 to 6" in asked.stderr


def test_short_ticks_keep_to_the_tables_room(
    hetflow, market: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("rent", "zones", market, *ASKED, "--learn-until", "2024-01-01T04:00:00Z", "--json")
    assert "decision_seconds" not in json.loads(hetflow(*asked).stdout)
    monkeypatch.setattr("hetflow.solvers.market.dynamic_program.MOST_BYTES", 70_000)
    answer = hetflow(*asked)
    assert answer.code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["decision_seconds"] > 600
    assert all(entry["missed_deadlines"] == 0 for entry in report["policies"])


def test_prices_of_zones_are_never_another_zones(hetflow, market: Path) -> None:
    """Windows one by one had the first zone's price, whatever their own."""
    answer = hetflow("rent", market, "--work-hours", 1, "--deadline-hours", 2, "--on-demand", 3,
                     "--spot", "a=0.5", "--spot", "b=1")  # fmt: skip
    assert answer.code == 2
    assert "--spot is by zone, and windows of a and b are replayed one by one" in answer.stderr
    assert "add --between-zones" in answer.stderr


def test_types_of_unlike_speed_share_one_deadline_and_one_table(hetflow, tmp_path: Path) -> None:
    market = tmp_path / "types.json"
    windows = tuple(
        Availability(
            zone="z", instance_type=name, start="2024-01-01T00:00:00Z", tick_seconds=600.0,
            available=there * 6,
        )
        for name, there in (("fast", (1, 0, 1, 1)), ("slow", (1, 1, 1, 0)))
    )  # fmt: skip
    files.write(market, Market(availability=windows))
    asked = ("rent", market, "--between-zones", "--work-hours", 1, "--deadline-hours", 2,
             "--restart-seconds", 60, "--on-demand", "fast=3", "--on-demand", "slow=1",
             "--spot", "fast=1", "--spot", "slow=0.2")  # fmt: skip
    answer = hetflow(*asked, "--machine-speed", "fast=1", "--machine-speed", "slow=0.4", "--json")
    assert answer.code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["machine_speeds"] == {"z fast": 1.0, "z slow": 0.4}
    assert report["on_demand_dollars_per_hour"] == {"z fast": 3.0, "z slow": 1.0}
    assert set(report["alone_dollars"]) == {"z fast"}  # the slow type alone ends too late
    for entry in report["policies"]:
        assert entry["missed_deadlines"] == 0
        assert entry["mean_over_bound"] >= 1 - 1e-6
    # Plans say it too: samples a second, relative to the fastest.
    for name, speed in (("fast", 1.0), ("slow", 2.5)):
        one = profile(name, speed)
        files.write(tmp_path / f"{name}.json", one)
        hetflow("solve", "split", "--profiles", tmp_path / f"{name}.json", "--gpus", f"1x{name}",
                "--batch-size", 8, "-o", tmp_path / f"plan-{name}.json")  # fmt: skip
    plans = [word for name in ("fast", "slow")
             for word in ("--machine-speed", f"{name}={tmp_path}/plan-{name}.json")]  # fmt: skip
    answer = hetflow(*asked, *plans, "--json")
    assert answer.code == 0, answer.stderr
    # A step of 8 samples takes 10 and 25 ms, and 4 ms of updates.
    speeds = json.loads(answer.stdout)["machine_speeds"]
    assert speeds == pytest.approx({"z fast": 1.0, "z slow": 14 / 29})
    answer = hetflow(*asked, "--machine-speed", "fast=1")
    assert answer.code == 2
    assert answer.stderr == (
        "hetflow: there is no speed of zone 'z slow'\nhint: add --machine-speed slow=SPEED\n"
    )
    answer = hetflow(*asked, "--machine-speed", "fsat=1")
    assert "did you mean 'fast'?" in answer.stderr
