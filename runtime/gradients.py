"""Gradients of a worker: hooks that see them come, where they lie, their sums over the workers.

A step adds the gradients of its passes up in flat buffers. During the last backward pass, each part
of a buffer is summed over the workers as soon as it is complete (VirtualFlow 3.2, 5.2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..devices.backend import backend_of
from ..schema.errors import TargetError
from . import peers
from .invariant import InvariantSum

# Hooks on parameters, hetflow's and the script's own.
#
# Hetflow's hooks tell when a gradient has come. A hook of the script acts on the gradient of the
# whole batch under plain PyTorch. A step runs several backward passes, on several workers, so
# autograd would call it with parts of that gradient. Therefore a step takes the script's hooks from
# the parameters, and calls each once at its end.

GradientHook = Callable[[Tensor], None]
"""Called with a parameter after backward has added to its gradient."""
_hooks_of_gradient = attrgetter("_backward_hooks")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")
_OWN: set[int] = set()  # the ids of hetflow's hooks; torch gives no id twice


class Hooks:
    """The hooks that one object has on parameters."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, parameter: nn.Parameter, hook: GradientHook) -> None:
        """Call ``hook`` after each backward pass of a parameter."""
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._note(handle)

    def add_on_gradient(self, parameter: nn.Parameter, hook: Callable[[Tensor], Tensor]) -> None:
        """Let ``hook`` change each gradient that comes to a parameter."""
        self._note(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, handle: RemovableHandle) -> None:
        _OWN.add(handle.id)
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all."""
        for handle in self._handles:
            handle.remove()
            _OWN.discard(handle.id)
        self._handles.clear()


@dataclass(frozen=True, slots=True)
class _Held:
    """A hook that was taken from a parameter, and the place from which it was taken."""

    name: str
    parameter: nn.Parameter
    home: dict[int, Any]
    key: int
    hook: Any
    is_of_gradient: bool  # by register_hook; else by register_post_accumulate_grad_hook


class ScriptHooks:
    """The script's hooks on a job's parameters.

    Attributes:
        held: Those that were taken from the parameters, and wait for ``run``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.held: list[_Held] = []

    def take(self) -> None:
        """Take the hooks from the parameters, before the passes of a step.

        Raises:
            TargetError: There is one that needs the backward pass around it.
        """
        found = self._found()
        for held in found:
            if getattr(held.hook, "__module__", "") == "torch.autograd.graph":
                raise TargetError(
                    f"{held.name} has a hook of register_multi_grad_hook, which autograd would "
                    f"call once for each virtual node, with parts of the gradients",
                    hint="remove it, and call its function after job.backward",
                )
        for held in found:
            del held.home[held.key]
        self.held += found

    def check(self, *, are_carried: bool) -> None:
        """Refuse hooks that could not be called as under plain PyTorch, after ``take``.

        Raises:
            TargetError: A hook changes gradients that are added to those of earlier steps; or the
                script's function has made a hook.
        """
        first = next((held for held in self.held if held.is_of_gradient), None)
        if are_carried and first is not None:
            raise TargetError(
                f"{first.name} has the hook {_name_of(first.hook)} on its gradient, and gradients "
                f"of an earlier step are still there: the hook would change both",
                hint="call optimizer.zero_grad() in every step, or remove the hook and call its "
                "function before optimizer.step()",
            )
        made = next(iter(self._found()), None)
        # A hook that the function makes is new in every pass; after ten steps it would run ten
        # times.
        if made is not None:
            raise TargetError(
                f"the loss function puts the hook {_name_of(made.hook)} on {made.name}: it would "
                f"be called once for each virtual node, with a part of the gradient",
                hint="register it once, before the loop",
            )

    def refuse(self) -> None:
        """Refuse all hooks: under a pipeline, gradients come in parts and their norms are told."""
        for held in self._found():
            raise TargetError(
                f"{held.name} has the hook {_name_of(held.hook)}, and under a pipeline it would be "
                f"called once for each microbatch, with a part of the gradient",
                hint="remove it, and clip or change gradients after job.backward; or solve for a "
                "split plan, where a hook is called with the gradient of the whole batch",
            )

    def put_back(self) -> None:
        """Give the parameters their hooks back."""
        for held in self.held:
            held.home[held.key] = held.hook
        self.held = []

    @property
    def are_carried(self) -> bool:
        """Whether a parameter whose gradient a hook sees has a gradient of an earlier pass."""
        gradients = [held.parameter.grad for held in self.held if held.is_of_gradient]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def run(self, unless: str = "") -> None:
        """Give the hooks back, and call each once with its parameter's gradient, if it has one.

        Args:
            unless: What gradients are meanwhile, if none of them may be changed.

        Raises:
            TargetError: A hook has changed one that may not be.
        """
        taken = self.held
        self.put_back()
        for held in taken:
            gradient = held.parameter.grad
            if gradient is None:
                continue
            before = gradient._version
            with torch.no_grad():
                changed = held.hook(gradient) if held.is_of_gradient else None
            if not held.is_of_gradient:
                held.hook(held.parameter)
            is_other = held.parameter.grad is not gradient or gradient._version != before
            if unless and (changed is not None or is_other):
                raise TargetError(
                    f"the hook {_name_of(held.hook)} changes the gradient of {held.name}, which "
                    f"is {unless}",
                    hint="call its function before optimizer.step(), once for the update",
                )
            if changed is not None:
                with torch.no_grad():
                    _replace(gradient, changed, held)

    def _found(self) -> list[_Held]:
        parameters = self._parameters.values()
        later = filter(None, map(_hooks_after, parameters))
        if not any(map(_hooks_of_gradient, parameters)) and _OWN.issuperset(chain(*later)):
            return []  # as a rule, in every step; the rest takes several times as long
        return [
            _Held(name, parameter, home, key, hook, is_of_gradient)
            for name, parameter in self._parameters.items()
            for is_of_gradient, home in (
                (True, parameter._backward_hooks),
                (False, parameter._post_accumulate_grad_hooks),
            )
            if home
            for key, hook in home.items()
            if key not in _OWN
        ]


def _replace(gradient: Tensor, changed: Any, held: _Held) -> None:
    if not isinstance(changed, Tensor) or changed.shape != gradient.shape:
        what = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TargetError(
            f"the hook {_name_of(held.hook)} of {held.name} returned {what}, and the gradient has "
            f"shape {list(gradient.shape)}",
            hint="return a tensor like the gradient, or None",
        )
    gradient.copy_(changed)


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def came_twice(name: str) -> TargetError:
    """The error where a parameter gets two gradients in a backward pass that overlaps with sums."""
    return TargetError(
        f"{name} got its gradient twice in one backward; hetflow cannot tell which is the last",
        hint="use checkpoint(..., use_reentrant=False), or prepare(..., overlap=False)",
    )


# Write the first gradients of a step over what their views held.
#
# A step's first gradient of a parameter is a tensor that autograd made. It is written into the
# parameter's view of a flat buffer, which becomes the parameter's ``grad``; later passes add to it.
# So a buffer need not be cleared and read first. On a host a gradient is written when it comes,
# while it is in the caches. On an accelerator gradients are held back and written together, by one
# kernel.


_ZERO = torch.zeros(())  # a plain 0.0 would be made a tensor for each gradient, which takes longer


class FirstGradients:
    """Writes first gradients into their views, at once or together.

    Args:
        none_is_zero: Whether a gradient that a hook of the script has used up (``grad`` is None)
            counts as zeros; otherwise the parameter counts as one without a gradient.
        host_adds_zero: Whether a gradient that is written at once has 0 added, so that -0 becomes
            +0, as by adding to a cleared buffer. It costs no more than a copy.
        device_adds_zero: The same for gradients that are written together; a kernel more.
        most_held_bytes: Gradients of so many bytes are written without waiting for more; by
            default it depends on the device kind.
    """

    def __init__(
        self,
        *,
        none_is_zero: bool = False,
        host_adds_zero: bool = False,
        device_adds_zero: bool = False,
        most_held_bytes: int | None = None,
    ) -> None:
        self._none_is_zero, self._most_held_bytes = none_is_zero, most_held_bytes
        self._host_adds_zero, self._device_adds_zero = host_adds_zero, device_adds_zero
        self._held: list[tuple[Tensor, Tensor]] = []  # parameter, view
        self._num_held_bytes = 0

    def begin(self) -> None:
        """Start a step: what an earlier one has left is forgotten."""
        self._held.clear()
        self._num_held_bytes = 0

    def take(self, parameter: Tensor, view: Tensor, at_once: bool) -> bool:
        """Put a parameter's first gradient into its view, at once or soon.

        Returns:
            Whether it has a gradient, or counts as having one.
        """
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        gradient = parameter.grad
        if gradient is None:
            if self._none_is_zero:
                view.zero_()
            return self._none_is_zero
        if gradient.layout != torch.strided:
            parameter.grad = view.zero_().add_(gradient)
        elif not at_once:
            self._held.append((parameter, view))
            self._num_held_bytes += view.nbytes
            if self._num_held_bytes >= (
                self._most_held_bytes or backend_of(view.device).bucket_bytes
            ):
                self.write()
        elif self._host_adds_zero:
            parameter.grad = torch.add(gradient, _ZERO, out=view)
        else:
            parameter.grad = view.copy_(gradient)
        return True

    def take_all(self, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Put the first gradients of parameters into their views, on a device by one kernel."""
        for parameter, view in pairs:
            gradient = parameter.grad
            if gradient is None or gradient.is_cpu or gradient.layout != torch.strided:
                self.take(parameter, view, True)
            else:
                self._held.append((parameter, view))
        self.write()

    def write(self) -> None:
        """Write the gradients that were held back."""
        if not self._held:
            return
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, view in self._held:
            gradient = parameter.grad
            if gradient is not None:
                found.append((parameter, view, gradient))
            elif self._none_is_zero:
                found.append((parameter, view, torch.zeros_like(view)))
        if found:
            views = [view for _, view, _ in found]
            with torch.no_grad():
                torch._foreach_copy_(views, [gradient for _, _, gradient in found])
                if self._device_adds_zero:
                    torch._foreach_add_(views, 0.0)
            for parameter, view, _ in found:
                parameter.grad = view
        self.begin()


# The gradient buffers of a worker that holds a whole model, cut into buckets (VirtualFlow 3.2).
#
# Every parameter's gradient is a view into one flat buffer (one per dtype and device). The order is
# the reverse of registration, which is about the order in which backward fills it. All virtual
# nodes of a device add into it, so memory does not grow with their number. A bucket of the
# all-reduce is a slice of the buffer. The last bucket has space for a few more numbers, so the sums
# of a step need no collective of their own.

# Parameters' places in a flat buffer of gradients.

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_kind = attrgetter("requires_grad", "dtype", "device", "shape")


def view_like(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """The part of ``flat`` for one parameter, in the parameter's memory format."""
    # In the parameter's own memory format: else each gradient is transposed on its way, and
    # optimizers leave their fast path, which asks for equal strides.
    part = flat[offset : offset + parameter.numel()]
    dense = any(
        parameter.dim() == dims and parameter.is_contiguous(memory_format=layout)
        for dims, layout in zip((4, 5), _CHANNELS_LAST, strict=True)
    )
    if dense and not parameter.is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)


def layout_of(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """What the views of parameters depend on; if it changes, buffers must be made again.

    It changes where parameters are frozen, unfrozen, cast, moved, or get another memory format.
    """
    # By ``map``, which takes half as long as a loop.
    return *map(_kind, parameters), *map(Tensor.stride, parameters)


# The first bucket is small, so that a small model's reduction also begins during backward, as in
# DistributedDataParallel.
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(slots=True)
class Bucket:
    """A slice of a flat buffer that one collective reduces.

    Attributes:
        flat: The slice, as real numbers.
        place: Number of the flat buffer, start and end in it.
        parameters: Indices of those whose gradients are complete when all have come.
        num_ready: How many have come in an armed backward pass.
        last: The parameter whose gradient was the last to come; -1 if none was yet.
    """

    flat: Tensor
    place: tuple[int, int, int]
    parameters: list[int] = field(default_factory=list)
    num_ready: int = 0
    last: int = -1

    @property
    def is_ready(self) -> bool:
        """Whether all its gradients have come."""
        return self.num_ready == len(self.parameters)


class FlatBuffers:
    """Gradient buffers of the parameters that are trained, and their buckets.

    Args:
        parameters: All parameters, trainable or not, in the same order on every worker.
        bucket_bytes: Minimum size of a bucket; None takes that of the device kind.
        alignment: Buckets end at multiples of so many numbers; the remainder goes into the next.
        num_sums: How many further float32 numbers travel with the last bucket.

    Attributes:
        flats: The buffers.
        views: Of each trainable parameter, by its index, the view for its gradient.
        buckets: In the order of their sums, which all workers share.
        bucket_of: Of each trainable parameter, by its index, its bucket; none if it has no numbers.
        sums: [num_sums] view of the further numbers; None where the last buffer is not float32.
        first_with_sums: The number of the bucket in which they begin; -1 without such numbers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: int | None,
        alignment: int,
        num_sums: int,
    ) -> None:
        self._parameters = parameters
        self._bucket_bytes, self._alignment = bucket_bytes, alignment
        self.flats: list[Tensor] = []
        self.views: dict[int, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.sums: Tensor | None = None
        self.first_with_sums = -1
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        # By kind, and the same on every worker: buckets are matched between workers by their order
        # alone, and no order of arrival may enter it.
        for index in reversed(range(len(parameters))):
            parameter = parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        for number, ((dtype, device), members) in enumerate(kinds.items(), start=1):
            has_sums = number == len(kinds) and dtype == torch.float32
            self._lay_out(members, dtype, device, num_sums if has_sums else 0)

    def _lay_out(
        self, members: Sequence[int], dtype: torch.dtype, device: torch.device, num_sums: int
    ) -> None:
        total = sum(self._parameters[index].numel() for index in members)
        unit = self._alignment
        flat = torch.zeros(-(-(total + num_sums) // unit) * unit, dtype=dtype, device=device)
        self.flats.append(flat)
        start, offset = 0, 0
        usual = self._bucket_bytes or backend_of(device).bucket_bytes
        bucket: list[int] = []
        for index in members:
            parameter = self._parameters[index]
            self.views[index] = view_like(flat, offset, parameter)
            bucket.append(index)
            offset += parameter.numel()
            least = usual if self.buckets else min(usual, FIRST_BUCKET_BYTES)
            if (offset - start) * flat.element_size() >= least or offset == total:
                end = len(flat) if offset == total else offset // unit * unit
                for cut in _cuts(start, end, usual // flat.element_size(), unit):
                    # Further buckets of a large parameter are ready together with its first.
                    self._add_bucket(flat, *cut, bucket)
                    bucket = []
                start = end
        if num_sums:
            self.sums = flat[total : total + num_sums]
            self.first_with_sums = next(
                number
                for number, bucket in enumerate(self.buckets)
                if bucket.place[0] == len(self.flats) - 1 and bucket.place[2] > total
            )

    def _add_bucket(self, whole: Tensor, start: int, end: int, members: list[int]) -> None:
        flat = whole[start:end]
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        made = Bucket(real, (len(self.flats) - 1, start, end), members)
        self.bucket_of.update(dict.fromkeys(members, made))
        self.buckets.append(made)


def _cuts(start: int, end: int, usual: int, unit: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) into about equal parts of about ``usual`` numbers, at multiples of unit."""
    parts = max(round((end - start) / max(usual, 1)), 1)
    length = max(-(-(end - start) // (parts * unit)) * unit, unit)
    for at in range(start, end, length):
        yield at, min(at + length, end)


# Which gradients of a step have come, and which buckets are complete.
#
# A hook of every parameter tells when its gradient has come. Between kernels, where Python's code
# is not in the caches, that takes 10 us a hook. So where a step is one pass, it is learned which
# parameter completes each bucket. From then on only these have hooks, and on the host those with
# large gradients, which are written while they are in the caches.

LARGE_BYTES = 1 << 15
"""Gradients of so many bytes are written to a host's memory when they come."""
MOST_MISSES = 3
"""Steps that began to learn anew, after which every parameter keeps its hook."""
_gradient, _NO_GRADIENT = attrgetter("grad"), id(None)  # tensors are compared by slower means


def have_no_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether ``grad`` of all parameters is None."""
    return {*map(_gradient, parameters)} <= {None}


NOTHING = nullcontext()
"""A context that does nothing, made once: a step enters several."""


@contextmanager
def _active(asked: SimpleNamespace) -> Iterator[None]:
    """Show torch.compile what it asks an active DistributedDataParallel for."""
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = asked  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before


class GradientReducer:
    """Accumulate the gradients of several passes, then sum them over the workers of a group.

    A step is ``begin()``, any number of backward passes with ``arm()`` before the last, then
    ``finish()``. During the last backward, each bucket is reduced as soon as its gradients are
    complete; the order of buckets is equal on every worker. A bucket with parameters that no pass
    used is reduced by ``finish``. Callers scale their losses so that the sum over passes and
    workers is the mean they want.

    Args:
        parameters: Name and parameter; each parameter once, in the same order on every worker.
        distributed: Whether to reduce at all; by default whether a group is initialised.
        bucket_bytes: Minimum size of a bucket, in bytes; the default depends on the device kind.
        invariant: Sums virtual nodes in an order that does not depend on the mapping; then call
            ``enter`` and ``leave`` around each pass. None is an ordinary all-reduce.
        is_first: Whether this worker contributes the gradients left by earlier steps; by default
            rank 0 of the group does.
        keeps_carried: Whether to keep a copy of those gradients, so that a step can be repeated.
        num_sums: How many further float32 numbers travel with the last bucket.

    Attributes:
        num_parameters: The number of parameters, trainable or not.
        flats: The gradient buffers.
        carried: Indices of the parameters whose gradients were still there when this step began.
        num_launched: How many buckets this worker has begun to reduce in this step.
        sums: [num_sums] view of the further numbers; None where the last buffer is not float32.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | Iterable[nn.Parameter],
        *,
        distributed: bool | None = None,
        bucket_bytes: int | None = None,
        invariant: InvariantSum | None = None,
        is_first: bool | None = None,
        keeps_carried: bool = False,
        num_sums: int = 0,
    ) -> None:
        named = (
            dict(parameters)
            if isinstance(parameters, Mapping)
            else {f"parameter {index}": p for index, p in enumerate(parameters)}
        )
        self._names = list(named)
        self._parameters = list(named.values())
        self.num_parameters = len(self._parameters)
        initialised = dist.is_available() and dist.is_initialized()
        self._distributed = initialised if distributed is None else distributed
        self._invariant = invariant
        if is_first is None:
            is_first = not self._distributed or dist.get_rank() == 0
        self._is_first = invariant.holds_first if invariant is not None else is_first
        self.carried: set[int] = set()
        self._before: dict[int, Tensor] | None = {} if keeps_carried else None
        self._bucket_bytes, self._num_sums = bucket_bytes, num_sums
        self._firsts = FirstGradients(
            none_is_zero=True,
            host_adds_zero=True,
            device_adds_zero=invariant is not None,
            most_held_bytes=bucket_bytes,
        )
        self._hooks = Hooks()
        self._works: list[peers.Transfer] = []
        self._write_sums: Callable[[Tensor], None] | None = None
        self.num_launched, self._defers_last = 0, False
        self._factor: Tensor | None = None
        self._used: set[int] = set()  # whose gradients have come in this step
        self._fired: set[int] = set()  # in the armed backward pass
        self._awaited: set[int] = set()  # whose first gradient of the step has not come
        self._versions: dict[int, int] = {}  # of buffers that hold gradients, in a lean step
        # Steps in which a bucket was not complete when its last gradient was thought to have come.
        self._num_misses = 0
        self._build(())  # parameters may be cast or moved before the first step

    def _build(self, layout: tuple[object, ...]) -> None:
        """Make what depends on the parameters' layout; none has a buffer where that is empty."""
        self._layout = layout
        self._hooks.remove()
        self._buffers = FlatBuffers(
            self._parameters if layout else (),
            bucket_bytes=self._bucket_bytes,
            alignment=self._invariant.alignment if self._invariant is not None else 1,
            num_sums=self._num_sums,
        )
        self.flats, self.sums = self._buffers.flats, self._buffers.sums
        self._trained = [self._parameters[index] for index in self._buffers.views]
        self._is_armed = False
        self._is_single = False  # the step is one pass, and no gradient was there when it began
        self._learns, self._has_learned = False, False
        self._is_lean = False  # only some parameters have hooks
        self._asked: SimpleNamespace | None = None  # what ``cutting`` shows to torch.compile
        if len(self._buffers.buckets) > 1 and (self._distributed or self._invariant is not None):
            usual = self._bucket_bytes or backend_of(self.flats[0].device).bucket_bytes
            self._asked = SimpleNamespace(bucket_bytes_cap=max(usual, FIRST_BUCKET_BYTES))
        self._watch_all()

    def is_finite(self) -> bool:
        """Whether all parameters are numbers. Waits for the device."""
        sums = [parameter.detach().sum(dtype=torch.float64) for parameter in self._parameters]
        return not sums or bool(
            torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all()
        )

    @property
    def has_some(self) -> bool:
        """Whether a gradient has come in this step, as far as hooks on parameters tell."""
        return bool(self._used)

    def begin(
        self,
        write_sums: Callable[[Tensor], None] | None = None,
        *,
        num_passes: int | None = None,
    ) -> None:
        """Start a step; when it ends, every gradient is a view of the buffer.

        Gradients that are still set (no ``zero_grad`` since) stay in the sum, as they do in plain
        PyTorch; they are equal on all workers, so only the first worker contributes them.

        Args:
            write_sums: Writes this worker's part into ``sums``, if there is such a place. Called
                once, when all gradients of this worker are complete.
            num_passes: Backward passes of this worker in this step, if the caller knows.
        """
        self._rebuild_if_changed()
        self._firsts.begin()
        is_fresh = have_no_gradients(self._trained)
        # Several passes over a tree of sums move whole buffers, so these must be whole at once.
        awaits_all = is_fresh and (self._invariant is None or self._invariant.num_turns == 1)
        # Kept only until it was called: it may refer to the owner, which must be freed at once.
        self._write_sums = write_sums if self.sums is not None else None
        self._works.clear()
        self.num_launched, self._factor = 0, None
        if self._invariant is not None:
            self._invariant.begin()
        for noted in (self._used, self._versions, self._awaited, self.carried):
            noted.clear()
        self._is_single = awaits_all and num_passes is not None and num_passes <= 1
        self._choose_hooks()
        if self._before is not None:
            self._before.clear()
        if awaits_all:  # each next gradient is a first one, written over what its view holds
            self._awaited.update(self._buffers.views)
        else:  # passes add to the views: earlier gradients stay in the sum, or buffers are moved
            self._attach_all(is_fresh=is_fresh)

    def _rebuild_if_changed(self) -> None:
        """Build the buffers again if parameters were frozen, unfrozen or cast since last step."""
        layout = layout_of(self._parameters)
        if layout == self._layout:
            return
        self._build(())  # first, so that there are never two sets of buffers
        self._build(layout)
        if self._invariant is not None:
            self._invariant.allocate(self.flats)

    def _attach_all(self, *, is_fresh: bool) -> None:
        """Make every gradient its view, with what earlier steps left in it."""
        keeps = self._is_first and not is_fresh
        # By buffer, or by one call: views are many, and each would be a kernel.
        empty = [self.sums] if keeps and self.sums is not None else []
        with torch.no_grad():
            if self._before is not None:
                self._note_before(self._before)
            for index, view in self._buffers.views.items():
                if not self._carry(index, view) and keeps:
                    empty.append(view)
                self._parameters[index].grad = view
            if empty:
                torch._foreach_zero_(empty)
            for flat in () if keeps else self.flats:
                flat.zero_()

    def take_earlier(self) -> None:
        """Take over what a script's own loop has left of earlier steps' gradients since ``begin``.

        It may have cleared or replaced them. Call it before the first gradient comes.
        """
        with torch.no_grad():
            for index, view in self._buffers.views.items():
                gradient = self._parameters[index].grad
                if index in self._awaited or gradient is view:
                    continue
                if gradient is None:
                    view.zero_()
                    self.carried.discard(index)
                elif gradient.data_ptr() != view.data_ptr():
                    if self._is_first:
                        view.copy_(gradient)
                    else:
                        view.zero_()
                self._parameters[index].grad = view

    @property
    def seen(self) -> list[object]:
        """What changes where a script clears or changes gradients between two passes of a step."""
        held = [self._parameters[index].grad is None for index in self._used]
        return [held, [flat._version for flat in self.flats]]

    def _note_before(self, before: dict[int, Tensor]) -> None:
        """Copy the gradients that earlier steps left, by one kernel for each kind of them."""
        there = {
            i: p.grad for i in self._buffers.views if (p := self._parameters[i]).grad is not None
        }
        before.update({index: torch.empty_like(gradient) for index, gradient in there.items()})
        if there:
            torch._foreach_copy_([*before.values()], [*there.values()])

    def _carry(self, index: int, view: Tensor) -> bool:
        """Note the gradient that earlier steps left; on the first worker, put it into its view."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return False
        self.carried.add(index)
        if self._is_first and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        return True

    def multiply(self, factor: Tensor) -> None:
        """Multiply this worker's gradients of this step by a factor [] before they are summed."""
        self._factor = factor

    def enter(self, node: int) -> None:
        """Begin a virtual node's pass."""
        if self._invariant is not None:
            self._invariant.enter(node)

    def leave(self) -> None:
        """End the pass: what it gave may lie in memory that the next pass writes to."""
        self._firsts.write()  # else a replayed graph would write over it
        if self._invariant is not None:
            self._invariant.leave()

    def cutting(self) -> AbstractContextManager[None]:
        """Let torch.compile cut the graphs of a pass in the body where buckets end.

        A compiled graph gives all its gradients at its end, so their sums could begin only then.
        torch cuts graphs in parts for a DistributedDataParallel that is active, and asks it only
        for the size of its buckets.
        """
        return NOTHING if self._asked is None else _active(self._asked)

    def arm(self, *, defer_last: bool = False) -> None:
        """Let the next backward reduce buckets as they fill.

        Args:
            defer_last: Keep the last bucket back until ``finish``. On an emulated device, the last
                gradient counts as ready when the stretched pass ends, not the real one.
        """
        is_last_turn = self._invariant is None or self._invariant.in_last_turn
        self._is_armed, self._defers_last = self._distributed and is_last_turn, defer_last
        self._fired.clear()
        for bucket in self._buffers.buckets:
            bucket.num_ready = 0
        is_whole = self._is_single and len(self._awaited) == len(self._buffers.views)
        self._learns = self._is_armed and is_whole
        if self._is_lean and not have_no_gradients(self._trained):
            # The script's function went back by itself: what has come may not be all.
            self._is_armed = False

    def launch_rest(self) -> None:
        """Start to reduce the buckets that the last backward did not."""
        self._is_armed = False
        self._complete()
        if self._learns and self._num_misses < MOST_MISSES:
            # Was each bucket complete when its last gradient was thought to have come?
            self._has_learned = all(bucket.is_ready for bucket in self._buffers.buckets)
            self._num_misses += int(self._is_lean and not self._has_learned)
        if self._invariant is not None:
            self._invariant.settle()
        if self._distributed or self._invariant is not None:
            while self.num_launched < len(self._buffers.buckets):
                self._launch_next()

    def _complete(self) -> None:
        views = self._buffers.views
        if self._is_lean:
            self._check_versions()
            if self._awaited:
                self._take_all([i for i in self._awaited if self._parameters[i].grad is not None])
        self._firsts.write()
        if not self._awaited:
            return
        with torch.no_grad():
            # What no pass of this worker reached is zero here, but may have a gradient elsewhere:
            # the view is summed with the rest, and holds what the step before left in it.
            torch._foreach_zero_([views[index] for index in self._awaited])
        for index in self._awaited:
            self._parameters[index].grad = views[index]
        self._awaited.clear()

    def _launch_ready(self) -> None:
        """Start the sums of the next buckets whose gradients have come."""
        buckets = self._buffers.buckets
        limit = len(buckets) - int(self._defers_last)
        # Never out of order, though a later bucket may be complete: workers whose gradients come in
        # another order would meet in unlike collectives.
        while self.num_launched < limit and buckets[self.num_launched].is_ready:
            self._launch_next()

    def _launch_next(self) -> None:
        self._firsts.write()
        bucket, sums = self._buffers.buckets[self.num_launched], self.sums
        # Before the sum, not after it: the factor is this worker's own, and in the sum its part can
        # no longer be told apart.
        if self._factor is not None:
            held = self._invariant.held(*bucket.place) if self._invariant is not None else []
            with torch.no_grad():
                torch._foreach_mul_([bucket.flat, *held], self._factor)
        if sums is not None and self.num_launched == self._buffers.first_with_sums:
            assert self._write_sums is not None
            # The loss and its weight travel in the padding of the last bucket: a collective of its
            # own would cost a latency in every step. By then the losses of all passes are known.
            self._write_sums(sums)
            self._write_sums = None
        self.num_launched += 1
        if self._invariant is not None:
            self._invariant.launch(*bucket.place)
            return
        work = peers.all_reduce(bucket.flat, async_op=True)
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Wait until every bucket is reduced. On CUDA this blocks the stream, not the host."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._invariant is not None:
            self._invariant.wait()

    def finish(self) -> None:
        """Reduce what is left and wait: afterwards gradients are the sums over all workers."""
        self.launch_rest()
        self.wait()

    def unused(self) -> list[int]:
        """Indices of the trainable parameters without a gradient on this worker in this step."""
        views, used = self._buffers.views, self._used
        if len(used) == len(views):  # as a rule, and the rest takes a while
            return []
        return [index for index in sorted(views) if index not in used and index not in self.carried]

    def drop(self, indices: Iterable[int]) -> None:
        """Set gradients to None: what plain PyTorch shows for parameters that no pass used."""
        for index in indices:
            self._parameters[index].grad = None

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor of shape []."""
        with torch.no_grad():
            for flat in self.flats:
                dtype = flat.real.dtype if flat.is_complex() else flat.dtype
                flat.mul_(factor.to(device=flat.device, dtype=dtype))

    def undo(self) -> None:
        """Reset gradients to their values before ``begin``; needs ``keeps_carried``."""
        for index in self._buffers.views:
            self._parameters[index].grad = (self._before or {}).get(index)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._hooks.remove()

    def _take_all(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        self._used.update(indices)
        self._awaited.difference_update(indices)
        views = self._buffers.views
        self._firsts.take_all([(self._parameters[index], views[index]) for index in indices])

    # A hook for each parameter

    def _watch_all(self) -> None:
        for index in self._buffers.views:
            self._hooks.add(self._parameters[index], self._hook(index))

    def _hook(self, index: int) -> GradientHook:
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        view, bucket = self._buffers.views[index], self._buffers.bucket_of.get(index)
        is_host = backend_of(view.device).is_host
        used, awaited, have_fired = self._used, self._awaited, self._fired
        take, launch_ready = self._firsts.take, self._launch_ready

        def fired(parameter: Tensor) -> None:
            used.add(index)
            if index in awaited:
                awaited.remove(index)
                take(parameter, view, is_host)
            if self._is_armed:
                if index in have_fired:
                    raise came_twice(self._names[index])
                have_fired.add(index)
                if bucket is not None:  # else it has no numbers
                    bucket.num_ready += 1
                    if bucket.num_ready == len(bucket.parameters):
                        bucket.last = index
                        launch_ready()

        return fired

    # A hook for each bucket

    def _choose_hooks(self) -> None:
        """Let all parameters have hooks in this step, or only those that need one."""
        self._learns = False
        if not self._is_single:  # what was learned is of steps whose gradients are all new
            self._num_misses += int(self._is_lean)
            self._has_learned = False
        if self._has_learned == self._is_lean:
            return
        self._hooks.remove()
        self._is_lean = self._has_learned
        if self._is_lean:
            for bucket in self._buffers.buckets:
                for index in bucket.parameters:
                    if index == bucket.last:
                        self._hooks.add(self._parameters[index], self._closing_hook(bucket))
                    elif self._is_large(index):
                        self._hooks.add(self._parameters[index], self._large_hook(index, bucket))
        else:
            self._watch_all()

    def _is_large(self, index: int) -> bool:
        view = self._buffers.views[index]
        return backend_of(view.device).is_host and view.nbytes >= LARGE_BYTES

    def _closing_hook(self, bucket: Bucket) -> GradientHook:
        """The hook that comes after a bucket's other gradients; else it changes nothing."""
        parameters = [self._parameters[index] for index in bucket.parameters]
        awaited = self._awaited

        def closed(_: Tensor) -> None:
            if not self._is_armed:
                return
            # Another order than was learned: some gradient of the bucket is still to come. It is
            # then summed by ``launch_rest``, and the miss is counted there.
            if _NO_GRADIENT in map(id, map(_gradient, parameters)):
                return
            if bucket.is_ready:
                raise came_twice(self._names[bucket.last])
            self._check_versions()
            self._take_all([index for index in bucket.parameters if index in awaited])
            bucket.num_ready = len(parameters)
            self._versions[bucket.place[0]] = 0
            self._launch_ready()
            for number in self._versions:  # only this object changes buffers that hold gradients
                self._versions[number] = self._buffers.flats[number]._version

        return closed

    def _large_hook(self, index: int, bucket: Bucket) -> GradientHook:
        """A hook that writes a large gradient at once."""
        view, number = self._buffers.views[index], bucket.place[0]
        flat, versions = self._buffers.flats[number], self._versions
        used, awaited, take = self._used, self._awaited, self._firsts.take

        def came(parameter: Tensor) -> None:
            if not self._is_armed:
                return
            if index not in awaited or versions.get(number, flat._version) != flat._version:
                raise came_twice(self._names[index])
            used.add(index)
            awaited.remove(index)
            take(parameter, view, True)
            versions[number] = flat._version

        return came

    def _check_versions(self) -> None:
        # Parameters without hooks: a second gradient shows only as a write to a buffer that holds
        # first ones already, which counts up the buffer's version.
        for number, version in self._versions.items():
            if self._buffers.flats[number]._version != version:
                raise came_twice("a parameter")
