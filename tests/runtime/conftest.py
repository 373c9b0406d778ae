"""What tests of the runtime share."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from hetflow.runtime.agreement.agreement import OtherOptimizers
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests.plan_parts import split_plan, whole_group


@pytest.fixture(autouse=True)
def _jobs_watch_no_longer_than_their_test() -> Iterator[None]:
    """A refused job is never finished; it would watch the optimizers of the tests after it."""
    yield
    for others in list(OtherOptimizers._open):
        others.close()


@pytest.fixture(scope="session")
def plan_of() -> Callable[[Sequence[tuple[int, int]]], Plan]:
    """Makes a plan of one device each for (virtual nodes, samples of each)."""
    return _plan_of


def _plan_of(devices: Sequence[tuple[int, int]]) -> Plan:
    groups = tuple(
        whole_group(
            device_type="cpu:fast",
            num_devices=1,
            device_batch_size=nodes * size,
            virtual_nodes=nodes,
            virtual_node_batch_size=size,
        )
        for nodes, size in devices
    )
    return split_plan(
        model="scenarios",
        global_batch_size=sum(group.device_batch_size for group in groups),
        groups=groups,
        predicted=Prediction(step_seconds=0.01, samples_per_second=2400.0),
        proof=Proof(
            termination="feasible", objective=0.01, lower_bound=None, gap=None, method="by hand"
        ),
    )
