"""Whether an error of this worker is its own or follows from the loss of another worker.

By type, and by where an error was raised; never by its text. Nothing here imports torch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..schema.errors import PeerLostError


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange of the runtime found that another worker is gone (runtime/peers.py)."""
    return isinstance(error, PeerLostError)


def may_be_echo(error: BaseException) -> bool:
    """Whether an error of the script may follow from the loss of another worker.

    It came out of an exchange that the script did by itself, or while one was being handled. It is
    the script's error all the same; but where another worker failed too, that one is to blame.
    """
    return any(isinstance(e, PeerLostError) or _is_of_an_exchange(e) for e in _with_causes(error))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and what was being handled then."""
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

    Errors of NCCL and of the store have types. gloo's are plain RuntimeErrors, known by the
    function they were raised in. One that a ``work.wait()`` of the script raises is not known.
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
