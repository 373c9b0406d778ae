"""The thesis's pictures, typed from the figures by hand: one cell a time unit, inputs from 1.

A forward pass takes one cell, a backward pass two (``B1 B1``), as in every figure.
"""

import pytest

from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.timing import StageTimes, Timing, time_schedule
from hetflow.schema.schedule import PASSES, Kind, Schedule


def drawn(schedule: Schedule) -> Timing:
    return time_schedule(schedule, StageTimes.uniform(schedule.num_stages, 1, 2))


def cells(timing: Timing, rank: int, count: int) -> str:
    row = ["."] * int(timing.makespan_seconds)
    pairs = zip(timing.schedule.ranks[rank], timing.spans[rank], strict=True)
    for operation, (start, end) in pairs:
        if operation.kind in PASSES:
            letter = "F" if operation.kind is Kind.FORWARD else "B"
            for at in range(int(start), int(end)):
                row[at] = f"{letter}{operation.microbatch + 1}"
    return " ".join(row[:count])


PIPEDREAM_STARTUP = [  # figure 2.4, and figure 3.2, which differs only in its weights
    "F1 F2 F3 F4 . . . . . . B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 F8",
    ". F1 F2 F3 . . . . B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5",
    ". . F1 F2 . . B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6",
    ". . . F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7",
]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical-sync", "2bw"])
def test_figures_2_4_and_3_2_startup_and_steady_state(name: str) -> None:
    timing = drawn(generate(name, pipeline_parallel_size=4, num_microbatches=16))
    assert [cells(timing, rank, 22) for rank in range(4)] == PIPEDREAM_STARTUP


def test_figure_2_7_even_inputs_go_to_worker_1() -> None:
    schedule = generate("pipedream", pipeline_parallel_size=2, num_microbatches=12, replicas=(2, 1))
    inputs = [
        [op.microbatch for op in operations if op.kind is Kind.FORWARD]
        for operations in schedule.ranks
    ]
    assert inputs == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11], list(range(12))]
    times = StageTimes(forward_seconds=(2, 1), backward_seconds=(4, 2))
    assert time_schedule(schedule, times).steady_seconds_per_microbatch == 3


def test_figure_2_8_weight_versions_of_input_5() -> None:
    schedule = generate("pipedream", pipeline_parallel_size=4, num_microbatches=16)
    read = versions_of_input(schedule, 5)
    # "input 5 uses parameter updates from input 1 on machine 1 and from 2 on machine 2"
    assert read == [{1}, {2}, {3}, {4}]
    synced = generate("pipedream-vertical-sync", pipeline_parallel_size=4, num_microbatches=16)
    # "input 5 uses parameters updated by input 1 on all workers"
    assert versions_of_input(synced, 5) == [{1}] * 4


def versions_of_input(schedule: Schedule, number: int) -> list[set[int | None]]:
    return [
        {
            op.weight_version
            for op in operations
            if op.kind in PASSES and op.microbatch == number - 1
        }
        for operations in schedule.ranks
    ]


def test_figure_3_2_double_buffered_weights() -> None:
    schedule = generate(
        "2bw", pipeline_parallel_size=4, num_microbatches=16, microbatches_per_update=4
    )
    # W^(4), our version 1, "is first used for input 9's forward pass"
    for number in range(1, 9):
        assert versions_of_input(schedule, number) == [{0}] * 4
    assert versions_of_input(schedule, 9) == [{1}] * 4
    # Input 7 on worker 3 at t = 21 must not use the version that exists there by then.
    timing = drawn(schedule)
    assert cells(timing, 2, 21).split()[20] == "F7"
    updates = [
        span[1]
        for op, span in zip(schedule.ranks[2], timing.spans[2], strict=True)
        if op.kind is Kind.UPDATE
    ]
    assert updates[0] == 17
    # "each worker can discard W^(0) once it is done with the backward pass for input 8"
    for operations in schedule.ranks:
        last = max(at for at, op in enumerate(operations) if op.weight_version == 0)
        assert operations[last].kind is Kind.BACKWARD
        assert operations[last].microbatch == 7


def test_figure_3_3_gpipe_and_flush_on_two_stages() -> None:
    gpipe = drawn(generate("gpipe", pipeline_parallel_size=2, num_microbatches=4))
    assert [cells(gpipe, rank, 15) for rank in range(2)] == [
        "F1 F2 F3 F4 . . . B1 B1 B2 B2 B3 B3 B4 B4",
        ". F1 F2 F3 F4 B1 B1 B2 B2 B3 B3 B4 B4 . .",
    ]
    flush = drawn(generate("1f1b", pipeline_parallel_size=2, num_microbatches=4))
    assert [cells(flush, rank, 15) for rank in range(2)] == [
        "F1 F2 . . B1 B1 F3 B2 B2 F4 B3 B3 . B4 B4",
        ". F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 . .",
    ]
    assert gpipe.peak_in_flight == (4, 4)
    assert flush.peak_in_flight == (2, 1)


def test_figure_4_3_gpipe() -> None:
    timing = drawn(generate("gpipe", pipeline_parallel_size=4, num_microbatches=8))
    backward = "B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 B8 B8"
    forward = "F1 F2 F3 F4 F5 F6 F7 F8"
    assert [cells(timing, rank, 33) for rank in range(4)] == [
        f"{forward} . . . . . . . . . {backward}",
        f". {forward} . . . . . . {backward} . .",
        f". . {forward} . . . {backward} . . . .",
        f". . . {forward} {backward} . . . . . .",
    ]
    assert timing.bubble_fraction == 3 / 8


def test_figure_4_4_default_schedule() -> None:
    timing = drawn(generate("1f1b", pipeline_parallel_size=4, num_microbatches=8))
    assert [cells(timing, rank, 33) for rank in range(4)] == [
        "F1 F2 F3 F4 . . . . . . B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 F8 B5 B5 . B6 B6 . B7 B7 . B8 B8",
        ". F1 F2 F3 . . . . B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 F8 B6 B6 . B7 B7 . B8 B8 . .",
        ". . F1 F2 . . B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 F8 B7 B7 . B8 B8 . . . .",
        ". . . F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 F8 B8 B8 . . . . . .",
    ]


INTERLEAVED = [  # figure 4.4 bottom; dark is the first chunk (a), light the second (b)
    "1a 2a 3a 4a 1b 2b 3b 4b 5a 6a 7a -1b 8a -2b 5b -3b 6b -4b 7b -1a 8b -2a -3a -4a "
    "-5b -6b -7b -8b -5a -6a -7a -8a",
    "1a 2a 3a 4a 1b 2b 3b 4b 5a -1b 6a -2b 7a -3b 8a -4b 5b -1a 6b -2a 7b -3a 8b -4a "
    "-5b -6b -7b -8b -5a -6a -7a -8a",
    "1a 2a 3a 4a 1b 2b 3b -1b 4b -2b 5a -3b 6a -4b 7a -1a 8a -2a 5b -3a 6b -4a 7b -5b "
    "8b -6b -7b -8b -5a -6a -7a -8a",
    "1a 2a 3a 4a 1b -1b 2b -2b 3b -3b 4b -4b 5a -1a 6a -2a 7a -3a 8a -4a 5b -5b 6b -6b "
    "7b -7b 8b -8b -5a -6a -7a -8a",
]


def test_figure_4_4_interleaved_schedule() -> None:
    schedule = generate(
        "interleaved", pipeline_parallel_size=4, num_microbatches=8, num_model_chunks=2
    )
    orders = [
        " ".join(
            ("" if op.kind is Kind.FORWARD else "-") + f"{op.microbatch + 1}{'ab'[op.stage // 4]}"
            for op in operations
            if op.kind in PASSES
        )
        for operations in schedule.ranks
    ]
    assert orders == INTERLEAVED
    # The flush happens sooner: a chunk takes half the time of a stage.
    interleaved = time_schedule(schedule, StageTimes.uniform(8, 0.5, 1.0))
    default = drawn(generate("1f1b", pipeline_parallel_size=4, num_microbatches=8))
    assert (interleaved.makespan_seconds, default.makespan_seconds) == (28.5, 33)
