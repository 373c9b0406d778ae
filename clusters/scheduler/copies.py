"""A good copy of the state beside it, and how a cluster goes on from it when the state is broken.

Launches go on whatever becomes of the state. So whoever recovers asks those to save and end that
began after the copy: a job never runs twice.
"""

import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from ...schema.errors import FileError, ProblemError
from ...schema.options import option
from ..engines.protocol import WORK, read_json
from .store import FILE, ClusterStore, lock

COPY = f"{FILE}.copy"
EVERY_SECONDS = 10.0


class Copies:
    """Copies a state that has changed, every few seconds; a broken one never replaces a good one.

    Args:
        store: The state.
        say: Called with why there is no copy, once for each reason.
    """

    def __init__(self, store: ClusterStore, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._last, self._version, self._said = float("-inf"), -1, ""

    def keep(self, now: float) -> None:
        """Copy it, where that is due."""
        if now - self._last < EVERY_SECONDS:
            return
        self._last = now
        try:
            version = self._store.version()
            if version != self._version:
                _copy(self._store)
                self._version = version
            self._said = ""
        except (OSError, sqlite3.Error, FileError) as error:
            if str(error) != self._said:
                self._said = str(error)
                self._say(f"{self._store.folder / COPY}: no copy of the state: {error}")


def _copy(store: ClusterStore) -> None:
    handle, made = tempfile.mkstemp(dir=store.folder, prefix=f".{COPY}.")
    os.close(handle)
    try:
        with closing(sqlite3.connect(made)) as copy:
            store.copy_to(copy)
            if (why := fault_of(copy)) is not None:
                raise FileError(why)
        os.replace(made, store.folder / COPY)
    finally:
        for name in (made, f"{made}-journal"):
            with suppress(OSError):
                os.unlink(name)


def fault_of(connection: sqlite3.Connection) -> str | None:
    """What is wrong with a database; None where it is whole."""
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        return str(error)
    return None if found == "ok" else str(found)


def recover(folder: Path) -> str:
    """Put the last good copy in the place of a broken state; says what was done.

    The broken one is kept beside it. Launches that began after the copy are asked to save and end,
    and their jobs go on after that.

    Raises:
        ProblemError: The state is whole, a scheduler runs on it, or there is no copy.
        FileError: The copy is broken, too, or cannot be put in place.
    """
    path, copy = folder / FILE, folder / COPY
    if not copy.is_file():
        raise ProblemError(
            f"{folder}: has no copy of a state", hint=f"name its folder with {option('state')}"
        )
    with lock(folder):
        if path.is_file():
            with closing(sqlite3.connect(path)) as connection:
                if fault_of(connection) is None:
                    raise ProblemError(
                        f"{path}: is not broken", hint="start it again: hetflow cluster start"
                    )
        with closing(sqlite3.connect(copy)) as connection:
            if (why := fault_of(connection)) is not None:
                raise FileError(f"{copy}: is broken, too: {why}")
        of = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copy.stat().st_mtime))
        broken = _set_aside(path)
        os.replace(copy, path)
        store = ClusterStore.open(folder)
        with closing(store):
            lost = _take_up(store, time.time())
    said = f"goes on from the copy of {of}; the broken state is {broken}"
    if lost:
        said += (
            f"; the copy does not know job {', '.join(map(str, lost))}: see what became of "
            "its launches (jobs/NUMBER/leases), and submit it again"
        )
    return said


def _set_aside(path: Path) -> Path:
    """Rename a broken state with its journal; they would be taken for the copy's."""
    number = 1
    while (broken := path.with_name(f"{FILE}.broken-{number}")).exists():
        number += 1
    for end in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{end}", f"{broken}{end}")
    return broken


def _take_up(store: ClusterStore, now: float) -> list[int]:
    """Know the launches that began after the copy; jobs that it does not know."""
    known = {row["number"]: row["leases"] for row in store.rows("SELECT number, leases FROM jobs")}
    there = sorted(int(one.name) for one in (store.folder / "jobs").glob("[0-9]*"))
    with store.transaction():
        for job in there:
            if job in known:
                _take_up_leases(store, job, known[job], now)
        if there:  # a new job gets no number that another one had
            store.run("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'jobs'", there[-1])
    return [job for job in there if job not in known]


def _take_up_leases(store: ClusterStore, job: int, number: int, now: float) -> None:
    """Record the last lease of a job that has a folder and that the copy saw planned at most."""
    begun = {
        row["number"]
        for row in store.rows("SELECT number FROM leases WHERE job = ? AND state != 'planned'", job)
    }
    folders = (store.job_folder(job) / "leases").glob("[0-9]*")
    new = sorted(n for n in (int(one.name) for one in folders) if n not in begun)
    if not new:
        return
    store.run(
        "UPDATE leases SET state = 'over', ended = ? WHERE job = ? AND state != 'over'", now, job
    )
    work = read_json(store.lease_folder(job, new[-1]) / WORK)
    if work is None:  # it was not given to an engine
        return
    store.run(
        "INSERT OR REPLACE INTO leases (job, number, devices, state, planned, started, stop_asked) "
        "VALUES (?, ?, ?, 'stopping', ?, ?, ?)",
        job, new[-1], json.dumps(work["devices"]), now, now, now,
    )  # fmt: skip
    store.run(
        "UPDATE jobs SET leases = ?, state = CASE WHEN state = 'held' THEN state ELSE 'running' "
        "END WHERE number = ?", max(number, new[-1]), job,
    )  # fmt: skip
