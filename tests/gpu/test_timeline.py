"""What the virtual clock of the software device says of hetflow's steps."""

from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Prediction, Proof
from hetflow.testing import Rates, Timeline
from hetflow.tests.plan_parts import split_plan, whole_group
from hetflow.tests.testing.hosts import GpuHost

SCRIPT = Path(__file__).with_name("clocked.py")
# Products of its small layers then take as long as those of real layers on real devices.
SMALL = Rates(slower=2000.0)
SHARES = {"V100": 200, "A100": 312}  # their passes then take as long as each other's


def trained(software: GpuHost, backend: str, fault: str = "none") -> Timeline:
    """The timeline of five steps of a split over two unlike GPUs."""
    host = software(",".join(SHARES), FAKECUDA_TIMELINE="timeline")
    plan = split_plan(
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
    files.write(host.folder / "plan.json", plan)
    host.done("launch", "--determinism", "none", "plan.json", SCRIPT, backend, fault)
    return host.timeline(SMALL)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_splits_sums_are_hidden_behind_its_backward_pass(software: GpuHost, backend: str) -> None:
    assert trained(software, backend).hidden_share > 0.7


def test_a_lost_overlap_is_seen(software: GpuHost) -> None:
    assert trained(software, "eager", "waits").hidden_share < 0.1
