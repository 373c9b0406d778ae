"""The planner's steps against the virtual clock's, for plans whose questions a seed drew."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.runtime.pipeline.trace import layers_of
from hetflow.schema.plan import Plan, Prediction, Proof, Stage
from hetflow.tests.plan_parts import parallel_plan_of, replica_group
from hetflow.tests.testing.hosts import real_types

from . import planned
from .asked_plans import Trial, answers, trials

NUMBERS = {"split": 3, "pipeline": 6, "parallel": 3}


def tolerance(plan: Plan) -> float:
    """How far apart a plan's two steps may be, as docs/gpus.md says and why."""
    return 0.05 if plan.kind == "parallel" else 0.04


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Splits, pipelines and plans of three dimensions, each over several types."""
    if real_types():
        pytest.skip("this machine has GPUs of its own")
    found = answers()
    assert Counter(plan.kind for plan in found) == NUMBERS
    assert all(len(plan.devices_by_type) > 1 for plan in found)
    return found


def of_two_tensor_parallel_stages() -> Plan:
    """Two V100 share the first half of the model, two A100 the second."""
    names = [layer.id for layer in layers_of(planned.model_of()).layers]
    first = names.index("blocks.2.norms.0")
    return parallel_plan_of(
        model="planned",
        global_batch_size=48,
        microbatch_size=8,
        num_microbatches=6,
        schedule="1f1b",
        num_model_chunks=1,
        stages=tuple(
            Stage(
                layers=tuple(layers),
                replicas=(
                    replica_group(
                        device_type=kind, tensor_parallel_size=2, num_replicas=1, samples=48
                    ),
                ),
            )
            for kind, layers in (("V100", names[:first]), ("A100", names[first:]))
        ),
        predicted=Prediction(step_seconds=1.0, samples_per_second=48.0),
        proof=Proof(
            termination="feasible", objective=1.0, lower_bound=None, gap=None, method="by hand"
        ),
    )


TWO_STAGES = of_two_tensor_parallel_stages()


def in_two_processes(plan: Plan) -> bool:
    """A pipeline of one device a stage whose step is planned well."""
    return plan.kind == "pipeline" and plan.num_devices == len(plan.stages) == 2


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory, plans: list[Plan]) -> list[Trial]:
    """All plans, then that of two tensor-parallel stages, which train in the same processes."""
    return in_order([*plans, TWO_STAGES], tmp_path_factory.mktemp("as-it-is"), "none")


@pytest.fixture(scope="module")
def on_one_stream(tmp_path_factory: pytest.TempPathFactory, plans: list[Plan]) -> list[Trial]:
    """Pipelines of two stages whose receives wait for all earlier passes."""
    chosen = [*filter(in_two_processes, plans), TWO_STAGES]
    return in_order(chosen, tmp_path_factory.mktemp("on-one-stream"), "one-stream")


def in_order(plans: list[Plan], folder: Path, fault: str) -> list[Trial]:
    """The plans' trials."""
    return sorted(trials(folder, plans, fault), key=lambda one: plans.index(one.plan))


def off(found: list[Trial]) -> list[str]:
    """Those whose steps are further apart than they may be."""
    return [str(one) for one in found if abs(one.ratio - 1) > tolerance(one.plan)]


def test_a_planned_step_takes_what_the_virtual_clock_says(as_it_is: list[Trial]) -> None:
    assert len(as_it_is) == sum(NUMBERS.values()) + 1
    assert off(as_it_is[:-1]) == []


def test_a_step_that_has_lost_its_overlap_is_further_off(on_one_stream: list[Trial]) -> None:
    assert off(on_one_stream[:-1])


@pytest.mark.parametrize("is_hidden", [True, False])
def test_messages_between_tensor_parallel_stages_are_hidden_and_their_sums_are_not_late(
    request: pytest.FixtureRequest, is_hidden: bool
) -> None:
    """Each sum is of a product that the next one needs, so nothing can hide it."""
    found = request.getfixturevalue("as_it_is" if is_hidden else "on_one_stream")[-1]
    spans = found.timeline.spans
    messages = replace(
        found.timeline,
        spans=tuple(one for one in spans if one.kind == "kernel" or one.name.startswith("send")),
    )
    first = [device for device in found.periods if device.spec.startswith("V100")]
    for device in first:
        period = found.periods[device]
        share = messages.hidden_share_of(device, period)
        assert share > 0.3 if is_hidden else share < 0.1
        late = [
            one.start_seconds - one.asked_seconds
            for one in spans
            if one.device == device
            and one.name.startswith("allreduce")
            and period[0] <= one.start_seconds < period[1]
        ]
        assert len(late) > 6 * 4  # of each microbatch four sums and more
        assert max(late) < 0.001
