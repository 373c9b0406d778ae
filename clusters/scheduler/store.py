"""The state of a live cluster: one SQLite file, every transition in a transaction.

Commands write requests into it (a job, a cancellation, a server to drain) and read the state; only
the scheduler changes the states of jobs and leases. Only the file's owner may read or write it.
"""

import fcntl
import json
import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ...schema.errors import FileError, ProblemError
from ...schema.files import made_folder
from ...schema.options import option
from ..engines.protocol import private

FILE = "state.sqlite"
RUN = "run"
"""In a lease's folder: that of its launch's run."""
FORMAT = "hetflow.cluster-state/2"
_OLDER = ("hetflow.cluster-state/1",)
STARTS = "(SELECT count(*) FROM leases AS one WHERE one.job = jobs.number AND " \
         "one.started IS NOT NULL AND one.launch IS NULL) AS starts"  # fmt: skip
"""A column of a query of jobs: how often each was started."""
SHOWN_STATE = (
    "CASE WHEN jobs.state != 'running' OR leases.trained IS NOT NULL THEN jobs.state "
    "WHEN leases.began IS NULL THEN 'waiting' ELSE 'starting' END AS shown_state"
)
"""A column of a query of jobs and their leases that hold devices: how far each has come."""
_BUSY_SECONDS = 10.0
_RECOVER = "if it is broken, `hetflow cluster recover` goes on from its last good copy"
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    submission TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'submitted' CHECK (state IN
        ('submitted', 'queued', 'running', 'held', 'done', 'cancelled')),
    reason TEXT,
    wanted TEXT CHECK (wanted IN ('hold', 'release', 'cancel')),
    submitted REAL NOT NULL,
    started REAL,
    ended REAL,
    failures INTEGER NOT NULL DEFAULT 0,
    leases INTEGER NOT NULL DEFAULT 0,
    device_seconds REAL NOT NULL DEFAULT 0,
    target_seconds REAL NOT NULL DEFAULT 0,
    throughput TEXT,
    digest TEXT,
    resizes INTEGER NOT NULL DEFAULT 0,
    user TEXT,
    released REAL,
    uid INTEGER
);
CREATE INDEX jobs_open ON jobs(state) WHERE state NOT IN ('done', 'cancelled');
CREATE INDEX jobs_wanted ON jobs(wanted) WHERE wanted IS NOT NULL;
CREATE TABLE leases (
    job INTEGER NOT NULL REFERENCES jobs(number),
    number INTEGER NOT NULL,
    devices TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('planned', 'starting', 'running', 'stopping', 'over')),
    planned REAL NOT NULL,
    started REAL,
    stop_asked REAL,
    credited REAL,
    ended REAL,
    exit_code INTEGER,
    predicted_steps_per_second REAL,
    measured_steps_per_second REAL,
    launch INTEGER,
    resizing_to TEXT,
    resize_asked REAL,
    began REAL,
    trained REAL,
    PRIMARY KEY (job, number)
);
-- No job runs twice at once, whatever a scheduler does wrong.
CREATE UNIQUE INDEX one_lease ON leases(job) WHERE state IN ('starting', 'running', 'stopping');
CREATE INDEX leases_open ON leases(state) WHERE state != 'over';
"""
# A table that earlier versions did not have.
_MEASURED = (
    "CREATE TABLE IF NOT EXISTS measured (kind TEXT NOT NULL, types TEXT NOT NULL, "
    "ratios TEXT NOT NULL, PRIMARY KEY (kind, types))"
)

# Columns that earlier versions did not have.
_LATER = (
    ("jobs", "resizes", "INTEGER NOT NULL DEFAULT 0"),
    ("leases", "launch", "INTEGER"),
    ("leases", "resizing_to", "TEXT"),
    ("leases", "resize_asked", "REAL"),
    ("jobs", "target_seconds", "REAL NOT NULL DEFAULT 0"),
    ("leases", "measured_steps_per_second", "REAL"),
    ("jobs", "user", "TEXT"),
    ("jobs", "released", "REAL"),
    ("leases", "began", "REAL"),
    ("leases", "trained", "REAL"),
    ("jobs", "uid", "INTEGER"),
)
# What leases that began under an earlier version are taken for: it counted from their start.
_TRAINED = "UPDATE leases SET began = started, trained = started WHERE trained IS NULL"


class ClusterStore:
    """The file of one cluster, open; FileError where it cannot be read or written."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        """Hold an open file; ``create`` and ``open`` make one."""
        self.folder = folder
        self._connection = connection

    @classmethod
    def create(cls, folder: Path) -> "ClusterStore":
        """Open a cluster's state, or begin one: it is complete afterwards, or absent.

        Raises:
            FileError: The folder cannot be written, or its state is of another version.
        """
        with made_folder(folder, mode=0o700):
            with _alone(folder):
                if not (folder / FILE).exists() or not (folder / FILE).stat().st_size:
                    _begin(folder)
            return cls._of(folder)

    @classmethod
    def _of(cls, folder: Path) -> "ClusterStore":
        store = cls(folder, _connected(folder / FILE))
        try:
            store._refuse_others()
            store._bring_up_to_date()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path) -> "ClusterStore":
        """Open the state of a cluster that was started.

        Raises:
            FileError: There is none, or it is of another version.
        """
        _refuse_strangers(folder)
        return cls._of(folder)

    @classmethod
    def read(cls, folder: Path) -> "ClusterStore":
        """Open the state of a cluster that was started, and never write to it.

        Raises:
            FileError: There is none, or it is of another version.
        """
        _refuse_strangers(folder)
        path = folder / FILE
        try:
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro",
                uri=True, timeout=_BUSY_SECONDS, isolation_level=None,
            )  # fmt: skip
        except sqlite3.Error as error:
            raise FileError(f"{path}: {error}") from None
        connection.row_factory = sqlite3.Row
        store = cls(folder, connection)
        try:
            store._refuse_others()
            if store._is_older():
                raise FileError(
                    f"{path}: an older hetflow wrote it",
                    hint="`hetflow queue` brings it up to date",
                )
        except BaseException:
            store.close()
            raise
        return store

    def _bring_up_to_date(self) -> None:
        """Add what earlier versions did not note; it counts from now on."""
        if self._is_older():
            with self.transaction():
                self.run(_MEASURED)
                for table, column, kind in self._missing():  # nobody else has by now
                    self.run(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
                    if column == "trained":
                        self.run(_TRAINED)
                self.set("format", FORMAT)

    def _is_older(self) -> bool:
        has_all = self.rows("SELECT name FROM sqlite_master WHERE name = 'measured'")
        return self.get("format") in _OLDER or not has_all or bool(self._missing())

    def _missing(self) -> list[tuple[str, str, str]]:
        return [
            (table, column, kind)
            for table, column, kind in _LATER
            if column not in {row["name"] for row in self.rows(f"PRAGMA table_info({table})")}
        ]

    def _refuse_others(self) -> None:
        try:
            found = self.get("format")
        except (FileError, sqlite3.Error, ValueError) as error:
            cause = error.__cause__ or error
            raise FileError(
                f"{self.folder / FILE}: not a cluster's state: {cause}", hint=_RECOVER
            ) from None
        if found != FORMAT and found not in _OLDER:
            raise FileError(
                f"{self.folder / FILE}: its format is {found!r}, this hetflow knows {FORMAT!r}",
                hint="go on with the hetflow that wrote it, or take a new folder",
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Inside, all writes are made, or none of them."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise FileError(
                f"{self.folder / FILE}: {error}", hint="make room, or see who holds it"
            ) from error

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Inside, all queries see the state as it is at the first one."""
        self.rows("BEGIN")
        try:
            yield
        finally:
            self.rows("ROLLBACK")

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """The answer to a query."""
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise FileError(f"{self.folder / FILE}: {error}") from error

    def version(self) -> int:
        """A number that is another one once anybody has written."""
        [row] = self.rows("PRAGMA data_version")
        return int(row[0]) * 2**40 + self._connection.total_changes

    def copy_to(self, other: sqlite3.Connection) -> None:
        """Copy the whole file, as it is at one moment."""
        self._connection.backup(other)

    def run(self, statement: str, *values: object) -> int:
        """Write; the number of the row that was added, if one was."""
        return self._connection.execute(statement, values).lastrowid or 0

    def run_each(self, statement: str, values: Iterable[tuple[object, ...]]) -> None:
        """Write once for each row of values."""
        self._connection.executemany(statement, values)

    def change_job(self, number: int, **columns: object) -> None:
        """Write columns of a job."""
        self.run(f"{_update('jobs', columns)} number = ?", *columns.values(), number)

    def change_lease(self, job: int, number: int, **columns: object) -> None:
        """Write columns of a lease."""
        where = f"{_update('leases', columns)} job = ? AND number = ?"
        self.run(where, *columns.values(), job, number)

    def get(self, key: str) -> Any:
        """A value of the cluster's own; None where it was never set."""
        found = self.rows("SELECT value FROM meta WHERE key = ?", key)
        return json.loads(found[0]["value"]) if found else None

    def set(self, key: str, value: Any) -> None:
        """Set a value of the cluster's own."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def lease_folder(self, job: int, lease: int) -> Path:
        """Where a lease's plan, output and run record are."""
        return self.job_folder(job) / "leases" / str(lease)

    def job_folder(self, job: int) -> Path:
        """Where a job's checkpoints and leases are."""
        return self.folder.absolute() / "jobs" / str(job)


def _update(table: str, columns: Iterable[str]) -> str:
    return f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in columns)} WHERE"


def _refuse_strangers(folder: Path) -> None:
    try:
        found = os.stat(folder / FILE)
        is_there, is_ours = stat.S_ISREG(found.st_mode), found.st_uid == os.geteuid()
    except OSError as error:
        is_there, is_ours = isinstance(error, PermissionError), False
    if is_there and not is_ours and not os.access(folder / FILE, os.R_OK):
        raise FileError(
            f"{folder}: the cluster is another user's",
            hint="its owner may do this; members of its group may submit, and use queue, logs, "
            "hold, release and cancel",
        )
    if not is_there:
        raise FileError(
            f"{folder}: no cluster was started there",
            hint=f"name its folder with {option('state')}, or start one with `hetflow "
            "cluster start`",
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, nobody else begins a state there; file systems without such locks do not tell."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _begin(folder: Path) -> None:
    """Make the file of a new state under another name, and rename it once it is complete."""
    path, made = folder / FILE, None
    try:
        handle, made = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
        os.close(handle)
        with closing(sqlite3.connect(made)) as connection, connection:
            connection.executescript(f"{_TABLES}{_MEASURED};")
            connection.execute("INSERT INTO meta VALUES (?, ?)", ("format", json.dumps(FORMAT)))
        os.replace(made, path)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror}") from None
    except sqlite3.Error as error:
        raise FileError(f"{path}: {error}") from None
    finally:
        for name in (made, f"{made}-journal") if made else ():
            with suppress(OSError):
                os.unlink(name)


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.Error as error:
        connection.close()
        is_other = not isinstance(error, sqlite3.OperationalError)  # else the disk is full, say
        what = "not a cluster's state: " if is_other else ""
        raise FileError(f"{path}: {what}{error}", hint=_RECOVER if is_other else None) from None
    return connection


def lock(folder: Path) -> IO[str]:
    """Be the only scheduler of a folder, for as long as what is returned is open.

    Raises:
        ProblemError: Another one is there.
    """
    stream = open(folder / "scheduler.lock", "a", opener=private)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ProblemError(
            f"{folder}: a scheduler runs on this state already",
            hint=f"stop it (`hetflow cluster stop`), or take another {option('state')}",
        ) from None
    return stream
