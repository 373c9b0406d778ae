"""What hosts tell each other when they meet, and what a failed worker writes down."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hetflow.runtime.launcher.failures import Failure
from hetflow.runtime.launcher.hosts import dealt
from hetflow.runtime.protocol.ended import FailureNote, read_note
from hetflow.runtime.protocol.messages import (
    Greeting,
    RankAnswer,
    Refused,
    answer_of,
    greeting_of,
)
from hetflow.schema.errors import LaunchError
from hetflow.schema.files import to_json

from ..launcher.test_dealing import config_of


def greeting(host: str, **other: Any) -> Greeting:
    own = {"hetflow": "0.1.0", "plan": "ab12", "script": "ef56", "policy": "stop"} | {
        "seed": 0,
        "determinism": "none",
        **other,
    }
    return Greeting(host=host, devices={"V100": 1}, **own)


def test_greetings_and_answers_come_as_they_were_sent() -> None:
    own = greeting("a")
    assert greeting_of(to_json(own).encode(), 1) == own
    for answer in (RankAnswer(slots=((0, 2), (1,)), hosts=("a", "b")), Refused(error="no\nway")):
        assert answer_of(to_json(answer).encode()) == answer


def test_a_host_of_another_version_is_named() -> None:
    older = json.loads(to_json(greeting("b")))
    del older["hetflow"]
    with pytest.raises(LaunchError) as refused:
        greeting_of(json.dumps(older).encode(), 1)
    assert refused.value.message == (
        "node 1 greets in a way that this version of hetflow cannot read: "
        "$.hetflow: missing; add it"
    )
    with pytest.raises(LaunchError, match="cannot read: .*must have a kind"):
        answer_of(b'{"slots": [[0]], "hosts": ["a"]}')


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"hetflow": "0.2.0"},
            "host 0 (a) runs hetflow 0.1.0, host 1 (b) 0.2.0; install the same version on all",
        ),
        ({"plan": "cd34"}, "the hosts were given different plans; give all the same file"),
        ({"seed": 3}, "host 0 was given --seed 0, host 1 --seed 3; give all the same"),
        (
            {"determinism": "elastic"},
            "host 0 was given --determinism none, host 1 --determinism elastic; give all the same",
        ),
        (
            {"script": "ff"},
            "host 1 (b) has another script than host 0 (a); copy the same file to all",
        ),
        ({"policy": "replace"}, "give every host the same on_failure and checkpoint"),
    ],
)
def test_hosts_that_were_not_started_alike_are_refused(
    other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        dealt(config_of("V100", "V100"), [greeting("a"), greeting("b", **other)])
    assert refused.value.message == sentence


def test_slots_are_dealt_by_host() -> None:
    found = dealt(config_of("V100", "V100"), [greeting("a"), greeting("b")])
    assert found == RankAnswer(slots=((0,), (1,)), hosts=("a", "b"))


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"x"', "[" * 100_000])
def test_a_note_that_is_torn_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert read_note(tmp_path / "note") is None
    assert read_note(tmp_path / "none") is None


def test_a_note_is_read_as_written_and_wrong_entries_are_not(tmp_path: Path) -> None:
    path = tmp_path / "note"
    note = FailureNote(error="E: \ud800", hint="h", at_seconds=2.5, lost_peer=True, exit_code=3)
    path.write_text(json.dumps(asdict(note)))
    assert read_note(path) == note
    path.write_text('{"error": 7, "at_seconds": 2, "hint": [], "lost_peer": "yes", "other": 1}')
    assert read_note(path) == FailureNote(at_seconds=2.0)


def test_a_failure_that_cannot_be_read_is_a_failure_in_one_line() -> None:
    own = Failure(exit_code=7, error="e", rank=2, stages=(1, 2), at_seconds=1.5, lost_peer=True)
    assert Failure.from_text(own.to_text()) == own
    for text in ("{}", "nonsense", '{"exit_code": "one", "error": 1}'):
        found = Failure.from_text(text)
        assert found.exit_code == 1
        assert found.sentence().startswith("another host failed, and how cannot be read here: $")
        assert "\n" not in found.sentence()
