"""All communication of this process with other workers: collectives, messages and the store.

Only an error raised in here means that another worker is gone; it is raised as ``PeerLostError``.
Any other error (of the script, its data, its model, its loss) belongs to the code that raised it
and stays as it is, whatever its text says. So no other module of the runtime calls
``torch.distributed``'s collectives directly (tests/test_house.py).

NCCL's and the store's errors have types in torch. gloo's are plain RuntimeErrors, raised by the
call or by ``wait``; a collective on valid tensors raises no other plain RuntimeError.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..schema.errors import PeerLostError

# RuntimeErrors with a meaning of their own, which a collective may raise as well.
_OF_THIS_WORKER: tuple[type[Exception], ...] = (
    NotImplementedError,
    RecursionError,
    # Older releases of torch raise plain RuntimeErrors for what later got types of its own.
    *(getattr(torch, n) for n in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, n)),
)

_SOURCE_PLACE = re.compile(r"^\[[^]]*\.cc:\d+\] ")  # torch's source line, on its build machine

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


_LOOK = timedelta(seconds=1)  # how often a wait asks whether it is in vain


class _Waits:
    """Whether collectives between hosts' memories are in vain by now; None where nobody knows."""

    are_in_vain: Callable[[], bool] | None = None


def give_up_when(are_in_vain: Callable[[], bool] | None) -> None:
    """Let waits for collectives of gloo end soon after they have become vain.

    Most fail at once when their connections are shut down. But gloo may lose the error of a send
    that met a broken connection while another of its threads closed it; that collective would
    wait for the group's time limit, which is minutes.
    """
    _Waits.are_in_vain = are_in_vain


class Transfer:
    """A collective or message that was started; its buffers are kept alive until it is done."""

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


class Collective(Transfer):
    """A collective; unlike a message, it goes on after a wait for it that ended early."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait as ``Transfer`` does; end too where the wait has become vain (``give_up_when``)."""
        are_in_vain = _Waits.are_in_vain
        while are_in_vain is not None:
            try:
                self._work.wait(_LOOK)
                return
            except RuntimeError as error:
                # It failed, or has come just after the look; the wait below tells which.
                if self._work.is_completed():
                    break
                if are_in_vain():
                    raise PeerLostError(f"lost another worker in {self._what}") from error
        super().wait()


def wait_for(transfers: Iterable[Transfer | None]) -> None:
    """Wait until all are done; None stands for one that is."""
    for transfer in transfers:
        if transfer is not None:
            transfer.wait()


def guarded(what: str, function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Wrap a function of torch that talks to other workers and runs no code of the script.

    Returns:
        The function; it raises PeerLostError where another worker is gone.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise _lost(what, error) from error

    return call


def _starting(
    function: Callable[..., Any], made: type[Transfer] = Transfer
) -> Callable[..., Transfer | None]:
    """Wrap the start of a message or collective; what it returns is to be waited for later."""
    what = function.__name__
    call = guarded(what, function)

    @wraps(function)
    def start(*args: Any, **kwargs: Any) -> Transfer | None:
        work = call(*args, **kwargs)
        return made(work, what) if isinstance(work, dist.Work) else None

    return start


def _collective(function: Callable[..., Any]) -> Callable[..., Transfer | None]:
    """Wrap a collective; with ``async_op`` it returns a Transfer to wait for later."""
    start = _starting(function, Collective)

    @wraps(function)
    def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Transfer | None:
        # Started, and then waited for in Python: a wait inside torch could not be given up.
        started = start(*args, async_op=async_op or _Waits.are_in_vain is not None, **kwargs)
        if async_op or started is None:
            return started
        started.wait()
        return None

    return run


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> "Transfer | None":
    """Like torch.distributed's; with ``async_op`` it returns a Transfer.

    What every step starts is given to the group at once: between two passes, where Python's code is
    no longer in the caches, torch's checks of the arguments take longer than the call.
    """
    asked = dist.group.WORLD if group is None else group
    is_usual = async_op and op == dist.ReduceOp.SUM and not tensor.is_complex()
    if not is_usual or not isinstance(asked, dist.ProcessGroup):
        return _any_all_reduce(tensor, op=op, group=group, async_op=async_op)
    try:
        return Collective(asked.allreduce([tensor], _SUM), "all_reduce")
    except RuntimeError as error:
        raise _lost("all_reduce", error) from error


def _started_sum() -> dist.AllreduceOptions:
    """The options of a sum that nobody waits for yet; its time limit is the group's."""
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):  # newer releases of torch
        options.asyncOp = True
    return options


_SUM = _started_sum()
_any_all_reduce = _collective(dist.all_reduce)
# Like torch.distributed's functions of these names; with ``async_op`` they return a Transfer.
broadcast = _collective(dist.broadcast)
reduce = _collective(dist.reduce)
# Newer releases of torch renamed it, and warn of the old name.
all_gather = _collective(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
reduce_scatter = _collective(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor))
all_to_all_single = _collective(dist.all_to_all_single)
isend = _starting(dist.isend)
irecv = _starting(dist.irecv)
all_gather_object = guarded("all_gather_object", dist.all_gather_object)
send = guarded("send", dist.send)
receive = guarded("receive", cast("Callable[..., int | None]", dist.recv))
init_process_group = guarded("init_process_group", dist.init_process_group)
new_group = guarded("new_group", dist.new_group)


def abort_groups() -> None:
    """Abort the collectives of all groups, so that nothing waits for their workers any more.

    May be called from any thread, and again. What an aborted collective leaves behind is garbage.
    """
    # Of a copy: the main thread may make or destroy groups meanwhile.
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # it may be gone already
            group.abort()


def forget_aborted_groups() -> None:
    """Leave groups whose collectives were aborted: destroying them would wait for their workers."""
    dist.distributed_c10d._abort_process_group()


def started(what: str, function: Callable[..., dist.Work], *arguments: Any) -> Transfer:
    """Start a message by a process group's own method: torch's functions would check it first."""
    try:
        return Transfer(function(*arguments), what)
    except RuntimeError as error:
        raise _lost(what, error) from error


class SharedStore:
    """Keys and values that all workers of a launch share."""

    def __init__(self, store: Store) -> None:
        self.of_torch = store

    def under(self, prefix: str) -> "SharedStore":
        """A view of the store in which every key gets a prefix."""
        return SharedStore(PrefixStore(prefix, self.of_torch))

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        guarded(_asking(key), self.of_torch.set)(key, value)

    def get(self, key: str) -> str:
        """Read a value; wait until it is there."""
        found: bytes = guarded(_asking(key), self.of_torch.get)(key)
        return found.decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        found: int = guarded(_asking(key), self.of_torch.add)(key, amount)
        return found

    def has(self, *keys: str) -> bool:
        """Whether all these keys are there."""
        return bool(guarded(_asking(*keys), self.of_torch.check)(list(keys)))

    def delete(self, key: str) -> None:
        """Remove a key and its value."""
        guarded(_asking(key), self.of_torch.delete_key)(key)

    def absent(self, sign: str, rank: int, world_size: int, *, seconds: float) -> list[int]:
        """Say a sign, and wait for all workers to say it.

        Returns:
            The ranks that have not said it after so long.

        Raises:
            PeerLostError: A worker is lost meanwhile.
        """
        signs, until = [f"{sign}/{n}" for n in range(world_size)], time.monotonic() + seconds
        self.set(signs[rank], "")
        while True:
            left = until - time.monotonic()
            try:
                self.wait(signs, min(_LOOK, timedelta(seconds=max(left, 1e-3))))
                return []
            except PeerLostError as error:
                if not error.timed_out or (_Waits.are_in_vain is not None and _Waits.are_in_vain()):
                    raise
            if left < 0:
                return [n for n, said in enumerate(signs) if not self.has(said)]

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        """Wait until all these keys are there.

        Raises:
            PeerLostError: They did not come within ``limit`` (``timed_out``), or the store is gone.
        """
        wait: Callable[..., None] = self.of_torch.wait
        guarded(_asking(*keys), wait)(list(keys), limit)


def _asking(*keys: str) -> str:
    return f"the store, for {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"


def _lost(what: str, error: RuntimeError) -> Exception:
    """The error to raise for a RuntimeError of a collective."""
    if isinstance(error, _OF_THIS_WORKER):
        return error
    if isinstance(error, dist.DistStoreError):  # its text has the full keys, with the prefix
        return PeerLostError(f"waited in vain for another worker in {what}", timed_out=True)
    text = _SOURCE_PLACE.sub("", str(error).strip().partition("\n")[0])
    # The store's time limits have a type; those of gloo, NCCL and files are known by their text.
    timed_out = any(words in str(error).lower() for words in ("timed out", "wait timeout"))
    said = "waited in vain for another worker" if timed_out else "lost another worker"
    return PeerLostError(f"{said} in {what}: {text}", timed_out=timed_out)
