"""Asking for schedules, rightly and wrongly; the short hand."""

from typing import Any

import pytest

from hetflow.formats.reports.timeline import from_text, to_text
from hetflow.planning.schedules.registry import generate
from hetflow.schema.errors import ProblemError
from hetflow.schema.schedule import SCHEDULES, Kind


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("1f1", {}, "unknown schedule '1f1'; known are gpipe, 1f1b"),
        ("gpipe", {"num_microbatches": 0}, "num_microbatches must be .* at least 1, got 0"),
        ("gpipe", {"num_microbatches": 1.5}, "whole number .* got 1.5"),
        ("gpipe", {"pipeline_parallel_size": -2}, "pipeline_parallel_size .* got -2"),
        ("gpipe", {"num_model_chunks": 2}, "gpipe runs one chunk on a device"),
        ("1f1b", {"replicas": [1, 2]}, "2 replica counts for 4 stages"),
        ("1f1b", {"replicas": [1, 0, 1, 1]}, "replicas of a stage must be"),
        ("1f1b", {"microbatches_per_update": 4}, "1f1b fixes when it updates"),
        ("2bw", {"microbatches_per_update": 3}, "with 3 microbatches per update; .* at least 4"),
        ("2bw", {"microbatches_per_update": 0}, "microbatches_per_update must be"),
        ("2bw", {"microbatches_per_update": 5}, "8 microbatches are not whole updates of 5"),
        ("interleaved", {"num_microbatches": 6}, "a multiple of 4 microbatches, got 6"),
        (
            "interleaved",
            {"num_microbatches": 12, "replicas": [2, 2, 2, 2]},
            "a multiple of 4 microbatches on each of 2 pipelines, got 12",
        ),
        ("interleaved", {"replicas": [2, 1, 1, 1]}, "as many replicas of every stage, got 2-1-1-1"),
        ("pipedream-vertical-sync", {"replicas": [2, 1, 1, 1]}, "as many replicas"),
        ("zb-h1", {"num_microbatches": 3}, "zb-h1 needs at least 4 microbatches"),
        ("zb-h2", {"num_model_chunks": 2}, "zb-h2 runs one chunk"),
        ("zb-v", {"num_microbatches": 3}, "zb-v needs at least 4 microbatches"),
        ("zb-v", {"num_model_chunks": 3}, "zb-v puts two stages on a rank"),
        ("dualpipe", {"num_microbatches": 6}, "dualpipe needs an even number"),
        ("dualpipe", {"pipeline_parallel_size": 3}, "dualpipe needs an even number"),
        ("dualpipe", {"replicas": [2, 2, 2, 2]}, "dualpipe does not take replicas"),
        ("dualpipe-v", {"num_microbatches": 7}, "at least twice as many microbatches"),
    ],
)
def test_shapes_a_schedule_cannot_have(name: str, shape: dict[str, Any], words: str) -> None:
    asked = {"pipeline_parallel_size": 4, "num_microbatches": 8} | shape
    with pytest.raises(ProblemError, match=words):
        generate(name, **asked)


def test_a_mistyped_name_gets_a_guess() -> None:
    with pytest.raises(ProblemError) as caught:
        generate("gpip", pipeline_parallel_size=1, num_microbatches=1)
    assert caught.value.hint == "did you mean 'gpipe'?"


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_schedule_carries_its_name(name: str) -> None:
    schedule = generate(name, pipeline_parallel_size=2, num_microbatches=8)
    assert schedule.name == name
    assert schedule.num_ranks == 2
    assert schedule.num_microbatches == 8


def test_two_buffered_weights_default_to_the_least_update() -> None:
    schedule = generate("2bw", pipeline_parallel_size=3, num_microbatches=12)
    lengths = {op.num_microbatches for op in schedule.ranks[0] if op.kind is Kind.UPDATE}
    assert lengths == {3}


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_text_round_trip(name: str) -> None:
    """Flushing schedules come back whole; of the others the passes do."""
    schedule = generate(name, pipeline_parallel_size=4, num_microbatches=12)
    lines = to_text(schedule)
    again = from_text(
        name, lines, placement=schedule.placement, num_microbatches=schedule.num_microbatches
    )
    assert to_text(again) == lines
    if schedule.weight_semantics == "flush":
        assert again.ranks == schedule.ranks


@pytest.mark.parametrize(
    ("word", "words"),
    [("X0", "'X0' is no pass"), ("F", "'F' is no pass"), ("F0", "write F0.STAGE")],
)
def test_unreadable_words(word: str, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        from_text("mine", [word], placement=((0,), (0,)), num_microbatches=1)


@pytest.mark.parametrize(
    ("name", "m", "bounds"),
    [
        ("gpipe", 5, (5, 5, 5, 5)),
        ("1f1b", 5, (4, 3, 2, 1)),
        ("1f1b", 2, (2, 2, 2, 1)),
        ("pipedream", 2, (2, 2, 2, 1)),
        ("zb-h1", 5, (4, 4, 4, 4)),
        ("zb-h2", 8, (7, 7, 7, 7)),
        ("zb-v", 8, (8, 8, 8, 8)),
        ("dualpipe", 8, (5, 5, 5, 5)),
        ("dualpipe-v", 8, (9, 9, 9, 9)),
    ],
)
def test_promised_activations(name: str, m: int, bounds: tuple[int, ...]) -> None:
    schedule = generate(name, pipeline_parallel_size=4, num_microbatches=m)
    assert schedule.max_in_flight == bounds


def test_channels_and_chunks() -> None:
    schedule = generate(
        "interleaved", pipeline_parallel_size=2, num_microbatches=2, num_model_chunks=2
    )
    assert schedule.stages_of_rank == ((0, 2), (1, 3))
    assert schedule.num_operations == sum(len(operations) for operations in schedule.ranks)
    assert schedule.channels == (
        (0, 1, False), (0, 1, True), (1, 0, False), (1, 0, True),
    )  # fmt: skip
