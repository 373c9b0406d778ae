"""A scheduler in the foreground, how it is stopped, and whom it tells of changes of jobs."""

import json
import logging
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ...schema.cluster import Cluster
from ...schema.errors import FileError, ProblemError
from ...schema.files import from_json, to_json, to_plain
from ..engines.protocol import ENGINES, Engine, EngineForUsers
from ..mechanisms.round_state import RoundRules
from .copies import Copies
from .history import entities_of
from .loop import Scheduler
from .requests import Group
from .sharing import ClusterSettings, check_settings
from .store import SHOWN_STATE, ClusterStore, lock

# Tells a program or a web address of the owner's choice about each change of a job's state.
#
# The document of a change goes to a program's stdin, or is posted; no shell is started, and nothing
# of a job is in a command line. What was not told when the scheduler ends is not told later.


FORMAT = "hetflow.job-change/1"
LONGEST_SECONDS = 10.0
"""What a program, or an address, may take for one change."""
MOST_WAITING = 1000
_STATES = (
    f"SELECT jobs.number, {SHOWN_STATE} FROM jobs LEFT JOIN leases "  # noqa: S608
    "ON leases.job = jobs.number AND leases.state IN ('starting', 'running', 'stopping') "
    "WHERE jobs.state NOT IN ('done', 'cancelled')"
)


class Notices:
    """Looks for changes, and tells them one after another, beside the scheduler."""

    def __init__(self, store: ClusterStore, to: str, say: Callable[[str], None]) -> None:
        """Tell of what changes from now on.

        ``to`` is an ``http://`` or ``https://`` address, or a program with its arguments; ``say``
        hears what could not be told.

        Raises:
            ProblemError: It is neither.
        """
        self._store, self._say = store, say
        self._tell = self._post if to.startswith(("http://", "https://")) else self._run
        self._address, self._command = to, words_of(to)
        self._known = self._states()
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._serve, daemon=True).start()

    def _states(self) -> dict[int, str]:
        return {row["number"]: row["shown_state"] for row in self._store.rows(_STATES)}

    def look(self, now: float) -> None:
        """Note what has changed since this was called last."""
        before, self._known = self._known, self._states()
        for number in sorted({*before, *self._known}):
            if before.get(number) == self._known.get(number):
                continue
            [row] = self._store.rows(
                "SELECT state, reason, user, json_extract(submission, '$.name') AS name "
                "FROM jobs WHERE number = ?", number,
            )  # fmt: skip
            change = {
                "schema": FORMAT, "job": number, "name": row["name"], "user": row["user"],
                "before": before.get(number), "state": self._known.get(number, row["state"]),
                "reason": row["reason"], "at": now,
            }  # fmt: skip
            try:
                self._waiting.put_nowait(change)
            except queue.Full:
                self._say(f"job {number}: {change['state']}: too many changes wait to be told")

    def _serve(self) -> None:
        while True:
            change = self._waiting.get()
            try:
                self._tell(json.dumps(change).encode())
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                why = str(error).replace(self._address, "ADDRESS")  # it may hold a secret
                self._say(f"job {change['job']}: {change['state']}: could not be told: {why}")

    def _post(self, document: bytes) -> None:
        request = urllib.request.Request(  # noqa: S310
            self._address, data=document, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONGEST_SECONDS):  # noqa: S310
            pass

    def _run(self, document: bytes) -> None:
        subprocess.run(
            self._command, input=document, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=LONGEST_SECONDS, check=True,
        )  # fmt: skip


def words_of(command: str) -> list[str]:
    """A program and its arguments, as they are quoted in a shell, which does not run them.

    Raises:
        ProblemError: It is empty, or a quote is open.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProblemError(f"on-change {command!r}: {error}") from None
    if not words:
        raise ProblemError("on-change: names no program and no address")
    return words


POLL_SECONDS = 0.1
_BEGAN = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since the epoch by the monotonic clock: a clock that is set moves no round's end."""
    return _BEGAN + time.monotonic()


AGAIN_SECONDS = 5.0
"""Between two tries to write the state."""
_T = TypeVar("_T")
_log = logging.getLogger("hetflow")
_STOP, _STARTED_WITH = "stop", "started_with"


def serve(
    folder: Path, pool: Cluster, engine: str, settings: ClusterSettings, say: Callable[[str], None]
) -> None:
    """Schedule until a user asks to stop.

    After ``request_stop`` all jobs save and end, and stay queued. After SIGTERM or ctrl-C jobs go
    on without a scheduler; the next one adopts them.

    Raises:
        HetflowError: Another scheduler is there, or the state cannot be read or written.
    """
    made = ENGINES.get(engine)(pool)
    if settings.on_change is not None:
        words_of(settings.on_change)
    members = None if settings.group is None else _group(folder, settings.group, made)
    check_settings(settings, made.devices())  # else a new folder would hold the state of no cluster
    store = ClusterStore.create(folder)
    with lock(folder):
        steady = _Steady(partial(Scheduler, store, made, settings), say)  # before, it may refuse
        with store.transaction():
            store.set(_STARTED_WITH, _described(pool, engine, settings))
            store.set(_STOP, None)
        say(f"{len(made.devices())} devices on {engine}, policy {settings.policy}, state {folder}")
        beside = nullcontext() if members is None else members.serving(store)
        copies, notices = Copies(store, say), None
        if settings.on_change is not None:
            notices = Notices(store, settings.on_change, say)
        with beside, _interrupts() as interrupted:
            while not interrupted.is_set():
                goes_on = steady.do(partial(_tick, store))
                if goes_on is False:
                    _drain_out(steady)
                    say("all jobs have saved and ended; those not done stay queued")
                    return
                if goes_on:
                    copies.keep(time.monotonic())
                if notices is not None and goes_on:
                    notices.look(time.time())
                interrupted.wait(POLL_SECONDS if goes_on else AGAIN_SECONDS)
        say("jobs that run go on; start the cluster again to schedule them")


def _group(folder: Path, name: str, engine: Engine) -> Group:
    def may_run_as(uid: int) -> bool:
        return isinstance(engine, EngineForUsers) and engine.may_run_as(uid)

    return Group(folder, name, may_run_as)


def request_stop(folder: Path) -> None:
    """Let all jobs save and end, then the scheduler; wait until it has ended.

    Where no scheduler runs, this process asks the jobs itself.

    Raises:
        HetflowError: No cluster was started there.
    """
    store = ClusterStore.open(folder)
    if store.get(_STARTED_WITH) is None:  # whoever made the state died, or was refused
        raise ProblemError(
            f"{folder}: no scheduler has run on this state yet",
            hint="start one with `hetflow cluster start`",
        )
    with store.transaction():
        store.set(_STOP, True)
    while True:
        try:
            held = lock(folder)
        except ProblemError:
            time.sleep(POLL_SECONDS)
            continue
        with held:
            if store.get(_STOP):
                with store.transaction():
                    store.set(_STOP, None)
                make = partial(Scheduler, store, *_as_started(store))
                _drain_out(_Steady(make, _log.warning))
        return


class _Steady:
    """A scheduler that waits while its state cannot be written (the disk is full), and goes on.

    Jobs run meanwhile. One that could not write remembers more than its state, so it begins anew.
    """

    def __init__(self, make: Callable[[], Scheduler], say: Callable[[str], None]) -> None:
        """Begin."""
        self._make, self._say = make, say
        self._scheduler: Scheduler | None = make()
        self._said = ""

    def do(self, act: Callable[[Scheduler], _T]) -> _T | None:
        """Do something with it; None where it could not."""
        try:
            if self._scheduler is None:
                self._scheduler = self._make()
            done = act(self._scheduler)
        except (FileError, OSError) as error:
            self._scheduler = None
            if str(error) != self._said:
                self._said = str(error)
                self._say(f"{error}; jobs that run go on, trying again every {AGAIN_SECONDS:.0f} s")
            return None
        if self._said:
            self._said = ""
            self._say("the state can be written again")
        return done


def _tick(store: ClusterStore, scheduler: Scheduler) -> bool:
    """Do what is due; False, and nothing, where somebody asked to stop."""
    if store.get(_STOP):
        return False
    scheduler.tick(steady_time())
    return True


def _drain_out(steady: _Steady) -> None:
    while not steady.do(lambda scheduler: scheduler.stop(steady_time())):
        time.sleep(POLL_SECONDS)


def _described(pool: Cluster, engine: str, settings: ClusterSettings) -> dict[str, object]:
    return {
        "pool": to_json(pool),
        "engine": engine,
        "policy": settings.policy,
        "round_seconds": settings.rules.round_seconds,
        "grace_seconds": settings.grace_seconds,
        "entities": [to_plain(entity) for entity in settings.entities],
    }


def _as_started(store: ClusterStore) -> tuple[Engine, ClusterSettings]:
    known = store.get(_STARTED_WITH)
    pool = from_json(known["pool"], Cluster, name="the cluster's state")
    settings = ClusterSettings(
        policy=known["policy"],
        rules=RoundRules(round_seconds=known["round_seconds"], reset_seconds=0.0),
        grace_seconds=known["grace_seconds"],
        entities=entities_of(known),
        dollars_per_hour=pool.dollars_per_hour,
    )
    return ENGINES.get(known["engine"])(pool), settings


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set when SIGINT or SIGTERM comes, so that a tick is never cut in two."""
    event = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # one that Python did not set
                signal.signal(number, handler)


def systemd_unit(arguments: Sequence[str]) -> str:
    """The unit that runs `hetflow` with these arguments, in this folder."""
    words = [sys.executable, "-m", "hetflow", *arguments]
    return (
        "[Unit]\nDescription=hetflow scheduler\nAfter=network.target\n\n[Service]\n"
        f"ExecStart={' '.join(map(_quoted, words))}\n"
        f"WorkingDirectory={_escaped(str(Path.cwd()))}\n"
        # Jobs outlive the scheduler, and the next one adopts them.
        "KillMode=process\nRestart=on-failure\n\n[Install]\nWantedBy=default.target\n"
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of ExecStart: systemd expands % and $ and reads backslashes in quotes."""
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return '"' + escaped.replace("\n", "\\n") + '"'
