"""The parameters that a worker owns, and stand-ins for the others.

A worker keeps the parameters of its own stages. Every other parameter becomes a single number that
takes almost no memory, and whose ``grad`` can hold the 2-norm of the real gradient. So a script
that clips by ``clip_grad_norm_(model.parameters(), limit)`` clips by the norm over all stages, and
all workers get the same norm.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.backend import backend_of
from ...devices.collectives import wire_device
from ...devices.host import TORCH_DEVICE as HOST
from ...devices.out_of_memory import is_out_of_memory
from ...schema.errors import TargetError
from ..digest import InPieces
from ..group import Place
from ..initial_values import forget
from ..manifest import shapes_of
from ..telling import log
from ..tensor.lanes import Lanes
from .pieces import broadcast, stream

Holders = tuple[int, ...]


class Ownership:
    """Parameters by name, the ranks that hold each, and stand-ins for the rest.

    Attributes:
        lanes: Which workers share layers, and how parameters are cut over them.
        own: Names of this worker's parameters.
        first: Of these, the names that this worker is the first rank to hold.
        cut: Of its own, the names of those of which it holds only a part.
        sums: By name, the sets of ranks; each set sums the gradients among its ranks.
        stages: By name, the stages that use the parameter.
        described: Dtypes and shapes of all parameters, by name.
        device_of_whole: Device of the whole model after ``gather``.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        used: Sequence[set[nn.Parameter]],
        ranks: Sequence[tuple[int, ...]],
        place: Place,
        lanes: Lanes,
    ) -> None:
        """Take all parameters, those that each stage uses, and the ranks of each stage."""
        rank, self._place, self.lanes = place.rank, place, lanes
        self.device_of_whole, self._has_told = place.device, False
        self._on_device: list[tuple[str, Tensor, Tensor | None]] = []
        self.parameters = parameters
        self.stages = {
            name: tuple(stage for stage, members in enumerate(used) if parameter in members)
            for name, parameter in parameters.items()
        }
        self.holders: dict[str, Holders] = {}
        for name in parameters:
            held = {holder for stage in self.stages[name] or (0,) for holder in ranks[stage]}
            self.holders[name] = tuple(sorted(held))
        self.own = {name for name, holders in self.holders.items() if rank in holders}
        self._others = {id(p) for name, p in parameters.items() if name not in self.own}
        self.first = {name for name, holders in self.holders.items() if rank == holders[0]}
        self.described = shapes_of(parameters)
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._is_whole, self._is_cut = True, False
        self.cut = {name for name in self.own if lanes.is_cut(name, rank)}
        self.sums = {name: lanes.sums(name, holders) for name, holders in self.holders.items()}
        self.tied = [name for name, stages in self.stages.items() if len(stages) > 1]

    def strip(self) -> None:
        """Keep only this worker's parameters in memory, on its device."""
        if not self._is_whole:
            return
        for name, value, gradient in self._on_device:
            parameter = self.parameters[name]
            # The script may have written to the whole parameter in the meantime.
            value.copy_(self.own_part(name, parameter.data))
            parameter.data = value
            parameter.grad = gradient
        self._on_device.clear()
        self.device_of_whole = self._place.device
        for name, parameter in self.parameters.items():
            if name not in self.own:
                forget(parameter)
                parameter.grad = None
                parameter.data = torch.zeros(1, dtype=parameter.dtype, device=self._place.device)
            elif name in self.cut and not self._is_cut:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = self.own_part(name, parameter.data)
                if gradient is not None:
                    parameter.grad = self.own_part(name, gradient)
        self._is_whole, self._is_cut = False, True

    def own_part(self, name: str, value: Any) -> Any:
        """This worker's part of a parameter, or of an optimizer's state of the same shape."""
        is_whole = isinstance(value, Tensor) and value.shape == self._shapes[name]
        if name not in self.cut or not is_whole:
            return value
        return self.lanes.part(name, value, self._place.rank)

    def lacks_some_of(self, module: nn.Module) -> bool:
        """Whether this worker lacks a parameter that a module itself holds."""
        held = module._parameters.values()
        return any(parameter is not None and id(parameter) in self._others for parameter in held)

    def check_held(
        self, used: Sequence[set[nn.Parameter]], ranks: Sequence[tuple[int, ...]]
    ) -> None:
        """Refuse stages that use other parameters than their workers hold.

        Args:
            used: [stages] the parameters that each uses.
            ranks: [stages] the ranks of each.

        Raises:
            TargetError: Names the parameter.
        """
        for stage, members in enumerate(used):
            for name, parameter in self.parameters.items():
                if parameter in members and not set(ranks[stage]) <= set(self.holders[name]):
                    raise TargetError(
                        f"in evaluation mode stage {stage} of the model uses {name}, which only "
                        "another stage has",
                        hint="job.evaluation(whole=True) brings the whole model to every worker",
                    )

    def is_first_to_share(self, name: str) -> bool:
        """Whether this worker is the first in the group that holds one replica of a parameter."""
        return name not in self.cut or self.lanes.lane(self._place.rank) == 0

    def alike_with(self, name: str, rank: int) -> Holders:
        """The ranks that hold the values of a parameter that a rank holds; empty if it does not."""
        sets = self.lanes.alike(name, self.holders[name])
        return next((ranks for _, ranks in sets if rank in ranks), ())

    def sum_of(self, name: str, rank: int) -> Holders:
        """The ranks that sum a gradient with a rank; empty if it does not hold the parameter."""
        return next((ranks for ranks in self.sums[name] if rank in ranks), ())

    @property
    def alike_sets(self) -> set[Holders]:
        """The sets of ranks that hold equal values of some parameter."""
        return {
            ranks
            for name, holders in self.holders.items()
            for _, ranks in self.lanes.alike(name, holders)
        }

    def held_bytes(self, name: str) -> dict[int, int]:
        """Rank -> bytes of a parameter, or of its part of it, on every rank that holds some."""
        shape, size = self._shapes[name], self.parameters[name].element_size()
        found: dict[int, int] = {}
        for rank in self.holders[name]:
            own = shape
            if self.lanes.is_cut(name, rank):
                own = self.lanes.part_shape(name, shape, rank)
            found[rank] = own.numel() * size
        return found

    def whole_shape(self, name: str) -> torch.Size:
        """The shape of a whole parameter, whichever worker holds it."""
        return self._shapes[name]

    def gather(self) -> None:
        """Bring the whole model to every worker: to its device, or to its host if it does not fit.

        Call it on all workers.
        """
        if self._is_whole or not dist.is_initialized():
            return
        rest, wire = self._room_for_rest(), wire_device(self._place.device)
        for name, parameter in self.parameters.items():
            value = rest.get(name, parameter.data)
            self._spread(name, value, wire)
            if name in rest or self.device_of_whole != self._place.device:
                if name in self.own:
                    self._on_device.append((name, parameter.data, parameter.grad))
                parameter.grad = None
                parameter.data = value.to(self.device_of_whole)
        self._is_whole = True

    def _spread(self, name: str, value: Tensor, wire: torch.device) -> None:
        """Send a parameter to all workers from the first that hold it. Call it on all workers.

        Args:
            name: Name of the parameter.
            value: Receives the whole parameter; on a worker that has it whole, the parameter.
            wire: Device that the collectives' backend sends from.
        """
        first, rank = self.holders[name][0], self._place.rank
        if not self.lanes.is_cut(name, first):
            # Replicas may differ: one worker may hold the parameter whole, another only a part.
            broadcast(value, wire, src=first, sends=rank == first, keeps=True)
            return
        parts = []
        for source in self.lanes.group(first):
            shape = self.lanes.part_shape(name, self._shapes[name], source)
            own = self.own_part(name, self.parameters[name].data)
            part = own if source == rank else own.new_empty(shape, device=value.device)
            broadcast(part, wire, src=source, sends=source == rank, keeps=True)
            parts.append(part.to(value.device))
        value.copy_(self.lanes.whole(name, parts))

    @property
    def is_whole(self) -> bool:
        """Whether this worker has the parameters of all workers."""
        return self._is_whole or len(self.own) == len(self.parameters)

    @property
    def is_readable(self) -> bool:
        """Whether every parameter of the model has its whole value on this worker."""
        return self._is_whole or not (self.cut or len(self.own) < len(self.parameters))

    def values_of(self, name: str) -> InPieces:
        """A parameter's values, sent by its first holder. Iterate them on all workers."""
        parameter, first = self.parameters[name], self.holders[name][0]
        shape, wire = self._shapes[name], wire_device(self._place.device)
        if self.lanes.is_cut(name, first):
            return InPieces(name, parameter.dtype, tuple(shape), self._joined(name, wire))
        sent = parameter if self._place.rank == first else None
        pieces = stream(sent, parameter.dtype, shape, wire, src=first)
        if not self._place.distributed:
            pieces = iter([parameter])
        return InPieces(name, parameter.dtype, tuple(shape), pieces)

    def _joined(self, name: str, wire: torch.device) -> Iterator[Tensor]:
        """Yield a cut parameter's whole value, which is freed after it was read."""
        value = torch.empty(self._shapes[name], dtype=self.parameters[name].dtype, device=wire)
        self._spread(name, value, wire)
        yield value

    def _room_for_rest(self) -> dict[str, Tensor]:
        """Memory for other workers' parameters, by name. Each worker chooses the device itself."""
        device = self._place.device
        if not backend_of(device).is_host:
            try:
                return self._empty_rest(device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            backend_of(device).release_unused()
            self.device_of_whole = torch.device(HOST)
            if not self._has_told:
                log.warning(
                    f"worker {self._place.rank}: {device} is too small for the whole model, which "
                    "is on the host outside of steps"
                )
            self._has_told = True
        return self._empty_rest(self.device_of_whole)

    def _empty_rest(self, device: torch.device) -> dict[str, Tensor]:
        return {
            name: torch.empty(self._shapes[name], dtype=parameter.dtype, device=device)
            for name, parameter in self.parameters.items()
            if name not in self.own or name in self.cut
        }
