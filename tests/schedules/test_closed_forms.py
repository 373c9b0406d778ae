"""The timer against the closed forms of thesis 4.2.2 and table 7.1, exactly."""

import random
from itertools import product
from statistics import mean

import pytest

from hetflow.planning.checks.schedule import validate
from hetflow.planning.schedules.closed_forms import (
    in_flight,
    interleaved_warmup,
    one_f_one_b_seconds,
)
from hetflow.planning.schedules.counting import peak_in_flight, peak_weight_versions
from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.replay import StepStage, flush_step_seconds
from hetflow.planning.schedules.timing import StageTimes, time_schedule
from hetflow.schema.schedule import PASSES
from hetflow.tests.schedules import bubbles

TIMES = [(1, 1), (1, 2), (3, 5), (7, 4)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [*product(range(1, 9), (1, 2, 3, 5, 8, 16, 33))])
def test_default_bubble(name: str, p: int, m: int) -> None:
    schedule = generate(name, pipeline_parallel_size=p, num_microbatches=m)
    bubble = bubbles.gpipe_bubble(p, m)
    for forward, backward in TIMES:
        timing = time_schedule(schedule, StageTimes.uniform(p, forward, backward))
        assert timing.makespan_seconds == m * (forward + backward) * (1 + bubble)
        for idle, busy in zip(timing.idle_seconds, timing.busy_seconds, strict=True):
            assert idle == busy * bubble


def timed(stages: list[float], messages: list[float], m: int) -> float:
    """A step of stages whose backward passes take twice as long as their forward passes."""
    both = zip(stages, [*messages, 0.0], strict=True)
    each = tuple(StepStage(1, own / 3, 2 * own / 3, message, 0.0, 0.0) for own, message in both)
    return flush_step_seconds("1f1b", each, m)


@pytest.mark.parametrize(
    ("stages", "messages", "m", "seconds"),
    [
        ([3.0] * 4, [0.0] * 3, 8, 33.0),  # equation 4.1
        ([3.0, 3.0], [3.0], 5, 36.0),  # no more than two in flight: three round trips of 12
        ([3.0, 6.0], [1.0], 5, 35.0),  # the slow stage hides the messages of all but the first
        ([6.0, 6.0], [9.0], 2, 39.0),  # the second message waits for the first one
        ([3.0], [], 7, 21.0),
    ],
)
def test_messages_beside_passes(
    stages: list[float], messages: list[float], m: int, seconds: float
) -> None:
    assert one_f_one_b_seconds(stages, messages, m) == seconds
    assert timed(stages, messages, m) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("unlike", "message", "most", "furthest"), [(0, 0.1, 0.006, 0.045), (0.15, 0.1, 0.01, 0.07)]
)
def test_drawn_pipelines_whose_messages_are_hidden(
    unlike: float, message: float, most: float, furthest: float
) -> None:
    """Of stages alike to a share, and messages that are another one of their passes."""
    draw, apart = random.Random(1), []
    for _ in range(200):
        p, m = draw.randint(2, 8), draw.choice((2, 4, 8, 16, 32, 64))
        stages = [draw.uniform(1 - unlike, 1 + unlike) for _ in range(p)]
        messages = [draw.uniform(0, 2 * message) for _ in range(p - 1)]
        counted = one_f_one_b_seconds(stages, messages, m)
        apart.append(abs(counted / timed(stages, messages, m) - 1))
    assert mean(apart) < most
    assert max(apart) < furthest


@pytest.mark.parametrize(
    ("p", "groups", "v"), [*product((1, 2, 3, 4, 6, 8), (1, 2, 3, 5), (1, 2, 3, 4))]
)
def test_interleaved_bubble(p: int, groups: int, v: int) -> None:
    m = p * groups
    schedule = generate(
        "interleaved", pipeline_parallel_size=p, num_microbatches=m, num_model_chunks=v
    )
    bubble = bubbles.interleaved_bubble(p, m, v)
    for forward, backward in TIMES:
        timing = time_schedule(schedule, StageTimes.uniform(p * v, forward, backward))
        assert timing.makespan_seconds == v * m * (forward + backward) * (1 + bubble)
    warmups = [interleaved_warmup(p, m, v, position) for position in range(p)]
    assert list(peak_in_flight(schedule)) == [min(m * v, warmup + 1) for warmup in warmups]


@pytest.mark.parametrize(("p", "m"), [*product(range(1, 9), (16, 32))])
def test_table_7_1_memory(p: int, m: int) -> None:
    """(weight versions, activations) on the first rank, where both are greatest."""
    table = {"gpipe": (1, m), "pipedream": (p, p), "2bw": (2, p), "1f1b": (1, p)}
    for name, expected in table.items():
        updates = {"microbatches_per_update": 8} if name == "2bw" else {}
        schedule = generate(name, pipeline_parallel_size=p, num_microbatches=m, **updates)
        versions, activations = peak_weight_versions(schedule), peak_in_flight(schedule)
        assert (versions[0], activations[0]) == expected
        assert (max(versions), max(activations)) == expected


def test_interleaved_memory_is_that_of_p_microbatches_and_a_rest() -> None:
    """Table 7.1 says p; in chunks of 1/v it is p v + p - 1 on the first rank."""
    schedule = generate(
        "interleaved", pipeline_parallel_size=4, num_microbatches=32, num_model_chunks=8
    )
    assert peak_in_flight(schedule)[0] == 4 * 8 + 4 - 1


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1), (3, 1), (2, 1, 1), (1, 2), (4, 3, 2)])
def test_round_robin_in_flight(replicas: tuple[int, ...]) -> None:
    schedule = generate(
        "pipedream", pipeline_parallel_size=len(replicas), num_microbatches=48, replicas=replicas
    )
    depth = [in_flight(replicas, stage) for stage in range(len(replicas))]
    of_rank = [depth[stages[0]] for stages in schedule.stages_of_rank]
    assert list(peak_in_flight(schedule)) == of_rank
    assert list(peak_weight_versions(schedule)) == of_rank
    assert depth[0] == in_flight(replicas, 0)


def test_noam_of_the_thesis() -> None:
    assert in_flight((1, 1, 1, 1), 0) == 4
    assert in_flight((2, 1), 0) == 2
    assert in_flight((15, 1), 0) == 2


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_versions_read(p: int) -> None:
    """The formulas for microbatch k on stage s, counted from 0."""
    n, m = 6 * p, 2 * p
    expected = {
        "pipedream": lambda s, k: max(0, k - (p - s) + 1),
        "pipedream-vertical-sync": lambda s, k: max(0, k - p + 1),
        "2bw": lambda s, k: max(0, k // m - 1),
        "1f1b": lambda s, k: 0,
    }
    for name, version in expected.items():
        updates = {"microbatches_per_update": m} if name == "2bw" else {}
        schedule = generate(name, pipeline_parallel_size=p, num_microbatches=n, **updates)
        for operations in schedule.ranks:
            for op in operations:
                if op.kind in PASSES:
                    assert op.weight_version == version(op.stage, op.microbatch)


def test_vertical_sync_keeps_p_versions_on_every_stage() -> None:
    schedule = generate("pipedream-vertical-sync", pipeline_parallel_size=5, num_microbatches=30)
    assert peak_weight_versions(schedule) == (5, 5, 5, 5, 5)


@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 3, 4, 8), (16, 24, 40))])
def test_zero_bubble(p: int, m: int) -> None:
    uniform = StageTimes.uniform(p, 1, 2)
    h1 = time_schedule(generate("zb-h1", pipeline_parallel_size=p, num_microbatches=m), uniform)
    idle = [span - busy for span, busy in zip(h1.span_seconds, h1.busy_seconds, strict=True)]
    assert max(idle) == bubbles.zero_bubble_h1_idle_seconds(p, 1, 1, 1)
    assert max(h1.peak_in_flight) <= p
    h2 = time_schedule(generate("zb-h2", pipeline_parallel_size=p, num_microbatches=m), uniform)
    assert h2.span_bubble_fractions == (0,) * p
    in_v = generate("zb-v", pipeline_parallel_size=p, num_microbatches=m)
    timing = time_schedule(in_v, StageTimes.uniform(2 * p, 1, 2))
    assert timing.span_bubble_fractions == (0,) * p
    assert max(timing.peak_in_flight) <= 2 * p


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_h2_holds_at_most_2p_minus_1_microbatches(p: int) -> None:
    """Whole microbatches, from the forward pass to the end of the weight gradient (the paper's)."""
    for m in (p, 2 * p, 2 * p + 1, 3 * p, 32):
        schedule = generate("zb-h2", pipeline_parallel_size=p, num_microbatches=m)
        assert validate(schedule) == []
        timing = time_schedule(schedule, StageTimes.uniform(p, 1, 2))
        assert max(timing.peak_in_flight) <= min(m, 2 * p - 1)
        if m >= 2 * p:
            assert timing.span_bubble_fractions == (0,) * p


@pytest.mark.parametrize("times", [(2, 2, 1), (3, 4, 2), (3, 1, 3), (5, 6, 4)])
def test_zero_bubble_h1_with_unlike_passes(times: tuple[int, int, int]) -> None:
    forward, of_input, of_weight = times
    schedule = generate("zb-h1", pipeline_parallel_size=4, num_microbatches=24)
    whole = of_input + of_weight
    given = StageTimes.uniform(4, forward, whole, backward_weight_seconds=of_weight)
    timing = time_schedule(schedule, given)
    idle = timing.span_seconds[0] - timing.busy_seconds[0]
    assert idle == bubbles.zero_bubble_h1_idle_seconds(4, *times)
