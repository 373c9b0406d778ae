"""Every case of the shared reference orders: passes, makespan, idle time, activations held.

The file was made by simulating published schedulers (tests/data/README.md).
"""

import json
import re
from typing import Any

import pytest

from hetflow.formats.reports.timeline import from_text, to_text
from hetflow.planning.checks.schedule import validate
from hetflow.planning.schedules.counting import peak_in_flight, peak_weight_versions
from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.timing import StageTimes, time_schedule
from hetflow.schema.schedule import Kind, Schedule
from hetflow.tests.data import reference

REFERENCE: dict[str, Any] = json.loads((reference.folder() / "ptdp" / "schedules.json").read_text())

OUR_NAMES = {
    "gpipe": "gpipe",
    "1f1b_flush": "1f1b",
    "1f1b_interleaved": "interleaved",
    "zb_h1": "zb-h1",
    "zb_h2": "zb-h2",
    "zbv": "zb-v",
    "dualpipe": "dualpipe",
    "dualpipev": "dualpipe-v",
}


def identity(case: dict[str, Any]) -> str:
    return f"{case['schedule']}-p{case['p']}-m{case['m']}-v{case['v']}-b{case['t_Binput']}"


def orders_of(case: dict[str, Any]) -> list[str]:
    """The orders in our short hand; the file writes DualPipe's second direction as /1."""
    if case["schedule"] != "dualpipe":
        return case["orders"]
    p, m = case["p"], case["m"]

    def renamed(match: re.Match[str], rank: int) -> str:
        letters, microbatch, second = match.groups()
        number = int(microbatch) + (m // 2 if second else 0)
        return f"{letters}{number}.{p - 1 - rank if second else rank}"

    return [
        re.sub(r"(F|BW|B|W)(\d+)(/1)?", lambda match, rank=rank: renamed(match, rank), line)
        for rank, line in enumerate(case["orders"])
    ]


def schedule_of(case: dict[str, Any]) -> Schedule:
    name, p, m = case["schedule"], case["p"], case["m"]
    if name in OUR_NAMES:
        return generate(
            OUR_NAMES[name],
            pipeline_parallel_size=p,
            num_microbatches=m,
            num_model_chunks=case["v"] if name == "1f1b_interleaved" else 1,
        )
    placement = tuple((min(stage, 2 * p - 1 - stage),) for stage in range(2 * p))
    return from_text(name, case["orders"], placement=placement, num_microbatches=m)


@pytest.mark.parametrize("case", REFERENCE.get("cases", []), ids=identity)
def test_reference_case(case: dict[str, Any]) -> None:
    schedule = schedule_of(case)
    # The published scheduler counts a microbatch half after its B: it holds nearly 4p of them.
    holds_fewer = case["schedule"] == "zb_h2"
    assert (list(to_text(schedule)) == orders_of(case)) is not holds_fewer
    assert validate(schedule) == []
    times = StageTimes.uniform(
        schedule.num_stages,
        case["t_F"],
        case["t_Binput"] + case["t_W"],
        backward_weight_seconds=case["t_W"],
    )
    timing = time_schedule(schedule, times)
    assert timing.makespan_seconds == case["makespan"]
    assert list(timing.busy_seconds) == case["busy"]
    assert list(timing.idle_seconds) == case["idle"]
    assert list(timing.span_seconds) == case["span_per_rank"]
    bubbles = [i / b for i, b in zip(timing.idle_seconds, timing.busy_seconds, strict=True)]
    assert bubbles == pytest.approx(case["bubble_over_ideal"], abs=1e-9)
    if holds_fewer:
        assert max(timing.peak_in_flight) <= 2 * case["p"] - 1 < max(case["peak_inflight_until_W"])
        return
    until_b = peak_in_flight(schedule, until_weight_gradient=False)
    assert list(until_b) == case["peak_inflight_until_B"]
    assert list(timing.peak_in_flight) == case["peak_inflight_until_W"]


@pytest.mark.parametrize(
    "case", REFERENCE.get("pipedream_async", []), ids=lambda case: str(case["replicas"])
)
def test_pipedream_case(case: dict[str, Any]) -> None:
    schedule = generate(
        "pipedream",
        pipeline_parallel_size=len(case["replicas"]),
        num_microbatches=case["n"],
        replicas=case["replicas"],
    )
    times = StageTimes(forward_seconds=tuple(case["t_F"]), backward_seconds=tuple(case["t_B"]))
    timing = time_schedule(schedule, times)
    assert timing.makespan_seconds == case["makespan"]
    assert timing.steady_seconds_per_microbatch == case["steady_period"]
    assert list(timing.peak_in_flight) == case["peak_inflight"]
    assert list(peak_weight_versions(schedule)) == case["weight_versions_per_rank"]
    stages = [stages[0] for stages in schedule.stages_of_rank]
    assert stages == case["stage_of_rank"]
    for line, head, warmup in zip(
        to_text(schedule), case["orders_head"], case["warmup_per_rank"], strict=True
    ):
        words = line.replace("BW", "B").split()
        assert words[: len(head.split())] == head.split()
        assert words[warmup + 1].startswith("B")


@pytest.mark.parametrize(
    "case", REFERENCE.get("pipedream_2bw", []), ids=lambda case: f"m{case['m']}"
)
def test_double_buffered_case(case: dict[str, Any]) -> None:
    versions = {int(number): version for number, version in case["version_of_microbatch"].items()}
    schedule = generate(
        "2bw",
        pipeline_parallel_size=4,
        num_microbatches=len(versions),
        microbatches_per_update=case["m"],
    )
    for operations in schedule.ranks:
        for operation in operations:
            if operation.kind in (Kind.FORWARD, Kind.BACKWARD):
                assert operation.weight_version == versions[operation.microbatch + 1]
    assert set(peak_weight_versions(schedule)) == {case["weight_versions"]}
    assert peak_in_flight(schedule) == (4, 3, 2, 1)
