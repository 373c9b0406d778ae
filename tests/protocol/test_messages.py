"""What workers and their controller tell each other: there and back, and what is no message."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.runtime.protocol.messages import (
    Abort,
    Beat,
    Closed,
    Finished,
    Fragile,
    FromController,
    FromWorker,
    Joined,
    Leave,
    Lost,
    Paused,
    Ready,
    Recover,
    Report,
    Reported,
    Resize,
    Unreadable,
    encode,
    from_controller,
    from_worker,
)
from hetflow.schema.errors import ProblemError
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

CONFIG = LaunchConfig(
    model="m",
    global_batch_size=4,
    seed=3,
    workers=tuple(
        WorkerSlot(
            rank=rank, device_type="cpu", virtual_nodes=(VirtualNode(index=rank, batch_size=2),)
        )
        for rank in range(2)
    ),
)
TO_CONTROLLER: tuple[FromWorker, ...] = (
    Beat(prepared=True, operation=7, waiting=False),
    Ready(),
    Joined(generation=2),
    Joined(generation=2, pause_seconds=0.25),
    Paused(generation=2, pause_seconds=0.0),
    Lost(generation=0, operation=3, why="lost another worker in all_reduce:\n\u00e9"),
    Closed(why="the script prepares several models"),
    Fragile(why="loops"),
    Finished(),
    Reported(),
    Unreadable(why="$: must be an object"),
)
TO_WORKER: tuple[FromController, ...] = (
    Resize(generation=1, config=CONFIG, ranks={"0": 1, "2": 0}, donors={"2": "0"}),
    Resize(generation=1, config=CONFIG, ranks={"2": 1, "3": 0}, donors={"2": "0"}, guests=("0",)),
    Recover(generation=1, config=CONFIG, ranks={"0": 0, "1": 1}, behind=("1",), donor="0"),
    Abort(generation=0),
    Leave(),
    Report(),
)


def test_every_message_comes_as_it_was_sent_in_one_line() -> None:
    assert {type(message) for message in TO_CONTROLLER} == set(get_args(FromWorker))
    assert {type(message) for message in TO_WORKER} == set(get_args(FromController))
    for said in TO_CONTROLLER:
        line = encode(said)
        assert line.count(b"\n") == 1
        assert from_worker(line) == said
    for told in TO_WORKER:
        line = encode(told)
        assert line.count(b"\n") == 1
        assert from_controller(line) == told


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"kind": "joined"}', "$.joined.generation: missing; add it"),
        (b'{"kind": "joined", "generation": -1}', "$.joined.generation: must be >= 0, got -1"),
        (b'{"kind": "joined", "generation": 1, "x": 2}', "$.joined.x: unknown key; remove it"),
        (b'{"kind": "closed", "why": null}', "$.closed.why: must be a string, got None"),
        (b'{"kind": "ready", "a\\nb": 1}', "$.ready.a b: unknown key; remove it"),
        (b"{}", "$: must have a kind, got {}"),
        (b"[]", "$: must be an object, got []"),
    ],
)
def test_what_is_no_message_is_told_in_one_line(line: bytes, sentence: str) -> None:
    with pytest.raises(ProblemError) as refused:
        from_worker(line)
    assert refused.value.message == sentence


def test_each_side_reads_the_others_messages_only() -> None:
    with pytest.raises(ProblemError, match=r"^\$: kind must be one of 'beat', .*'unreadable', got"):
        from_worker(encode(Leave()))
    with pytest.raises(ProblemError, match=r"^\$: kind must be one of 'resize', .*'leave', got"):
        from_controller(encode(Ready()))


def test_a_mapping_whose_names_do_not_fit_is_no_message() -> None:
    with pytest.raises(ProblemError, match="ranks must be 0 to 1, each once"):
        Resize(generation=1, config=CONFIG, ranks={"0": 0, "1": 0}, donors={})
    with pytest.raises(ProblemError, match="donors names a worker that has no rank"):
        Resize(generation=1, config=CONFIG, ranks={"0": 0, "1": 1}, donors={"2": "0"})
    with pytest.raises(ProblemError, match="donor names a worker that has no rank"):
        Recover(generation=1, config=CONFIG, ranks={"0": 0, "1": 1}, behind=(), donor="2")
    line = encode(TO_WORKER[0]).replace(b'"2": 0', b'"2": 1')
    with pytest.raises(ProblemError, match="ranks must be 0 to 1, each once"):
        from_controller(line)


@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, len(TO_WORKER) - 1))
def test_no_bytes_end_in_anything_but_that_line(junk: bytes, at: int, which: int) -> None:
    line = encode(TO_WORKER[which])
    for text in (junk, line[:at] + junk + line[at:], line[:at]):
        assert "\n" not in sentence_of(text)


def sentence_of(line: bytes) -> str:
    try:
        from_controller(line)
    except ProblemError as error:
        return error.message
    return ""
