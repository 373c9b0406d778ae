"""The norms of gradients that other workers hold, as tables on the hosts or on the devices.

A table says of each parameter whether it has a gradient, and the norms of that gradient. Hosts
exchange plain numbers. Between devices the norms stay on the devices, so no host waits for them.
Whether there is a gradient is known on the hosts in either case.

In the first step workers exchange all norms; later only the 2-norm, and other norms that the script
has asked for on some worker. If a script asks for a further norm, all workers exchange all norms at
once.

One collective from device to device sums losses and tables, and no host waits for it. All numbers
that hosts decide by (weights, flags, which parameters have gradients) go from host to host
(``synchronise.py``). Every number comes from one worker, and all others send zeros, so the result
has the same bits whatever the order in which the collective adds.
"""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schema.errors import TargetError
from .. import peers
from ..group import Place
from ..sharding.sliced import get_grad, set_grad

# The gradient of a parameter that is cut: one worker's part, which knows the whole's norm.
#
# ``clip_grad_norm_(model.parameters(), limit)`` must clip by the norm of all gradients on every
# worker, even where a worker holds only a part of a parameter. So the part refers to a companion
# tensor, a stand-in that answers with the whole gradient's norm (``NormOnly``). An operation
# that scales the part scales the companion too. Where replicas share gradients, the part may be
# nothing: then the companion takes the place of the gradient in every function.

TAKE_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
}
_SCALE = {
    "mul_", "div_", "zero_", "_foreach_mul_", "_foreach_div_", "_foreach_zero_",
    "_amp_foreach_non_finite_check_and_unscale_",
}  # fmt: skip


class PartGradient(Tensor):
    """A part of a gradient; norm functions of it return the norm of the whole gradient."""

    _companion: Tensor
    _is_nothing: bool = False

    @staticmethod
    def of(part: Tensor, companion: Tensor) -> "PartGradient":
        """Wrap the part in its own memory; ``companion`` knows the norms of the whole gradient."""
        made: PartGradient = part.as_subclass(PartGradient)
        made._companion = companion
        return made

    @staticmethod
    def elsewhere(parameter: Tensor, companion: Tensor) -> "PartGradient":
        """Make the gradient of a parameter that another worker has; it takes no memory."""
        made = PartGradient.of(parameter.new_zeros(()).expand(parameter.shape), companion)
        made._is_nothing = True
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take norms of the companion, scale both, and apply everything else to the part."""
        kwargs = kwargs or {}
        if func in TAKE_NORMS:
            return func(companions(args[0]), *args[1:], **kwargs)
        if getattr(func, "__name__", "") != "__get__" and has_nothing(args):
            return func(*companions(args, only_nothing=True), **kwargs)
        scale_companions(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def plain(gradient: Tensor) -> Tensor:
    """A gradient as an ordinary tensor; of a ``PartGradient``, the part itself."""
    if isinstance(gradient, PartGradient):
        return gradient.as_subclass(Tensor)
    return gradient


def is_elsewhere(gradient: Tensor) -> bool:
    """Whether another worker has a gradient, whose norms alone are known here."""
    return isinstance(gradient, PartGradient) and gradient._is_nothing


def has_nothing(given: Any) -> bool:
    """Whether a gradient of a list is elsewhere."""
    if isinstance(given, list | tuple):
        return any(map(has_nothing, given))
    return isinstance(given, Tensor) and is_elsewhere(given)


def companions(given: Any, *, only_nothing: bool = False) -> Any:
    """A gradient or a list of gradients, with each part replaced by its companion.

    ``only_nothing`` keeps the parts that this worker has.
    """
    if isinstance(given, PartGradient) and (given._is_nothing or not only_nothing):
        return given._companion
    if isinstance(given, list | tuple):
        return [companions(entry, only_nothing=only_nothing) for entry in given]
    return given


def scale_companions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """If a function scales gradients in place, scale the companions of parts too."""
    if getattr(func, "__name__", "") not in _SCALE:
        return
    first = args[0]
    if isinstance(first, PartGradient):
        func(first._companion, *args[1:], **kwargs)
        return
    if not isinstance(first, list | tuple):
        return
    places = [n for n, entry in enumerate(first) if isinstance(entry, PartGradient)]
    if not places:
        return
    rest = [
        [given[n] for n in places] if isinstance(given, list | tuple) else given
        for given in args[1:]
    ]
    func([first[n]._companion for n in places], *rest, **kwargs)


NORMS = (2.0, 1.0, math.inf)
NUM_ROWS = 1 + len(NORMS)
Rows = NDArray[np.float64]
"""[NUM_ROWS, parameters] whether a parameter has a gradient, then its norms; float64."""
_MOST_INDICES = 64


class Indices:
    """Lists of indices as tensors on a device; each list is sent there once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def of(self, indices: Sequence[int]) -> Tensor:
        """[indices] int64, on the device."""
        key = tuple(indices)
        if key not in self._sent:
            if len(self._sent) >= _MOST_INDICES:
                self._sent.clear()
            host = torch.tensor(key, dtype=torch.int64)
            self._sent[key] = host.to(self.device, non_blocking=True)
        return self._sent[key]


class NormTable:
    """The norms of all parameters' gradients, some of which may not be known.

    On a host single norms are plain numbers. On a device they stay there, and nothing waits.

    Args:
        used: [parameters] whether there is a gradient.
        norms: [norms, parameters] float64; changed in place.
        indices: Makes indices on the same device.
    """

    def __init__(self, used: Sequence[bool], norms: Tensor, indices: Indices) -> None:
        self.used = used
        self._norms, self._indices = norms, indices

    @property
    def is_finite(self) -> "bool | Tensor":
        """Whether no gradient has an infinite or NaN entry; needs the infinity norms."""
        found = torch.isfinite(self._norms[NORMS.index(math.inf)]).all()
        return bool(found) if self._norms.is_cpu else found

    def multiply(self, factor: float) -> None:
        """Scale all norms."""
        if factor != 1:
            self._norms *= factor

    def divide(self, divisor: "float | Tensor") -> None:
        """Scale all norms."""
        if isinstance(divisor, Tensor) or divisor != 1:
            self._norms /= divisor

    def two_norms(self, indices: Sequence[int]) -> Tensor:
        """[indices] the 2-norms of these parameters' gradients, float64."""
        return self._norms[0].index_select(0, self._indices.of(indices))

    def norm(self, index: int, norm: float) -> "float | Tensor":
        """A norm of one gradient."""
        found = self._norms[NORMS.index(norm), index]
        return found.item() if found.is_cpu else found

    def ratios(self, norm: float) -> "Sequence[float] | Tensor":
        """[parameters] the norm over the 2-norm; 1 where that is zero or overflows."""
        two, row = self._norms[0], self._norms[NORMS.index(norm)]
        usable = (two > 0) & (two < math.inf)
        found = torch.where(usable, row / two, torch.ones_like(two))
        return found.tolist() if found.is_cpu else found


class Columns:
    """The columns of a table: one for each whole parameter, and one for each part of a cut one.

    Args:
        tellers: [parameters] the ranks that each send the norm of its gradient, or of a part of it.
        device: Where tables are.
    """

    def __init__(self, tellers: Sequence[Sequence[int]], device: torch.device) -> None:
        self._columns = [(index, rank) for index, ranks in enumerate(tellers) for rank in ranks]
        self._num_parameters = len(tellers)
        self._are_whole = len(self._columns) == len(tellers)
        self.indices = Indices(device)

    def __len__(self) -> int:
        return len(self._columns)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The columns that a rank sends, and the indices of their parameters."""
        return [(n, index) for n, (index, teller) in enumerate(self._columns) if teller == rank]

    def table(self, rows: Rows) -> NormTable:
        """The table of whole gradients, from [NUM_ROWS, columns] on the host."""
        used = [False] * self._num_parameters
        for (index, _), flag in zip(self._columns, (rows[0] > 0).tolist(), strict=True):
            used[index] |= flag
        return NormTable(used, self.joined(torch.from_numpy(rows[1:])), self.indices)

    def joined(self, norms: Tensor) -> Tensor:
        """[norms, parameters] the norms of whole gradients, from those of parts in their order."""
        if self._are_whole:
            return norms
        # The first parts of all parameters at once, then the second ones, and so on: a few kernels,
        # and parts add up in one order on all workers.
        padded = torch.cat([norms, norms.new_zeros(len(NORMS), 1)], 1)
        parts = [padded.index_select(1, self.indices.of(places)) for places in self._places()]
        found = []
        for row, norm in enumerate(NORMS):
            whole = parts[0][row].square() if norm == 2.0 else parts[0][row]
            for part in parts[1:]:
                if norm == math.inf:
                    whole = torch.maximum(whole, part[row])
                else:
                    whole = whole + (part[row].square() if norm == 2.0 else part[row])
            found.append(whole.sqrt() if norm == 2.0 else whole)
        return torch.stack(found)

    def _places(self) -> list[list[int]]:
        """[parts, parameters] the column of each parameter's part; zeros where it has fewer."""
        of_parameter: list[list[int]] = [[] for _ in range(self._num_parameters)]
        for column, (index, _) in enumerate(self._columns):
            of_parameter[index].append(column)
        most = max(map(len, of_parameter))
        # The zero column follows all others.
        padded = [places + [len(self)] * (most - len(places)) for places in of_parameter]
        return [list(places) for places in zip(*padded, strict=True)]


def norms_of(gradients: Sequence[Tensor], norms: Sequence[float]) -> Tensor:
    """[norms, gradients] the norms of each gradient, float64, on the gradients' device."""
    return torch.stack([_each(gradients, norm).double() for norm in norms])


def _each(gradients: Sequence[Tensor], norm: float) -> Tensor:
    gradients = [g if g.numel() else g.new_zeros(1) for g in gradients]  # of a share of nothing
    if norm == math.inf and not any(g.is_complex() for g in gradients):
        # vector_norm is ten times slower for this norm: it does not use vector instructions.
        ends: list[Any] = [torch.aminmax(gradient) for gradient in gradients]
        least, most = (torch.stack(part) for part in zip(*ends, strict=True))
        return torch.maximum(-least, most)
    return torch.stack(torch._foreach_norm(list(gradients), norm))


Loss = tuple[Tensor, float]
"""The loss [] of a microbatch, and its weight."""


class DeviceSums:
    """Sums what the workers' devices have to tell."""

    def __init__(
        self,
        place: Place,
        tellers: Sequence[int],
        columns: Columns,
        told: Sequence[tuple[int, nn.Parameter]],
    ) -> None:
        self._place, self._columns, self._told = place, columns, list(told)
        self._num_losses = len(tellers)
        self._own_loss = list(tellers).index(place.rank) if place.rank in tellers else None

    def sum(
        self, losses: Sequence[Loss], used: Sequence[bool], norms: Collection[float] | None
    ) -> tuple[Tensor, NormTable | None]:
        """The sum of losses * weights [], float64, and a table of norms, over all workers.

        ``losses`` are of this worker's microbatches; ``used`` says of [parameters] whether any
        worker has a gradient; ``norms`` are to be sent, None for no table.
        """
        # An entry for each worker that has losses, to which the all-reduce adds zeros. They are
        # added up here, in one order: the mean has the same bits on all workers, in every run.
        own = torch.zeros(self._num_losses, dtype=torch.float64, device=self._place.device)
        if losses and self._own_loss is not None:
            own[self._own_loss].copy_(weighted_sum(losses))
        table = None
        if norms is not None:
            table = self._own_norms(norms)
            own = torch.cat([own, table.view(-1)])
        if self._place.distributed:
            peers.all_reduce(own)
        loss = reduce(operator.add, own[: self._num_losses].unbind())
        return loss, None if table is None else self._table(used, own[self._num_losses :])

    def tell(self, used: Sequence[bool], norms: Collection[float]) -> NormTable:
        """A table of these norms, as gradients are now. Call it on all workers."""
        own = self._own_norms(norms).view(-1)
        peers.all_reduce(own)
        return self._table(used, own)

    def _table(self, used: Sequence[bool], sums: Tensor) -> NormTable:
        norms = self._columns.joined(sums.view(len(NORMS), -1))
        return NormTable(used, norms, self._columns.indices)

    def _own_norms(self, norms: Collection[float]) -> Tensor:
        """[norms, columns] the norms that this worker sends, and zeros; float64."""
        number, device = len(self._columns), self._place.device
        found = [(column, plain(p.grad)) for column, p in self._told if p.grad is not None]
        if not found:
            return torch.zeros((len(NORMS), number), dtype=torch.float64, device=device)
        rows = [row for row, norm in enumerate(NORMS) if norm in norms]
        taken = norms_of([gradient for _, gradient in found], [NORMS[row] for row in rows])
        # A row of zeros stands for the norms that were not asked for; a column of zeros stands for
        # what other workers send.
        padded = torch.nn.functional.pad(taken, (0, 1, 0, 1))
        row_of = {row: place for place, row in enumerate(rows)}
        column_of = {column: place for place, (column, _) in enumerate(found)}
        lines = self._columns.indices.of([row_of.get(row, len(rows)) for row in range(len(NORMS))])
        places = self._columns.indices.of([column_of.get(n, len(found)) for n in range(number)])
        return padded.index_select(0, lines).index_select(1, places)


def weighted_sum(losses: Sequence[Loss]) -> Tensor:
    """[] the sum of losses * weights in the order given, float64, on the losses' device."""
    values = torch.stack([loss.reshape(()) for loss, _ in losses]).double()
    weights = [weight for _, weight in losses]
    products: Sequence[Tensor]
    if len(set(weights)) == 1:
        products = (values * weights[0]).unbind()
    else:
        products = [v * weight for v, weight in zip(values.unbind(), weights, strict=True)]
    return reduce(operator.add, products)


PATIENCE_SECONDS = 30.0
"""How long to wait for workers that must ask too; all are between the same two steps."""


class ToldNorms:
    """The norms that workers have sent each other in this step.

    Attributes:
        wanted: The norms that are sent in each step.
        asked: The norms that this worker's script has ever asked for.
    """

    def __init__(self, tell: Callable[[], NormTable], place: Place) -> None:
        """``tell`` makes a table of all norms as they are now; all workers call it together."""
        self._tell, self._place = tell, place
        self._num_meetings = 0
        self.wanted = set(NORMS)
        self.asked: set[float] = set()
        self._known: set[float] = set()
        self._table: NormTable | None = None
        self._ratios: dict[float, Sequence[float] | Tensor] = {}

    def take(self, table: NormTable, known: set[float]) -> None:
        """Take a step's table, and which norms it contains."""
        self._table, self._known, self._ratios = table, known, {}

    def ratio(self, index: int, norm: float) -> float | Tensor:
        """A parameter's norm of some order over its 2-norm; 1 if that is zero or overflows."""
        if norm not in self._ratios:
            self.asked.add(norm)
            if norm not in self._known:
                self._meet(norm)
                # Gradients may have been scaled since (clipped, unscaled); ratios stay the same.
                self.take(self._tell(), set(NORMS))
            assert self._table is not None
            self._ratios[norm] = self._table.ratios(norm)
        return self._ratios[norm][index]

    def told(self, index: int, norm: float) -> tuple[float | Tensor, float | Tensor]:
        """The 2-norm and another norm, as received; call ``ratio`` before, which asks for it."""
        assert self._table is not None
        return self._table.norm(index, 2.0), self._table.norm(index, norm)

    def _meet(self, norm: float) -> None:
        """Wait until all workers ask; a worker that does not is named instead of waited for."""
        place = self._place
        assert place.store is not None
        self._num_meetings += 1
        absent = place.store.absent(
            f"norms/{self._num_meetings}", place.rank, place.world_size, seconds=PATIENCE_SECONDS
        )
        if absent:
            raise TargetError(
                f"worker {place.rank} asks for the {norm:g}-norm of all gradients for the first "
                f"time, and {PATIENCE_SECONDS:g} s later worker {', '.join(map(str, absent))} does "
                "not",
                hint="ask on every worker, or for the 2-norm, which all are told in each step",
            )


# Of the gradients of parameters on other workers a worker knows only the norms.
# ``clip_grad_norm_(model.parameters(), limit, norm_type)`` takes each gradient's norm, and the norm
# of these norms. So a single number with the right norm can replace a gradient of any shape.

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

        ``number`` is [1], of the gradient's dtype and on its device, and receives the 2-norm.
        ``told`` has the other norms, and the parameter's place in them is ``index``.
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
    two, exact = (
        told.to(found.dtype) if isinstance(told, Tensor) else torch.full_like(found, told)
        for told in gradient._told.told(gradient._index, order)
    )
    return torch.where(found == two, exact, scaled)


def _product(found: Tensor, ratio: float | Tensor) -> Tensor:
    """Multiply by a ratio of float64 as by a Python number: the dtype stays."""
    if not isinstance(ratio, Tensor):
        return found * ratio
    wide = torch.promote_types(found.dtype, torch.float32)
    return (found.to(wide) * ratio.to(wide)).to(found.dtype)


class PartNorms:
    """Makes one worker's parts of gradients return the whole gradients' norms.

    So do the gradients of parameters that another replica updates, of which it has nothing.

    If another replica holds a parameter whole, its gradient returns the same norm. A norm that it
    computed itself would be rounded differently, and the replicas would clip by different numbers.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, nn.Parameter]],
        elsewhere: Sequence[tuple[int, nn.Parameter]],
        told: ToldNorms,
    ) -> None:
        """Take the parameters of both, with their indices in tables of norms."""
        self._parts, self._elsewhere, self._told = list(parts), list(elsewhere), told

    def show(self, table: NormTable, loss_scale: float | Tensor) -> None:
        """Give each part of a gradient a companion with the norm of the whole gradient.

        Norms in the table are without the loss scale, by which a GradScaler will divide both.
        """
        shown: list[tuple[int, nn.Parameter, Tensor | None]] = [
            *((i, p, plain(p.grad)) for i, p in self._parts if p.grad is not None),
            *((i, p, None) for i, p in self._elsewhere if table.used[i]),
        ]
        if not shown:
            return
        norms = table.two_norms([index for index, _, _ in shown]) * loss_scale
        kinds = {(parameter.dtype, parameter.device) for _, parameter, _ in shown}
        numbers = {kind: norms.to(dtype=kind[0], device=kind[1]) for kind in kinds}
        for place, (index, parameter, part) in enumerate(shown):
            number = numbers[parameter.dtype, parameter.device][place : place + 1]
            companion = NormOnly.of(number, self._told, index)
            if part is None:
                parameter.grad = PartGradient.elsewhere(parameter, companion)
            else:
                parameter.grad = PartGradient.of(part, companion)


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

    def show(self, table: NormTable) -> None:
        """Set each as ``grad`` of its parameter, with the 2-norm, where a gradient exists."""
        for numbers, indices in self._kinds:
            numbers.copy_(table.two_norms(indices))
        with torch._C.DisableTorchFunctionSubclass():  # in one go: ``grad`` asks for it each time
            for index, parameter, stand_in in self._all:
                wanted = stand_in if table.used[index] else None
                if get_grad(parameter) is not wanted:
                    set_grad(parameter, wanted)
