"""Price histories on the command line: imported, shown, drawn."""

import json
from pathlib import Path

import pytest

TABLE = "Date,NC6,NC12\n2/28/2020,$0.90,$0.4\n2/29/2020,$0.12,\n3/1/2020,$0.11,$0.2\n"
MACHINES = "Instance,GPU type,# GPUs,On demand $/h\nNC6,K80,1,0.90\nNC12,K80,2,\n"


@pytest.fixture
def market(hetflow, tmp_path: Path) -> Path:
    (tmp_path / "us_east.csv").write_text(TABLE)
    (tmp_path / "machines.csv").write_text(MACHINES)
    target = tmp_path / "market.json"
    answer = hetflow("import", tmp_path / "us_east.csv", "--format", "azure-spot-prices",
                     "--instance-types", tmp_path / "machines.csv", "-o", target)  # fmt: skip
    assert answer.code == 0, answer.stderr
    return target


def test_prices_are_imported_and_shown(hetflow, market: Path) -> None:
    assert json.loads(market.read_text())["schema"] == "hetflow.market/1"
    shown = hetflow("show", market)
    assert shown.code == 0
    (one,) = (line.split() for line in shown.stdout.splitlines() if "us_east  NC6 " in line)
    # Least, median and most, and a day of three at the on-demand price.
    assert one[3:] == ["2020-02-28", "3.0", "0.0", "0.11", "0.12", "0.9", "33.3"]
    (two,) = (line.split() for line in shown.stdout.splitlines() if "us_east  NC12 " in line)
    assert two[3:] == ["2020-02-28", "3.0", "1.0", "0.2", "0.2", "0.4", "-"]


@pytest.mark.parametrize(
    ("options", "said"), [((), "azure NC12"), (("--per-device",), "azure K80")]
)
def test_prices_are_drawn(hetflow, market: Path, tmp_path: Path, options: tuple, said: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "prices.svg"
    answer = hetflow("show", market, "--plot", target, *options)
    assert answer.code == 0, answer.stderr
    assert f"<!-- {said} -->" in target.read_text()


@pytest.mark.parametrize("way", ["--per-device", "--by-cloud"])
def test_a_way_to_draw_prices_is_refused_where_there_are_none(
    hetflow, tmp_path: Path, way: str
) -> None:
    """--per-device drew when machines were there instead, without a word."""
    zone = {"zone": "a", "start": "2024-01-01T00:00:00Z", "tick_seconds": 600, "available": [1, 0]}
    market = tmp_path / "market.json"
    market.write_text(json.dumps({"schema": "hetflow.market/1", "availability": [zone]}))
    answer = hetflow("show", market, "--plot", tmp_path / "prices.svg", way)
    assert answer.code == 2
    assert "this market has no prices to plot" in answer.stderr


def test_a_catalogue_alone_is_a_market(hetflow, tmp_path: Path) -> None:
    table, target = tmp_path / "machines.csv", tmp_path / "market.json"
    table.write_text("Instance,GPU type,# GPUs,On demand $/h,Spot $/h,Egress $/GB,Region\n"
                     "a2-highgpu-1g,A100,1,3.67,1.1,0.02,us-central1\n")  # fmt: skip
    answer = hetflow("import", table, "--format", "instance-types", "-o", target)
    assert answer.code == 0, answer.stderr
    (machine,) = json.loads(target.read_text())["instance_types"]
    assert machine["spot_dollars_per_hour"] == 1.1
    assert machine["egress_dollars_per_gigabyte"] == 0.02
    assert "a2-highgpu-1g" in hetflow("show", target).stdout
    table.write_text("Instance,GPU type,# GPUs\n")
    empty = hetflow("import", table, "--format", "instance-types")
    assert empty.code == 2
    assert "describes no machine" in empty.stderr


def test_a_machine_that_the_table_lacks_is_named(hetflow, tmp_path: Path) -> None:
    (tmp_path / "us_east.csv").write_text(TABLE.replace("NC12", "NC24"))
    (tmp_path / "machines.csv").write_text(MACHINES)
    answer = hetflow("import", tmp_path / "us_east.csv", "--format", "azure-spot-prices",
                     "--instance-types", tmp_path / "machines.csv")  # fmt: skip
    assert answer.code == 2
    assert "does not describe 'NC24'" in answer.stderr
    assert "nearest is 'NC" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing option '--device-type'"),
        (("--device-type", "V100"), "Missing option '--device-memory'"),
        (("--format", "aws-spot-price"), "did you mean 'aws-spot-prices'?"),
    ],
)
def test_what_import_lacks_is_said(hetflow, tmp_path: Path, arguments: tuple, said: str) -> None:
    answer = hetflow("import", tmp_path / "graph.txt", *arguments)
    assert answer.code == 2
    assert said in answer.stderr


def test_strategies_are_replayed(hetflow, market: Path) -> None:
    arguments = ("rent", "prices", market, "--cloud", "azure", "--work-hours", 30,
                 "--rate", "K80=1", "--restart-seconds", 0)  # fmt: skip
    answer = hetflow(*arguments, "--json")
    assert answer.code == 0, answer.stderr
    found = json.loads(answer.stdout)
    without_cloud = hetflow(*arguments[:3], *arguments[5:], "--json")
    assert json.loads(without_cloud.stdout) == found  # the markets have one cloud only
    dollars = {name: one["dollars"] for name, one in found["outcomes"].items()}
    # NC12's price is unknown on the second day, so that who took it (20 cents a GPU) cannot be
    # replayed, and who moves goes to NC6 for 6 hours at 12 cents.
    assert dollars["one_device"] == pytest.approx(24 * 0.9 + 6 * 0.12)
    assert "multi_gpu" in found["refused"]
    assert dollars["dynamic"] == pytest.approx(24 * 0.2 + 6 * 0.12)
    assert found["bound_dollars"] == pytest.approx(dollars["dynamic"])
    kept = market.with_name("report.json")
    table = hetflow(*arguments, "-o", kept).stdout
    assert json.loads(kept.read_text()) == found
    assert hetflow("show", kept).stdout == table
    assert "from 2020-02-28T00:00:00Z" in table
    assert "azure us_east NC12 > azure us_east NC6" in table
    assert "multi_gpu: at 2020-02-29T00:00:00Z no price is known" in table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "K80"), "--rate must be such as V100=9.6, got 'K80'"),
        (("--rate", "K80=nan"), "must be finite and > 0"),
        (("--rate", "H100=1"), "no machine with prices has one of H100"),
        (("--rate", "K80=1", "--start", "2020-02-28T00:00:00"), "is not in UTC; end it with Z"),
        (("--rate", "K80=1", "--start", "2021-02-28T00:00:00Z"), "there are no prices at 2021"),
        (("--rate", "K80=1", "--cloud", "azur"), "hint: did you mean 'azure'?"),
        (("--rate", "K80=1", "--cloud", "gcp"), "--cloud 'gcp' has no price of such devices"),
        (("--rate", "K80=1", "--checkpoint-gigabytes", 2), "of azure has an egress price"),
        (("--rate", "K80=0.01", "--rate", "K80=1", "--work-hours", 999), "cannot end before"),
    ],
)
def test_what_rent_prices_lacks_is_said(hetflow, market: Path, options: tuple, said: str) -> None:
    answer = hetflow("rent", "prices", market, "--work-hours", 3, *options)
    assert answer.code == 2
    assert said in answer.stderr


def test_a_machine_at_a_fixed_price_is_taken_where_it_is_cheaper(
    hetflow, market: Path, tmp_path: Path
) -> None:
    found = json.loads(market.read_text())
    (one, two) = found["instance_types"]
    one["on_demand_dollars_per_hour"] = 0.5  # the history begins at 0.90 for a day
    two["on_demand_dollars_per_hour"] = None
    always = {**one, "name": "NC6s", "cloud": "gcp", "on_demand_dollars_per_hour": None,
              "spot_dollars_per_hour": 0.3}  # fmt: skip
    found["instance_types"].append(always)
    target = tmp_path / "fixed.json"
    target.write_text(json.dumps(found))
    answer = hetflow("rent", "prices", target, "--cloud", "azure", "--work-hours", 30, "--rate",
                     "K80=1", "--restart-seconds", 0, "-o", tmp_path / "report.json")  # fmt: skip
    assert answer.code == 0, answer.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    dollars = {name: one["dollars"] for name, one in report["outcomes"].items()}
    assert dollars["one_device"] == pytest.approx(30 * 0.5)
    # 20 cents a device of NC12 for the day in which its price is known, then NC6's history.
    assert dollars["dynamic"] == pytest.approx(24 * 0.2 + 6 * 0.12)
    assert "azure NC6 on-demand" in answer.stdout
    without_two = hetflow("rent", "prices", target, "--cloud", "gcp", "--work-hours", 30, "--rate",
                          "K80=1", "--restart-seconds", 0, "--json")  # fmt: skip
    assert json.loads(without_two.stdout)["outcomes"]["one_device"]["dollars"] == pytest.approx(9)


def test_prices_that_never_change_are_enough(hetflow, tmp_path: Path) -> None:
    """A market without a history of the devices was refused, whatever it knew of their prices."""
    table, target = tmp_path / "machines.csv", tmp_path / "market.json"
    table.write_text("Instance,GPU type,# GPUs,On demand $/h,Spot $/h,Cloud\n"
                     "p3,V100,1,3,,aws\np3s,V100,4,,8,gcp\n")  # fmt: skip
    assert hetflow("import", table, "--format", "instance-types", "-o", target).code == 0
    asked = ("rent", "prices", target, "--work-hours", 1000, "--restart-seconds", 0)
    answer = hetflow(*asked, "--rate", "V100=1", "--json")
    assert answer.code == 0, answer.stderr
    report = json.loads(answer.stdout)
    dollars = {name: one["dollars"] for name, one in report["outcomes"].items()}
    assert dollars["one_device"] == pytest.approx(3000)
    assert dollars["multi_cloud"] == pytest.approx(2000) == report["bound_dollars"]
    assert hetflow(*asked, "--rate", "H100=1").code == 2
