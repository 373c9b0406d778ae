"""What users ask a cluster for, and what each of them may: one answer for owner and group.

The owner of the state asks it directly. Other users of a group on the same host ask its scheduler,
at a socket of the folder (``Group``). The group may enter the folder and connect, and can read
nothing there but what is its own. The kernel says which user has connected, so nobody can ask for
another; nothing that such a request holds is believed.
"""

import grp
import hashlib
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...planning.inputs import profiles_of
from ...schema import files
from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.files import from_json, to_json
from ...schema.options import option
from ...schema.profile import Profile
from ...schema.records import Index, Name, record
from ..engines.accounts import Account, account
from . import view
from .store import FILE, ClusterStore
from .submission import (
    MOST_OF_ARRAY,
    Submission,
    check_asked,
    submit,
    submit_array,
    user_name,
)

_MOST_WEIGHT = 1.0


@record
class Request:
    """A question, or something to do.

    ``submit`` has a submission, and the indices of its array; from another user with the profiles
    themselves. ``hold``, ``release``, ``cancel`` and ``outputs`` have a job's number or name;
    ``queue`` has the number of ended jobs to tell of.
    """

    schema: Literal["hetflow.request/1"] = "hetflow.request/1"
    wish: Literal["submit", "hold", "release", "cancel", "queue", "outputs"]
    job: Name | None = None
    finished: Index = 10
    submission: Submission | None = None
    profiles: tuple[Profile, ...] = ()
    indices: tuple[Index, ...] | None = None

    def __post_init__(self) -> None:
        if self.wish == "submit":
            if self.submission is None:
                raise ProblemError("a request to submit has no submission")
        elif self.wish != "queue" and self.job is None:
            raise ProblemError(f"a request to {self.wish} names no job")


def send(folder: Path, request: Request) -> Any:
    """Ask the cluster of a folder; what ``answer`` says.

    Raises:
        HetflowError: As ``answer``; or this user may not ask, or no scheduler runs.
    """
    if not is_member(folder):
        with closing(ClusterStore.open(folder)) as store:
            return answer(store, request)
    asked = request.submission
    if asked is not None and asked.profiles is not None:  # which the scheduler must not read
        profiles = profiles_of(Path(asked.profiles), asked.model)
        request = replace(request, profiles=profiles)
    return ask(folder, to_json(request))


def answer(store: ClusterStore, request: Request, member: Account | None = None) -> Any:
    """Do what is asked for; what JSON can say of it.

    ``member`` is another user than the state's owner.

    Returns:
        Of ``submit`` the jobs' numbers; of ``queue`` a list of ``QueuedJob.to_plain``; of
        ``outputs`` the job's number, if it is open, and its launches' devices and output files,
        which are relative to the state's folder.

    Raises:
        HetflowError: It cannot be done, or not by this user.
    """
    if request.wish == "queue":
        return [
            row.to_plain() for row in view.queue(store, finished=request.finished, member=member)
        ]
    if request.wish == "submit":
        assert request.submission is not None
        asked = request.submission
        if member is not None:
            asked = _admitted(store, asked, request, member)
        if request.indices is None:
            return [submit(store, asked, member)]
        return submit_array(store, asked, request.indices, member)
    assert request.job is not None
    number = view.job_number(store, request.job)
    _check_owner(store, number, member)
    if request.wish == "outputs":
        is_open = view.is_open(store, number)  # before: what is written after this is read next
        found = [
            (devices, str(path.relative_to(store.folder.absolute())))
            for devices, path in view.outputs(store, number)
        ]
        return {"number": number, "is_open": is_open, "outputs": found}
    view.ask(store, number, request.wish)
    return None


def _check_owner(store: ClusterStore, job: int, member: Account | None) -> None:
    [row] = store.rows("SELECT user, uid FROM jobs WHERE number = ?", job)
    if member is not None and row["uid"] != member.uid:
        whose = f"{row['user']}'s" if row["user"] else "another user's"
        raise ProblemError(
            f"job {job} is {whose}: only that user and the cluster's owner may do this"
        )


def _admitted(
    store: ClusterStore, asked: Submission, request: Request, member: Account
) -> Submission:
    """Another user's submission, with profiles that the scheduler keeps."""
    # What a client checks is checked again: nothing that it says is believed.
    indices = request.indices or ()
    if len(set(indices)) != len(indices) or len(indices) > MOST_OF_ARRAY:
        raise ProblemError(f"an array has at most {MOST_OF_ARRAY} jobs, each once")
    [row] = store.rows(
        "SELECT count(*) AS number FROM jobs WHERE uid = ? AND state NOT IN ('done', 'cancelled')",
        member.uid,
    )  # fmt: skip
    if row["number"] + max(1, len(indices)) > MOST_OF_ARRAY:
        raise ProblemError(
            f"{member.name} has {row['number']} open jobs; {MOST_OF_ARRAY} may be open"
        )
    for path in (asked.script, asked.directory):
        if not os.path.isabs(path):
            raise ProblemError(f"{path}: is no absolute path")
    if any("\0" in word for word in (asked.script, asked.directory, *asked.arguments)):
        raise ProblemError("a path or an argument holds a zero byte")
    if asked.priority_weight > _MOST_WEIGHT:
        raise ProblemError(
            f"priority_weight {asked.priority_weight:g}: only the cluster's owner gives weights "
            f"above {_MOST_WEIGHT:g}"
        )
    if (asked.profiles is None) != (not request.profiles):
        raise ProblemError("the profiles must come with the request")
    if asked.profiles is not None:
        asked = replace(asked, profiles=str(_kept(store, request.profiles, member)))
    check_asked(asked, "submit")
    return asked


def _kept(store: ClusterStore, profiles: tuple[Profile, ...], member: Account) -> Path:
    """Write another user's profiles into a folder of the state, named by what they say."""
    texts = [to_json(one) for one in profiles]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
    folder = store.folder.absolute() / "profiles" / f"{member.uid}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        files.write_text(folder / f"{number}.json", text, force=True)
    return folder


SOCKET = "requests.sock"
MOST_BYTES = 16 * 2**20
LONGEST_SECONDS = 10.0
"""What a request may take to arrive, and its answer to leave."""
MOST_OF_USER = 4
"""Connections of one user at once."""
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger("hetflow")


def is_member(folder: Path) -> bool:
    """Whether this user has to ask the scheduler, because the state is another user's."""
    is_ours = os.access(folder / FILE, os.R_OK | os.W_OK)
    return not is_ours and os.path.lexists(folder / SOCKET)


def ask(folder: Path, text: str) -> Any:
    """Send a request to the scheduler of another user; its answer.

    Raises:
        HetflowError: No scheduler answers, or it refuses.
    """
    data = text.encode()
    if len(data) > MOST_BYTES:
        raise ProblemError(f"the request has {len(data)} bytes, and may have {MOST_BYTES}")
    try:
        with closing(socket.socket(socket.AF_UNIX)) as asking, _reachable(folder) as place:
            asking.settimeout(LONGEST_SECONDS)
            asking.connect(str(place / SOCKET))
            with suppress(BrokenPipeError):  # refused before all was sent
                asking.sendall(data)
                asking.shutdown(socket.SHUT_WR)
            # The answer may take longer than the request: a submission is planned first.
            document = json.loads(_received(asking, 2**62, time.monotonic() + 6 * LONGEST_SECONDS))
    except (OSError, ValueError) as error:
        raise FileError(
            f"{folder}: its scheduler does not answer: {error}",
            hint=f"ask the cluster's owner to start it (hetflow cluster start) with "
            f"{option('group', 'NAME')}",
        ) from None
    if "error" in document:
        raise ProblemError(document["error"], hint=document.get("hint"))
    return document["answer"]


class Group:
    """The users of a group who may use a cluster, and the socket at which they ask."""

    def __init__(self, folder: Path, name: str, may_run_as: Callable[[int], bool]) -> None:
        """Serve nobody yet.

        Raises:
            ProblemError: There is no such group, or this system does not say who connects.
        """
        if not hasattr(socket, "SO_PEERCRED"):
            raise ProblemError("group: this system does not say which user connects; Linux does")
        try:
            self._gid = grp.getgrnam(name).gr_gid
        except KeyError:
            raise ProblemError(f"group {name!r}: this host has none of that name") from None
        self._folder, self._may_run_as = folder, may_run_as
        self._connected = Counter[int]()
        self._guard = threading.Lock()

    @contextmanager
    def serving(self, store: ClusterStore) -> Iterator[None]:
        """Inside, members are answered.

        Raises:
            FileError: The folder cannot be opened to the group.
        """
        try:
            self._protect(store)
            listening = self._listening()
        except OSError as error:
            raise FileError(
                f"{self._folder}: cannot be opened to the group: {error.strerror}",
                hint="its owner has to be in the group, or root",
            ) from None
        with closing(listening):
            thread = threading.Thread(target=self._accept, args=(listening,), daemon=True)
            thread.start()
            try:
                yield
            finally:
                with suppress(OSError):
                    listening.shutdown(socket.SHUT_RDWR)
                with suppress(OSError):
                    (self._folder / SOCKET).unlink()
                thread.join()

    def _protect(self, store: ClusterStore) -> None:
        """Let the group in, after what lies there has been closed to it."""
        # What is checked here and opened below is one folder, whatever its name leads to by then.
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_uid != os.geteuid():
                raise ProblemError(f"{self._folder}: is not this user's: take a folder of your own")
            _check_above(self._folder)
            of_others = {
                str(row["number"])
                for row in store.rows("SELECT number FROM jobs WHERE uid NOTNULL")
            }
            jobs = self._folder / "jobs"
            jobs.mkdir(mode=0o700, exist_ok=True)
            for entry in os.scandir(self._folder):
                # A mode set on a link would be that of what it leads to.
                if entry.is_symlink() or entry.name == jobs.name:
                    continue
                os.chmod(entry.path, 0o700 if entry.is_dir() else 0o600)
            for entry in os.scandir(jobs):
                if entry.name not in of_others:
                    os.chmod(entry.path, 0o700)
            # Members reach their own jobs by number, and cannot list those of others.
            os.chmod(jobs, 0o711)
            # Last: all that lies inside is closed by now.
            os.fchown(handle, -1, self._gid)
            os.fchmod(handle, 0o710)
        finally:
            os.close(handle)

    def _listening(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        try:
            with _reachable(self._folder) as place:
                # An earlier scheduler may have left it.
                (self._folder / SOCKET).unlink(missing_ok=True)
                listening.bind(str(place / SOCKET))
                os.chown(place / SOCKET, -1, self._gid)
                os.chmod(place / SOCKET, 0o660)
            listening.listen()
        except BaseException:
            listening.close()
            raise
        return listening

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if listening.fileno() < 0 or not (self._folder / SOCKET).exists():
                    return
                time.sleep(0.1)  # no file descriptor is left, say
                continue
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            uid = int(_CREDENTIALS.unpack(data)[1])
            with self._guard:
                is_many = self._connected[uid] >= MOST_OF_USER
                self._connected[uid] += not is_many
            if is_many:
                with closing(connection), suppress(OSError):
                    connection.sendall(b'{"error": "too many requests of yours are open"}')
                continue
            threading.Thread(target=self._serve, args=(connection, uid), daemon=True).start()

    def _serve(self, connection: socket.socket, uid: int) -> None:
        try:
            with closing(connection):
                until = time.monotonic() + LONGEST_SECONDS
                document = json.dumps(self._answered(connection, uid, until)).encode()
                connection.settimeout(LONGEST_SECONDS)
                connection.sendall(document)
        except OSError:  # whoever asked has gone, or is too slow
            pass
        finally:
            with self._guard:
                self._connected[uid] -= 1

    def _answered(self, connection: socket.socket, uid: int, until: float) -> dict[str, Any]:
        try:
            text = _received(connection, MOST_BYTES, until).decode(errors="replace")
            if not self._may_run_as(uid):
                owner = user_name(os.geteuid())
                raise ProblemError(
                    f"this cluster runs jobs as {owner} alone",
                    hint=f"only a scheduler that root runs with {option('engine', 'local')} runs "
                    "each job as its "
                    "submitter",
                )
            member = account(uid)
            with closing(ClusterStore.open(self._folder)) as store:
                return {"answer": answer(store, from_json(text, Request, name="request"), member)}
        except HetflowError as error:
            return {"error": error.message, "hint": error.hint}
        except OSError:
            raise
        except Exception:  # no request may end the scheduler
            _log.warning(f"a request of user {uid} could not be answered", exc_info=True)
            return {"error": "the scheduler could not answer", "hint": "tell the cluster's owner"}


def _check_above(folder: Path) -> None:
    """Refuse a folder that another user could put a different one in the place of."""
    for above in folder.resolve().parents:
        found = above.stat()
        # With the sticky bit only owners rename.
        is_open = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if is_open or found.st_uid not in (0, os.geteuid()):
            raise ProblemError(
                f"{folder}: others may rename what is in {above}",
                hint="take a folder below one that only root or you may write to, such as /var/lib",
            )


def _received(connection: socket.socket, most: int, until: float) -> bytes:
    """All that is sent until the other side says that this is all."""
    parts: list[bytes] = []
    size = 0
    while True:
        # One limit for all parts, so that nobody holds a connection open byte by byte.
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > most:
            raise ProblemError(f"the request has more than {most} bytes")


@contextmanager
def _reachable(folder: Path) -> Iterator[Path]:
    """Another name of a folder, short enough for the address of a socket (108 bytes)."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
