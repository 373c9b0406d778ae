"""What a worker and its controller tell each other: typed messages, each a line of JSON.

Both ends are of one installation, so the lines are no format that is kept. A package that was
changed under a running launch is the exception: its new workers may send what the controller does
not know, and the other way round. So everything that comes in is validated, and a message that
cannot be read is a ProblemError that says where it is wrong.
"""

import json
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ..schema.errors import ProblemError
from ..schema.files import to_plain
from ..schema.launch import LaunchConfig
from ..schema.records import Index, Seconds, faults_of, record

MAX_SENTENCE_CHARACTERS = 300

Ranks = dict[str, Index]
"""The rank of each worker by its name; ranks change, names stay."""


# From a worker to its controller


@record
class Beat:
    """A sign of life.

    ``prepared`` says that the script has come to ``hf.prepare``, ``waiting`` that this worker waits
    for others; ``operation`` is how many operations of all workers it has completed.
    """

    prepared: bool
    operation: Index
    waiting: bool
    kind: Literal["beat"] = "beat"


@record
class Ready:
    """A joining worker waits at its first batch."""

    kind: Literal["ready"] = "ready"


@record
class Joined:
    """This worker has met the others of a generation; ``pause_seconds`` is what that took."""

    generation: Index
    pause_seconds: Seconds = 0.0
    kind: Literal["joined"] = "joined"


@record
class Paused:
    """A leaving worker has handed over, and how long it kept the others."""

    generation: Index
    pause_seconds: Seconds
    kind: Literal["paused"] = "paused"


@record
class Lost:
    """This worker lost another in a generation, after so many completed operations."""

    generation: Index
    operation: Index
    why: str
    kind: Literal["lost"] = "lost"


@record
class Closed:
    """The workers of this job cannot change any more."""

    why: str
    kind: Literal["closed"] = "closed"


@record
class Fragile:
    """The others cannot continue without a worker that dies: no process knows their positions."""

    kind: Literal["fragile"] = "fragile"


@record
class Finished:
    """The script is over; the interpreter is about to end, and heartbeats with it."""

    kind: Literal["finished"] = "finished"


@record
class Unreadable:
    """This worker cannot read what its controller has said."""

    why: str
    kind: Literal["unreadable"] = "unreadable"


FromWorker = Beat | Ready | Joined | Paused | Lost | Closed | Fragile | Finished | Unreadable


# From the controller to a worker


@record
class Resize:
    """The next generation is ready: go over to it after the same step.

    ``donors`` names, for each joining worker, who gives it the state. ``guest`` is a worker that
    leaves, but meets the joining ones once to give it: where no worker stays.
    """

    generation: Index
    config: LaunchConfig
    ranks: Ranks
    donors: dict[str, str]
    guest: str | None = None
    kind: Literal["resize"] = "resize"

    def __post_init__(self) -> None:
        _check_ranks(self.config, self.ranks)
        if not self.donors.keys() <= self.ranks.keys():
            raise ProblemError("donors names a worker that has no rank")


@record
class Recover:
    """The workers that continue after a loss: ``behind`` get missing results from ``donor``."""

    generation: Index
    config: LaunchConfig
    ranks: Ranks
    behind: tuple[str, ...]
    donor: str
    kind: Literal["recover"] = "recover"

    def __post_init__(self) -> None:
        _check_ranks(self.config, self.ranks)
        if not {*self.behind, self.donor} <= self.ranks.keys():
            raise ProblemError("behind or donor names a worker that has no rank")


@record
class Abort:
    """A generation is broken: cut its connections."""

    generation: Index
    kind: Literal["abort"] = "abort"


@record
class Leave:
    """The others have met without this worker: it may end."""

    kind: Literal["leave"] = "leave"


FromController = Resize | Recover | Abort | Leave


def encode(message: FromWorker | FromController) -> bytes:
    """A message as a line."""
    return json.dumps(to_plain(message), allow_nan=False).encode() + b"\n"


def from_worker(line: bytes) -> FromWorker:
    """Read what a worker has said.

    Raises:
        ProblemError: It is none of a worker's messages.
    """
    found: FromWorker = _decoded(line, FromWorker)
    return found


def from_controller(line: bytes) -> FromController:
    """Read what the controller has said.

    Raises:
        ProblemError: It is none of a controller's messages.
    """
    found: FromController = _decoded(line, FromController)
    return found


def _decoded(line: bytes, expected: Any) -> Any:
    try:
        return _reader(expected).validate_json(line)
    except ValidationError as error:
        said = " ".join("; ".join(faults_of(error)).split())  # a key may be of several lines
        raise ProblemError(said[:MAX_SENTENCE_CHARACTERS]) from None


@cache
def _reader(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[expected, Field(discriminator="kind")])


def _check_ranks(config: LaunchConfig, ranks: Ranks) -> None:
    if sorted(ranks.values()) != list(range(config.world_size)):
        raise ProblemError(f"ranks must be 0 to {config.world_size - 1}, each once")
