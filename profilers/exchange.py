"""Steps and messages of several workers at once, inside each of them (VirtualFlow 5.1.2).

Times are by the wall clock: waiting is what is measured. Steps that synchronise and steps that do
not alternate, so that a drift of the machine meets both.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..devices.backend import backend_of
from ..devices.collectives import HOST_COLLECTIVE
from ..schema.errors import TargetError
from .bench import Bench

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ..runtime.gradients import GradientReducer
    from ..runtime.peers import SharedStore

TIMEOUT = timedelta(seconds=120)
LOOPBACK_ADDRESS = "127.0.0.1"
_LOOK_SECONDS = 0.0005
_FAILED = "failed"


@contextmanager
def process_group(
    path: str, *, rank: int, world_size: int, backend: str, device: str
) -> Iterator["SharedStore"]:
    """Join the other workers' process group, and leave it; gives the store they share."""
    import torch
    import torch.distributed as dist

    from ..runtime.peers import SharedStore

    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    backend_of(device).set_current(torch.device(device))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        yield SharedStore(store).under("hetflow")
    finally:
        dist.destroy_process_group()


class StartingLine:
    """Where processes that exchange nothing wait for each other: each leaves a file in a folder."""

    def __init__(self, folder: str, index: int, number: int) -> None:
        self._folder, self._index, self._number = folder, index, number

    def say(self, what: str) -> None:
        """Tell the other processes that this one has done something."""
        with open(os.path.join(self._folder, f"{what}-{self._index}"), "wb"):
            pass

    def have_all(self, what: str) -> bool:
        """Whether every process has said it."""
        return all(self._has_said(what, index) for index in range(self._number))

    def _has_said(self, what: str, index: int) -> bool:
        return os.path.exists(os.path.join(self._folder, f"{what}-{index}"))

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """Tell the other processes when this one fails, so that they stop waiting."""
        try:
            yield
        except BaseException:
            self.say(_FAILED)
            raise

    def wait(self, what: str) -> None:
        """Call ``say``, and wait until all processes have.

        Raises:
            TargetError: One has failed, or did not come within two minutes.
        """
        self.say(what)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while not self.have_all(what):
            failed = any(self._has_said(_FAILED, index) for index in range(self._number))
            if failed or time.monotonic() > end:
                raise TargetError("another measuring process failed")
            time.sleep(_LOOK_SECONDS)


_STORES: list[object] = []  # they live as long as the process


def hold_store(_: object) -> dict[str, int]:
    """Hold a store in which the workers of a script meet; its ``port`` on this host."""
    import torch.distributed as dist

    with socket.socket() as listening:
        listening.bind((LOOPBACK_ADDRESS, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK_ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    _STORES.append(store)
    return {"port": port}


_WARM_UP_STEPS = 3
_MIN_REPEATS = 5
_MAX_REPEATS = 100
_SMALLEST_BYTES, _LEAST_LARGEST_BYTES = 1 << 10, 1 << 16


def exchange(
    bench: Bench,
    *,
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    batch_size: int,
    budget_seconds: float,
    measures_messages: bool,
) -> dict[str, Any]:
    """Join the other workers, measure, leave.

    Args:
        bench: The loaded workload.
        rank: Of this worker.
        world_size: Of all workers.
        folder: Where the workers meet; a file in it is their store, so no port is opened for it.
        backend: The library for collectives.
        batch_size: Samples per worker and step; 1 isolates synchronisation.
        budget_seconds: Wall time to spend on steps, and again on messages.
        measures_messages: Whether to all-reduce messages of several sizes too.

    Returns:
        ``single`` and ``distributed``: wall seconds of each step; ``messages``: for each size
        (``all_reduce_sizes``) its bytes and the wall seconds of each all-reduce.
    """
    path = os.path.join(folder, "store")
    with process_group(
        path, rank=rank, world_size=world_size, backend=backend, device=bench.device
    ):
        steps = _steps(bench, batch_size, budget_seconds)
        sizes = all_reduce_sizes(bench.weight_bytes) if measures_messages else ()
        messages = [
            {"num_bytes": size, "seconds": _messages(bench, size, budget_seconds / len(sizes))}
            for size in sizes
        ]
        return {**steps, "messages": messages}


def all_reduce_sizes(weight_bytes: int) -> tuple[int, ...]:
    """From 1 KiB by steps of 4 to the model's gradients, to 64 KiB at least."""
    sizes = [_SMALLEST_BYTES]
    while 4 * sizes[-1] < weight_bytes or sizes[-1] < _LEAST_LARGEST_BYTES:
        sizes.append(4 * sizes[-1])
    whole = weight_bytes // 4 * 4
    return tuple(sizes) if whole <= sizes[-1] else (*sizes, whole)


def _steps(bench: Bench, batch_size: int, budget_seconds: float) -> dict[str, list[float]]:
    from ..runtime.gradients import GradientReducer

    batch = bench.make_batch(batch_size)
    parameters = [p for p in bench.model.parameters() if p.requires_grad]
    reducers = {
        "single": GradientReducer(parameters, distributed=False),
        "distributed": GradientReducer(parameters, distributed=True),
    }
    samples: dict[str, list[float]] = {"single": [], "distributed": []}

    def pair() -> None:
        # One set of gradients serves both; each reducer points it into its own buffer.
        for kind, reducer in reducers.items():
            samples[kind].append(_step(bench, reducer, batch))

    for _ in range(_WARM_UP_STEPS):
        pair()
    last = samples["single"][-1] + samples["distributed"][-1]
    repeats = _agreed_repeats(bench, budget_seconds / max(last, 1e-6))
    for kept in samples.values():
        kept.clear()
    for _ in range(repeats):
        pair()
    for reducer in reducers.values():
        reducer.close()
    return samples


def _step(bench: Bench, reducer: "GradientReducer", batch: Any) -> float:
    for parameter in bench.model.parameters():
        parameter.grad = None
    _meet(bench)
    start = time.perf_counter()
    reducer.begin()
    reducer.arm()
    bench.run_pass(batch)
    reducer.finish()
    bench.wait()
    return time.perf_counter() - start


def _messages(bench: Bench, num_bytes: int, budget_seconds: float) -> list[float]:
    import torch
    import torch.distributed as dist

    message = torch.zeros(max(1, num_bytes // 4), device=bench.device)

    def once() -> float:
        _meet(bench)
        start = time.perf_counter()
        dist.all_reduce(message)
        bench.wait()
        return time.perf_counter() - start

    warm_up = [once() for _ in range(_WARM_UP_STEPS)]
    return [once() for _ in range(_agreed_repeats(bench, budget_seconds / max(warm_up[-1], 1e-6)))]


def _agreed_repeats(bench: Bench, affordable: float) -> int:
    """The first worker's wish, clamped: all must take the same number of steps."""
    import torch
    import torch.distributed as dist

    wish = torch.tensor([int(max(_MIN_REPEATS, min(_MAX_REPEATS, affordable)))])
    wish = wish.to(bench.device)
    dist.broadcast(wish, src=0)
    return int(wish.item())


def _meet(bench: Bench) -> None:
    import torch.distributed as dist

    dist.barrier()
    bench.wait()


# Messages between two workers, as pipelines send them, inside each of them.
# Both ends are the runtime's own (transport and channels): messages travel as between the workers
# of a launch on this host. Both workers read one clock, so they begin at an agreed moment, and a
# message takes from then until it can be read on the other side.

_CHANNELS = 2  # there and back
KINDS = ("there", "back", "both")
_ROUNDS = 3
_FEWEST, _MOST = 3, 30  # messages of one size in one round, each way
_LEAD_SECONDS = 5e-4  # between agreeing on a moment and the moment


def exchange_messages(
    _: object,
    *,
    rank: int,
    folder: str,
    device: str,
    message_bytes: list[int],
    budget_seconds: float,
    backend: str | None = None,
) -> dict[str, Any]:
    """Join the other worker, send messages there, back and both ways at once, leave.

    Sizes take turns over several rounds, so that a drift of the machine meets all of them.

    Args:
        rank: 0 or 1; messages from 0 go there, from 1 back.
        folder: Where the two meet; a file in it is their store, so no port is opened for it.
        device: Torch's name of this worker's device.
        message_bytes: Sizes to send, ascending.
        budget_seconds: Wall time to spend, about; every size is sent a few times at least.
        backend: The library for collectives; None takes the device's.

    Returns:
        Of each kind, [sizes][messages] wall seconds until a message had come to this worker; of
        ``there`` and ``back`` only where it receives. Besides, ``channel_bytes`` of device memory
        that one channel takes here beside tensors; None on a CPU.
    """
    import torch

    torch.set_num_threads(1)
    own = backend_of(device)
    path = os.path.join(folder, "links")
    with (
        process_group(
            path, rank=rank, world_size=2, backend=backend or own.collective, device=device
        ),
        torch.no_grad(),
    ):
        place = torch.device(device)
        # What the first work of a process on the device loads is no channel's.
        torch.zeros(max(message_bytes), dtype=torch.uint8, device=place).clone()
        before = own.beside_bytes(place)
        end = _End(rank, place)
        found: dict[str, Any] = dict(_rounds(end, message_bytes, budget_seconds))
        after = own.beside_bytes(place)
        found["channel_bytes"] = None
        if before is not None and after is not None:
            found["channel_bytes"] = max(0, after - before) // _CHANNELS
        return found


class _End:
    """One worker's end of the link: a channel each way, and a moment to begin at."""

    def __init__(self, rank: int, device: "torch.device") -> None:
        from ..runtime.group import Place, subgroup
        from ..runtime.pipeline.channels import Outbox, ReceiveQueue, Rooms
        from ..runtime.pipeline.transport import transport_of
        from ..runtime.protocol.environment import Start

        start = Start(rank=rank, world_size=2, timeout_seconds=TIMEOUT.total_seconds())
        place = Place(start=start, slot=None, device=device, rank=rank, world_size=2)
        transport = transport_of(place, [[[0]], [[1]]])
        assert transport is not None
        mine, theirs = (0, 1, True), (1, 0, False)
        if rank == 1:
            mine, theirs = theirs, mine
        self.rank, self.device = rank, device
        self.outbox: Outbox = Outbox(transport.lines(mine))
        self.inbox: ReceiveQueue = ReceiveQueue(transport.lines(theirs))
        self._are_joined = transport.lines(mine).are_joined
        self._rooms = Rooms()  # as the outbox counts its own
        self._agreeing: ProcessGroup = subgroup(place, backend=HOST_COLLECTIVE)

    def warm_up(self, message: "torch.Tensor") -> float:
        """Send both ways until frames have room for such messages; seconds of the last."""
        self.once(message, "both")
        while self._rooms.ahead[0] != self._room_for(message):
            self.once(message, "both")
        return self.once(message, "both")

    def once(self, message: "torch.Tensor", kind: str) -> float:
        """One message each way, or one way; seconds until what this worker gets is there."""
        sends = kind == "both" or (kind == "there") == (self.rank == 0)
        receives = kind == "both" or not sends
        self.meet()
        begin = self.agreed(time.monotonic() + _LEAD_SECONDS)
        while time.monotonic() < begin:
            pass
        if sends:
            self.outbox.send((message,))
            self._rooms.passed(self._room_for(message))
        if receives:
            self.inbox.take()
            self._wait()
        seconds = time.monotonic() - begin
        self.outbox.flush()
        self._wait()
        return seconds if receives else 0.0

    def _room_for(self, message: "torch.Tensor") -> int:
        return message.numel() if self._are_joined else 0

    def agreed(self, number: float) -> float:
        """What the first worker says."""
        import torch
        import torch.distributed as dist

        said = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(said, src=0, group=self._agreeing)
        return float(said.item())

    def meet(self) -> None:
        """Wait for the other worker."""
        import torch.distributed as dist

        dist.barrier(group=self._agreeing)

    def _wait(self) -> None:
        backend_of(self.device).synchronize(self.device)


def _rounds(
    end: _End, message_bytes: list[int], budget_seconds: float
) -> dict[str, list[list[float]]]:
    import torch

    found: dict[str, list[list[float]]] = {kind: [[] for _ in message_bytes] for kind in KINDS}
    share = budget_seconds / (_ROUNDS * len(message_bytes) * len(KINDS))
    for _ in range(_ROUNDS):
        for index, size in enumerate(message_bytes):
            message = torch.zeros(size, dtype=torch.uint8, device=end.device)
            seconds = end.warm_up(message) + _LEAD_SECONDS
            repeats = int(end.agreed(max(_FEWEST, min(_MOST, share / seconds))))
            for _ in range(repeats):
                for kind in KINDS:
                    found[kind][index].append(end.once(message, kind))
    end.meet()  # nobody leaves while the other still waits for a message
    return found
