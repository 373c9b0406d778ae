"""The messages that the controllers of several hosts exchange through the store at the start."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ...schema.errors import LaunchError
from ...schema.files import to_json
from ...schema.records import Index, Name, adapter_of, faults_of, record


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
class Dealt:
    """Node 0's answer: [hosts] ranks of each host's workers, and [hosts] names."""

    slots: tuple[tuple[Index, ...], ...]
    hosts: tuple[Name, ...]
    kind: Literal["dealt"] = "dealt"


@record
class Refused:
    """Node 0's answer if the hosts cannot launch together, with the reason."""

    error: str
    kind: Literal["refused"] = "refused"


_ANSWER = Annotated[Dealt | Refused, Field(discriminator="kind")]


def text_of(told: Greeting | Dealt | Refused) -> str:
    """Encode a greeting or an answer for the store."""
    return to_json(told)


def greeting_of(text: bytes, node: int) -> Greeting:
    """Decode the greeting of a host.

    Raises:
        LaunchError: The text is not a greeting of this version.
    """
    found: Greeting = _read(text, Greeting, f"node {node}")
    return found


def answer_of(text: bytes) -> Dealt | Refused:
    """Decode node 0's answer to the greetings.

    Raises:
        LaunchError: The text is not an answer of this version.
    """
    found: Dealt | Refused = _read(text, _ANSWER, "node 0")
    return found


def _read(text: bytes, expected: Any, who: str) -> Any:
    try:
        return adapter_of(expected).validate_json(text)
    except ValidationError as error:
        faults = " ".join("; ".join(faults_of(error)).split())[:300]
        raise LaunchError(
            f"{who} greets in a way that this version of hetflow cannot read: {faults}",
            hint="all hosts need the same version of hetflow",
        ) from None
