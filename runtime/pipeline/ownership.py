"""Which parameters a worker owns, and what stands for the others.

A worker keeps the parameters of its own stages. Every other parameter is a single number, so that
it takes no memory and its ``grad`` can hold the 2-norm of the real gradient: a script that clips
by ``clip_grad_norm_(model.parameters(), limit)`` clips by the norm over all stages, everywhere
alike. Optimizers are left with the worker's own parameters only.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...schema.errors import TargetError
from ..buffers import VirtualNodeBuffers, _find_slots, _Slot

Holders = tuple[int, ...]


class Ownership:
    """Parameters by name, the ranks that hold each, and stand-ins for the rest."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        used: Sequence[set[nn.Parameter]],
        ranks: Sequence[tuple[int, ...]],
        rank: int,
    ) -> None:
        self.parameters = parameters
        self.holders: dict[str, Holders] = {}
        for name, parameter in parameters.items():
            of_stages = [stage for stage, members in enumerate(used) if parameter in members]
            held = {holder for stage in of_stages or [0] for holder in ranks[stage]}
            self.holders[name] = tuple(sorted(held))
        self.own = {name for name, holders in self.holders.items() if rank in holders}
        self._rank = rank
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._is_whole = True
        self.tied = [
            name
            for name, parameter in parameters.items()
            if sum(parameter in members for members in used) > 1
        ]

    def strip(self) -> None:
        """Leave only this worker's parameters in memory."""
        for name, parameter in self.parameters.items():
            if name not in self.own:
                parameter.grad = None
                parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        self._is_whole = False

    def gather(self) -> None:
        """Bring the whole model to every worker. Call it on all."""
        if self._is_whole or not dist.is_initialized():
            return
        for name, parameter in self.parameters.items():
            whole = parameter.data.contiguous()
            if name not in self.own:
                shape = self._shapes[name]
                whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            dist.broadcast(whole, src=self.holders[name][0])
            if name not in self.own:
                parameter.grad = None
                parameter.data = whole
        self._is_whole = True

    def take_from(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Leave the optimizer with this worker's parameters.

        Raises:
            TargetError: It holds parameters that are not the model's.
        """
        own = {id(self.parameters[name]) for name in self.own}
        known = {id(parameter) for parameter in self.parameters.values()}
        for group in optimizer.param_groups if optimizer else ():
            if any(id(parameter) not in known for parameter in group["params"]):
                raise TargetError(
                    "under a pipeline the optimizer may hold the model's parameters only"
                )
            for parameter in group["params"]:
                if id(parameter) not in own and optimizer is not None:
                    optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) in own]


class StageBuffers(VirtualNodeBuffers):
    """Buffers of a pipeline: a microbatch's belong to the stage that writes them."""

    def __init__(
        self,
        model: nn.Module,
        local: Sequence[int],
        batch_sizes: Sequence[int],
        own: Sequence[nn.Module],
    ) -> None:
        super().__init__(model, local, batch_sizes)
        self._slots = _find_slots(model)
        modules = {id(module) for part in own for module in part.modules()}
        self._own_slots = {
            slot.name
            for slot in self._slots
            if any(id(module) in modules for module, _ in slot.owners)
        }

    def _merged(self, slot: _Slot, all_reduce: "object") -> Tensor:
        local = self._local
        self._local = local if slot.name in self._own_slots else ()
        try:
            return super()._merged(slot, all_reduce)  # type: ignore[arg-type]
        finally:
            self._local = local
