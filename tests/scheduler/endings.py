"""Signals at every moment of a job's end, on a live cluster: a job that has ended is done once.

``python -m hetflow.tests.scheduler.endings --seed 1 --jobs 100``
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetflow.clusters.engines.protocol import ENDED, STARTED
from hetflow.clusters.scheduler import leases, view
from hetflow.clusters.scheduler.store import RUN, ClusterStore
from hetflow.clusters.scheduler.submission import submission, submit
from hetflow.runtime.protocol.ended import have_all_left
from hetflow.schema import files
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

from .conftest import write_workplace

SCRIPT = """
import atexit, fcntl, os, pathlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def note(what):
    with (here / "notes").open("a") as notes:
        notes.write(f"{what} {rank} {os.getpid()}\\n")

own = (here / f"lock {rank}").open("w")
try:
    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("together")
note("began")
atexit.register(note, "uploaded")
torch.manual_seed(0)
x = torch.randn(48, 8)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = hf.prepare(model, optimizer)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
for epoch in range(3):
    for number, batch in enumerate(job.batches(loader)):
        if (epoch, number) == (2, 2):
            note("last")
        job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
note("evaluated")
"""
MOMENTS = ("last", "evaluated", "ended", "left", "record", "over")
"""What a signal waits for: the last step, the script's last line, its recorded end, the end of the
workers' exit functions, the launch's record, and what the keeper wrote."""
VICTIMS = ("launcher", "keeper", "scheduler", "worker 0", "worker 1")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_LONGEST_DELAY_SECONDS = 0.15
_LIMIT_SECONDS = 240.0
_START = ("cluster", "start", "--gpus", "2xcpu:fast", "--round", "600", "--grace", "20")


class Violation(AssertionError):
    """A job was not done, or done otherwise than it must be."""


@dataclass(frozen=True, slots=True)
class Story:
    """What happens to one job: signals, all at once, some time after a moment."""

    moment: str
    delay_seconds: float
    signals: tuple[tuple[str, signal.Signals], ...]

    def __str__(self) -> str:
        sent = ", ".join(f"{number.name} to {victim}" for victim, number in self.signals)
        return f"{sent}, {1e3 * self.delay_seconds:.0f} ms after {self.moment!r}"


def stories(seed: int, number: int) -> list[Story]:
    """Every kind of signal to every process is drawn in turn; one job of three gets two."""
    draw, kinds, found = random.Random(seed), list[tuple[str, signal.Signals]](), list[Story]()
    while len(found) < number:
        sent = []
        for _ in range(2 if draw.random() < 1 / 3 else 1):
            kinds = kinds or draw.sample([(v, s) for v in VICTIMS for s in SIGNALS], 15)
            sent.append(kinds.pop())
        delay = draw.choice([0.0, draw.uniform(0.0, _LONGEST_DELAY_SECONDS)])
        found.append(Story(draw.choice(MOMENTS), delay, tuple(sent)))
    return found


class Queue:
    """A live cluster of two devices in a folder, whose scheduler is started again when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scheduler = self._start()
        self._until(lambda: "devices on" in self._log.read_text())
        self._store = ClusterStore.open(folder / "state")

    @property
    def _log(self) -> Path:
        return self._folder / "scheduler.log"

    def _start(self) -> "programs.Program | subprocess.Popen[str]":
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "hetflow.cli.main", *_START]
            return programs.start(command, cwd=self._folder, stdout=log, stderr=log)

    def _until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + _LIMIT_SECONDS
        while not holds():
            if self._scheduler.poll() is not None:
                self._scheduler = self._start()
            if time.monotonic() > end:
                raise Violation("it takes too long")
            time.sleep(0.001)

    def run(self, story: Story | None) -> tuple[str | None, bool]:
        """Run a job to its end; its digest, and whether the signals left anything to do again.

        Raises:
            Violation: It did not end, or what was done was done again.
        """
        here = Path(tempfile.mkdtemp(dir=self._folder))
        asked = {"batch_size": 16, "steps": 9, "virtual_nodes": 4, "devices": 2,
                 "script": str(self._folder / "train.py"), "arguments": [str(here)],
                 "profiles": str(self._folder / "profiles")}  # fmt: skip
        job = submit(self._store, submission(asked, base=self._folder, name=here.name))
        try:
            again = story is not None and self._send(story, job, here)
            self._until(lambda: self._is_over(job))
            digest = self._check(job, here, again)
        except Violation as error:
            [row] = self._row(job)
            raise Violation(f"{error}\n{row}\n{_lines(here)}") from None
        return digest, again

    def _row(self, job: int) -> list[view.QueuedJob]:
        return [row for row in view.queue(self._store) if row.number == job]

    def _check(self, job: int, here: Path, again: bool) -> str | None:
        [row] = self._row(job)
        notes = Counter(line.split()[0] + line.split()[1] for line in _lines(here))
        if row.state != "done":
            raise Violation(f"{row.state}: {row.reason}")
        if notes["together0"] or notes["together1"]:
            raise Violation("two launches of a job were there at once")
        for what in ("evaluated", "uploaded"):
            times = [notes[f"{what}{rank}"] for rank in range(2)]
            if not any(times) or (max(times) > 1 and not again):  # a launch may lose a worker
                raise Violation(f"{what} {times} times by workers 0 and 1")
        self._until(lambda: _is_free(here / "lock 0") and _is_free(here / "lock 1"))
        return row.digest

    def _is_over(self, job: int) -> bool:
        time.sleep(0.02)
        [row] = self._store.rows("SELECT state FROM jobs WHERE number = ?", job)
        return row["state"] in ("done", "held", "cancelled")

    def _send(self, story: Story, job: int, here: Path) -> bool:
        """Send a story's signals; whether some of the job was still to be done then."""
        folder = self._store.lease_folder(job, 1)
        self._until(lambda: _has_come(story.moment, folder, here) or self._is_done(job))
        time.sleep(story.delay_seconds)
        pids = {victim: self._pid_of(victim, folder, here) for victim, _ in story.signals}
        logs = folder / RUN / "logs"
        has_left, has_ended = have_all_left(logs), _have_ended(logs)
        for victim, number in story.signals:
            with suppress(ProcessLookupError):
                os.kill(pids[victim], number)
        return any(
            not (has_left if number == signal.SIGKILL and victim != "keeper" else has_ended)
            for victim, number in story.signals
            if victim != "scheduler"
        )

    def _is_done(self, job: int) -> bool:
        [row] = self._store.rows("SELECT state FROM jobs WHERE number = ?", job)
        return bool(row["state"] == "done")

    def _pid_of(self, victim: str, folder: Path, here: Path) -> int:
        """A process; one that is gone has the number of none."""
        if victim == "scheduler":
            return self._scheduler.pid
        if victim == "launcher":
            return int(json.loads((folder / STARTED).read_text())["pid"])
        if victim == "keeper":
            return _keeper_of(folder)
        pids = [int(pid) for what, rank, pid in map(str.split, _lines(here))
                if (what, rank) == ("began", victim[-1])]  # fmt: skip
        return pids[-1] if _runs(pids[-1], b"hetflow.runtime.worker") else _NOBODY

    def end(self) -> None:
        """End the scheduler, and what it left."""
        self._scheduler.kill()
        self._scheduler.wait()
        for lease in leases.open_leases(self._store):
            with suppress(OSError, ValueError):
                folder = leases.folder_of(self._store, lease)
                os.kill(json.loads((folder / STARTED).read_text())["pid"], signal.SIGKILL)
        self._store.close()


_NOBODY = 1 << 30


def _lines(here: Path) -> list[str]:
    return (here / "notes").read_text().splitlines() if (here / "notes").exists() else []


def _have_ended(logs: Path) -> bool:
    return all((logs / f"rank{rank}.ended").exists() for rank in range(2))


def _has_come(moment: str, folder: Path, here: Path) -> bool:
    logs = folder / RUN / "logs"
    if moment in ("last", "evaluated"):
        return any(line.startswith(moment) for line in _lines(here))
    if moment == "ended":
        return _have_ended(logs)
    if moment == "left":
        return have_all_left(logs)
    if moment == "over":
        return (folder / ENDED).exists()
    with suppress(Exception):
        return files.read(folder / RUN / "run.json", RunRecord).status == "done"
    return False


def _runs(pid: int, words: bytes) -> bool:
    try:
        return words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False


def _keeper_of(folder: Path) -> int:
    words = f"hetflow.clusters.engines.keeper {folder} ".encode()
    return next((int(one.name) for one in Path("/proc").glob("[0-9]*")
                 if _runs(int(one.name), words)), _NOBODY)  # fmt: skip


def _is_free(lock: Path) -> bool:
    with lock.open() as own:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def campaign(
    folder: Path, seed: int, number: int, say: Callable[[str], object] = lambda text: None
) -> Counter[str]:
    """Run so many jobs of a seed; how many ended how.

    Raises:
        Violation: With the story.
    """
    counts: Counter[str] = Counter()
    queue = Queue(folder)
    try:
        expected, _ = queue.run(None)
        for place, story in enumerate(stories(seed, number)):
            try:
                digest, again = queue.run(story)
                # Without a record there is no digest: SIGKILL came between the end and the record.
                if digest != expected and (digest is not None or again):
                    raise Violation(f"the digest is {digest}, not {expected}")
            except Violation as error:
                raise Violation(f"seed {seed}, job {place}, {story}: {error}") from None
            counts["again" if again else "once" if digest else "once, without a record"] += 1
            say(f"{place}: {story}: {'done, with more to do' if again else 'done once'}")
    finally:
        queue.end()
    return counts


def main() -> None:
    """Run a campaign by hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100)
    arguments = parser.parse_args()
    say = lambda text: print(text, flush=True)  # noqa: E731, T201
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        write_workplace(Path(name), SCRIPT, patch)
        counts = campaign(Path(name), arguments.seed, arguments.jobs, say)
    say(str(dict(counts)))


if __name__ == "__main__":
    main()
