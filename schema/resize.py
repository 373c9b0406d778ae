"""The request of ``hetflow resize`` to a running launch, and the launch's answer."""

from typing import Literal

from .launch import LaunchConfig
from .records import Index, Name, Seconds, record


@record
class ResizeRequest:
    """A request to run the same virtual nodes on other devices from now on.

    If ``wants_answer`` is false, no client waits for the answer.
    """

    schema: Literal["hetflow.resize/1"] = "hetflow.resize/1"
    config: LaunchConfig
    wants_answer: bool = True


@record
class ResizeAnswer:
    """The outcome of a request.

    A ``refused`` request was not tried. A ``failed`` one was tried, and the job continues on its
    former devices. ``joined`` and ``left`` name workers. ``pause_seconds`` is how long training
    paused, ``start_seconds`` how long the joining workers took to start.

    Example:
        >>> import hetflow
        >>> hetflow.ResizeAnswer(status="refused", detail="the launch has ended").joined
        ()
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
