"""The parameters that a worker owns, and stand-ins for the others.

A worker keeps the parameters of its own stages. Every other parameter becomes a stand-in of its
shape that takes almost no memory, and whose ``grad`` can hold the 2-norm of the real gradient. So a
script that clips by ``clip_grad_norm_(model.parameters(), limit)`` clips by the norm over all
stages, and all workers get the same norm. What would read a stand-in's numbers is refused.

Tensors are sent piece by piece, so that no device needs memory for a whole one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.backend import backend_of, is_out_of_memory
from ...devices.collectives import wire_device
from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from .. import peers
from ..buffers import put_back
from ..checkpoints.checkpoint import shapes_of
from ..group import Place
from ..initial_values import fill, forget, initial_value
from ..log import log
from ..nested_tensors import InPieces, tensors_in, zeros_for
from ..setup import move_optimizer_state
from ..sharding.flats import OF_NO_NUMBER, OF_NUMBERS, OF_SHAPE, name_of
from ..sharding.sliced import get_grad, plain, set_grad, writes
from ..tensor.roles import Lanes
from .cut import StageModule

PIECE_BYTES = 25 << 20
"""Bytes of the largest piece, which a device needs for tensors that it does not hold."""


def broadcast(tensor: Tensor, wire: torch.device, *, src: int, sends: bool, keeps: bool) -> None:
    """Send one worker's values to all workers. Call it on all of them.

    It is written to on those that keep the values. ``wire`` is where the collectives' backend sends
    from, and ``src`` the rank that sends.
    """
    dense = tensor.contiguous() if sends or keeps else None
    at = 0
    own = dense if sends else None
    for piece in stream(own, tensor.dtype, tensor.shape, wire, src=src):
        if dense is not None and not sends:
            dense.view(-1)[at : at + len(piece)].copy_(piece)
            at += len(piece)
    if not sends and dense is not None and dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def stream(
    tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int], wire: torch.device, *, src: int
) -> Iterator[Tensor]:
    """Yield one worker's values on all, as flat pieces in order. Iterate it to the end on all.

    They are on any device, and None on the other workers. ``wire`` is where the collectives'
    backend sends from.
    """
    flat = None if tensor is None else tensor.detach().contiguous().view(-1)
    length = max(1, PIECE_BYTES // dtype.itemsize)
    for start in range(0, prod(shape), length):
        number = min(length, prod(shape) - start)
        if flat is None:
            passing = torch.empty(number, dtype=dtype, device=wire)
        else:
            passing = flat[start : start + number].to(wire)
        peers.broadcast(passing, src=src)
        yield passing


def sent_by(rank: int, name: str, tensor: Tensor, shape: Sequence[int], place: Place) -> InPieces:
    """A tensor as a rank has it, sent to all workers. Iterate its pieces on all of them."""
    pieces = iter([tensor])
    if place.distributed:
        own, wire = tensor if place.rank == rank else None, wire_device(place.device)
        pieces = stream(own, tensor.dtype, shape, wire, src=rank)
    return InPieces(name, tensor.dtype, tuple(shape), pieces)


def in_buckets(
    names: Sequence[str], bytes_of: Callable[[str], int], most_bytes: int
) -> Iterator[list[str]]:
    """Yield runs of tensors that one collective takes together.

    A tensor of more than ``most_bytes`` is a run of its own.
    """
    bucket: list[str] = []
    filled = 0
    for name in names:
        size = bytes_of(name)
        if bucket and filled + size > most_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


Holders = tuple[int, ...]


class Elsewhere(Tensor):
    """The stand-in of a tensor that only other workers have: a number that has its shape.

    What would read its numbers is refused. What writes to it does nothing: those that have the
    tensor do it.
    """

    _whole: torch.Size
    _name: str

    @staticmethod
    def of(zero: Tensor, name: str, shape: torch.Size) -> "Elsewhere":
        """The stand-in of the model's tensor of a name, in the memory of a zero [1]."""
        made: Elsewhere = zero.as_subclass(Elsewhere)
        made._whole, made._name = shape, name
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's that reads no number."""
        return _without_numbers(function, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> "Elsewhere":
        """A stand-in with memory of its own, as a copy of its model has it."""
        memo[id(self)] = made = self.clone()
        return made  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(self, "saved")


class ElsewhereParameter(nn.Parameter):
    """A parameter whose numbers only other workers have, as ``Elsewhere``."""

    _whole: torch.Size
    _name: str

    @property
    def grad(self) -> Any:
        """What knows its gradient's norms: a property of Python's is the shortest way."""
        with plain():
            return get_grad(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        with plain():
            set_grad(self, value)

    @staticmethod
    def hold(parameter: nn.Parameter, zero: Tensor, name: str, shape: torch.Size) -> None:
        """Let a parameter be the stand-in of the model's one of a name, as ``Elsewhere.of``."""
        parameter.grad, parameter.data = None, zero
        vars(parameter).update(_whole=shape, _name=name)
        parameter.__class__ = ElsewhereParameter

    @staticmethod
    def leave(parameter: nn.Parameter) -> None:
        """Let a stand-in be a plain parameter again, of which nothing else is pickled."""
        if isinstance(parameter, ElsewhereParameter):
            del parameter._whole, parameter._name
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    __torch_function__ = Elsewhere.__torch_function__

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A stand-in with memory of its own, as a copy of its model has it."""
        with plain():
            memo[id(self)] = made = nn.Parameter(self.detach().clone(), self.requires_grad)
        ElsewhereParameter.hold(made, made.data, self._name, self._whole)
        return made

    __reduce_ex__ = Elsewhere.__reduce_ex__


_AWAY = (Elsewhere, ElsewhereParameter)
_STAY = {"data", "detach", "clone", "contiguous", "to", Tensor.cpu.__name__, "float", "double"}
"""Functions and properties of a stand-in that give a stand-in."""
_TOLD = OF_NO_NUMBER | {"data_ptr", "untyped_storage"}


def _without_numbers(function: Any, args: Any, kwargs: Any) -> Any:
    (name, is_property), first = name_of(function), args[0] if args else kwargs.get("tensor")
    with plain():
        if isinstance(first, _AWAY):
            if name in _STAY:
                is_set = function.__name__ == "__set__"
                made = None if is_set else function(*args, **kwargs)
                return made if made is None else Elsewhere.of(made, first._name, first._whole)
            if name in ("__repr__", "__format__"):
                return f"<{first._name}, {list(first._whole)}, of another stage>"
            if name in OF_SHAPE or name.endswith("_like"):
                shown = first.new_empty(()).expand(first._whole)
                return function(shown, *args[1:], **kwargs)
        is_told = name.startswith(("new_", "is_")) and name != "is_nonzero"
        if is_told or name in _TOLD or is_property and name not in OF_NUMBERS:
            return function(*args, **kwargs)
    if writes(name) and isinstance(first, _AWAY):
        return first
    if writes(name) and isinstance(first, list | tuple):
        here = [at for at, tensor in enumerate(first) if not isinstance(tensor, _AWAY)]
        if len(here) < len(first):  # of lists of tensors only those that are here count
            args = [[a[at] for at in here] if isinstance(a, list | tuple) else a for a in args]
            return function(*args, **kwargs) if here else None
    _refuse(next(v for v in tensors_in((args, kwargs)) if isinstance(v, _AWAY)), "read")


def _refuse(away: Any, how: str) -> NoReturn:
    raise TargetError(
        f"{away._name} is {how}, and only the workers of another stage have it",
        hint="compute a penalty inside the model, or take the optimizer's weight_decay; inside "
        "job.evaluation(whole=True) every worker has the whole model",
    )


class Ownership:
    """Parameters by name, the ranks that hold each, and stand-ins for the rest.

    Attributes:
        lanes: Which workers share layers, and how parameters are cut over them.
        own: Names of this worker's parameters.
        first: Of these, the names that this worker is the first rank to hold.
        cut: Of its own, the names of those of which it holds only a part.
        sums: By name, the sets of ranks; each set sums the gradients among its ranks.
        stages: By name, the stages that use the parameter.
        shapes: Those of whole parameters, by name, whichever worker holds them.
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
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
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
        others = {name: p for name, p in self.parameters.items() if name not in self.own}
        zeros = zeros_for(others.values(), self._place.device)
        for (name, parameter), zero in zip(others.items(), zeros, strict=True):
            forget(parameter)
            ElsewhereParameter.hold(parameter, zero, name, self.shapes[name])
        for name, parameter in self.parameters.items():
            if name in self.cut and not self._is_cut:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = self.own_part(name, parameter.data)
                if gradient is not None:
                    parameter.grad = self.own_part(name, gradient)
        self._is_whole, self._is_cut = False, True

    def own_part(self, name: str, value: Any) -> Any:
        """This worker's part of a parameter, or of an optimizer's state of the same shape."""
        is_whole = isinstance(value, Tensor) and value.shape == self.shapes[name]
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
        """Refuse stages that use other parameters than their workers hold."""
        for stage, members in enumerate(used):
            for name, parameter in self.parameters.items():
                if parameter in members and not set(ranks[stage]) <= set(self.holders[name]):
                    raise TargetError(
                        f"in evaluation mode stage {stage} of the model uses {name}, which only "
                        "another stage has",
                        hint="job.evaluation(whole=True) brings the whole model to every worker",
                    )

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
        shape, size = self.shapes[name], self.parameters[name].element_size()
        found: dict[int, int] = {}
        for rank in self.holders[name]:
            own = shape
            if self.lanes.is_cut(name, rank):
                own = self.lanes.part_shape(name, shape, rank)
            found[rank] = own.numel() * size
        return found

    def gather(self) -> None:
        """Bring the whole model to every worker: to its device, or to its host if it does not fit.

        Call it on all workers.
        """
        if self._is_whole or not dist.is_initialized():
            return
        rest, wire = self._room_for_rest(), wire_device(self._place.device)
        for name, parameter in self.parameters.items():
            value = rest.get(name, parameter.data)
            ElsewhereParameter.leave(parameter)
            self._spread(name, value, wire)
            if name in rest or self.device_of_whole != self._place.device:
                if name in self.own:
                    self._on_device.append((name, parameter.data, parameter.grad))
                parameter.grad = None
                parameter.data = value.to(self.device_of_whole)
        self._is_whole = True

    def _spread(self, name: str, value: Tensor, wire: torch.device) -> None:
        """Send a parameter to all workers from the first that hold it. Call it on all workers."""
        first, rank = self.holders[name][0], self._place.rank
        if not self.lanes.is_cut(name, first):
            # Replicas may differ: one worker may hold the parameter whole, another only a part.
            broadcast(value, wire, src=first, sends=rank == first, keeps=True)
            return
        parts = []
        for source in self.lanes.group(first):
            shape = self.lanes.part_shape(name, self.shapes[name], source)
            own = self.own_part(name, self.parameters[name].data)
            part = own if source == rank else own.new_empty(shape, device=value.device)
            broadcast(part, wire, src=source, sends=source == rank, keeps=True)
            parts.append(part.to(value.device))
        value.copy_(self.lanes.whole(name, parts))

    def is_readable_in(self, module: nn.Module) -> bool:
        """Whether every parameter of a module has its whole value on this worker."""
        held = set(map(id, module.parameters()))
        lacking = (p for name, p in self.parameters.items() if name not in self.own - self.cut)
        return self._is_whole or held.isdisjoint(map(id, lacking))

    @property
    def is_whole(self) -> bool:
        """Whether this worker has the parameters of all workers."""
        return self._is_whole or len(self.own) == len(self.parameters)

    def values_of(self, name: str) -> InPieces:
        """A parameter's values, sent by its first holder. Iterate them on all workers."""
        parameter, first, shape = self.parameters[name], self.holders[name][0], self.shapes[name]
        if self.lanes.is_cut(name, first):
            return InPieces(name, parameter.dtype, tuple(shape), self._joined(name))
        return sent_by(first, name, parameter, shape, self._place)

    def _joined(self, name: str) -> Iterator[Tensor]:
        """Yield a cut parameter's whole value, which is freed after it was read."""
        wire = wire_device(self._place.device)
        value = torch.empty(self.shapes[name], dtype=self.parameters[name].dtype, device=wire)
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
            name: torch.empty(self.shapes[name], dtype=parameter.dtype, device=device)
            for name, parameter in self.parameters.items()
            if name not in self.own or name in self.cut
        }


# Place this worker's own stages on its device, without ever moving the rest of the model there.
#
# Stages are cut before anything is moved. A trace records the device of the tensors that a forward
# makes, so layers are traced on the worker's device. Meanwhile the parameters are replaced by
# stand-ins of the same shapes, which take no memory there.

Buffer = tuple[nn.Module, str, Tensor]


@contextmanager
def shapes_on(
    device: torch.device, model: nn.Module, shapes: Iterable[tuple[nn.Parameter, torch.Size]]
) -> Iterator[None]:
    """Within the context, give parameters and buffers their shapes on a device, without values.

    The tensors that the model's modules move themselves move to the device and stay.
    """
    known = list(shapes)
    stand_ins: list[nn.Parameter] = [p for p, _ in known if isinstance(p, ElsewhereParameter)]
    for parameter in stand_ins:  # a trace is of plain ones
        parameter.__class__ = nn.Parameter
    values = [(parameter, parameter.data, parameter.grad) for parameter, _ in known]
    buffers = [(m, key, b) for m in model.modules() for key, b in m._buffers.items()]
    zeros: dict[torch.dtype, Tensor] = {}
    try:
        _show_shapes([(m, key, b) for m, key, b in buffers if b is not None], device)
        for parameter, shape in known:
            if parameter.dtype not in zeros:
                zeros[parameter.dtype] = torch.zeros((), dtype=parameter.dtype, device=device)
            parameter.grad = None
            parameter.data = zeros[parameter.dtype].expand(shape)
        model.to(device)
        yield
    finally:
        for parameter, value, gradient in values:
            parameter.data = value
            parameter.grad = gradient
        for parameter in stand_ins:
            parameter.__class__ = ElsewhereParameter
        put_back(buffers)


def _show_shapes(buffers: Sequence[Buffer], device: torch.device) -> None:
    """Put tensors of the buffers' shapes in their places, all in memory of the largest's size."""
    # With their strides too, which code that views a buffer needs.
    layouts = {id(b): torch.empty_like(b, device="meta") for _, _, b in buffers}
    room: dict[torch.dtype, int] = {}
    for layout in layouts.values():
        room[layout.dtype] = max(room.get(layout.dtype, 0), layout.numel())
    memory = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in room.items()}
    shown = {
        name: memory[layout.dtype].as_strided(layout.shape, layout.stride())
        for name, layout in layouts.items()
    }
    for module, key, buffer in buffers:
        module._buffers[key] = shown[id(buffer)]


def place_own(
    own: Sequence[nn.Parameter],
    parts: Sequence[StageModule],
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
    waiting: Sequence[nn.Parameter] = (),
) -> None:
    """Move this worker's parameters and their optimizer state to its device.

    Those that are ``waiting`` stay where they are: of each the worker will have a share only.
    """
    for parameter in own:
        fill(parameter, place.device, computes=place.rank == 0)
    stay = [(parameter, parameter.data) for parameter in waiting]
    for parameter, value in stay:
        parameter.data = value.new_empty(0)
    for part in parts:
        part.module.to(place.device)  # a module's own ``to`` may move more than its parameters
    for parameter, value in stay:
        parameter.data = value
    for parameter in own:  # also those that no stage uses
        parameter.data = parameter.data.to(place.device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(place.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer, own)


def broadcast_parts(
    model: nn.Module, parameters: dict[str, nn.Parameter], own: Collection[str], place: Place
) -> None:
    """Start from the first worker's values; each worker keeps those of its own tensors only."""
    if not place.distributed:
        return
    wire = wire_device(place.device)
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        # A deferred value of another worker's parameter is computed here, sent, and freed.
        value = initial_value(tensor) if place.rank == 0 else tensor.detach()
        broadcast(value, wire, src=0, sends=place.rank == 0, keeps=name in own)


def move_buffers(model: nn.Module, device: torch.device) -> list[Buffer]:
    """Put copies of buffers of other devices on a device; the originals, for ``put_back``."""
    before: list[Buffer] = []
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and value.device != device:
                before.append((module, name, value))
                module._buffers[name] = made.setdefault(id(value), value.to(device))
    return before
