"""Policies that see consolidated and unconsolidated devices (thesis 5.3.1), by hand."""

from collections.abc import Callable

import pytest

from hetflow.clusters.simulator.cases import Case, run_case
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs, consolidated_devices

MakeJob = Callable[..., Job]
TABLE = Throughputs(
    models=tuple(
        ModelThroughput(
            model=model,
            scale_factor=2,
            steps_per_second={"fast": 8.0},
            unconsolidated_steps_per_second={"fast": apart},
        )
        for model, apart in (("wide", 4.0), ("compact", 8.0))
    )
)


def case(placement: str, **given: object) -> Case:
    """Four devices, three on one server and one on another."""
    values: dict[str, object] = {
        "throughputs": TABLE, "num_devices": {"fast": 4}, "servers": ((3, 1),),
        "placement": placement,
    }  # fmt: skip
    return Case(**{**values, **given})  # type: ignore[arg-type]


def ends(placement: str, jobs: list[Job]) -> list[float]:
    return sorted(done.finish_seconds for done in run_case(case(placement), jobs).jobs)


def test_the_job_that_scales_well_is_the_one_that_is_spread(job: MakeJob) -> None:
    # Both can run at all times, one of them spread: max-min is 1 where it is the compact one.
    jobs = [job(0, model="compact", scale_factor=2), job(1, model="wide", scale_factor=2)]
    assert ends("mixed", jobs) == pytest.approx([500.0, 500.0])
    # Blind to placement the first is consolidated, and the other makes 4 steps a second until
    # the second round, where the first one ends: 2,880 of 4,000 by 720 s, the rest at 8.
    assert ends("consolidated", jobs) == pytest.approx([500.0, 720.0 + 1120.0 / 8.0])


def test_jobs_take_turns_on_the_server_that_holds_them(job: MakeJob) -> None:
    jobs = [job(n, model="wide", scale_factor=2, steps=7200.0) for n in (0, 1)]
    # Half of the time consolidated each. The first makes 2,880 + 1,440 + 2,880 steps, the second
    # 1,440 + 2,880 + 1,440, then alone the last 1,440 at 8 a second.
    assert ends("mixed", jobs) == pytest.approx([1080.0, 1260.0])
    assert ends("consolidated", jobs) == pytest.approx([900.0, 1440.0])


def test_jobs_of_one_device_are_consolidated_anywhere(job: MakeJob) -> None:
    single = ModelThroughput(model="wide", scale_factor=1, steps_per_second={"fast": 4.0})
    table = Throughputs(models=(*TABLE.models, single))
    jobs = [job(0, model="wide"), job(1, model="wide", scale_factor=2, steps=8000.0)]
    given = case("mixed", throughputs=table, num_devices={"fast": 3}, servers=((2, 1),))
    run = run_case(given, jobs)
    assert {done.finish_seconds for done in run.jobs} == {1000.0}
    assert run.busy_seconds == {"fast": pytest.approx(3000.0)}


def test_how_many_devices_can_be_consolidated() -> None:
    assert consolidated_devices(TABLE, ((3, 1),)) == (2,)
    assert consolidated_devices(TABLE, ((4, 3, 1),)) == (6,)


def test_placement_needs_servers() -> None:
    with pytest.raises(HetflowError, match="give servers"):
        case("mixed", servers=None)
    with pytest.raises(HetflowError, match="without space sharing"):
        case("mixed", space_sharing=True)
