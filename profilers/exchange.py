"""Steps and messages of several workers at once, inside each of them (VirtualFlow 5.1.2).

Times are by the wall clock: waiting is what is measured. Steps that synchronise and steps that do
not alternate, so that a drift of the machine meets both.
"""

import os
import time
from typing import TYPE_CHECKING, Any

from .bench import Bench
from .meeting import process_group

if TYPE_CHECKING:
    from ..runtime.gradients.reducer import GradientReducer

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
    from ..runtime.gradients.reducer import GradientReducer

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
