"""``hetflow rent machines`` on the command line."""

import json
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.market import InstanceType, Market

PROFILES = Path(__file__).parents[2] / "examples" / "virtualflow_6_5"


def test_the_front_and_the_choice(hetflow, tmp_path: Path) -> None:
    machines = (
        InstanceType(name="v", device_type="V100", on_demand_dollars_per_hour=3.0),
        InstanceType(name="p", device_type="P100", on_demand_dollars_per_hour=1.5),
    )
    files.write(tmp_path / "market.json", Market(instance_types=machines))
    asked = ("rent", "machines", tmp_path / "market.json", "--profiles", PROFILES,
             "--batch-size", 8192, "--steps", 1000, "--most-devices", 2)  # fmt: skip
    answer = hetflow(*asked, "--json")
    assert answer.code == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["choice"] == told["choices"][0]
    assert all(one["is_pareto"] for one in told["choices"])
    table = hetflow(*asked, "--top", 20).stdout
    assert "dearer or slower" in table
    assert "1 x v on demand" in table
    picture = tmp_path / "front.svg"
    assert hetflow(*asked, "--plot", picture).code == 0
    assert "<!-- Pareto front -->" in picture.read_text()
    assert "must end in .png or .svg" in hetflow(*asked, "--plot", "front.jpg").stderr
    late = hetflow(*asked, "--deadline-hours", "0.001")
    assert late.code == 3
    assert "no choice ends within 0.001 h; the soonest takes" in late.stderr
    poor = hetflow(*asked, "--budget", "0.001")
    assert poor.code == 3
    assert "no choice costs 0.001 $ or less; the cheapest is" in poor.stderr
    for flag in ("--budget", "--deadline-hours"):
        assert f"{flag} must be > 0, got nan" in hetflow(*asked, flag, "nan").stderr


def test_throughputs_in_place_of_profiles(hetflow, tmp_path: Path) -> None:
    machines = (
        InstanceType(name="v", device_type="V100", on_demand_dollars_per_hour=3.0),
        InstanceType(name="p", device_type="P100", num_devices=2, on_demand_dollars_per_hour=3.2),
    )
    files.write(tmp_path / "market.json", Market(instance_types=machines))
    (tmp_path / "rates.csv").write_text(
        "model,device_type,steps_per_second,scale_factor\na b,V100,2,1\na b,P100,3,2\nc,V100,1,1\n"
    )
    market = ("rent", "machines", tmp_path / "market.json", "--steps", 7200)
    asked = (*market, "--throughputs", tmp_path / "rates.csv")
    answer = hetflow(*asked, "--model", "a b", "--batch-size", 50, "--json")
    assert answer.code == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["choice"] == found["choices"][0]
    assert [(one["machines"], round(one["dollars"], 6)) for one in found["choices"]] == [
        ({"p on demand": 1}, round(3.2 * 2 / 3, 6))
    ]
    table = hetflow(*asked, "--model", "a b", "--top", 2).stdout
    assert "dearer or slower" in table
    assert "1 x v on demand" in table
    several = hetflow(*asked)
    assert several.code == 2
    assert "of 2 models: a b, c\nhint: choose one, such as --model 'a b'" in several.stderr
    plan = hetflow(*asked, "--model", "c", "-o", tmp_path / "plan.json")
    assert (plan.code, (tmp_path / "plan.json").exists()) == (2, False)
    assert "throughputs make no plan to write" in plan.stderr
    assert "neither profiles nor throughputs are given" in hetflow(*market).stderr
    both = hetflow(*asked, "--profiles", PROFILES)
    assert "both profiles and throughputs are given" in both.stderr
    unsized = hetflow(*market, "--profiles", PROFILES)
    assert "profiles need a batch size\nhint: add --batch-size N" in unsized.stderr


def test_rent_answers_as_its_older_names_do(hetflow, tmp_path: Path) -> None:
    machine = InstanceType(name="v", device_type="V100", on_demand_dollars_per_hour=3.0)
    market = tmp_path / "market.json"
    files.write(market, Market(instance_types=(machine,)))
    which = ("--profiles", PROFILES, "--batch-size", 8192, "--steps", 1000, "--most-devices", 2,
             "--deadline-hours", 900, "--json")  # fmt: skip
    found = hetflow("rent", market, *which)
    assert found.code == 0, found.stderr
    assert found.stdout == hetflow("rent", "machines", market, *which).stdout
    when = ("--rate", "V100=2", "--work-hours", 3, "--json")
    found = hetflow("rent", market, *when)
    assert json.loads(found.stdout)["work_hours"] == 3
    assert found.stdout == hetflow("rent", "prices", market, *when).stdout
    late = hetflow("rent", market, *when, "--deadline-hours", 2)
    assert (late.code, "cannot end within 2 h on any device" in late.stderr) == (3, True)
    assert "within 9 h" in hetflow("rent", market, *when[:-1], "--deadline-hours", 9).stdout


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), "--work-hours is missing"),
        (("--work-hours", 3, "--deadline-hours", 4), "--on-demand is missing"),
        (("--rate", "V100=1"), "--work-hours is missing"),
        (("--rate", "V100=1", "--steps", 3), "--steps and --rate ask two questions"),
        (("--rate", "V100=1", "--on-demand", 3), "--on-demand says nothing with --rate"),
        (("--steps", 3, "--on-demand", 3), "--on-demand says nothing with --steps"),
        (("--work-hours", 3, "--cloud", "aws"), "says nothing of a job under a deadline"),
        (("--steps", 0), "--steps must be >= 1, got 0"),
    ],
)
def test_what_a_question_lacks_or_does_not_read_is_said(hetflow, asked: tuple, said: str) -> None:
    answer = hetflow("rent", "market.json", *asked)
    assert answer.code == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
