"""Tells a program or a web address of the owner's choice about each change of a job's state.

The document of a change goes to a program's stdin, or is posted; no shell is started, and nothing
of a job is in a command line. What was not told when the scheduler ends is not told later.
"""

import json
import queue
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from ...schema.errors import ProblemError
from .store import SHOWN_STATE, ClusterStore

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

        Args:
            store: The state.
            to: An ``http://`` or ``https://`` address, or a program with its arguments.
            say: Called with what could not be told.

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
