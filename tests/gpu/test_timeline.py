"""What the virtual clock of the software device says of hetflow's steps."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.planning.costs.estimate import Estimator
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.testing import Rates, Timeline
from hetflow.tests.handmade import two_stages
from hetflow.tests.plan_parts import split_plan, whole_group, with_replicas
from hetflow.tests.testing.hosts import GpuHost

SCRIPT = Path(__file__).with_name("clocked.py")
# Products of its small layers then take as long as those of real layers on real devices.
SMALL = Rates(slower=2000.0)
NUM_LAYERS = 24
SHARES = {"V100": 200, "A100": 312}  # their passes then take as long as each other's


def split() -> Plan:
    """A plan of one worker on each type."""
    return split_plan(
        model="clocked",
        global_batch_size=sum(SHARES.values()),
        groups=tuple(
            whole_group(
                device_type=kind,
                num_devices=1,
                device_batch_size=size,
                virtual_nodes=1,
                virtual_node_batch_size=size,
            )
            for kind, size in SHARES.items()
        ),
        predicted=Prediction(step_seconds=0.01, samples_per_second=51200.0),
        proof=Proof(
            termination="feasible", objective=0.01, lower_bound=None, gap=None, method="by hand"
        ),
    )


def pipeline() -> Plan:
    """A plan of two stages."""
    halves = (
        [str(number) for number in range(NUM_LAYERS)],
        [str(number) for number in range(NUM_LAYERS, 2 * NUM_LAYERS)],
    )
    plan = two_stages(("V100", "A100"))
    return replace(
        plan,
        global_batch_size=512,
        microbatch_size=64,
        num_microbatches=8,
        stages=tuple(
            replace(
                with_replicas(stage, samples=512, virtual_nodes=8, virtual_node_batch_size=64),
                layers=tuple(half),
            )
            for stage, half in zip(plan.stages, halves, strict=True)
        ),
    )


def trained(software: GpuHost, plan: Plan, backend: str = "eager", fault: str = "none") -> Timeline:
    """The timeline of five steps over two unlike GPUs."""
    host = software(",".join(SHARES), FAKECUDA_TIMELINE="timeline")
    files.write(host.folder / "plan.json", plan)
    host.done("launch", "--determinism", "none", "plan.json", SCRIPT, backend, fault)
    return host.timeline(SMALL)


def test_a_compiled_splits_sums_are_hidden_behind_its_backward_pass(software: GpuHost) -> None:
    assert trained(software, split(), "aot_eager").hidden_share > 0.7


def test_a_backward_pass_hides_sums_and_takes_what_the_planner_is_told(software: GpuHost) -> None:
    """And an update does. Forward passes are left out: in the first steps the loss is tested."""
    timeline = trained(software, split())
    assert timeline.hidden_share > 0.7
    target = targets.parse(f"{SCRIPT}:workload")
    counts = count_model(target, sorted(SHARES.values()), (), "sgd")
    passes = {found.batch_size: found for found in counts.passes}
    for device, size in zip(timeline.devices, SHARES.values(), strict=True):
        estimator = Estimator(spec=SMALL.spec(device.spec))
        first, last = timeline.steady(device)
        ran: Counter[str] = Counter()
        for span in timeline.spans:
            if span.device == device and first <= span.start_seconds < last:
                ran[span.name] += span.end_seconds - span.start_seconds
        planned = (*passes[size].backward, *counts.update)
        for name in ("mm", "threshold_backward", "_foreach_add_"):
            seconds = estimator.seconds([one for one in planned if one.name == name])
            assert ran[name] / 3 == pytest.approx(seconds, rel=0.05), name


def test_a_lost_overlap_is_seen(software: GpuHost) -> None:
    assert trained(software, split(), fault="waits").hidden_share < 0.1


@pytest.mark.parametrize(
    ("backend", "fault", "is_hidden"),
    [("eager", "none", True), ("eager", "one-stream", False), ("aot_eager", "none", True)],
)
def test_a_pipelines_receives_are_posted_ahead_of_the_passes_before(
    software: GpuHost, backend: str, fault: str, is_hidden: bool
) -> None:
    """The first stage is the slower one. It waits for its first gradient, and for no later one."""
    timeline = trained(software, pipeline(), backend, fault)
    slower = next(device for device in timeline.devices if device.spec.startswith("V100"))
    hidden = timeline.hidden_share_of(slower)
    assert hidden > 0.6 if is_hidden else hidden < 0.4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_goes_on_where_a_device_has_one_queue(software: GpuHost, schedule: str) -> None:
    """As under CUDA_DEVICE_MAX_CONNECTIONS=1; a circle of waits would be a DeadlockError."""
    host = software(",".join(SHARES), FAKECUDA_TIMELINE="timeline")
    files.write(host.folder / "plan.json", replace(pipeline(), schedule=schedule))
    host.done("launch", "--determinism", "none", "plan.json", SCRIPT, "eager", "none")
    with_all = host.timeline(SMALL).step_seconds
    with_one = host.timeline(replace(SMALL, one_queue=True)).step_seconds
    assert with_all <= with_one < 1.1 * with_all
