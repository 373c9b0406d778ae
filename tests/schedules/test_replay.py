"""The replay of a step that flushes, pass by pass, against the timer of schedules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.replay import StepStage, flush_step_seconds
from hetflow.planning.schedules.timing import StageTimes, time_schedule
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(50))
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 7.0])


@FEW
@given(
    st.lists(st.tuples(st.integers(1, 4), *[SECONDS] * 5), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_the_replay_is_the_timer(stages, num_microbatches, schedule):
    stages = tuple(StepStage(*entry) for entry in stages)
    times = StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in stages),
        backward_seconds=tuple(stage.backward_seconds for stage in stages),
        activation_seconds=tuple(stage.transfer_seconds for stage in stages[:-1]),
        gradient_seconds=tuple(stage.transfer_seconds for stage in stages[:-1]),
        reduce_seconds=tuple(stage.reduce_seconds for stage in stages),
        update_seconds=tuple(stage.update_seconds for stage in stages),
    )
    made = generate(
        schedule,
        pipeline_parallel_size=len(stages),
        num_microbatches=num_microbatches,
        replicas=[stage.num_replicas for stage in stages],
    )
    expected = time_schedule(made, times).makespan_seconds
    assert flush_step_seconds(schedule, stages, num_microbatches) == pytest.approx(expected)
