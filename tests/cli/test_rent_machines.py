"""``hetflow rent machines`` on the command line."""

import json
from pathlib import Path

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
