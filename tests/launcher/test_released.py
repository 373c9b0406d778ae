"""A resize is answered when the devices that it leaves are free."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetflow.runtime.launcher.mapping import without
from hetflow.runtime.protocol import control
from hetflow.runtime.protocol.messages import Joined

from .test_dealing import config_of
from .test_echoes import Processes

TWO = config_of("V100", "V100")


class Leaving(Processes):
    """Two workers, of which one may have ended well; nobody has to join."""

    done: frozenset[str] = frozenset()

    def start(self, *given: object, **named: object) -> None: ...

    def is_done(self, name: str) -> bool:
        return name in self.done


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Leaving]:
    made = Leaving(tmp_path, checkpoint=None)
    yield made
    made.inbox.close()
    for line in made.held.values():
        line.theirs.close()
        line.close()


def test_a_resize_is_done_when_who_leaves_has_ended(tmp_path: Path, workers: Leaving) -> None:
    workers.heard = [(name, Joined(generation=0)) for name in ("0", "1")]
    asked = control.ask(tmp_path, without(TWO, [1]), name="own")
    assert workers.supervisor.tick(0.0) is None
    workers.heard = [("0", Joined(generation=1, pause_seconds=0.5))]
    for _ in range(3):
        assert workers.supervisor.tick(0.0) is None
    assert control.current(tmp_path).world_size == 1  # it trains on
    assert control.answered(asked) is None
    workers.done = frozenset({"1"})
    assert workers.supervisor.tick(0.0) is None
    answer = control.answered(asked)
    assert answer is not None
    assert (answer.status, answer.left, answer.pause_seconds) == ("done", ("1",), 0.5)
    assert control.ask(tmp_path, TWO, name="own") == asked
    assert workers.supervisor.tick(0.0) is None
    assert control.current(tmp_path).world_size == 1  # asked once more for the same thing


def test_what_has_not_been_answered_at_the_end_is(tmp_path: Path, workers: Leaving) -> None:
    workers.heard = [(name, Joined(generation=0)) for name in ("0", "1")]
    asked = control.ask(tmp_path, without(TWO, [1]))
    workers.supervisor.tick(0.0)
    workers.heard = [("0", Joined(generation=1))]
    workers.supervisor.tick(0.0)
    workers.done = frozenset({"0", "1"})
    workers.supervisor.finish()
    answer = control.answered(asked)
    assert answer is not None
    assert answer.status == "done"
