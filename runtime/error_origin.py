"""Tell whether an error is this worker's own, or follows from the loss of another or from a plan.

The type of an error decides, and where it was raised. Nothing here imports torch.
"""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..schema.errors import PeerLostError, TargetError

_SINGLE_VALUE = "Expected more than 1 value per channel when training"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective or message of the runtime found another worker gone (peers.py)."""
    return isinstance(error, PeerLostError)


def may_be_echo(error: BaseException) -> bool:
    """Whether an error of the script may follow from the loss of another worker.

    It may if it was raised by a collective that the script called itself, or while such an error
    was being handled. It still counts as the script's error; but where another worker failed too,
    that worker is to blame.
    """
    return any(isinstance(e, PeerLostError) or _is_of_an_exchange(e) for e in _with_causes(error))


def explained(error: BaseException) -> BaseException:
    """The error in one line, where it is torch's and a plan may be the reason: batch norm of one.

    Example:
        >>> explained(ValueError("Expected more than 1 value per channel when training")).message
        'a batch norm got one sample, of which there is no variance'
    """
    if not isinstance(error, ValueError) or not str(error).startswith(_SINGLE_VALUE):
        return error
    norm, found = "a batch norm", error.__traceback__
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(found))
    modules: list[Any] = [each["self"] for each in frames if "self" in each]
    modules = [module for module in modules if hasattr(module, "named_modules")]
    if modules:
        named = ((name, m) for outer in modules for name, m in outer.named_modules() if name)
        name = next((name for name, module in named if module is modules[-1]), "")
        norm = (
            f"layer {name} ({type(modules[-1]).__name__})" if name else type(modules[-1]).__name__
        )
    made = TargetError(
        f"{norm} got one sample, of which there is no variance",
        hint="let each virtual node, and a short last batch, have two samples or more: a larger "
        "batch, fewer virtual nodes, DataLoader(drop_last=True); or use GroupNorm, or "
        "SyncBatchNorm, whose batch is the global batch",
    )
    return made.with_traceback(found)


def forget_frames(error: BaseException) -> None:
    """Let go of what the functions held that an error came through, such as process groups."""
    for one in _with_causes(error):
        one.__traceback__ = None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the errors that caused it, and those being handled when it was raised."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [e for e in (one.__cause__, one.__context__) if e is not None]


def _is_of_an_exchange(error: BaseException) -> bool:
    """Whether ``torch.distributed`` raised it.

    Errors of NCCL and of the store have types. gloo raises plain RuntimeErrors; they are known by
    the function that raised them. One raised by a ``work.wait()`` of the script is not recognised.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or dist.__file__ is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    file = innermost.tb_frame.f_code.co_filename if innermost is not None else ""
    return Path(dist.__file__).parent in Path(file).parents
