"""Parameters laid end to end in a vector that the workers share by unlike cuts.

Between steps a parameter is this worker's slice of it, with the gradient and the optimizer's state
of that slice. While its layer runs, the parameter is a view of the whole vector. Freed vectors give
their memory back and keep their identity, because autograd may have saved views of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.collectives import is_on_devices, wire_device
from ...schema.errors import PeerLostError
from .. import peers
from ..group import Place
from ..invariant import Subtree
from ..nested_tensors import tensors_in
from .leaves import LeafSums, NodeOrder
from .precision import AS_IS, Precision

# The way of a vector between workers that hold other parts of it before and after.
#
# A worker keeps what it is to hold, and gets the rest from the others::
#
#     before    |--- 0 ---|------- 1 -------|          0 keeps its numbers and gets some of 1,
#     next      |------- 0 -------|--- 2 ---|          which leaves; 2 joins and gets the rest


Part = tuple[int, int]
"""Where a worker's numbers of a vector begin and end."""


def sources(held: Sequence[Part], wanted: Part, rank: int) -> list[tuple[int, int, int]]:
    """Who gives a worker which numbers: itself first, else the first that holds them.

    ``held`` are [workers] what each holds; ``wanted`` is what the worker of this rank is to hold.

    Returns:
        (worker, begin, end) in order of workers, but for itself.

    Raises:
        PeerLostError: Nobody holds some of it.
    """
    missing, found = [wanted], []
    for worker in (rank, *range(len(held))):
        low, high = held[worker]
        rest = []
        for begin, end in missing:
            first, last = max(begin, low), min(end, high)
            if first < last:
                found.append((worker, first, last))
                rest += [(begin, first), (last, end)]
            else:
                rest.append((begin, end))
        missing = [(begin, end) for begin, end in rest if begin < end]
    if missing:
        raise PeerLostError("lost all workers that kept a share of the states")
    return found


class Passage:
    """The way of a vector from what each worker holds of it to what each is to hold.

    ``held`` and ``wanted`` are [workers] what each holds and is to hold; ``place`` is this worker
    among those of both generations.
    """

    def __init__(self, place: Place, held: Sequence[Part], wanted: Sequence[Part]) -> None:
        self._place = place
        self._held, self.wanted = held[place.rank], wanted[place.rank]
        self._given = [sources(held, part, rank) for rank, part in enumerate(wanted)]
        self._travels = any(
            worker != rank for rank, given in enumerate(self._given) for worker, _, _ in given
        )

    def carry(self, own: Tensor) -> Tensor:
        """Exchange a vector, [numbers held] to [numbers wanted]; call it on all workers."""
        rank, (low, _), (first, last) = self._place.rank, self._held, self.wanted
        made = own.new_empty(last - first)
        for worker, begin, end in self._given[rank]:
            if worker == rank:
                made[begin - first : end - first] = own[begin - low : end - low]
        # From facts that all workers know: all leave the exchange out, or none does.
        if not self._travels:
            return made
        parts: list[Tensor] = []
        leave, come = [0] * len(self._given), [0] * len(self._given)
        for taker, given in enumerate(self._given):
            for worker, begin, end in given:
                if worker == rank != taker:
                    parts.append(own[begin - low : end - low])
                    leave[taker] += end - begin
                if taker == rank != worker:
                    come[worker] += end - begin
        sent = torch.cat([own[:0], *parts]).to(wire_device(own.device))
        received = sent.new_empty(sum(come))
        peers.all_to_all_single(received, sent, output_split_sizes=come, input_split_sizes=leave)
        at = 0
        for worker, begin, end in self._given[rank]:
            if worker != rank:
                made[begin - first : end - first] = received[at : at + end - begin]
                at += end - begin
        return made


ALIGNMENT = 64
"""Numbers of a parameter between two places where it may be cut.

Kernels treat the last few numbers of a vector by other instructions, which may round differently.
Between such places they are the same in a slice as in the whole, so an update has the same bits.
"""


def cuts_of(before: int, lengths: Sequence[int], shares: Sequence[int]) -> list[int]:
    """[workers + 1] where each worker's part of a vector begins and ends.

    Parts of all vectors together are in proportion to the shares, but for ``ALIGNMENT``.

    Args:
        before: Numbers in the vectors before this one.
        lengths: [parameters] numbers of those in this one.
        shares: [workers] what each is to hold, in any unit.
    """
    total, length = sum(shares), sum(lengths)
    bounds = list(pairwise([0, *accumulate(lengths)]))

    def aligned(cut: int) -> int:
        start, end = next((a, b) for a, b in bounds if a <= cut <= b)
        return (
            end
            if cut == end
            else min(end, start + (cut - start + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT)
        )

    ends = (
        (before + length) * share // total - before * share // total for share in accumulate(shares)
    )
    return [0, *accumulate((aligned(min(end, length)) for end in ends), max)]


def parts_of(cuts: Sequence[int], kept: Sequence[range]) -> list[Part]:
    """[workers] where what each keeps of a vector begins and ends.

    ``cuts`` are those of ``cuts_of``, and ``kept`` [workers] the ranks whose parts each keeps.
    """
    return [(cuts[ranks.start], cuts[ranks.stop]) for ranks in kept]


@dataclass(frozen=True, slots=True)
class Sharers:
    """The workers that share a vector: those of a split, or the replicas of a stage.

    Attributes:
        place: This worker.
        ranks: [workers] the rank of each, in the order of their parts.
        group: The group of these; None: of all workers.
    """

    place: Place
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None

    @property
    def number(self) -> int:
        """This worker's position among them."""
        return self.ranks.index(self.place.rank)

    @property
    def are_several(self) -> bool:
        """Whether there are others."""
        return len(self.ranks) > 1

    def send_parts(self, whole: Tensor, cuts: Sequence[int]) -> list[peers.Transfer | None]:
        """Begin to send all workers each one's part of a vector.

        ``cuts`` are [workers + 1] where parts begin and end.
        """
        if whole.element_size() == 1:  # gloo knows no float8: its bytes travel
            whole = whole.view(torch.uint8)
        parts = [whole[low:high] for low, high in pairwise(cuts)]
        if self._is_one_call(parts):
            own = parts[self.number]
            return [peers.all_gather(whole, own, group=self.group, async_op=True)]
        return [
            peers.broadcast(part, src=rank, group=self.group, async_op=True)
            for rank, part in zip(self.ranks, parts, strict=True)
            if self.are_several and part.numel()
        ]

    def sum_parts(self, whole: Tensor, cuts: Sequence[int]) -> list[peers.Transfer | None]:
        """Begin to sum each part of a vector to its worker; the arguments are ``send_parts``'s."""
        parts = [whole[low:high] for low, high in pairwise(cuts)]
        if self._is_one_call(parts):
            own = parts[self.number]
            return [peers.reduce_scatter(own, whole, group=self.group, async_op=True)]
        return [
            peers.reduce(part, dst=rank, group=self.group, async_op=True)
            for rank, part in zip(self.ranks, parts, strict=True)
            if self.are_several and part.numel()
        ]

    def _is_one_call(self, parts: Sequence[Tensor]) -> bool:
        # Between hosts' memories gloo's all-gather takes longer than a broadcast for each owner.
        # Parts of one call are in order of ranks, and equally long.
        is_even = self.are_several and len({len(part) for part in parts}) == 1
        is_in_order = [*self.ranks] == sorted(self.ranks)
        return is_even and is_in_order and len(parts[0]) > 0 and is_on_devices(self.group)


def all_workers(place: Place) -> Sharers:
    """All workers of a job."""
    return Sharers(place, range(place.world_size))


OF_SHAPE = {
    "shape", "ndim", "nbytes", "size", "numel", "nelement", "dim", "ndimension", "stride",
    "__len__",
}  # fmt: skip
"""Functions of tensors and their properties that tell of the shape alone."""
OF_NO_NUMBER = {
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "is_floating_point", "is_complex", "element_size", "get_device", "__hash__", "backward",
    "detach_",
}  # fmt: skip
"""Functions that look at no number of a tensor, nor at its shape."""
OF_NUMBERS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Properties that tell of numbers."""


def name_of(function: Any) -> tuple[str, bool]:
    """The name of a function of torch's or of a tensor's property; and whether it is a property."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(function.__self__, "__name__", ""), True
    return name, False


class AwayParameter(nn.Parameter):
    """A parameter whose weights are away in a step; what reads it brings them, or is refused.

    Parameters have this class from when a step frees them until they are whole. Its layer runs
    behind hooks that make them whole, so that other code alone meets the class.
    """

    _asks: tuple[torch.Size, Callable[[], None]]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch's; if it reads numbers, when they are here."""
        kwargs, first = kwargs or {}, args[0] if args else None
        name, is_property = name_of(function)
        if isinstance(first, AwayParameter) and name in OF_SHAPE:
            shape, _ = _plainly(getattr, first, "_asks")
            shown = torch.empty(shape, dtype=_plainly(getattr, first, "dtype"), device="meta")
            return function(shown, *args[1:], **kwargs)
        if is_property and name not in OF_NUMBERS:
            return _plainly(function, *args)
        if name in OF_NO_NUMBER or name.startswith("new_"):
            return _plainly(function, *args, **kwargs)
        for value in tensors_in((args, kwargs)):
            if isinstance(value, AwayParameter):
                value.come()
        return function(*args, **kwargs)

    def come(self) -> None:
        """Be a whole parameter.

        Raises:
            TargetError: The weights cannot come here.
        """
        self._asks[1]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the whole parameter."""
        self.come()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole parameter."""
        self.come()
        return self.__reduce_ex__(protocol)

    @classmethod
    def hide(cls, parameter: Any, asks: tuple[torch.Size, Callable[[], None]]) -> None:
        """Let a parameter be away.

        ``asks`` are its whole shape, and what makes it whole or raises.
        """
        if type(parameter) is nn.Parameter:
            vars(parameter)["_asks"], parameter.__class__ = asks, cls

    @classmethod
    def show(cls, parameter: Any) -> None:
        """Let a parameter be a plain one."""
        is_away = type(parameter) is cls
        if is_away:
            parameter.__class__ = nn.Parameter
            del parameter._asks  # nothing of it is pickled


def _plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


class Flat:
    """The parameters of one kind in a unit of the model.

    Args:
        members: Index and parameter; all of one dtype, trained or all frozen.
        cuts: [workers + 1] see ``cuts_of``.
        keeps_whole: Whether weights are not shared, so that the whole vector stays.
        kept: [workers] the ranks whose parts each keeps; the own one among them.
        order: In which order virtual nodes add up; None: as the workers run them.
        counts: Whether this worker's gradients count in sums; else another computes the same.
        precision: The types in which they are kept, run and summed.

    Attributes:
        part: Where what this worker keeps of the vector begins and ends.
        own: What it keeps of the weights.
        is_alone: Whether what others keep is 0 in the whole vector: they are elsewhere.
        casts: Whether weights run in another type than that in which they are kept.
    """

    def __init__(
        self,
        members: Sequence[tuple[int, nn.Parameter]],
        cuts: Sequence[int],
        sharers: Sharers,
        *,
        keeps_whole: bool,
        kept: Sequence[range],
        order: NodeOrder | None = None,
        counts: bool = True,
        precision: Precision = AS_IS,
    ) -> None:
        self._counts = counts
        self.kept, self.is_alone = kept, False
        self.members, self.sharers, self._keeps_whole = members, sharers, keeps_whole
        first = members[0][1]
        self.is_trained, self._cuts = first.requires_grad, list(cuts)
        self.shapes = [parameter.shape for _, parameter in members]
        ends = list(accumulate(shape.numel() for shape in self.shapes))
        self.bounds = list(pairwise([0, *ends]))
        low, high = self.part = parts_of(cuts, kept)[sharers.number]
        own_type, running = precision.kept_type(first), precision.running_type(first)
        self.casts, self._summed = own_type != running, precision.summed_type(first)
        self._shows_kept = self.casts and precision.running is not None
        whole = torch.empty(ends[-1], dtype=first.dtype, device=sharers.place.device)
        for (start, end), (_, parameter) in zip(self.bounds, members, strict=True):
            whole[start:end].view(parameter.shape).copy_(parameter.detach())
            parameter.data = whole[:0]  # frees the script's, so that no two copies are here
        if sharers.are_several and not sharers.place.is_outside:
            sent = whole.view(torch.uint8) if first.element_size() == 1 else whole
            peers.broadcast(sent, src=sharers.ranks[0], group=sharers.group)
        self._shows_own = keeps_whole and not self.casts
        self.own = whole[low:high]
        if not self._shows_own:
            self.own = self.own.to(own_type, copy=True)
        self._whole = whole if first.dtype == running else torch.empty_like(whole, dtype=running)
        self._shown: Tensor | None = None  # the whole vector as it is kept, between passes
        self._sums: Tensor | None = None  # of this worker's own part; at the end of what it keeps
        self._before: dict[int, Tensor] = {}  # gradients of earlier steps
        self._gradient: Tensor | None = None
        self._passes: Tensor | None = None  # the sum of a step's, where they add up in another type
        self._expects = False  # whether autograd makes the gradients, for ``_taken``
        self._gathering: list[peers.Transfer | None] | None = None
        self._reducing: list[tuple[Tensor, list[peers.Transfer | None]]] = []
        self._order = order
        self._leaves: LeafSums | None = None
        self._own_leaves: LeafSums | None = None
        self._coming: list[tuple[Sequence[Subtree | None], Tensor, peers.Transfer | None]] = []
        self._asks: dict[int, tuple[torch.Size, Callable[[], None]]] = {}
        self.is_whole = self._is_away = False
        self.free()

    def asks(self, number: int, come: Callable[[], None]) -> None:
        """Have ``come`` called where a member is read in a step while its weights are away.

        Afterwards they are whole; or it raises.
        """
        self._asks[number] = self.shapes[number], come

    def _owned(self, kept: Tensor) -> Tensor:
        """This worker's own part of what it keeps of a vector."""
        low, high = self._cuts[self.sharers.number :][:2]
        return kept[low - self.part[0] : high - self.part[0]]

    def owned_of(self, number: int, kept: Tensor) -> Tensor:
        """The numbers that this worker owns of what it keeps of a member."""
        whole, own = self.slice_of(number), self.slice_of(number, self.sharers.number)
        return kept[own.start - whole.start : own.stop - whole.start] if kept.numel() else kept

    def laid_out(self, slices: Mapping[int, Tensor]) -> Tensor:
        """Slices of some members in this worker's part of a vector; the rest is 0."""
        vector = next(iter(slices.values())).new_zeros(self.part[1] - self.part[0])
        for number, value in slices.items():
            self.own_of(vector, number).copy_(value)
        return vector

    def move(self, own: Tensor, cuts: Sequence[int], part: tuple[int, int]) -> None:
        """Hold another part from now on; ``take`` follows. Nothing is gathered meanwhile.

        ``cuts`` are [next workers + 1], see ``cuts_of``; ``part`` is where its part begins and
        ends.
        """
        self._cuts, self.part, self._sums, self.own = list(cuts), part, None, own
        if self._shows_own:
            self.own = self._whole[slice(*part)].copy_(own)
        self.free()

    def take(self, sharers: Sharers, order: NodeOrder | None) -> None:
        """Be one of other workers from now on, in another order of sums."""
        self.sharers, self._order = sharers, order

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[low:high] for low, high in pairwise(self._cuts)]

    def slice_of(self, number: int, worker: int | None = None) -> slice:
        """A worker's slice of a member, in numbers of that member; by default this worker's."""
        low, high = self.part if worker is None else self._cuts[worker : worker + 2]
        start, end = self.bounds[number]
        begin = min(max(low, start), end) - start
        return slice(begin, max(begin, min(high, end) - start))

    def own_of(self, flat: Tensor, number: int) -> Tensor:
        """The slice of a member in this worker's part of the vector."""
        low, start = self.part[0], self.bounds[number][0]
        found = self.slice_of(number)
        if found.start == found.stop:
            return flat[:0]
        return flat[start + found.start - low : start + found.stop - low]

    def gather(self) -> None:
        """Begin to bring all parts together; ``wait`` ends it."""
        if self.is_whole or self._gathering is not None:
            return
        if not self._keeps_whole:
            storage = self._whole.untyped_storage()
            storage.resize_(self._whole.numel() * self._whole.element_size())
            if self.is_alone:
                self._whole.zero_()  # what others keep does not come, and must not be garbage
        if self._shown is not None:
            self._whole.copy_(self._shown)
        elif not self._shows_own:
            self._whole[slice(*self.part)].copy_(self.own)
        self._gathering = []
        if not self.is_alone and self._shown is None:
            self._gathering = self.sharers.send_parts(self._whole, self._cuts)

    def wait(self) -> None:
        """Make the parameters whole, and wait until they are."""
        self.gather()
        peers.wait_for(self._gathering or ())
        if self._gathering is not None:
            self._gathering, self.is_whole, self._is_away = None, True, False
            for number, (_, parameter) in enumerate(self.members):
                AwayParameter.show(parameter)
                parameter.data = self._view(self._whole, number)

    def _view(self, whole: Tensor, number: int) -> Tensor:
        """A member as a view of a whole vector."""
        start, end = self.bounds[number]
        return whole[start:end].view(self.shapes[number])

    @property
    def is_readable(self) -> bool:
        """Whether the parameters are whole."""
        return self.is_whole or self._shown is not None

    def show(self) -> None:
        """Make the parameters whole as the script knows them, until they are freed.

        Where a policy casts them they are so between passes; each pass casts them anew, since a
        script may write to them.
        """
        if not self._shows_kept:
            self.wait()
            return
        if self._gathering is not None:
            self.wait()
        if self._shown is None:
            self._shown = self._gathered(self.own)
        for number, (_, parameter) in enumerate(self.members):
            AwayParameter.show(parameter)
            parameter.data = self._view(self._shown, number)
        self.is_whole = self._is_away = False

    def _gathered(self, own: Tensor) -> Tensor:
        """A whole vector, of which each worker has its part."""
        whole = own.new_zeros(self.bounds[-1][1])
        whole[slice(*self.part)] = own
        if not self.is_alone:
            peers.wait_for(self.sharers.send_parts(whole, self._cuts))
        return whole

    def free(self, *, shows: bool = True) -> None:
        """Make the parameters this worker's slices; what is gathered is given back.

        With ``shows`` parameters show their slices. In a step they are ``AwayParameter``.
        """
        if self._gathering is not None:
            self.wait()
        self._shown = None
        for number, (_, parameter) in enumerate(self.members):
            AwayParameter.show(parameter)
            parameter.data = self.own_of(self.own, number) if shows else self._whole[:0]
        self._is_away = not shows
        self.hide()
        # Emptied, and not replaced: what autograd has saved of the weights shows this storage, and
        # finds their values again when the gather of the backward pass has filled it.
        if not self._keeps_whole:
            self._whole.untyped_storage().resize_(0)
        self.is_whole = False

    def hide(self) -> None:
        """Let parameters that a step has freed be ``AwayParameter``."""
        for number, asks in self._asks.items() if self._is_away else ():
            AwayParameter.hide(self.members[number][1], asks)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have ``whole_kept`` find whole weights; they go after it, unless they were there."""
        is_there = self.is_whole or self.casts  # else members come one by one
        if not is_there:
            self.wait()
        yield
        if not is_there:
            self.free()

    def keep_own(self) -> None:
        """Keep this worker's part of whole weights that may have been changed."""
        if self._shown is not None:
            self.own.copy_(self._shown[slice(*self.part)])
            return
        if not self.is_whole or self._shows_own:
            return
        seen = self._whole[slice(*self.part)]
        if self.casts:  # of what was not changed the lower bits stay
            seen = torch.where(seen == self.own.to(seen), self.own, seen.to(self.own))
        self.own.copy_(seen)

    def whole_kept(self, number: int) -> Tensor:
        """A member's whole value in the type in which it is kept; call it on all workers."""
        if self._shown is None and self.casts:
            return self.whole_of(number, self.own_of(self.own, number))
        return self._view(self._whole if self._shown is None else self._shown, number)

    def alone_of(self, number: int, own: Tensor) -> Tensor:
        """A tensor of a member's shape from this worker's slice; the rest is 0."""
        whole = own.new_zeros(self.shapes[number].numel())
        whole[self.slice_of(number)] = own
        return whole.view(self.shapes[number])

    def whole_of(self, number: int, own: Tensor) -> Tensor:
        """A tensor of a member's shape, such as its moment, from the slices of all workers."""
        found = self.alone_of(number, own)
        whole = found.view(-1)
        cuts = [self.slice_of(number, w).start for w in range(len(self.sharers.ranks))]
        peers.wait_for(self.sharers.send_parts(whole, [*cuts, len(whole)]))
        return found

    # Gradients

    @property
    def awaits_gradients(self) -> bool:
        """Whether whole gradients may come."""
        return self._expects or self._gradient is not None

    def begin_sums(self) -> bool:
        """Begin a step; whether gradients of an earlier one are there, which stay in the sum."""
        self._sums = None
        if self._order is not None:
            self._leaves = LeafSums(self._order.num_leaves)
            self._own_leaves = LeafSums(self._order.num_leaves)
        gradients = {n: p.grad for n, (_, p) in enumerate(self.members) if p.grad is not None}
        self._before = gradients
        if gradients:
            self._sums = self._owned(self.laid_out(gradients)).clone()
        for _, parameter in self.members:
            parameter.grad = None
        return bool(gradients)

    @property
    def gradient_version(self) -> tuple[int, int]:
        """How often the room for gradients has changed, and how many parameters show it."""
        if self._gradient is None:
            return 0, 0
        shown = sum(parameter.grad is not None for _, parameter in self.members)
        return self._gradient._version, shown

    def await_gradients(self) -> None:
        """Give each parameter room for its whole gradient; parameters are whole."""
        if not self.is_trained:
            return
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._whole)
        for number, (_, parameter) in enumerate(self.members):
            start, end = self.bounds[number]
            parameter.grad = self._gradient[start:end].view(self.shapes[number])

    def expect_gradients(self) -> None:
        """Let whole gradients come that are reduced before others come."""
        # Autograd then keeps the tensors that it has made. Into room that is there already it would
        # add each to zeros: a kernel for every parameter.
        self._expects = self.is_trained and self._gradient is None

    def clear_gradients(self) -> None:
        """Set the gradients that have come to 0."""
        if self._gradient is not None:
            self._gradient.zero_()
        for _, parameter in self.members if self._expects else ():
            parameter.grad = None

    def reduce(
        self, factor: Tensor | None = None, names: Sequence[Subtree | None] | None = None
    ) -> None:
        """Begin to sum the gradients that have come, to the workers that own them.

        ``factor`` [] multiplies those of this worker before. ``names`` are [workers] the virtual
        node whose gradient each has; None where all add up.
        """
        gradient = self._taken(factor)
        if gradient is None:
            return
        if names is not None:
            self._send(gradient, names)
            return
        self._reducing.append((gradient, self.sharers.sum_parts(gradient, self._cuts)))

    def _taken(self, factor: Tensor | None) -> Tensor | None:
        """The gradients that have come, which the parameters leave."""
        gradient, self._gradient = self._gradient, None
        if self._expects:
            self._expects, gradient = False, self._joined()
        if gradient is None:
            return None
        gradient = gradient.to(self._summed)
        if self._passes is not None:
            gradient, self._passes = self._passes.add_(gradient), None
        if not self._counts:
            gradient.zero_()
        elif factor is not None:
            gradient.mul_(factor.to(gradient))
        for _, parameter in self.members:
            parameter.grad = None
        return gradient

    def _joined(self) -> Tensor:
        """The gradients that autograd has made, end to end; 0 where it has made none."""
        whole = torch.empty_like(self._whole, dtype=self._summed)
        rooms, came = [], []  # copied by one kernel for all, at the end
        for (start, end), (_, parameter) in zip(self.bounds, self.members, strict=True):
            room, grad = whole[start:end], parameter.grad
            if grad is None:
                room.zero_()
                continue
            rooms.append(room.view(grad.shape))
            came.append(grad.to_dense() if grad.is_sparse else grad)
        if came:
            torch._foreach_copy_(rooms, came)
        return whole

    def keep_pass(self) -> None:
        """Add a pass's gradients to those of the step's others, in the type of sums."""
        gradient = self._taken(None) if self._summed != self._whole.dtype else None
        if gradient is not None:
            self._passes = gradient

    def keep(self, node: int, factor: Tensor | None) -> None:
        """Add a virtual node's gradients to those of this worker's others."""
        gradient = self._taken(factor)
        if gradient is not None and self._own_leaves is not None:
            self._own_leaves.add_leaf(node, gradient.to(self.own))

    def reduce_kept(self) -> None:
        """Begin to sum what was kept, to the workers that own it."""
        if self._order is None or self._own_leaves is None or not self.is_trained:
            return
        for names in self._order.at_end():
            own = names[self.sharers.number]
            kept = self.own[:0] if own is None else self._own_leaves.take(own)
            self._send(kept, names)

    def _send(self, gradient: Tensor, names: Sequence[Subtree | None]) -> None:
        """Begin to send each owner its part of this worker's gradients."""
        if not self.sharers.are_several:
            self._coming.append((names, gradient, None))
            return
        # Parts as they are, and no reduction: the owner adds them in the order of virtual nodes,
        # which no library's sum keeps.
        lengths = [high - low for low, high in pairwise(self._cuts)]
        own, sent = lengths[self.sharers.number], gradient.to(wire_device(gradient.device))
        into = [own if name is not None else 0 for name in names]
        received = sent.new_empty(sum(into))
        work = peers.all_to_all_single(
            received,
            sent,
            output_split_sizes=into,
            input_split_sizes=lengths if sent.numel() else [0] * len(lengths),
            async_op=True,
        )
        self._coming.append((names, received, work))

    def add_reduced(self) -> None:
        """Wait for the sums that were begun, and add this worker's part."""
        for gradient, works in self._reducing:
            peers.wait_for(works)
            part = self._parts(gradient)[self.sharers.number]
            if self._sums is None:
                self._sums = part.to(self.own, copy=True)  # of the whole gradient nothing stays
            else:
                self._sums += part
        self._reducing.clear()
        for names, received, arrives in self._coming:
            peers.wait_for([arrives])
            self._add(names, received.to(self.own))
        self._coming.clear()

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Add up the sums of those who own the same numbers of such vectors elsewhere."""
        if self._sums is None:
            self._sums = torch.zeros_like(self._owned(self.own))
        if self._sums.numel():
            peers.all_reduce(self._sums, group=group)

    def _add(self, names: Sequence[Subtree | None], received: Tensor) -> None:
        assert self._leaves is not None
        held = [name for name in names if name is not None]
        for name, part in zip(held, received.view(len(held), -1), strict=True):
            if name.start == 0 and self._sums is not None:  # of an earlier step: as node 0's
                part += self._sums
                self._sums = None
            self._leaves.add(name, part)
        self._leaves.settle()

    def whole_sums(self) -> Tensor:
        """The whole vector of the gradients, on all workers; some member has one."""
        gradients = {n: p.grad for n, (_, p) in enumerate(self.members) if p.grad is not None}
        return self._gathered(self.laid_out(gradients))

    def give_gradients(self) -> None:
        """Let each parameter's gradient be this worker's slice of the sum."""
        if not self.is_trained:
            return
        root = None if self._leaves is None else self._leaves.root()
        if root is not None:
            self._sums = root if self._sums is None else root.add_(self._sums)
        if self._sums is None:
            self._sums = torch.zeros_like(self._owned(self.own))
        shown = self._sums
        if any(len(ranks) > 1 for ranks in self.kept):  # a sum goes to all who keep its numbers
            wanted = parts_of(self._cuts, self.kept)
            shown = Passage(self.sharers.place, list(pairwise(self._cuts)), wanted).carry(shown)
        self._sums = shown
        for number, (_, parameter) in enumerate(self.members):
            parameter.grad = self.own_of(shown, number)

    def undo(self) -> None:
        """Drop a step that was broken off, whose transfers may still write to their buffers."""
        whole = torch.empty_like(self._whole)
        if self._shows_own:
            self.own = whole[slice(*self.part)].copy_(self.own)
        self._whole, self._gathering, self._gradient, self._sums = whole, None, None, None
        self._reducing, self._coming, self._leaves, self._own_leaves = [], [], None, None
        self._passes, self._expects = None, False
        self.free()
        for number, (_, parameter) in enumerate(self.members):
            parameter.grad = self._before.get(number)

    def scale(self, factor: Tensor) -> None:
        """Multiply the sums."""
        if self._sums is not None:
            self._sums.mul_(factor.to(self._sums))
