"""The parameters that a worker owns, and stand-ins for the others.

A worker keeps the parameters of its own stages. Every other parameter becomes a single number that
takes almost no memory, and whose ``grad`` can hold the 2-norm of the real gradient. So a script
that clips by ``clip_grad_norm_(model.parameters(), limit)`` clips by the norm over all stages, and
all workers get the same norm.

Tensors are sent piece by piece, so that no device needs memory for a whole one.

Of the gradients of parameters on other workers it knows only the norms.
``clip_grad_norm_(model.parameters(), limit, norm_type)`` takes each gradient's norm, and the norm
of these norms. So a single number with the right norm can replace a gradient of any shape.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.backend import backend_of
from ...devices.collectives import wire_device
from ...devices.host import TORCH_DEVICE as HOST
from ...devices.out_of_memory import is_out_of_memory
from ...schema.errors import TargetError
from .. import peers
from ..digest import InPieces
from ..group import Place
from ..initial_values import forget
from ..log import log
from ..manifest import shapes_of
from ..tensor.gradients import TAKE_NORMS, PartGradient, companions, plain, scale_companions
from ..tensor.groups import Lanes
from .norms import NORMS, Table, ToldNorms

_NEED_ALL = {"abs", "max", "min", "amax", "amin", "mean", "median", "std", "var", "sort", "topk"}


class NormOnly(Tensor):
    """One number, the 2-norm of a gradient elsewhere; functions for other norms return those.

    Scaling it (clipping, unscaling) scales all its norms. It is reused in every step.
    """

    _told: ToldNorms
    _index: int

    @staticmethod
    def of(number: Tensor, told: ToldNorms, index: int) -> "NormOnly":
        """Make a stand-in.

        Args:
            number: [1] receives the 2-norm; of the gradient's dtype, on its device.
            told: Has the other norms.
            index: The parameter's index in their tables.
        """
        made: NormOnly = number.as_subclass(NormOnly)
        made._told, made._index = told, index
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return norms; refuse functions that would need the gradient itself."""
        kwargs = kwargs or {}
        if func in TAKE_NORMS:
            order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2.0))
            given = companions(args[0])
            if isinstance(given, Tensor):
                return _norm(given, order)
            return [_norm(gradient, order) for gradient in given]
        if getattr(func, "__name__", "") in _NEED_ALL:
            raise TargetError(
                f"{func.__name__} of a gradient that another worker of the pipeline has",
                hint="only norms are known here: use clip_grad_norm_ or clip_grad_value_",
            )
        scale_companions(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _norm(gradient: Tensor, order: Any) -> Tensor:
    plain = gradient.as_subclass(Tensor)
    order = 2.0 if order in (None, "fro") else float(order)
    if not isinstance(gradient, NormOnly):
        whole: Tensor = torch.linalg.vector_norm(plain, order)
        return whole
    if order not in NORMS:
        known = ", ".join(f"{norm:g}" for norm in NORMS)
        raise TargetError(
            f"the {order:g}-norm of a gradient that another worker of the pipeline has",
            hint=f"norms {known} are known everywhere",
        )
    found: Tensor = plain.abs().squeeze()
    if order == 2:
        return found
    scaled = _product(found, gradient._told.ratio(gradient._index, order))
    # If not yet scaled, return it exactly as received: a tied weight's workers clip equally.
    two, exact = (_as(found, told) for told in gradient._told.told(gradient._index, order))
    return torch.where(found == two, exact, scaled)


def _product(found: Tensor, ratio: float | Tensor) -> Tensor:
    """Multiply by a ratio of float64 as by a Python number: the dtype stays."""
    if not isinstance(ratio, Tensor):
        return found * ratio
    wide = torch.promote_types(found.dtype, torch.float32)
    return (found.to(wide) * ratio.to(wide)).to(found.dtype)


def _as(found: Tensor, told: float | Tensor) -> Tensor:
    """A number that was told, as a tensor like another."""
    return told.to(found.dtype) if isinstance(told, Tensor) else torch.full_like(found, told)


class PartNorms:
    """Makes one worker's parts of gradients return the whole gradients' norms.

    If another replica holds a parameter whole, its gradient returns the same norm. A norm that it
    computed itself would be rounded differently, and the replicas would clip by different numbers.
    """

    def __init__(self, parts: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters, with their indices in tables of norms."""
        self._parts, self._told = list(parts), told

    def show(self, table: Table, loss_scale: float | Tensor) -> None:
        """Give each part of a gradient a companion with the norm of the whole gradient.

        Args:
            table: Norms of gradients without the loss scale.
            loss_scale: The factor by which a GradScaler will divide both part and companion.
        """
        shown = [(i, p, plain(p.grad)) for i, p in self._parts if p.grad is not None]
        if not shown:
            return
        norms = table.two_norms([index for index, _, _ in shown]) * loss_scale
        kinds = {(part.dtype, part.device) for _, _, part in shown}
        numbers = {kind: norms.to(dtype=kind[0], device=kind[1]) for kind in kinds}
        for place, (index, parameter, part) in enumerate(shown):
            number = numbers[part.dtype, part.device][place : place + 1]
            parameter.grad = PartGradient.of(part, NormOnly.of(number, self._told, index))


class StandIns:
    """One worker's stand-ins for the gradients of parameters that it does not hold."""

    def __init__(self, apart: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters, with their indices in tables of norms."""
        self._kinds: list[tuple[Tensor, list[int]]] = []
        self._all: list[tuple[int, nn.Parameter, NormOnly]] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
        for index, parameter in apart:
            kind = (parameter.dtype, parameter.device)
            by_kind.setdefault(kind, []).append((index, parameter))
        for (dtype, device), members in by_kind.items():
            numbers = torch.zeros(len(members), dtype=dtype, device=device)
            self._kinds.append((numbers, [index for index, _ in members]))
            self._all += [
                (index, parameter, NormOnly.of(numbers[place : place + 1], told, index))
                for place, (index, parameter) in enumerate(members)
            ]

    def show(self, table: Table) -> None:
        """Set each as ``grad`` of its parameter, with the 2-norm, where a gradient exists."""
        for numbers, indices in self._kinds:
            numbers.copy_(table.two_norms(indices))
        for index, parameter, stand_in in self._all:
            wanted = stand_in if table.used[index] else None
            if parameter.grad is not wanted:
                parameter.grad = wanted


PIECE_BYTES = 25 << 20
"""Bytes of the largest piece, which a device needs for tensors that it does not hold."""


def broadcast(tensor: Tensor, wire: torch.device, *, src: int, sends: bool, keeps: bool) -> None:
    """Send one worker's values to all workers. Call it on all of them.

    Args:
        tensor: On any device; written to on workers that keep the values.
        wire: Device that the collectives' backend sends from.
        src: The rank that has the values.
        sends: Whether this worker is that rank.
        keeps: Whether this worker wants the values.
    """
    dense = tensor.contiguous() if sends or keeps else None
    length = max(1, PIECE_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), length):
        number = min(length, tensor.numel() - start)
        if dense is None:
            passing = torch.empty(number, dtype=tensor.dtype, device=wire)
            peers.broadcast(passing, src=src)
            continue
        piece = dense.view(-1)[start : start + number]
        passing = piece.to(wire)
        peers.broadcast(passing, src=src)
        if not sends and passing is not piece:
            piece.copy_(passing)
    if not sends and dense is not None and dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def stream(
    tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int], wire: torch.device, *, src: int
) -> Iterator[Tensor]:
    """Send one worker's values to all workers, piece by piece. Iterate to the end on all of them.

    Args:
        tensor: The values, on any device; None on the other workers.
        dtype: The values' dtype.
        shape: The tensor's shape.
        wire: Device that the collectives' backend sends from.
        src: The rank that has the values.

    Yields:
        Flat pieces, in order.
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


def in_buckets(
    names: Sequence[str], bytes_of: Callable[[str], int], most_bytes: int
) -> Iterator[list[str]]:
    """Yield runs of tensors that one collective takes together.

    Args:
        names: The tensors, in order.
        bytes_of: Gives a tensor's bytes by its name.
        most_bytes: Limit of a run; a tensor that is larger is a run of its own.
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
