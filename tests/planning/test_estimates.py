"""Plans made from estimated profiles say so, wherever they are shown."""

from dataclasses import replace

import pytest

import hetflow
from hetflow.formats.reports.explain import explain, explanation_document, explanation_table
from hetflow.formats.reports.tables import table_of
from hetflow.planning.costs.device_table import spec_of
from hetflow.planning.costs.efficiency import ESTIMATED_ERROR, RATIO_ERROR
from hetflow.planning.costs.estimate import Estimator, estimated_profile
from hetflow.profilers.estimate import specs_of
from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.layers import (
    LayerCounts,
    LayerTable,
    LayerTrace,
    ModelCounts,
    Operator,
    PassCounts,
)
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile


def passes(size: int) -> PassCounts:
    product = Operator(name="mm", dtype="float32", flops=1e12 * size, num_bytes=10**8)
    return PassCounts(
        batch_size=size, forward=(product,), backward=(product, product), kept_bytes=10**8 * size,
        peak_bytes=2 * 10**8 * size, batch_bytes=10**6 * size,
    )  # fmt: skip


def layer(name: str) -> LayerCounts:
    product = Operator(name="mm", dtype="float32", flops=2e12, num_bytes=10**8)
    return LayerCounts(
        id=name, op="Linear", forward=(product,), backward=(product, product),
        activation_bytes=10**6, weight_bytes=10**8, stashed_bytes=2 * 10**8, workspace_bytes=0,
    )  # fmt: skip


COUNTS = ModelCounts(
    weight_bytes=4 * 10**8,
    num_parameters=10**8,
    standing_bytes=12 * 10**8,
    optimizer=OptimizerState(name="sgd-momentum", state_bytes_per_weight_byte=1.0),
    update=(),
    update_workspace_bytes=0,
    passes=tuple(map(passes, (1, 2, 4, 8, 16))),
    tables=(
        LayerTable(
            whole=passes(8),
            layers=tuple(layer(name) for name in "abcd"),
            edges=(("a", "b"), ("b", "c"), ("c", "d")),
            trace=LayerTrace(way="fx"),
        ),
    ),
)


def profile(name: str) -> Profile:
    return estimated_profile(COUNTS, Estimator(spec=spec_of(name)), model="toy")


def shown(plan: Plan) -> str:
    explained = explain(plan) if plan.kind == "split" else explain(plan)
    assert explanation_document(explained)["estimated"] is True
    return f"{table_of(plan)}\n{explanation_table(explained)}"


@pytest.mark.parametrize("strategy", ["split", "pipeline"])
def test_a_plan_from_estimates_says_so_everywhere(strategy: str) -> None:
    plan = hetflow.solve(
        [profile("V100"), profile("H100")], "2xV100,2xH100", batch_size=64, strategy=strategy,
        fastest=True,
    )  # fmt: skip
    assert plan.estimates
    used = {estimate.device_type for estimate in plan.estimates}
    text = shown(plan)
    for device_type in used:
        assert text.count(f"{device_type} estimated, not measured") == 2  # table, explanation
        assert f"{device_type} (estimated)" in text
    assert "the estimates allow" in text
    assert files.from_json(files.to_json(plan), type(plan)) == plan
    step = plan.predicted.step_seconds
    assert plan.predicted.step_seconds_low == pytest.approx(step * (1 - ESTIMATED_ERROR.products))
    assert hetflow.check(plan, [profile("V100"), profile("H100")], "2xV100,2xH100") == []


def test_a_plan_of_three_dimensions_says_so_too() -> None:
    plan = hetflow.solve(
        [profile("V100"), profile("H100")], "2xV100,2xH100", batch_size=64, strategy="parallel"
    )
    assert plan.estimates
    for estimate in plan.estimates:
        assert str(estimate) in table_of(plan)


def test_only_types_in_use_are_named() -> None:
    measured = replace(profile("V100"), estimate=None)
    plan = hetflow.solve([measured, profile("K80")], "4xV100", batch_size=64, strategy="split")
    assert plan.estimates == ()
    assert "estimated" not in table_of(plan)


def test_an_estimated_profile_is_shown_as_such() -> None:
    text = table_of(profile("H100"))
    assert text.startswith("toy on H100 (estimated): ")
    assert "figures of H100-SXM5-80GB" in text


def test_estimated_and_measured_devices_take_two_commands() -> None:
    assert [spec.name for spec in specs_of(["spec:V100,spec:H100-PCIE-80GB"])] == [
        "V100-SXM2-16GB",
        "H100-PCIE-80GB",
    ]
    assert specs_of(["cpu"]) == ()
    with pytest.raises(ProblemError, match='devices="spec:V100" is estimated and cpu is measured'):
        specs_of(["spec:V100", "cpu"])
    with pytest.raises(ProblemError, match="A100 is asked for twice"):
        specs_of(["spec:A100", "spec:A100-SXM4-80GB"])
    with pytest.raises(ProblemError, match="nothing of them is measured"):
        hetflow.profile("zoo:mlp", ["spec:V100"], effort="quick")
    with pytest.raises(ProblemError, match="are for estimates"):
        hetflow.profile("zoo:mlp", ["cpu"], precision="tf32")


def test_a_split_over_estimated_types_says_what_wrong_ratios_cost() -> None:
    """A V100 with a fourth of the batch or less, so most of its error is lost."""
    profiles = [profile("V100"), profile("H100")]
    plan = hetflow.solve(profiles, "1xV100,1xH100", batch_size=64, strategy="split")
    samples = {group.device_type: group.device_batch_size for group in plan.groups}
    lost = RATIO_ERROR.products * (1 - samples["V100"] / 64)
    assert f"if V100 is {RATIO_ERROR.products:.0%} slower" in shown(plan)
    assert f"a step is {lost:.0%} longer than with the best shares" in shown(plan)


def test_a_split_over_a_measured_and_an_estimated_type_trusts_the_measured_one_more() -> None:
    known = replace(profile("V100"), estimate=None, step_error=0.01)
    plan = hetflow.solve([known, profile("H100")], "1xV100,1xH100", batch_size=64, strategy="split")
    paper = hetflow.solve(
        [known, profile("H100")], "1xV100,1xH100", batch_size=64, strategy="split", fastest=True
    )
    assert "as slow as their errors allow" in plan.proof.method
    assert plan.predicted.step_seconds_high <= paper.predicted.step_seconds_high
    assert plan.predicted.step_seconds <= paper.predicted.step_seconds * 1.02
