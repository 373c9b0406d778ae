"""After a death the others meet again; what follows where they cannot, or do not come."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetflow.runtime.launcher.failures import Failure
from hetflow.runtime.protocol.messages import Joined, Lost

from .test_echoes import Processes, failed

KILLED = "worker 2 (V100) was killed by SIGKILL"
REFUSED = "lost another worker in init_process_group: NCCL error: unhandled system error"


@contextmanager
def three(folder: Path, *, has_checkpoint: bool, **asked: float) -> Iterator[Processes]:
    """Three workers that train, of which the last has just been killed."""
    saved = folder / "saved" if has_checkpoint else None
    made = Processes(folder, checkpoint=saved, number=3, **asked)
    for line in made.held.values():
        line.is_prepared = True
    try:
        made.heard = [(name, Joined(generation=0, pause_seconds=0.0)) for name in made.held]
        assert made.supervisor.tick(0.0) is None
        made.dead["2"] = failed(folder, 2, "", -9)
        assert made.supervisor.tick(0.0) is None
        yield made
    finally:
        made.inbox.close()
        for line in made.held.values():
            line.theirs.close()
            line.close()


def lose(processes: Processes, generation: int, why: str) -> Failure | None:
    """The two that are left say that they have lost this generation, in the same step."""
    processes.heard = [(n, Lost(generation=generation, operation=5, why=why)) for n in ("0", "1")]
    return processes.supervisor.tick(0.0)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_who_cannot_meet_again_starts_from_the_checkpoint(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    with three(tmp_path, has_checkpoint=has_checkpoint) as processes:
        assert lose(processes, 0, "lost another worker in all_reduce: aborted") is None
        for generation in (1, 2):
            assert lose(processes, generation, REFUSED) is None
            assert list(processes.held) == ["0", "1"]
        found = lose(processes, 3, REFUSED)
        said = f"{KILLED}; the others could not meet again in 3 tries: {REFUSED}"
        if has_checkpoint:
            assert found is None
            assert processes.told == [f"{said}; starting again from the last checkpoint"]
            assert list(processes.held) == ["3", "4", "5"]
            kinds = [entry.kind for entry in processes.supervisor.generations]
            assert kinds == ["start", "restart"]
        else:
            assert found is not None
            assert (found.exit_code, found.sentence()) == (1, said)
            assert "checkpoint" in (found.as_error().hint or "")
            assert processes.told == []


def test_a_restart_gives_a_step_all_its_tries_again(tmp_path: Path) -> None:
    with three(tmp_path, has_checkpoint=True) as processes:
        for generation in range(4):
            assert lose(processes, generation, REFUSED) is None
        assert list(processes.held) == ["3", "4", "5"]
        began = processes.supervisor.number
        processes.heard = [(n, Joined(generation=began, pause_seconds=0.0)) for n in "345"]
        assert processes.supervisor.tick(0.0) is None
        processes.dead["5"] = failed(tmp_path, 5, "", -9)
        processes.heard = [(n, Lost(generation=began, operation=5, why="reset")) for n in "34"]
        assert processes.supervisor.tick(0.0) is None
        assert list(processes.held) == ["3", "4"]  # they meet again
        assert len(processes.told) == 1


def test_survivors_whom_an_abort_does_not_free_are_killed_and_all_start_again(
    tmp_path: Path,
) -> None:
    with three(tmp_path, has_checkpoint=True, timeout_seconds=0.0) as processes:
        for name in ("0", "1"):
            processes.held[name].is_waiting = True
        assert processes.supervisor.tick(0.0) is None
        (said,) = processes.told
        why = "did not come out of a broken exchange for 0 s and was killed"
        assert said == (
            f"{KILLED}; worker 0 (V100) {why}; worker 1 (V100) {why}; "
            "starting again from the last checkpoint"
        )
        assert list(processes.held) == ["3", "4", "5"]


def test_a_survivor_at_work_of_its_own_is_waited_for(tmp_path: Path) -> None:
    with three(tmp_path, has_checkpoint=True, timeout_seconds=0.0) as processes:
        assert processes.supervisor.tick(0.0) is None
        assert list(processes.dead) == ["2"]
