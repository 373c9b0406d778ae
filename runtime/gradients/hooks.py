"""Hooks on parameters, hetflow's and the script's own; and the buffers where gradients lie.

Hetflow's hooks tell when a gradient has come.

A hook of the script acts on the gradient of the whole batch under plain PyTorch. A step runs
several backward passes, on several workers, so autograd would call it with parts of that gradient.
Therefore a step takes the script's hooks from the parameters, and calls each once at its end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...devices.backend import backend_of
from ...schema.errors import TargetError

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
    """The script's hooks on a job's parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._held: list[_Held] = []

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
        self._held += found

    def check(self, *, are_carried: bool) -> None:
        """Refuse hooks that could not be called as under plain PyTorch, after ``take``.

        Args:
            are_carried: Whether gradients of an earlier step are still in the parameters.

        Raises:
            TargetError: A hook changes gradients that are added to those of earlier steps; or the
                script's function has made a hook.
        """
        first = next((held for held in self._held if held.is_of_gradient), None)
        if are_carried and first is not None:
            raise TargetError(
                f"{first.name} has the hook {_name_of(first.hook)} on its gradient, and gradients "
                f"of an earlier step are still there: the hook would change both",
                hint="call optimizer.zero_grad() in every step, or remove the hook and call its "
                "function before optimizer.step()",
            )
        made = next(iter(self._found()), None)
        if made is not None:
            raise TargetError(
                f"the loss function puts the hook {_name_of(made.hook)} on {made.name}: it would "
                f"be called once for each virtual node, with a part of the gradient",
                hint="register it once, before the loop",
            )

    def refuse(self) -> None:
        """Refuse all hooks: under a pipeline, gradients come in parts and their norms are told.

        Raises:
            TargetError: There is one.
        """
        for held in self._found():
            raise TargetError(
                f"{held.name} has the hook {_name_of(held.hook)}, and under a pipeline it would be "
                f"called once for each microbatch, with a part of the gradient",
                hint="remove it, and clip or change gradients after job.backward; or solve for a "
                "split plan, where a hook is called with the gradient of the whole batch",
            )

    def put_back(self) -> None:
        """Give the parameters their hooks back."""
        for held in self._held:
            held.home[held.key] = held.hook
        self._held = []

    def run(self) -> None:
        """Give the hooks back, and call each once with its parameter's gradient, if it has one."""
        taken = self._held
        self.put_back()
        for held in taken:
            gradient = held.parameter.grad
            if gradient is None:
                continue
            if not held.is_of_gradient:
                held.hook(held.parameter)
                continue
            with torch.no_grad():
                changed = held.hook(gradient)
                if changed is not None:
                    _replace(gradient, changed, held)

    @property
    def are_there(self) -> bool:
        """Whether hooks wait for ``run``."""
        return bool(self._held)

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
            parameter.grad = torch.add(gradient, 0.0, out=view)
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
        for index in reversed(range(len(parameters))):
            parameter = parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        for number, ((dtype, device), members) in enumerate(kinds.items(), start=1):
            has_sums = number == len(kinds) and dtype == torch.float32
            self._lay_out(members, dtype, device, num_sums if has_sums else 0)

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(flat.nbytes for flat in self.flats)

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
