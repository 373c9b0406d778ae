"""Tell whether an error is this worker's own or follows from the loss of another worker.

The type of an error decides, and where it was raised; never its text. Nothing here imports torch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..schema.errors import PeerLostError


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
