"""The judge's own schedules: equal to those that run, and no wrong list passes."""

import random
from dataclasses import replace

import pytest

from hetflow.planning.checks.schedule import judged, validate
from hetflow.planning.checks.schedule_lists import DEFINITIONS
from hetflow.schema.errors import ProblemError
from hetflow.schema.schedule import (
    SCHEDULES,
    Operation,
    PipelineShape,
    Schedule,
    generator_of,
    planned_schedules,
)


def shapes(name: str) -> list[PipelineShape]:
    chunks = {"interleaved": (2, 3), "zb-v": (2,)}.get(name, (1,))
    return [
        PipelineShape(
            pipeline_parallel_size=p, num_microbatches=m, num_model_chunks=v, replicas=replicas[:p]
        )
        for p in (2, 4)
        for m in (1, 4, 16)
        for v in chunks
        for replicas in ((1,) * 5, (2,) * 5, (3, 1, 2, 2, 1))
    ]


def test_every_planned_schedule_is_defined() -> None:
    own = [known.name for known in SCHEDULES.registered if known.plannable]
    assert set(own) & set(planned_schedules()) == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_lists_are_those_of_the_definition(name: str) -> None:
    """For each shape both know the schedule, or neither does."""
    known = 0
    for shape in shapes(name):
        generate = generator_of(name)
        try:
            generate(shape)
        except ProblemError:
            with pytest.raises(ProblemError):
                judged(name, generate, shape)
        else:
            assert judged(name, generate, shape).faults == ()
            known += 1
    assert known > 2


def _damaged(schedule: Schedule, draw: random.Random) -> Schedule:
    """A list in which an operation is lost, doubled, moved, or has another number."""
    ranks = [list(operations) for operations in schedule.ranks]
    operations = draw.choice(ranks)
    at = draw.randrange(len(operations))
    one: Operation = operations[at]
    way = draw.randrange(5)
    if way == 0:
        del operations[at]
    elif way == 1:
        operations.insert(at, one)
    elif way == 2:
        operations.insert(draw.randrange(len(operations)), operations.pop(at))
    elif way == 3:
        other = (one.microbatch + 1) % schedule.num_microbatches
        operations[at] = replace(one, microbatch=other)
    elif one.weight_version is not None:
        operations[at] = replace(one, weight_version=one.weight_version + 1)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_what_the_public_validator_refuses_the_judge_refuses(name: str) -> None:
    draw, refused = random.Random(name), 0
    shape = PipelineShape(
        pipeline_parallel_size=3,
        num_microbatches=12 if name == "2bw" else 6,
        num_model_chunks={"interleaved": 2, "zb-v": 2}.get(name, 1),
        replicas=(2, 2, 2),
    )
    whole = generator_of(name)(shape)
    for _ in range(30):
        wrong = _damaged(whole, draw)
        if validate(wrong):
            refused += 1
            assert judged(name, lambda _, wrong=wrong: wrong, shape).faults != ()
    assert refused > 8


def test_a_valid_list_in_another_order_is_refused() -> None:
    shape = PipelineShape(pipeline_parallel_size=2, num_microbatches=4)
    other = replace(generator_of("gpipe")(shape), name="1f1b")
    assert validate(other) == []
    assert judged("1f1b", lambda _: other, shape).faults == (
        "rank 0: its passes are not in the order of 1f1b",
        "rank 1: its passes are not in the order of 1f1b",
    )
