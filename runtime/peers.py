"""Everything this process asks of other workers: exchanges, and the launch's store.

Only an error raised in here means that another worker is gone: it is raised as ``PeerLostError``.
Whatever else is raised (by the script, its data, its model, its loss) is that code's own and stays
as it is, whatever its text says. So no module of the runtime calls ``torch.distributed``'s
exchanges by itself (tests/test_house.py).

Torch has types for errors of NCCL and of the store. gloo's are plain RuntimeErrors, from the call
or from ``wait``; no other plain RuntimeError is raised by an exchange of tensors that exist.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..schema.errors import PeerLostError

# RuntimeErrors with a meaning of their own, which an exchange may raise as well.
_OF_THIS_WORKER: tuple[type[Exception], ...] = (
    NotImplementedError,
    RecursionError,
    # Older torch raises plain RuntimeErrors for what has types of its own since.
    *(getattr(torch, n) for n in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, n)),
)

_SOURCE_PLACE = re.compile(r"^\[[^]]*\.cc:\d+\] ")  # of torch's code, on the machine that built it

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Transfer:
    """An exchange that was started; buffers are kept until it is done."""

    __slots__ = ("_what", "_work")

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        """Wait until it is done. On CUDA with NCCL this blocks the stream, not the host.

        Raises:
            PeerLostError: Another worker is gone, or did not come within the time limit.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(self._what, error) from error


def guarded(what: str, function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """A function of torch that talks to other workers and runs no code of the script.

    Args:
        what: What it does, for the error.
        function: The function.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise _lost(what, error) from error

    return call


def _starting(function: Callable[..., Any]) -> Callable[..., "Transfer | None"]:
    """An exchange of the group; what it returns (where it is asked to) is waited for later."""
    what = function.__name__
    call = guarded(what, function)

    @wraps(function)
    def start(*args: Any, **kwargs: Any) -> Transfer | None:
        work = call(*args, **kwargs)
        return Transfer(work, what) if isinstance(work, dist.Work) else None

    return start


# As torch.distributed's functions of these names; with ``async_op`` they return a Transfer.
all_reduce = _starting(dist.all_reduce)
broadcast = _starting(dist.broadcast)
# Newer torch has another name for it, and warns of this one.
all_gather = _starting(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
all_to_all_single = _starting(dist.all_to_all_single)
isend = _starting(dist.isend)
irecv = _starting(dist.irecv)
send = guarded("send", dist.send)
receive = guarded("receive", cast("Callable[..., int | None]", dist.recv))
init_process_group = guarded("init_process_group", dist.init_process_group)
new_group = guarded("new_group", dist.new_group)


def send_over(group: dist.ProcessGroup, part: Tensor, peer: int, tag: int) -> Transfer:
    """Start to send to a rank of a group."""
    try:
        return Transfer(group.send([part], peer, tag), "send")
    except RuntimeError as error:
        raise _lost("send", error) from error


def receive_over(group: dist.ProcessGroup, part: Tensor, peer: int, tag: int) -> Transfer:
    """Start to receive from a rank of a group."""
    try:
        return Transfer(group.recv([part], peer, tag), "receive")
    except RuntimeError as error:
        raise _lost("receive", error) from error


class SharedStore:
    """Keys and values that all workers of a launch see.

    Args:
        store: Torch's.
    """

    def __init__(self, store: Store) -> None:
        self.of_torch = store

    def under(self, prefix: str) -> "SharedStore":
        """The part of it whose keys begin with a prefix."""
        return SharedStore(PrefixStore(prefix, self.of_torch))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        guarded(_asking(key), self.of_torch.set)(key, value)

    def get(self, key: str) -> str:
        """A value; waits until it is there."""
        found: bytes = guarded(_asking(key), self.of_torch.get)(key)
        return found.decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a number; what it comes to."""
        found: int = guarded(_asking(key), self.of_torch.add)(key, amount)
        return found

    def has(self, *keys: str) -> bool:
        """Whether there are all these keys."""
        return bool(guarded(_asking(*keys), self.of_torch.check)(list(keys)))

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        """Wait until all these keys are there.

        Raises:
            PeerLostError: They did not come within ``limit`` (``timed_out``), or it is gone.
        """
        wait: Callable[..., None] = self.of_torch.wait
        guarded(_asking(*keys), wait)(list(keys), limit)


def _asking(*keys: str) -> str:
    return f"the store, for {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"


def _lost(what: str, error: RuntimeError) -> Exception:
    """What to raise for a RuntimeError of an exchange."""
    if isinstance(error, _OF_THIS_WORKER):
        return error
    if isinstance(error, dist.DistStoreError):  # its text tells the whole keys, with the prefix
        return PeerLostError(f"waited in vain for another worker in {what}", timed_out=True)
    text = _SOURCE_PLACE.sub("", str(error).strip().partition("\n")[0])
    # Time limits of the store have a type; of gloo's and NCCL's only the text tells.
    timed_out = "timed out" in str(error).lower()
    said = "waited in vain for another worker" if timed_out else "lost another worker"
    return PeerLostError(f"{said} in {what}: {text}", timed_out=timed_out)
