"""What ``hetflow resize`` asks of a running launch, and what it answers."""

from typing import Literal

from .launch import LaunchConfig
from .records import Index, Name, Seconds, record, register_keys


@record
class ResizeRequest:
    """Run the same virtual nodes on other devices from now on.

    Without ``wants_answer`` no client waits for its result.
    """

    schema: Literal["hetflow.resize/1"] = "hetflow.resize/1"
    config: LaunchConfig
    wants_answer: bool = True


@record
class ResizeAnswer:
    """What became of a request.

    ``refused`` changed nothing and never will; ``failed`` was tried, and the job goes on as it
    was. ``joined`` and ``left`` name the workers, ``pause_seconds`` is how long training stood
    still, ``start_seconds`` how long the joining workers took to be ready.
    """

    schema: Literal["hetflow.resized/1"] = "hetflow.resized/1"
    status: Literal["done", "refused", "failed"]
    detail: str
    hint: str | None = None
    generation: Index | None = None
    joined: tuple[Name, ...] = ()
    left: tuple[Name, ...] = ()
    start_seconds: Seconds | None = None
    pause_seconds: Seconds | None = None


register_keys(ResizeRequest, ResizeAnswer)
