"""A worker is killed when some have completed a step and others have not."""

import os
from pathlib import Path

import pytest

from .elastic_runs import Launch, around_script

pytestmark = pytest.mark.processes

# One worker has all it needs to complete STEP but the last word. When the others have completed
# it, its gradients are spoilt, another is killed, and it finds its own generation lost.
LATE = """
import os, signal, sys, time
from pathlib import Path
from hetflow.runtime.elastic.control import Control
from hetflow.runtime.elastic.member import Member
from hetflow.runtime.gradients import GradientReducer
from hetflow.schema.errors import PeerLostError

here, number = Path(sys.argv[1]).parent, 0
wait, stepped = GradientReducer.wait, Member.stepped

def late(self):
    global number
    wait(self)
    number += 1
    if os.environ["HETFLOW_WORKER"] != "<WORKER>" or number != <STEP>:
        return
    while len(list(here.glob("agreed-*"))) < 2:
        time.sleep(0.01)
    for flat in self.flats:
        flat.fill_(float("nan"))
    os.kill(int((here / "agreed-2").read_text()), signal.SIGKILL)
    while not Control._of_process.is_broken:
        time.sleep(0.01)
    raise PeerLostError("the step did not end here")

def agreed(self):
    if number == <STEP>:
        new = here / f"new-{os.getpid()}"
        new.write_text(str(os.getpid()))
        new.rename(here / f"agreed-{os.environ['HETFLOW_WORKER']}")
    stepped(self)

GradientReducer.wait, Member.stepped = late, agreed
"""


def launched(folder: Path, step: int, worker: int) -> Launch:
    folder.mkdir()
    first = LATE.replace("<STEP>", str(step)).replace("<WORKER>", str(worker))
    script = around_script(folder / "late.py", first)
    return Launch(folder / "run", [4, 2, 2], script=script)


def check(launch: Launch, undisturbed: str) -> None:
    assert launch.digest() == undisturbed
    generations = launch.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "failure"]
    # Data workers that lose their parent may still write a line.
    assert generations[1]["detail"].startswith("worker 2 (cpu:fast) was killed by SIGKILL")
    done = [(step, pid) for _, step, _, _, pid in launch.steps()]
    assert len(done) == len(set(done))  # nobody did a step again that it had completed


@pytest.mark.slow
def test_who_missed_the_end_of_a_step_gets_it_from_who_has_it(tmp_path: Path) -> None:
    whole = Launch(tmp_path / "whole", [8]).digest()
    check(launched(tmp_path / "late", step=2, worker=0), whole)


@pytest.mark.slow
@pytest.mark.parametrize("awkward", ["", "1"])
def test_whatever_comes_after_the_step(
    tmp_path: Path, awkward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step, with gradients kept or not; an evaluation; the end of the epoch."""
    if awkward:
        monkeypatch.setitem(os.environ, "AWKWARD", awkward)
    whole = Launch(tmp_path / "whole", [8]).digest()
    for step, worker in ((2, 1), (3, 0), (4, 0)):
        check(launched(tmp_path / f"late-{step}", step, worker), whole)
