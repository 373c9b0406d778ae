"""Pipelines correct layers: a stage's layers take what its passes took, and only they change."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.planning.correcting import Correction, correct
from hetflow.planning.costs.observed import Run
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.profile import (
    BatchPoint,
    Emulation,
    LayerGraph,
    LayerNode,
    PipelineCosts,
    Profile,
)
from hetflow.schema.run import DeviceRun, MeasuredTerm, MeasuredTerms, RunRecord, StageRun
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage

SGD = OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0)
NAMES = ("a", "b", "c", "d")


def graph(size: int, unit: float) -> LayerGraph:
    return LayerGraph(
        microbatch_size=size,
        nodes=tuple(
            LayerNode(
                id=name,
                op="linear",
                forward_seconds=unit * (index + 1),
                backward_seconds=2 * unit * (index + 1),
                activation_bytes=8,
                weight_bytes=8,
            )
            for index, name in enumerate(NAMES)
        ),
        edges=tuple(zip(NAMES, NAMES[1:], strict=False)),
    )


def profile(**fields: Any) -> Profile:
    given = {"layers": graph(4, 0.01), "more_layers": (graph(8, 0.02),), **fields}
    return Profile(
        model="m",
        device_type="A",
        device_memory_bytes=1 << 20,
        weight_bytes=32,
        update_seconds=0.001,
        batch_curve=(BatchPoint(batch_size=4, step_seconds=0.3, peak_memory_bytes=1),),
        optimizer=SGD,
        **given,
    )


COSTS = PipelineCosts(pass_seconds=0.002, message_seconds=0.001, fixed_seconds=0.01)


def run_of(
    took: dict[tuple[str, ...], tuple[float, float]],
    *,
    name: str = "r",
    step: float = 1.0,
    recompute: bool = False,
    size: int = 4,
) -> Run:
    stages = tuple(
        pipeline_stage(
            layers=layers,
            num_replicas=1,
            device_type="A",
            first_device=index,
            num_in_flight=1,
            weight_versions=1,
            seconds_per_input=0.1,
            compute_seconds=0.1,
            output_seconds=0.0,
            memory_bytes=1,
        )
        for index, layers in enumerate(took)
    )
    plan = pipeline_plan(
        model="m",
        global_batch_size=16,
        microbatch_size=size,
        num_microbatches=16 // size,
        schedule="1f1b",
        recompute=recompute,
        stages=stages,
        predicted=Prediction(step_seconds=1.0, samples_per_second=16.0),
        proof=Proof(termination="feasible", objective=1.0, lower_bound=None, gap=None, method="-"),
        noam=2,
        stage_cost="ring",
        solved="flat",
        optimizer=SGD,
    )
    term = MeasuredTerm(seconds=0.01)
    devices = tuple(
        DeviceRun(
            rank=index,
            device_type="A",
            host="h",
            num_samples=1,
            num_steps=30,
            predicted_compute_seconds=None,
            pass_seconds=None,
            compute_seconds=None,
            sync_seconds=0.01,
            update_seconds=0.01,
            step_seconds=step,
            step_seconds_spread=None,
            peak_memory_bytes=None,
            terms=MeasuredTerms(
                num_steps=27, step=MeasuredTerm(seconds=step), sync=term, update=term
            ),
            stages=(
                StageRun(
                    stage=index,
                    forward=MeasuredTerm(seconds=forward),
                    backward=MeasuredTerm(seconds=backward),
                ),
            ),
        )
        for index, (forward, backward) in enumerate(took.values())
    )
    record = RunRecord(
        plan=plan,
        status="done",
        exit_code=0,
        world_size=len(devices),
        wall_seconds=9.0,
        num_steps=30,
        predicted_step_seconds=None,
        measured_step_seconds=step,
        step_seconds_error=None,
        final_loss=None,
        parameters_digest=None,
        devices=devices,
    )
    return Run(name=name, record=record)


def corrected(before: Profile, *runs: Run, step: float | None = None) -> Correction:
    """``step`` is what the cost model makes of the corrected layers, beside the fixed cost.

    It waits for 20 messages.
    """

    def retime(plan: Plan, profiles: Sequence[Profile]) -> float | None:
        costs = profiles[0].pipeline
        if step is None or costs is None:
            return step
        return step + costs.fixed_seconds + 20 * (costs.message_seconds - COSTS.message_seconds)

    return correct([before], runs, corrected_at="now", retime=retime)


def times(profile: Profile, size: int = 4) -> dict[str, tuple[float, float]]:
    (table,) = (t for t in profile.layer_tables if t.microbatch_size == size)
    return {n.id: (n.forward_seconds, n.backward_seconds) for n in table.nodes}


AS_PREDICTED = {("a", "b"): (0.032, 0.062), ("c", "d"): (0.072, 0.142)}
"""With 0.002 a pass beyond the layers."""


def test_a_run_as_predicted_changes_nothing() -> None:
    before = profile(pipeline=COSTS)
    found = corrected(before, run_of(AS_PREDICTED), step=1.0 - COSTS.fixed_seconds)
    assert found.profiles == (before,)
    again = run_of({("a", "b"): (0.032, 0.092), ("c", "d"): (0.072, 0.212)}, recompute=True)
    assert corrected(before, again, step=1.0 - COSTS.fixed_seconds).profiles == (before,)


def test_layers_of_a_stage_take_what_its_passes_took_at_every_size() -> None:
    run = run_of({("a", "b"): (0.062, 0.092), ("c", "d"): (0.072, 0.142)})
    (after,) = corrected(profile(pipeline=COSTS), run).profiles
    assert times(after)["a"] == pytest.approx((0.02, 0.03))
    assert times(after)["b"] == pytest.approx((0.04, 0.06))
    assert times(after)["c"] == pytest.approx((0.03, 0.06))
    assert times(after, 8)["b"] == pytest.approx((0.08, 0.12))


def test_each_size_takes_what_its_own_passes_took() -> None:
    small = run_of({NAMES: (0.202, 0.402)})  # twice what was predicted
    large = run_of({NAMES: (0.202, 0.402)}, name="large", size=8)  # as predicted
    (after,) = corrected(profile(pipeline=COSTS), small, large).profiles
    assert times(after)["b"] == pytest.approx((0.04, 0.08))
    assert times(after, 8)["b"] == pytest.approx(times(profile(), 8)["b"])


def test_layers_that_ran_nowhere_are_scaled_as_those_that_did() -> None:
    run = run_of({("a", "b"): (0.06, 0.03)})
    (after,) = corrected(profile(), run).profiles
    assert times(after)["d"] == pytest.approx((0.08, 0.04))


def test_what_is_left_of_the_step_is_its_fixed_cost() -> None:
    before = profile(pipeline=COSTS)
    (after,) = corrected(before, run_of(AS_PREDICTED), step=0.9).profiles
    assert after.pipeline is not None
    assert after.pipeline.fixed_seconds == pytest.approx(0.1)
    (after,) = corrected(before, run_of(AS_PREDICTED), step=1.5).profiles
    assert after.pipeline is not None
    assert after.pipeline.fixed_seconds == after.pipeline.message_seconds == 0.0


def test_where_a_fixed_cost_would_be_negative_messages_cost_less() -> None:
    (after,) = corrected(profile(pipeline=COSTS), run_of(AS_PREDICTED), step=1.008).profiles
    assert after.pipeline is not None
    assert after.pipeline.fixed_seconds == 0.0
    assert after.pipeline.message_seconds == pytest.approx(0.0006, rel=1e-4)


def test_one_disturbed_run_of_three_moves_nothing() -> None:
    quiet = [run_of(AS_PREDICTED, name=name) for name in ("x", "y")]
    slow = {layers: (3 * ahead, 3 * back) for layers, (ahead, back) in AS_PREDICTED.items()}
    disturbed = run_of(slow, name="z", step=3.0)
    before = profile(pipeline=COSTS)
    found = corrected(before, *quiet, disturbed, step=1.0 - COSTS.fixed_seconds)
    (after,) = found.profiles
    assert (times(after), after.pipeline) == (times(before), COSTS)


def test_passes_shorter_than_their_own_cost_leave_layers_some_time() -> None:
    before = profile(pipeline=replace(COSTS, pass_seconds=0.05))
    (after,) = corrected(before, run_of({NAMES: (0.04, 0.5)})).profiles
    assert after.pipeline is not None
    assert after.pipeline.pass_seconds == 0.02
    assert sum(forward for forward, _ in times(after).values()) == pytest.approx(0.02)


def test_a_step_that_cannot_be_predicted_anew_is_said() -> None:
    """Its stages' passes correct the layers, and the fixed cost stays."""
    found = corrected(profile(pipeline=COSTS), run_of({NAMES: (0.4, 0.5)}), step=None)
    assert found.profiles[0].pipeline == COSTS
    assert "the rest of its step" in found.remarks[0]
    assert corrected(profile(), run_of({NAMES: (0.4, 0.5)}), step=None).remarks == ()


def test_emulated_stages_and_other_sizes_stay_and_are_named() -> None:
    emulated = profile(emulation=Emulation(speed=0.5))
    found = corrected(emulated, run_of({NAMES: (0.4, 0.5)}))
    assert found.profiles == (emulated,)
    assert "emulated" in found.remarks[0]
    other = profile(layers=graph(8, 0.02), more_layers=())
    found = corrected(other, run_of({NAMES: (0.4, 0.5)}))
    assert found.profiles == (other,)
    assert "no layers as its stage 0" in found.remarks[0]


seconds = st.floats(min_value=1e-4, max_value=1.0)


@given(seconds, seconds, seconds, seconds, seconds, st.booleans())
def test_stages_take_what_they_took_and_nothing_is_negative(
    first: float, second: float, third: float, fourth: float, own: float, recompute: bool
) -> None:
    took = {("a", "b"): (first, second), ("c", "d"): (third, fourth)}
    before = profile(pipeline=replace(COSTS, pass_seconds=own))
    (after,) = corrected(before, run_of(took, recompute=recompute), step=0.5).profiles
    assert after.pipeline is not None
    found, beside = times(after), after.pipeline.pass_seconds
    assert beside <= own
    for layers, (forward, backward) in took.items():
        ahead = sum(found[name][0] for name in layers)
        back = sum(found[name][1] for name in layers)
        assert ahead + beside == pytest.approx(forward)
        if not recompute:
            assert back + beside == pytest.approx(backward)
        elif backward > forward:
            assert back + ahead + beside == pytest.approx(backward)


@given(seconds, seconds, seconds)
def test_the_order_of_runs_does_not_matter(first: float, second: float, third: float) -> None:
    runs = [
        run_of({NAMES: (value, 2 * value)}, name=name)
        for name, value in (("x", first), ("y", second), ("z", third))
    ]
    before = profile(pipeline=COSTS)
    one = corrected(before, *runs, step=0.5)
    assert corrected(before, *reversed(runs), step=0.5) == one
