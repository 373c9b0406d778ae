"""The judge's own equations, and the solvers', against the schedules' lists of operations."""

import itertools

import pytest

from hetflow.planning.checks import definitions
from hetflow.planning.costs import pipeline as costs
from hetflow.planning.schedules.counting import held_by_stage
from hetflow.planning.schedules.registry import generate

SHAPES = [list(shape) for size in (1, 2, 3) for shape in itertools.product((1, 2, 3), repeat=size)]


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("gpipe", 4), ("gpipe", 12), ("1f1b", 4), ("1f1b", 12), ("pipedream", 12), ("2bw", 12)],
)
def test_what_a_replica_holds_is_what_its_list_of_operations_holds(
    schedule: str, count: int
) -> None:
    endless = schedule in ("pipedream", "2bw")
    for replicas in SHAPES:
        made = generate(
            schedule,
            pipeline_parallel_size=len(replicas),
            num_microbatches=4 * count if endless else count,
            replicas=replicas,
            microbatches_per_update=count if schedule == "2bw" else None,
        )
        for stage, held in enumerate(held_by_stage(made)):
            workers, own = sum(replicas[stage:]), replicas[stage]
            in_flight = definitions.in_flight(schedule, workers, own, count)
            assert in_flight == costs.num_in_flight(schedule, workers, own, count) == held[0]
            versions = definitions.weight_versions(schedule, in_flight)
            assert versions == costs.weight_versions(schedule, in_flight) == held[1]
