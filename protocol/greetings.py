"""What the controllers of several hosts tell each other when they meet, through the store."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ..schema.errors import LaunchError
from ..schema.files import to_json
from ..schema.records import Index, Name, faults_of, record


@record
class Greeting:
    """One host.

    ``plan`` is the digest of the plan it was given, ``policy`` what is to follow a worker's death,
    ``devices`` what it contributes, type to number.
    """

    host: Name
    hetflow: Name
    plan: Name
    policy: Name
    devices: dict[str, Index]


@record
class Dealt:
    """The ranks of each host's workers, and the hosts' names; by host."""

    slots: tuple[tuple[Index, ...], ...]
    hosts: tuple[Name, ...]
    kind: Literal["dealt"] = "dealt"


@record
class Refused:
    """Why there will be no launch."""

    error: str
    kind: Literal["refused"] = "refused"


_ANSWER = Annotated[Dealt | Refused, Field(discriminator="kind")]


def text_of(told: Greeting | Dealt | Refused) -> str:
    """A greeting or an answer as it travels."""
    return to_json(told)


def greeting_of(text: bytes, node: int) -> Greeting:
    """Read the greeting of a host.

    Raises:
        LaunchError: It is none of this version's.
    """
    found: Greeting = _read(text, Greeting, f"node {node}")
    return found


def answer_of(text: bytes) -> Dealt | Refused:
    """Read node 0's answer to the greetings.

    Raises:
        LaunchError: It is none of this version's.
    """
    found: Dealt | Refused = _read(text, _ANSWER, "node 0")
    return found


def _read(text: bytes, expected: Any, who: str) -> Any:
    try:
        return TypeAdapter(expected).validate_json(text)
    except ValidationError as error:
        faults = " ".join("; ".join(faults_of(error)).split())[:300]
        raise LaunchError(
            f"{who} greets in a way that this version of hetflow cannot read: {faults}",
            hint="all hosts need the same version of hetflow",
        ) from None
