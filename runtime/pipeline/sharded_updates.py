"""Sharded optimizer state: workers that hold the same parameters update a share each.

This is stage 1 of ZeRO (Rajbhandari et al., 2020, 5.1). Of the workers that hold a parameter, one
keeps its optimizer state, makes its update and sends the new value to the others. Parameters are
never cut for that, so every update has the bits that it has without sharding, also by an optimizer
that looks at a whole parameter. Gradients stay whole on every worker, for norms and clipping.

Only ``step`` sees the share. At all other times the optimizer's groups hold all parameters of the
worker, so ``zero_grad``, a GradScaler and a learning-rate schedule find what they always find.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from .. import peers
from ..telling import log
from .ownership import Holders, Ownership
from .pieces import in_buckets

BUCKET_BYTES = 25 << 20
"""Bytes of parameters that one collective sends; a larger parameter is sent alone."""
_LEAVE_OUT = "or plan without --shard-optimizer"


def keepers_of(ownership: Ownership, names: Sequence[str]) -> dict[str, Holders]:
    """The ranks that keep the optimizer's state of each parameter: one rank for every part of it.

    The largest parameter comes first, and each goes to the replica whose fullest worker has the
    least so far. So with d replicas of a stage no worker keeps more than (s + (d - 1) m) / d bytes
    for parameters of s bytes together, of which the largest has m (Graham, 1969; the planner counts
    this). Deterministic, and equal on all workers.

    Args:
        ownership: Which ranks hold which parameters.
        names: The parameters of the optimizer, in its order.
    """
    held: dict[int, int] = defaultdict(int)
    found: dict[str, Holders] = {}
    sizes = {name: ownership.held_bytes(name) for name in names}
    for name in sorted(sizes, key=lambda name: -max(sizes[name].values())):
        kept: list[int] = []
        for replicas in _replicas(ownership, name):
            chosen = min(replicas, key=lambda ranks: max(held[rank] for rank in ranks))
            for rank in chosen:
                held[rank] += sizes[name][rank]
            kept += chosen
        found[name] = tuple(sorted(kept))
    return found


def _replicas(ownership: Ownership, name: str) -> list[list[Holders]]:
    """The replicas of a parameter that are cut alike, by the number of parts.

    The parts of one replica stay together: a checkpoint joins them within their group.
    """
    lanes = ownership.lanes
    by_parts: dict[int, list[Holders]] = {}
    for rank in ownership.holders[name]:
        ranks = lanes.group(rank) if lanes.is_cut(name, rank) else (rank,)
        replicas = by_parts.setdefault(len(ranks), [])
        if ranks not in replicas:
            replicas.append(ranks)
    return [by_parts[number] for number in sorted(by_parts)]


def check_shardable(optimizer: Any, *, is_main: bool) -> None:
    """Refuse an optimizer whose updates cannot be shared out among workers.

    Args:
        optimizer: The script's optimizer.
        is_main: Whether this worker tells the user what may be wrong.

    Raises:
        TargetError: It is no optimizer of torch's kind, so its groups cannot be exchanged.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(
            f"the state of {name} cannot be sharded: it is no torch.optim.Optimizer",
            hint=f"give prepare a torch.optim.Optimizer, {_LEAVE_OUT}",
        )
    if is_main and not type(optimizer).__module__.startswith("torch.optim."):
        log.warning(
            f"{name} is not one of torch's optimizers: with sharded state it gives the same "
            "parameters only if it updates each parameter by itself"
        )


class ShardedUpdates:
    """Makes an optimizer's ``step`` update this worker's share and exchange the results.

    Args:
        optimizer: The script's optimizer; its ``step`` is replaced.
        ownership: Which ranks hold which parameters.
        keepers: From ``keepers_of``.
        rank: This worker's.
        group_of: Gives the process group of a set of ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ownership: Ownership,
        keepers: dict[str, Holders],
        rank: int,
        group_of: Callable[[Holders], dist.ProcessGroup],
    ) -> None:
        self._optimizer, self._ownership, self._rank = optimizer, ownership, rank
        self._group_of = group_of
        self._elsewhere = {
            id(ownership.parameters[name])
            for name, ranks in keepers.items()
            if name in ownership.own and rank not in ranks
        }
        # In an order that all members of a set of workers share.
        self._sent: dict[tuple[Holders, int, str], list[str]] = {}
        for name in ownership.parameters:
            alike = ownership.alike_with(name, rank) if name in keepers else ()
            if len(alike) > 1:
                (keeper,) = set(alike) & set(keepers[name])
                dtype = str(ownership.parameters[name].dtype)
                self._sent.setdefault((alike, keeper, dtype), []).append(name)
        self._step = optimizer.step
        optimizer.step = self._stepping()  # type: ignore[method-assign]

    def _stepping(self) -> Callable[..., Any]:
        optimizer = self._optimizer

        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            """Update this worker's share of the parameters, and get the others' shares."""
            optimizer._opt_called = True  # type: ignore[attr-defined]
            answer = None
            if closure is not None:  # it computes gradients of all parameters
                with torch.enable_grad():
                    answer = closure()
            with self._own_share():
                self._step(**options)
            self._exchange()
            return answer

        # Else a learning-rate scheduler would wrap it as a method, to note that a step was made.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    @contextmanager
    def _own_share(self) -> Iterator[None]:
        """Within the context the optimizer's groups hold this worker's share only."""
        optimizer = self._optimizer
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(optimizer, hooks, None):
                raise TargetError(
                    f"{type(optimizer).__name__} has hooks on its steps, which would see only this "
                    "worker's share of the parameters",
                    hint=f"do it before or after optimizer.step(), {_LEAVE_OUT}",
                )
        whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._elsewhere]
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

    def _exchange(self) -> None:
        """Send what this worker has updated, and receive what others have."""
        parameters = self._ownership.parameters
        for (ranks, keeper, _), names in sorted(self._sent.items()):
            for bucket in in_buckets(names, lambda n: parameters[n].nbytes, BUCKET_BYTES):
                values = [parameters[name].detach() for name in bucket]
                self._send(values, keeper, self._group_of(ranks))

    def _send(self, parameters: list[Tensor], keeper: int, group: dist.ProcessGroup) -> None:
        first = parameters[0]
        if len(parameters) == 1 and first.is_contiguous():
            peers.broadcast(first, src=keeper, group=group)
            return
        is_own = keeper == self._rank
        sizes = [parameter.numel() for parameter in parameters]
        flat = first.new_empty(sum(sizes))
        if is_own:
            torch.cat([parameter.reshape(-1) for parameter in parameters], out=flat)
        peers.broadcast(flat, src=keeper, group=group)
        if not is_own:
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                parameter.copy_(part.view(parameter.shape))
