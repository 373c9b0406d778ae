"""Signals around a job: noted while it trains, the script's own before and after it."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetflow.runtime.finish import StopRequests
from hetflow.runtime.protocol.handover import SIGNAL
from hetflow.tests import programs

pytestmark = pytest.mark.processes

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers as they are, and no jobs that other tests have left open."""
    for name, empty in (("_open", []), ("_before", {}), ("_received", [])):
        monkeypatch.setattr(StopRequests, name, empty)
    before = {number: signal.getsignal(number) for number in (TERM, SIGNAL)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_scripts_own_handler_is_called_when_the_job_leaves_and_is_back_after_it() -> None:
    calls: list[str] = []
    own = lambda number, frame: calls.append("own")  # noqa: E731
    signal.signal(TERM, own)
    requests = StopRequests([TERM], lambda: calls.append("asked"))
    signal.raise_signal(TERM)
    assert calls == ["asked"]
    requests.pass_on()
    assert calls == ["asked", "own"]
    requests.close()  # and for a signal that nobody left for, once more
    assert calls == ["asked", "own", "own"]
    assert signal.getsignal(TERM) is own
    requests.close()
    signal.raise_signal(TERM)
    assert calls == ["asked", "own", "own", "own"]


def test_several_jobs_are_all_asked_and_end_in_any_order() -> None:
    calls: list[str] = []
    signal.signal(TERM, signal.SIG_IGN)
    first = StopRequests([TERM], lambda: calls.append("first"))
    second = StopRequests([TERM, SIGNAL], lambda: calls.append("second"))
    signal.raise_signal(TERM)
    signal.raise_signal(SIGNAL)
    assert calls == ["first", "second", "second"]
    first.close()
    signal.raise_signal(TERM)
    assert calls[3:] == ["second"]
    second.close()
    assert signal.getsignal(TERM) is signal.SIG_IGN
    assert signal.getsignal(SIGNAL) is signal.SIG_IGN  # too late, and no reason to die


def test_a_handler_that_the_script_sets_later_stays() -> None:
    requests = StopRequests([TERM], lambda: None)
    own = lambda number, frame: None  # noqa: E731
    signal.signal(TERM, own)
    requests.close()
    assert signal.getsignal(TERM) is own


SCRIPT = """
import os, signal, sys, time
import torch
from hetflow import runtime as hf
from torch.utils.data import DataLoader, TensorDataset
OWN
model = torch.nn.Linear(2, 1)
job = hf.prepare(model)
for batch in job.batches(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)):
    job.backward(lambda x: model(x).mean(), batch)
    if "DURING" and job.num_steps == 2:
        os.kill(os.getpid(), signal.SIGNUMBER)
job.finish()
print("finished", flush=True)
os.kill(os.getpid(), signal.SIGNUMBER)
time.sleep(20)
print("swallowed", flush=True)
"""
OWN = "signal.signal(signal.SIGTERM, lambda *_: (print('own', flush=True), sys.exit(7)))"


def _without_launch() -> dict[str, str]:
    """This process's environment, less what another test's launch may have left in it."""
    return {key: value for key, value in os.environ.items() if not key.startswith("HETFLOW_")}


@pytest.mark.parametrize(
    ("name", "own", "during", "code", "said", "saved"),
    [
        ("SIGTERM", "", "", -TERM, "finished\n", 4),
        pytest.param(*("SIGINT", "", "", -signal.SIGINT, "finished\n", 4), marks=pytest.mark.slow),
        pytest.param(*("SIGTERM", OWN, "", 7, "finished\nown\n", 4), marks=pytest.mark.slow),
        ("SIGTERM", OWN, "yes", 7, "own\n", 3),
        pytest.param(*("SIGTERM", "", "yes", 143, "", 3), marks=pytest.mark.slow),
    ],
)
def test_a_signal_after_the_job_ends_the_script_as_usual(
    tmp_path: Path, name: str, own: str, during: str, code: int, said: str, saved: int
) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.replace("SIGNUMBER", name).replace("OWN", own).replace("DURING", during)
    script.write_text(text)
    done = programs.run(
        [sys.executable, script],
        env={**_without_launch(), "HETFLOW_CHECKPOINT": str(tmp_path / "saved")},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"step-{saved:09d}"]
