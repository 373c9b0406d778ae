"""Typed messages between a worker and its controller, each one line of JSON.

Both ends usually run the same installation, so the messages are not a stable format. But if the
package is changed during a launch, new workers and the controller may not know each other's
messages. So every received message is validated, and an invalid one raises a ProblemError that
says where it is wrong.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ...schema.errors import LaunchError, ProblemError
from ...schema.files import to_plain
from ...schema.launch import LaunchConfig
from ...schema.records import Index, Name, Seconds, adapter_of, faults_of, record

# The messages that the controllers of several hosts exchange through the store at the start.


@record
class Greeting:
    """A host's greeting to node 0.

    ``plan`` and ``script`` are digests of the host's files, ``policy`` is what to do when a worker
    dies, and ``devices`` what the host contributes (type -> number).
    """

    host: Name
    hetflow: Name
    plan: Name
    seed: Index
    determinism: Name
    script: Name
    policy: Name
    devices: dict[str, Index]


@record
class RankAnswer:
    """Node 0's answer: [hosts] ranks of each host's workers, and [hosts] names."""

    slots: tuple[tuple[Index, ...], ...]
    hosts: tuple[Name, ...]
    kind: Literal["dealt"] = "dealt"


@record
class Refused:
    """Node 0's answer if the hosts cannot launch together, with the reason."""

    error: str
    kind: Literal["refused"] = "refused"


_ANSWER = Annotated[RankAnswer | Refused, Field(discriminator="kind")]


def greeting_of(text: bytes, node: int) -> Greeting:
    """Decode the greeting of a host.

    Raises:
        LaunchError: The text is not a greeting of this version.
    """
    found: Greeting = _read(text, Greeting, f"node {node}")
    return found


def answer_of(text: bytes) -> RankAnswer | Refused:
    """Decode node 0's answer to the greetings.

    Raises:
        LaunchError: The text is not an answer of this version.
    """
    found: RankAnswer | Refused = _read(text, _ANSWER, "node 0")
    return found


def faults_in(error: ValidationError) -> str:
    """What is wrong with a text, in one line of sane length; a key may have several lines."""
    return " ".join("; ".join(faults_of(error)).split())[:300]


def _read(text: bytes, expected: Any, who: str) -> Any:
    try:
        return adapter_of(expected).validate_json(text)
    except ValidationError as error:
        raise LaunchError(
            f"{who} greets in a way that this version of hetflow cannot read: {faults_in(error)}",
            hint="all hosts need the same version of hetflow",
        ) from None


Ranks = dict[str, Index]
"""Worker name -> rank; a worker's rank may change, its name does not."""


# From a worker to its controller


@record
class Beat:
    """A heartbeat.

    ``prepared`` means that the script has reached ``hf.prepare``, ``waiting`` that this worker
    waits for others. ``operation`` is the number of collective operations that it has completed.
    ``left_at`` is the number of its steps where its script has ended and it waits for the others.
    """

    prepared: bool
    operation: Index
    waiting: bool
    left_at: Index | None = None
    kind: Literal["beat"] = "beat"


@record
class Ready:
    """A joining worker waits at its first batch."""

    kind: Literal["ready"] = "ready"


@record
class Joined:
    """This worker has connected to the others of a generation, which took ``pause_seconds``."""

    generation: Index
    pause_seconds: Seconds = 0.0
    kind: Literal["joined"] = "joined"


@record
class Paused:
    """A leaving worker has handed over its state; ``pause_seconds`` is how long others waited."""

    generation: Index
    pause_seconds: Seconds
    kind: Literal["paused"] = "paused"


@record
class Lost:
    """This worker lost another one of a generation, after a number of completed operations."""

    generation: Index
    operation: Index
    why: str
    kind: Literal["lost"] = "lost"


@record
class Closed:
    """The workers of this job cannot be changed any more."""

    why: str
    kind: Literal["closed"] = "closed"


@record
class Fragile:
    """The others cannot continue if a worker dies."""

    why: str
    kind: Literal["fragile"] = "fragile"


@record
class Finished:
    """The script has ended; the process will exit soon and sends no more heartbeats."""

    kind: Literal["finished"] = "finished"


@record
class Reported:
    """This worker has answered ``Report``: its measurements are in the store, if it has any."""

    kind: Literal["reported"] = "reported"


@record
class Unreadable:
    """This worker cannot read a message of its controller."""

    why: str
    kind: Literal["unreadable"] = "unreadable"


FromWorker = (
    Beat | Ready | Joined | Paused | Lost | Closed | Fragile | Finished | Reported | Unreadable
)


# From the controller to a worker


@record
class Resize:
    """The next generation is ready: all workers switch to it after the same step.

    ``donors`` maps each joining worker to the worker that sends it the state. ``guests`` are
    leaving workers that meet the next ones once, to hand over what these cannot get otherwise: the
    state where no worker stays, and shares of it.
    """

    generation: Index
    config: LaunchConfig
    ranks: Ranks
    donors: dict[str, str]
    guests: tuple[str, ...] = ()
    kind: Literal["resize"] = "resize"

    def __post_init__(self) -> None:
        _check_ranks(self.config, self.ranks)
        if not self.donors.keys() <= self.ranks.keys():
            raise ProblemError("donors names a worker that has no rank")

    @property
    def together(self) -> Ranks:
        """The ranks where the next workers meet the guests, which come last."""
        first = len(self.ranks)
        return {**self.ranks, **{name: first + n for n, name in enumerate(self.guests)}}


@record
class Recover:
    """The workers that continue after a loss; those in ``behind`` get results from ``donor``."""

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
    """A generation has failed: close its connections."""

    generation: Index
    kind: Literal["abort"] = "abort"


@record
class Leave:
    """The others have connected without this worker, which may exit."""

    kind: Literal["leave"] = "leave"


@record
class Report:
    """The launch was told to end: report the measurements so far, before the workers are ended."""

    kind: Literal["report"] = "report"


FromController = Resize | Recover | Abort | Report | Leave
_FROM_WORKER = Annotated[FromWorker, Field(discriminator="kind")]
_FROM_CONTROLLER = Annotated[FromController, Field(discriminator="kind")]


def encode(message: FromWorker | FromController) -> bytes:
    """Encode a message as a line."""
    return json.dumps(to_plain(message), allow_nan=False).encode() + b"\n"


def from_worker(line: bytes) -> FromWorker:
    """Decode a worker's message.

    Raises:
        ProblemError: The line is not a valid message of a worker.
    """
    found: FromWorker = _decoded(line, _FROM_WORKER)
    return found


def from_controller(line: bytes) -> FromController:
    """Decode a controller's message.

    Raises:
        ProblemError: The line is not a valid message of a controller.
    """
    found: FromController = _decoded(line, _FROM_CONTROLLER)
    return found


def _decoded(line: bytes, expected: Any) -> Any:
    try:
        return adapter_of(expected).validate_json(line)
    except ValidationError as error:
        raise ProblemError(faults_in(error)) from None


def _check_ranks(config: LaunchConfig, ranks: Ranks) -> None:
    if sorted(ranks.values()) != list(range(config.world_size)):
        raise ProblemError(f"ranks must be 0 to {config.world_size - 1}, each once")
