"""``hetflow export`` of launches, and of machines that ``hetflow rent machines`` chose."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.market import InstanceType, Market
from hetflow.schema.plan import Plan
from hetflow.tests.exporters.launch_cases import plan_of

PROFILES = Path(__file__).parents[2] / "examples" / "virtualflow_6_5"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    files.write(tmp_path / "plan.json", plan_of(("V100", 2, 2), ("P100", 8, 1)))
    return tmp_path / "plan.json"


def test_it_prints_or_writes_the_whole_script(hetflow: Any, plan: Path, tmp_path: Path) -> None:
    asked = ("export", plan, "--to", "slurm", "--hosts", "1x(2xV100),2x(4xP100)")
    script = ("--", "train it.py", "--epochs", "3", "-o", "x")
    printed = hetflow(*asked, *script)
    assert printed.code == 0, printed.stderr
    assert "#SBATCH --nodes=2 --ntasks-per-node=1\n" in printed.stdout
    assert " 'train it.py' --epochs 3 -o x &\n" in printed.stdout
    target = tmp_path / "job.sh"
    assert hetflow(*asked, "-o", target, *script).stdout == ""
    assert target.read_text() == printed.stdout
    again = hetflow(*asked, "-o", target, *script)
    assert again.code == 2
    assert "exists already" in again.stderr
    told = json.loads(hetflow(*asked, "--json", *script).stdout)
    assert told == {"format": "slurm", "text": printed.stdout}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "slurn"), "unknown export format 'slurn'"),
        (("--to", "slurm"), "there is no script to start"),
        (("--to", "pipedream", "--", "a.py"), "pipedream starts no script, got 'a.py'"),
        (("--to", "ray", "--hosts", "1x(2xV100),1x(4xP100)", "--", "a.py"),
         "the plan needs 8 x P100, the 2 hosts have 4"),
        (("--to", "ray", "--hosts", "1x(2xV100", "--", "a.py"), "--hosts '1x(2xV100': cannot read"),
        (("--to", "ray", "--hosts", "hosts.json", "--", "a.py"),
         "--hosts 'hosts.json' is the name of a file"),
        (("--to", "ray", "--name", "V100", "--", "a.py"), "--name 'V100' is not TYPE=NAME"),
        (("--to", "ray", "--determinism", "much", "--", "a.py"), "determinism must be one of"),
        (("--to", "ray", "--checkpoint-every", "5", "--", "a.py"), "--checkpoint-every 5 needs"),
        (("--to", "ray", "--volume", "x", "--", "a.py"), "--volume 'x' is not CLAIM:/PATH"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_line(
    hetflow: Any, plan: Path, options: tuple[str, ...], said: str
) -> None:
    answer = hetflow("export", plan, *options)
    assert answer.code == 2
    assert said in answer.stderr
    assert answer.stdout == ""


def test_a_plan_that_cannot_be_launched_is_not_exported(hetflow: Any, tmp_path: Path) -> None:
    plan = plan_of(("cpu:fast", 1, 1))
    files.write(tmp_path / "emulated.json", plan)
    answer = hetflow("export", tmp_path / "emulated.json", "--to", "slurm", "--", "a.py")
    assert answer.code == 2
    assert "the plan's cpu:fast is emulated: Slurm has no such device" in answer.stderr
    assert "--name cpu:fast=NAME" in answer.stderr
    (tmp_path / "no.json").write_text('{"schema": "hetflow.plan/1"}')
    assert hetflow("export", tmp_path / "no.json", "--to", "slurm", "--", "a.py").code == 2


def test_the_machines_that_were_chosen_become_a_task(hetflow: Any, tmp_path: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")

    def machine(name: str, region: str, dollars: float, spot: float) -> InstanceType:
        return InstanceType(
            name=name, device_type="V100", num_devices=1, cloud="aws", region=region,
            on_demand_dollars_per_hour=dollars, spot_dollars_per_hour=spot,
        )  # fmt: skip

    machines = (machine("p3", "us-east-1", 3.0, 1.2), machine("p3", "us-west-2", 3.1, 1.1))
    market, plan = tmp_path / "market.json", tmp_path / "plan.json"
    files.write(market, Market(instance_types=machines))
    asked = ("rent", "machines", market, "--profiles", PROFILES, "--batch-size", 8192, "--steps",
             1000, "--most-devices", 2, "--deadline-hours", 0.4)  # fmt: skip
    answer = hetflow(*asked, "-o", plan)
    assert answer.code == 0, answer.stderr
    assert files.read(plan, Plan).cluster == Cluster.parse("2x(1xV100)")
    task = hetflow("export", plan, "--to", "skypilot", "--market", market, "--", "a.py")
    assert task.code == 0, task.stderr
    document = yaml.safe_load(task.stdout)
    assert document["num_nodes"] == 2
    places = [(one["infra"], one["use_spot"]) for one in document["resources"]["ordered"]]
    assert places == [
        ("aws/us-west-2", True), ("aws/us-east-1", True),
        ("aws/us-east-1", False), ("aws/us-west-2", False),
    ]  # fmt: skip
    script = hetflow("export", plan, "--to", "hosts", "--market", market, "--checkpoint", "/c",
                     "--", "a.py").stdout  # fmt: skip
    assert "hosts 0 to 1: 1xV100 each; rent aws us-west-2 p3 spot at 1.1 $/h" in script
    assert "--checkpoint /c" in script
    one = tmp_path / "one.json"
    answer = hetflow(*asked, "--deadline-hours", 9, "-o", one)
    assert answer.code == 0, answer.stderr
    script = hetflow("export", one, "--to", "hosts", "--market", market, "--", "a.py").stdout
    assert "# Rent aws us-west-2 p3 spot at 1.1 $/h\n# Start it on the host" in script
    large = hetflow("export", plan, "--to", "skypilot", "--hosts", "1x(2xV100)", "--market", market,
                    "--", "a.py")  # fmt: skip
    assert "the market has no machine with 2 x V100 then" in large.stderr
