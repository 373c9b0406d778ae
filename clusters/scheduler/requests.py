"""What users ask a cluster for, and what each of them may: one answer for owner and group.

The owner of the state asks it directly. Another user asks its scheduler (``group``), and is who the
kernel says that asks; nothing that such a request holds is believed.
"""

import hashlib
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...planning.inputs import profiles_of
from ...schema import files
from ...schema.errors import ProblemError
from ...schema.files import from_json, to_json
from ...schema.profile import Profile
from ...schema.records import Index, Name, record
from ..engines.accounts import Account
from . import group, view
from .store import ClusterStore
from .submission import MOST_OF_ARRAY, Submission, check_asked, submit, submit_array

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
    if not group.is_member(folder):
        with closing(ClusterStore.open(folder)) as store:
            return answer(store, request)
    asked = request.submission
    if asked is not None and asked.profiles is not None:  # which the scheduler must not read
        profiles = profiles_of(Path(asked.profiles), asked.model)
        request = replace(request, profiles=profiles)
    return group.ask(folder, to_json(request))


def answer_member(store: ClusterStore, text: str, member: Account) -> Any:
    """Answer the request of another user.

    Args:
        store: The state.
        text: What was sent, which may be anything.
        member: Who sent it.

    Raises:
        HetflowError: It is no request, or this user may not ask for it.
    """
    return answer(store, from_json(text, Request, name="request"), member)


def answer(store: ClusterStore, request: Request, member: Account | None = None) -> Any:
    """Do what is asked for; what JSON can say of it.

    Args:
        store: The state.
        request: It is.
        member: Another user than the state's owner.

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
