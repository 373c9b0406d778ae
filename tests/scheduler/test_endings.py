"""A sample of the signals at a job's end (slow); ``endings.py`` says how to run many."""

from pathlib import Path

import pytest

from .conftest import write_workplace
from .endings import MOMENTS, SCRIPT, SIGNALS, VICTIMS, campaign, stories

pytestmark = pytest.mark.processes


def test_stories_have_every_signal_to_every_process_at_every_moment() -> None:
    found = stories(1, 300)
    assert found[:100] == stories(1, 100) != stories(2, 100)
    sent = {(victim, number) for story in found for victim, number in story.signals}
    assert sent == {(victim, number) for victim in VICTIMS for number in SIGNALS}
    assert {story.moment for story in found} == set(MOMENTS)


@pytest.mark.slow
def test_a_job_that_has_ended_is_done_once_whatever_is_stopped_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workplace(tmp_path, SCRIPT, monkeypatch)
    assert sum(campaign(tmp_path, 24, 6).values()) == 6
