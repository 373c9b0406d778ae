"""``hetflow solve --market``: a plan of each kind says what its devices cost."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.schema import files
from hetflow.schema.cluster import Cluster, DeviceType, ServerGroup
from hetflow.schema.market import InstanceType, Market
from hetflow.schema.plan import Plan
from hetflow.schema.profile import LayerGraph, LayerNode, Profile
from hetflow.tests.handmade import profile

Hetflow = Callable[..., Any]
ON_DEMAND = {"V100": 3.0, "P100": 1.5}
SPOT = {"V100": 0.9}
KINDS = {
    "split": (),
    "pipeline": ("--schedule", "interleaved", "--link-bytes-per-second", "1e9"),
    "parallel": ("--top", "3", "--link-bytes-per-second", "1e9"),
    "auto": ("--link-bytes-per-second", "1e9"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    for name, slowness in (("V100", 1.0), ("P100", 2.0)):
        files.write(tmp_path / "profiles" / f"{name}.json", layered(name, slowness))
    machines = (
        InstanceType(name="p3", device_type="v100", num_devices=4, on_demand_dollars_per_hour=12.0,
                     spot_dollars_per_hour=3.6),
        InstanceType(name="p1", device_type="P100", on_demand_dollars_per_hour=1.5),
    )  # fmt: skip
    files.write(tmp_path / "market.json", Market(instance_types=machines))
    return tmp_path


def layered(device_type: str, slowness: float) -> Profile:
    nodes = tuple(
        LayerNode(
            id=f"block{i}",
            op="Block",
            forward_seconds=slowness * 0.01,
            backward_seconds=slowness * 0.02,
            activation_bytes=1 << 16,
            weight_bytes=25 << 20,
        )
        for i in range(4)
    )
    edges = tuple((f"block{i}", f"block{i + 1}") for i in range(3))
    graph = LayerGraph(microbatch_size=8, nodes=nodes, edges=edges)
    return replace(profile(device_type, slowness), layers=graph)


def plan_of(hetflow: Hetflow, folder: Path, kind: str, *more: object, pool: str) -> Plan:
    out = folder / "plan.json"
    asked = ("--strategy", kind, "--gpus", pool, "--batch-size", 64, *KINDS[kind], *more)
    out_too = ("-o", out, "--force", "--json")
    answer = hetflow("solve", "--profiles", folder / "profiles", *asked, *out_too)
    assert answer.code == 0, answer.stderr
    plan = files.read_plan(out)
    assert json.loads(answer.stdout) == files.to_plain(plan)
    return plan


def assert_priced(one: Any, devices: Mapping[str, int], prices: Mapping[str, float]) -> None:
    """The dollars of the devices, counted by hand."""
    hourly = sum(number * prices[name] for name, number in devices.items())
    predicted = one.predicted
    assert predicted.dollars_per_hour == pytest.approx(hourly)
    samples_per_hour = 3600 * 64 / predicted.step_seconds
    assert predicted.dollars_per_million_samples == pytest.approx(hourly / samples_per_hour * 1e6)


def without_dollars(plan: Plan) -> dict[str, Any]:
    found = files.to_plain(plan)
    found["predicted"] = {k: v for k, v in found["predicted"].items() if "dollars" not in k}
    for key in ("provenance", "cluster", "alternatives"):  # a Pareto table knows dollars, if told
        found.pop(key, None)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_its_dollars_and_stays_as_it_was(
    hetflow: Hetflow, folder: Path, kind: str
) -> None:
    pool = "4xV100" if kind == "pipeline" else "2xV100,2xP100"
    market = ("--market", folder / "market.json")
    before = plan_of(hetflow, folder, kind, pool=pool)
    assert before.predicted.dollars_per_hour is None
    plan = plan_of(hetflow, folder, kind, *market, pool=pool)
    assert without_dollars(plan) == without_dollars(before)
    assert_priced(plan, plan.devices_by_type, ON_DEMAND | SPOT)
    if kind == "pipeline":
        assert sum(stage.num_replicas for stage in plan.stages) > plan.num_devices
        assert plan.devices_by_type == {"V100": plan.num_devices}
    for other in plan.alternatives if kind == "parallel" else ():
        assert_priced(other, other.devices_by_type, ON_DEMAND | SPOT)
    assert plan.provenance is not None
    told = plan.provenance["prices"]
    assert told["V100"] == {"dollars_per_hour": 0.9, "machine": "p3 spot"}
    table = hetflow("show", folder / "plan.json").stdout
    assert f"{plan.predicted.dollars_per_hour:.2f} $/hour" in table
    assert f"{plan.predicted.dollars_per_million_samples:.4g} $/million samples" in table
    judged = hetflow("check", folder / "plan.json", "--profiles", folder / "profiles")
    assert judged.code == 0, judged.stderr
    wrong = replace(plan.predicted, dollars_per_hour=plan.predicted.dollars_per_hour * 2)
    files.write(folder / "wrong.json", replace(plan, predicted=wrong))
    refused = hetflow("check", folder / "wrong.json", "--profiles", folder / "profiles")
    assert refused.code == 2
    assert "the cluster's prices give" in refused.stderr
    assert "an hour's samples cost" in refused.stderr
    bought = plan_of(hetflow, folder, kind, *market, "--no-spot", pool=pool)
    assert_priced(bought, bought.devices_by_type, ON_DEMAND)


def test_a_cluster_files_own_prices_count_too(hetflow: Hetflow, folder: Path) -> None:
    pool = Cluster(
        device_types={"V100": DeviceType(dollars_per_hour=2.0)},
        servers=(ServerGroup(count=1, devices={"V100": 2}),),
    )
    files.write(folder / "pool.json", pool)
    asked = ("solve", "split", "--profiles", folder / "profiles", "--batch-size", 64,
             "--cluster", folder / "pool.json")  # fmt: skip
    own = json.loads(hetflow(*asked).stdout)
    assert own["predicted"]["dollars_per_hour"] == 4.0
    other = json.loads(hetflow(*asked, "--market", folder / "market.json").stdout)
    assert other["predicted"]["dollars_per_hour"] == pytest.approx(1.8)


def test_what_has_no_price_is_named(hetflow: Hetflow, folder: Path) -> None:
    asked = ("solve", "--profiles", folder / "profiles", "--batch-size", 64)
    market = ("--market", folder / "market.json")
    wrong = hetflow(*asked, "--gpus", "2xP10", *market)
    assert wrong.code == 2
    assert "the market has no price of 'P10'; did you mean 'P100'?" in wrong.stderr
    never = hetflow(*asked, "--gpus", "2xP100", *market, "--spot")
    assert never.code == 2
    assert "no spot price of 'P100'" in never.stderr
    assert "it has another one: leave --spot out" in never.stderr
    for flag in ("--spot", "--no-spot"):
        bare = hetflow(*asked, "--gpus", "2xV100", flag)
        assert bare.code == 2
        assert "a kind of prices is given, and no market\nhint: add --market FILE" in bare.stderr
    timed = hetflow(*asked, "--gpus", "2xV100", "--at", "2020-03-07T00:00:00Z")
    assert "a time of prices is given, and no market" in timed.stderr
    cheap = json.loads(hetflow(*asked, "--gpus", "2xv100", *market, "--spot").stdout)
    assert cheap["predicted"]["dollars_per_hour"] == pytest.approx(1.8)


def test_prices_come_in_any_form_of_market_data(hetflow: Hetflow, folder: Path) -> None:
    (folder / "machines.csv").write_text("Instance,GPU type,# GPUs\np3,V100,4\np1,P100,1\n")
    (folder / "prices.csv").write_text(
        "Time,Cloud,Zone,Instance,$/h\n2026-03-01T00:00:00Z,own,a,p3,8\n"
        "2026-03-01T00:00:00Z,own,a,p1,1\n2026-03-02T00:00:00Z,own,a,p3,4\n"
    )
    markets = ("--market", folder / "machines.csv", "--market", folder / "prices.csv")
    plan = plan_of(hetflow, folder, "split", *markets, pool="1xV100,1xP100")
    assert plan.predicted.dollars_per_hour == pytest.approx(4 / 4 + 1)
    done = hetflow("solve", "--profiles", folder / "profiles", "--gpus", "1xV100",
                   "--batch-size", 8, "--market", folder / "profiles" / "V100.json")  # fmt: skip
    assert done.code == 2
    assert "V100.json" in done.stderr
