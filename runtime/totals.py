"""Losses with their weights, and the sums of a step: losses, weights, which parameters were used.

Each pass's mean loss is scaled by its share before backward, so the summed gradients are the mean
over the global batch (VirtualFlow 5.2). If the script gives weights (such as numbers of tokens),
their total is known only when all workers are done. Shares are then fractions of a power of two
near the last step's total, and the gradients are scaled once at the end.

Losses and weights are sent per virtual node: all workers but its holder send zeros. They are added
up in order of virtual nodes, so the mapping does not change their bits. On the host they are plain
numbers: between two passes torch's code is no longer in the caches, and a torch operation takes 20
to 100 us. On a device they stay tensors and nothing waits for them: the host reads a step's flags
and weights in the next step. Sending a few numbers takes about as long as a megabyte. So between
devices, and where no buffers are exchanged, the sums travel with the last bucket of gradients
(``PackedSums``).
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float, memmove
from dataclasses import dataclass
from functools import reduce, wraps
from struct import pack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..devices.backend import Mark, backend_of
from ..schema.errors import TargetError
from . import peers
from .gradients import GradientReducer
from .group import Place
from .setup import skip_overflow
from .sharding.states import SharedStates

# What the script's function may return: a mean loss, or a mean loss with a stated weight.


@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean loss over something else than samples, and the number of things it is the mean over.

    The step's loss is the mean of the virtual nodes' losses by these weights. A weight of 0 leaves
    the virtual node out, whatever its loss is (a mean over no tokens is not a number).

    Attributes:
        loss: [] the mean loss.
        weight: What it is the mean over, such as the number of tokens: finite and at least 0. A
            tensor on a device stays there, except under a pipeline plan. Its pass goes back even if
            it is 0, so let the loss divide by ``weight.clamp(min=1)``: a mean over nothing has
            gradients that are not numbers.

    Example:
        >>> import torch
        >>> from hetflow import runtime as hf
        >>> each, is_counted = torch.tensor([1.0, 3.0, 8.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> hf.Weighted((each * is_counted).sum() / is_counted.sum(), is_counted.sum())
        Weighted(loss=tensor(2.), weight=tensor(2.))
    """

    loss: Tensor
    weight: float | Tensor


def weighted_by(
    function: Callable[..., Any], weight: Callable[..., float], *, has_aux: bool
) -> Callable[..., Any]:
    """A function whose loss has the weight that another function gives for the same batch."""

    @wraps(function)
    def weighted(*inputs: Any) -> Any:
        answer = function(*inputs)
        loss, rest = loss_and_rest(answer) if has_aux else (answer, None)
        stated = Weighted(loss, weight(*inputs))
        return (stated, rest) if has_aux else stated

    return weighted


def loss_and_weight(answer: Any) -> tuple[Tensor, float | Tensor | None]:
    """Split the result of the script's function: the mean loss [], and its weight if it gave one.

    A weight on an accelerator stays there, as [] float64, and is not tested; see ``weight_number``.

    Raises:
        TargetError: The result has another form.
    """
    stated = answer if isinstance(answer, Weighted) else None
    loss = answer if stated is None else stated.loss
    if isinstance(loss, Weighted):
        raise TargetError(
            "the loss has two weights: one of hf.Weighted and one of weight=", hint="give one"
        )
    if isinstance(loss, tuple | list):
        raise TargetError(
            f"the loss function returned a {type(loss).__name__} of {len(loss)}, and hetflow does "
            f"not guess what each value is",
            hint="return hf.Weighted(mean loss, weight) for a mean over something else than "
            "samples; or give job.backward has_aux=True for (loss, other values)",
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TargetError(
            f"the loss function must return a scalar mean loss, got {_shown(loss)}",
            hint="return loss.mean(), or hf.Weighted(mean loss, weight)",
        )
    if stated is None:
        return loss, None
    weight = stated.weight
    if isinstance(weight, Tensor) and not backend_of(weight.device).is_host:
        return loss, weight.detach().double().reshape(())
    return loss, weight_number(weight)


def weight_number(weight: float | Tensor) -> float:
    """A loss's weight as a number; waits for the device where it is kept there.

    Raises:
        TargetError: It is negative or not finite.
    """
    number = float(weight)
    if not 0 <= number < math.inf:
        raise TargetError(f"the weight of a loss must be finite and >= 0, got {number}")
    return number


def check_has_graph(loss: Tensor) -> None:
    """Refuse a loss that has no gradient.

    Raises:
        TargetError: It was computed without autograd, or from values that need no gradient.
    """
    if not loss.requires_grad:
        raise TargetError(
            "the loss has no gradient: the function computes it under torch.no_grad() or "
            "inference_mode(), from detached values or numbers, or with frozen parameters only",
            hint="compute it from the model's outputs with gradients; to evaluate, use "
            "job.evaluation() or job.predict",
        )


def loss_and_rest(answer: Any) -> tuple[Any, Any]:
    """Split what a function returns under ``has_aux=True``: (its loss, its other values).

    Raises:
        TargetError: It is no pair.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TargetError(
            f"with has_aux=True the function must return (loss, other values), got {_shown(answer)}"
        )
    return answer


def outputs_in(answer: Any, num_samples: int) -> list[Tensor]:
    """The tensors of a function's outputs; each has the samples as its first dimension.

    Raises:
        TargetError: There are none, or one has another first dimension.
    """
    tensors = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
    if not tensors or any(t.dim() == 0 or len(t) != num_samples for t in tensors):
        shapes = [tuple(t.shape) for t in tensors]
        raise TargetError(
            f"with over_batch=, the function must return a tensor (or several) with one row for "
            f"each of its {num_samples} samples, got shapes {shapes}",
            hint="return what the model gives for each sample; compute the loss in over_batch",
        )
    return tensors


def _shown(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


# Pack the sums of a step into float32 numbers, which travel with a bucket of gradients.
#
# The sums stay exact. Each loss and each weight comes from one worker, and the others send zeros; a
# double is sent as three float32 numbers that add up to it. Flags and counts are small integers.

NUM_THIRDS = 3
"""How many float32 numbers represent a double exactly."""


@dataclass(frozen=True, slots=True)
class PackedSums:
    """The layout of the packed numbers.

    Packed, in float32: flags; losses as three numbers each; weights as three numbers each; for
    every parameter whether it is used. Unpacked, in float64: flags, losses * weights, weights,
    used parameters.

    On the host these are plain numbers: between two passes torch's and numpy's code is no longer
    in the caches.

    Attributes:
        num_flags: Number of flags: small integers, whose sums are below 2**24.
        num_nodes: Number of virtual nodes; each has a loss and a weight.
        num_parameters: Number of parameters.
    """

    num_flags: int
    num_nodes: int
    num_parameters: int

    @property
    def length(self) -> int:
        """The number of packed float32 numbers."""
        return self.num_flags + 2 * NUM_THIRDS * self.num_nodes + self.num_parameters

    def pack(
        self,
        flags: Sequence[float],
        losses: Mapping[int, Tensor | float],
        weights: Mapping[int, Tensor | float],
        unused: Sequence[int],
        into: Tensor,
    ) -> None:
        """Write one worker's numbers without making the host wait.

        Args:
            flags: [num_flags] in order.
            losses: Loss by virtual node, on the device or as a number.
            weights: Weight by virtual node, as losses.
            unused: Indices of the parameters that this worker has not used.
            into: [length] float32, contiguous, where they are summed.
        """
        nodes, first = self.num_nodes, self.num_flags
        host = [*flags, *[0.0] * (2 * NUM_THIRDS * nodes), *[1.0] * self.num_parameters]
        on_device: list[tuple[slice, Tensor]] = []
        for start, values in ((first, losses), (first + NUM_THIRDS * nodes, weights)):
            for node, value in values.items():
                place = slice(start + node, start + node + NUM_THIRDS * nodes, nodes)
                if isinstance(value, Tensor):
                    on_device.append((place, value))
                else:
                    host[place] = _thirds_of_number(value)
        for index in unused:
            host[index - self.num_parameters] = 0.0
        if into.is_cpu:
            memmove(into.data_ptr(), pack(f"{len(host)}f", *host), 4 * len(host))
        else:
            into.copy_(torch.tensor(host, dtype=torch.float32), non_blocking=True)
        for place, value in on_device:
            if value.dtype == torch.float64:
                into[place] = torch.stack(_thirds_of(value)).reshape(-1)
            else:
                into[place.start] = value

    def unpack(self, sums: Tensor) -> Tensor:
        """Unpack [length] sums over workers to float64; the class's docstring gives the order."""
        if sums.is_cpu:
            return torch.tensor(self.unpack_on_host(sums), dtype=torch.float64)
        first, nodes = self.num_flags, self.num_nodes
        rest = first + 2 * NUM_THIRDS * nodes
        wide = sums.double()
        losses, weights = wide[first:rest].view(2, NUM_THIRDS, nodes).sum(1)
        return torch.cat([wide[:first], losses * weights, weights, wide[rest:]])

    def unpack_on_host(self, sums: Tensor) -> list[float]:
        """Like ``unpack``, of sums that are on the host."""
        numbers: list[float] = sums.tolist()
        first, nodes = self.num_flags, self.num_nodes
        middle, rest = first + NUM_THIRDS * nodes, first + 2 * NUM_THIRDS * nodes
        losses = _whole_of(numbers[first:middle])
        weights = [*_whole_of(numbers[middle:rest])]
        products = map(operator.mul, losses, weights)
        return [*numbers[:first], *products, *weights, *numbers[rest:]]


def _thirds_of_number(value: float) -> list[float]:
    """Like ``_thirds_of``, without tensors: these would take ten times as long."""
    first = c_float(value).value
    rest = value - first
    if not rest or not math.isfinite(rest):
        return [first, 0.0, 0.0]
    second = c_float(rest).value
    return [first, second, c_float(rest - second).value]


def _whole_of(thirds: Sequence[float]) -> Iterable[float]:
    """[nodes] the doubles that [3 * nodes] float32 numbers add up to."""
    nodes = len(thirds) // NUM_THIRDS
    return map(
        sum, zip(thirds[:nodes], thirds[nodes : 2 * nodes], thirds[2 * nodes :], strict=True)
    )


def _thirds_of(value: Tensor) -> list[Tensor]:
    """Three float32 numbers that add up to a double; zeros after the first for infinity."""
    first = value.float()
    rest = (value - first).nan_to_num(0.0, 0.0, 0.0)
    second = rest.float()
    return [first, second, (rest - second).float()]


class LateValues:
    """Read a few numbers per step from an asynchronous device, through pinned memory.

    They are read in the next step, when they have usually arrived. If the host is a whole step
    ahead, it waits for the previous step, and the device still has work.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._arrives: tuple[torch.device, Mark] | None = None

    def exchange(self, values: Tensor) -> list[float] | None:
        """Hand in this step's numbers and get those of the step before.

        Args:
            values: [numbers] of this step, on the device.

        Returns:
            [numbers] of the step before; None in the first step.
        """
        before = self.take()
        kept = self._buffer
        if kept is None or (kept.shape, kept.dtype) != (values.shape, values.dtype):
            self._buffer = kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        kept.copy_(values, non_blocking=True)
        self._arrives = values.device, backend_of(values.device).mark(values.device)
        return before

    def forget(self) -> None:
        """Treat the next step as a first one."""
        self._arrives = None

    def take(self) -> list[float] | None:
        """The numbers that were handed in last; None where there are none."""
        if self._arrives is None:
            return None
        assert self._buffer is not None
        device, mark = self._arrives
        backend = backend_of(device)
        if not backend.has_passed(mark):
            backend.wait_for(mark)
        self._arrives = None
        found: list[float] = self._buffer.tolist()
        return found


# Indices in the vector that is summed; the losses and weights of all virtual nodes follow.
_WEIGHTED, _STOP, _MOVE, _WORKERS, _SETTINGS, _SQUARED, _SCALERS, _SCALED, _NODES = range(9)
# The settings' number has 22 bits and its square 44: so many digits, whose sums are exact in
# float32 over 8192 workers.
_DIGIT_BITS, _NUMBER_DIGITS, _SQUARE_DIGITS = 11, 2, 4
_NUM_DIGITS = _NUMBER_DIGITS + _SQUARE_DIGITS
_EXACT = (torch.float32, torch.float64)
Sums = Sequence[Any] | Tensor
"""A step's sums, float64: plain numbers on the host; a worker alone leaves losses on its device."""
Gradients = GradientReducer | SharedStates
"""The gradients of a step, which are summed over the workers: whole ones, or shares."""
_Noted = tuple[Gradients, list[int], bool]  # reducer, unused parameters, has other workers
_MOST_SAMPLES = 1 << 48  # of a dataset; what is more is no length
_MAX_NUMBERS = 64  # weights such as numbers of tokens give many different shares


def packed_sums(num_nodes: int, num_parameters: int, *, on_host: bool) -> PackedSums:
    """The layout of a step's sums where they travel with a bucket of gradients.

    On the host the settings' number and its square come as further flags.
    """
    return PackedSums(_NODES + (_NUM_DIGITS if on_host else 0), num_nodes, num_parameters)


def is_one_number(workers: float, total: float, squares: float) -> bool:
    """Whether all workers had the same number: then its variance over the workers is 0."""
    return int(total) ** 2 == int(workers) * int(squares)


def _digits(number: int, count: int) -> list[float]:
    """A number's digits, the lowest first; each is small enough for a flag."""
    return [
        float(number >> (_DIGIT_BITS * place) & (1 << _DIGIT_BITS) - 1) for place in range(count)
    ]


def _number_of(digits: Sequence[float]) -> float:
    return sum(digit * 2.0 ** (_DIGIT_BITS * place) for place, digit in enumerate(digits))


class StepTotals:
    """Weight the passes of a step, and combine their sums over the workers.

    Attributes:
        settings_differ: Whether the last step's sums show that optimizer settings differ. On a
            device they are not read, because that would wait for the device.
    """

    def __init__(
        self,
        reducer: Gradients,
        place: Place,
        num_nodes: int = 1,
        *,
        are_alike: bool = True,
    ) -> None:
        self._reducer, self._place, self._distributed = reducer, place, place.distributed
        self._is_on_host = backend_of(place.device).is_host
        self._num_nodes = num_nodes
        self.wants_stop, self.wants_move = False, False
        self.stops: Tensor | float | None = None
        self._settings_number = 0
        self._step: _Noted = (reducer, [], place.distributed)
        self._sums: Sums | None = None
        self.settings_differ = False
        self.extra: list[float] = []
        self._num_samples = 0
        self._share_of, self._guess = 1.0, 1.0
        self._weighted: bool | None = None
        self._last_weight: Tensor | None = None
        self._known_weight: float | None = None  # of a step; all workers know it on the host
        self._late = LateValues()
        self._losses: dict[int, Tensor | float] = {}
        self._weights: dict[int, Tensor | float] = {}
        self._keeps_weights = False  # on the device
        self._numbers: dict[tuple[object, ...], Tensor] = {}
        self._are_alike = are_alike
        self._scale: Tensor | None = None
        self._has_scaler, self.may_overflow_elsewhere = False, False
        self._layout: PackedSums | None = None
        self._digits_of: tuple[int, list[float]] = (-1, [])

    def begin(
        self,
        num_samples: int,
        settings_number: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        """Start a step.

        ``settings_number`` stands for this worker's optimizer settings; the samples are those of
        the batch on all workers together.
        """
        self._num_samples, self._settings_number = num_samples, settings_number
        self._weighted = None
        self._losses, self._weights = {}, {}
        self._scale, self._has_scaler = None, False
        # The total that shares are fractions of: equal on all workers before any weight is known.
        # Any step's total gives the same bits, because shares differ by powers of two.
        guess = self._known_weight if self._known_weight is not None else float(num_samples)
        if guess != self._guess:
            self._guess = guess
            self._share_of = 2.0 ** round(math.log2(guess)) if guess > 0 else 1.0
        self.take_scaler(scaler)

    def add(
        self, answer: Any, num_samples: int, node: int = 0
    ) -> tuple[Tensor, Tensor | float] | None:
        """Take the loss of a pass over ``num_samples`` samples.

        ``answer`` is what the script's function gave; see ``loss_and_weight``.

        Returns:
            The tensor to call backward on, and its share of the mean; None for weight 0 that the
            host knows.

        Raises:
            TargetError: The script's function returned neither form.
        """
        loss, weight = loss_and_weight(answer)
        weighted = weight is not None
        if self._weighted not in (None, weighted):
            raise TargetError("the loss function must give a weight for every batch, or for none")
        self._weighted = weighted
        own = float(num_samples) if weight is None else weight
        known: Tensor | float = loss.item() if loss.is_cpu else loss.detach()
        if isinstance(own, Tensor) and self._is_on_host:
            own = weight_number(own)
        self._keeps_weights = isinstance(own, Tensor)
        if isinstance(own, Tensor):
            known = torch.where(own != 0, known, 0.0)  # a mean over nothing may be no number
        elif own == 0:
            return None
        self._weights[node], self._losses[node] = own, known
        if weighted and self._reducer.carried:
            raise TargetError(
                "gradients of an earlier step are still there, and this loss has weights",
                hint="call optimizer.zero_grad() in every step, without set_to_none=False",
            )
        share = own / self._share_of if weighted else own / self._num_samples
        return loss, share

    def take_scaler(self, scaler: "torch.amp.GradScaler | None") -> None:
        """Note the scaler of this worker's losses; before the sums of a step start.

        Workers on unlike devices may have unlike scales, or none: each takes its own out of its
        gradients before they are summed, and gives it back to the sums, for its scaler to remove.
        """
        self._has_scaler = scaler is not None and scaler.is_enabled()
        if scaler is None or not self._has_scaler or self._are_alike or self._scale is not None:
            return
        # A scaler makes its state at the first loss, and this worker may have none.
        scaler.scale(torch.zeros((), device=self._place.device))
        self._scale = scaler._get_scale_async()
        assert self._scale is not None
        self._reducer.multiply(self._scale.double().reciprocal().float())

    def own_mean(self) -> Tensor:
        """[] float64: the mean loss of this worker's passes so far; not a number without any."""
        if not self._weights:
            return torch.tensor(math.nan, dtype=torch.float64)
        weight = reduce(operator.add, self._weights.values())
        parts = [loss * (self._weights[node] / weight) for node, loss in self._losses.items()]
        return torch.as_tensor(reduce(operator.add, parts)).double()

    def go_back(
        self, loss: Tensor, share: Tensor | float, scaler: "torch.amp.GradScaler | None"
    ) -> None:
        """Run a pass's backward pass: gradients are those of ``loss * share``, scaled."""
        check_has_graph(loss)
        gradient = self._gradient(loss, share) if scaler is None else None
        if gradient is not None:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
            return
        if isinstance(share, Tensor):
            scaled = loss * share.to(loss.dtype)  # a product of two tensors [] would be wider
        else:
            scaled = loss if share == 1 else loss * share
        (scaler.scale(scaled) if scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]

    def _gradient(self, loss: Tensor, share: Tensor | float) -> Tensor | None:
        """The gradient [] to start with, which saves a kernel; None where the product rounds."""
        if loss.dtype not in _EXACT:
            return None
        if isinstance(share, Tensor):
            return share.to(loss.dtype).reshape(loss.shape)
        return self._like(loss, share)

    def _like(self, loss: Tensor, number: float) -> Tensor:
        # Kept: to make one copies a number to the device in every pass.
        key = number, loss.dtype, loss.device, loss.shape
        if key not in self._numbers:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            self._numbers[key] = torch.full_like(loss, number, requires_grad=False)
        return self._numbers[key]

    def exchange(
        self, start: Callable[[Tensor], Callable[[], Tensor]] | None = None, *, last: bool = False
    ) -> Sums:
        """Sum the step's totals while gradients are on their way, and wait for both.

        Args:
            start: Starts to sum a tensor over the workers, and returns a function that waits for
                the sum; by default an all-reduce.
            last: Start when the gradients are here: who has the sums knows that all have theirs.

        Returns:
            The sums over all workers.
        """
        sums = self._reducer.sums
        if sums is not None:  # ``write`` put them into the last bucket
            self._reducer.wait()
            return self._unpacked(sums)
        if start is None and not (self._distributed or self._weighted):
            self._reducer.wait()
            return self._own_numbers()  # the host knows all but the losses: nothing is sent
        if last:
            self._reducer.wait()
            return (start or self._start)(self._own_sums())()
        wait = (start or self._start)(self._own_sums())
        self._reducer.wait()
        return wait()

    def write(self, sums: Tensor) -> None:
        """Write this worker's numbers into a bucket's space; see ``GradientReducer.begin``.

        On a device the optimizers' settings are left out: they are not compared here.
        """
        _, unused, _ = self._note_step()
        flags = self._flags()
        flags[_SETTINGS] = flags[_SQUARED] = 0.0
        if self._is_on_host:
            if self._digits_of[0] != self._settings_number:
                number = _digits(self._settings_number, _NUMBER_DIGITS)
                square = _digits(self._settings_number**2, _SQUARE_DIGITS)
                self._digits_of = self._settings_number, number + square
            flags += self._digits_of[1]
        self._packed().pack(flags, self._losses, self._weights, unused, sums)

    def _unpacked(self, sums: Tensor) -> Sums:
        packed = self._packed()
        if not self._is_on_host:
            return packed.unpack(sums)
        found = packed.unpack_on_host(sums)
        digits = found[_NODES : _NODES + _NUM_DIGITS]
        del found[_NODES : _NODES + _NUM_DIGITS]
        number, workers = self._settings_number, found[_WORKERS]
        if digits == [*map(workers.__mul__, self._digits_of[1])]:  # as a rule: all have this one
            found[_SETTINGS], found[_SQUARED] = number * workers, number**2 * workers
        else:
            found[_SETTINGS] = _number_of(digits[:_NUMBER_DIGITS])
            found[_SQUARED] = _number_of(digits[_NUMBER_DIGITS:])
        return found

    def _packed(self) -> PackedSums:
        number = self._reducer.num_parameters
        if self._layout is None or self._layout.num_parameters != number:
            self._layout = packed_sums(self._num_nodes, number, on_host=self._is_on_host)
        return self._layout

    def _flags(self) -> list[float]:
        flags = [0.0] * _NODES
        flags[_WEIGHTED], flags[_STOP] = float(bool(self._weighted)), float(self.wants_stop)
        flags[_MOVE] = float(self.wants_move)
        flags[_WORKERS], flags[_SETTINGS] = 1.0, float(self._settings_number)
        flags[_SQUARED] = float(self._settings_number**2)
        flags[_SCALERS] = float(self._has_scaler)
        flags[_SCALED] = float(self._has_scaler and self._scale is None)
        return flags

    def _start(self, sums: Tensor) -> Callable[[], Tensor]:
        work = peers.all_reduce(sums, async_op=True) if self._distributed else None

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return sums

        return wait

    def _note_step(self) -> _Noted:
        self._step = (self._reducer, self._reducer.unused(), self._distributed)
        return self._step

    def move(self, reducer: Gradients, place: Place, *, are_alike: bool = True) -> None:
        """Continue with other workers; ``close`` may still end the step before.

        Joining workers know the last weight, so all workers start from it. Waits for the device.
        """
        self._reducer, self._place, self._are_alike = reducer, place, are_alike
        self._distributed = place.distributed
        self._is_on_host, self._layout = backend_of(place.device).is_host, None
        self._known_weight = self.last_weight
        self._late.forget()

    def _own_sums(self) -> Tensor:
        # One copy of all that the host knows, without a wait; what is on the device stays there.
        numbers = self._own_numbers()
        on_device = {n: value for n, value in enumerate(numbers) if isinstance(value, Tensor)}
        host = [0.0 if isinstance(value, Tensor) else value for value in numbers]
        sums = torch.tensor(host, dtype=torch.float64).to(self._place.device, non_blocking=True)
        for index, value in on_device.items():
            sums[index] = value
        return sums

    def _own_numbers(self) -> list[Any]:
        """[flags, settings, losses * weights, weights, extra, used parameters] of this worker."""
        _, unused, distributed = self._note_step()
        used = [1.0] * (self._reducer.num_parameters if distributed else 0)
        nodes = self._num_nodes
        numbers: list[Any] = [*self._flags(), *[0.0] * (2 * nodes), *self.extra, *used]
        for index in unused if distributed else ():
            numbers[index - len(used)] = 0.0
        for node, weight in self._weights.items():
            loss = self._losses[node]
            numbers[_NODES + node] = (loss.double() if isinstance(loss, Tensor) else loss) * weight
            numbers[_NODES + nodes + node] = weight
        return numbers

    def close(self, sums: Sums) -> Tensor:
        """Make the gradients the mean by the sums over all workers; return the mean loss []."""
        reducer, unused, distributed = self._step
        if isinstance(sums, Tensor) and sums.device != self._place.device:
            sums = sums.to(self._place.device)
        found: Any = sums.tolist() if isinstance(sums, Tensor) and sums.is_cpu else sums
        if unused and distributed:
            # Plain PyTorch leaves an unused parameter's gradient at None: optimizers skip it.
            used = found[len(found) - reducer.num_parameters :]
            used = used.tolist() if isinstance(used, Tensor) else used
            reducer.drop(index for index in unused if not used[index])
        elif unused:
            reducer.drop(unused)
        # A worker without samples does not know whether the others gave weights: the sums say so.
        weighted = bool(found[_WEIGHTED] > 0) if self._weighted is None else self._weighted
        middle = _NODES + self._num_nodes
        loss = reduce(operator.add, found[_NODES:middle])
        weight = reduce(operator.add, found[middle : middle + self._num_nodes])
        self._sums = found
        is_known = not isinstance(found, Tensor)
        self.settings_differ = is_known and not is_one_number(*found[_WORKERS : _SQUARED + 1])
        exact: Tensor | None = None
        if weighted:
            self._last_weight = exact = torch.as_tensor(weight, dtype=torch.float64).clone()
        known: Sequence[Any] | None = found
        if isinstance(found, Tensor):
            head = found[: middle + self._num_nodes]
            if reducer is self._reducer and not backend_of(head.device).is_host:
                known = self._late.exchange(head)  # the last step's: nothing waits for this one's
            else:  # workers have changed since, and joining ones know the sums of this step
                self._late.forget()
                known = head.tolist()
        if known is not None:
            self.stops = known[_STOP]
            if known[_WEIGHTED] > 0:
                weights = known[middle : middle + self._num_nodes]
                self._known_weight = self._looked_at(weights)
            self.may_overflow_elsewhere |= known[_SCALERS] > 0 and not self._has_scaler
            if 0 < known[_SCALED] < known[_WORKERS]:
                raise TargetError(
                    f"{known[_SCALED]:.0f} of {known[_WORKERS]:.0f} workers gave job.backward a "
                    f"GradScaler that is enabled, so scaled gradients met others",
                    hint="let all workers on devices of one type scale, or none; types may differ",
                )
        elif not self._are_alike and not self._has_scaler:  # of a first step
            self.may_overflow_elsewhere |= bool(found[_SCALERS] > 0)
        factor = self._scale
        if exact is not None:
            # Without any weight there is no gradient: each share was 0.
            share = torch.where(exact > 0, self._share_of / exact, 0.0)
            factor = share if factor is None else share * factor.to(share.device)
        if factor is not None:
            reducer.scale(factor)
        # After a change of workers, no other worker holds the earlier gradient buffer.
        self._step = (self._reducer, unused, self._distributed)
        if isinstance(loss, float):
            found_mean = loss / weight if weight else math.nan
            return torch.scalar_tensor(found_mean, dtype=torch.float64)
        # On a device a tensor of one number divides, for a plain number is inverted before.
        mean: Tensor = loss / (weight if isinstance(weight, Tensor) else self._like(loss, weight))
        return mean

    def _looked_at(self, weights: Sequence[float]) -> float:
        """The sum of weights that the host has just learned; refuses wrong ones."""
        total = float(sum(map(weight_number, weights)))
        # A pass of weight 0 on a device could not be left out, and may have spoilt the parameters.
        if self._keeps_weights and not all(weights) and not self._reducer.is_finite():
            raise TargetError(
                "parameters are no numbers after a step in which a pass had weight 0: its loss is "
                "a mean over nothing, or the training has diverged",
                hint="let the loss divide by weight.clamp(min=1), or give weights as numbers of "
                "Python, so that such a pass is left out",
            )
        return total

    def look(self) -> None:
        """Test the last step's weights, which the host has not seen yet; waits for the device."""
        middle = _NODES + self._num_nodes
        if self._keeps_weights and isinstance(self._sums, Tensor):
            self._looked_at(self._sums[middle : middle + self._num_nodes].tolist())

    def skip_overflow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take the gradients from optimizers whose step the scalers of other workers skip.

        It waits for the device, as a scaler does; only where others have scaled and this has not.
        """
        if not self.may_overflow_elsewhere or self._has_scaler:
            return
        for optimizer in optimizers:
            skip_overflow(optimizer)

    def extras_of(self, sums: Sums) -> Sums:
        """The sums of ``extra`` over the workers."""
        start = _NODES + 2 * self._num_nodes
        found = sums[start : start + len(self.extra)]
        return found.tolist() if isinstance(found, Tensor) and found.is_cpu else found

    @property
    def num_moving(self) -> int:
        """How many workers asked for a move in the last step. Waits for the device."""
        return int(self._sums[_MOVE]) if self._sums is not None else 0

    @property
    def all_stop(self) -> bool:
        """Whether a worker wanted to stop when the last step ended; on a device, the step before.

        All workers answer the same after the same step.
        """
        return self.stops is not None and bool(self.stops > 0)

    @property
    def last_weight(self) -> float | None:
        """The total weight of the last step, where the script gives weights."""
        return None if self._last_weight is None else float(self._last_weight)

    @last_weight.setter
    def last_weight(self, weight: float | None) -> None:
        self._last_weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        self._known_weight = weight
        self._late.forget()

    def meet(self) -> None:
        """Wait until all workers have reached this call."""
        if self._distributed:
            peers.all_reduce(torch.zeros(1, device=self._place.device))


def check_same_length(order: list[int], place: Place) -> list[int]:
    """Return an epoch's order if all workers have the same length of it; else they would hang.

    Raises:
        TargetError: Another worker's dataset has another length.
    """
    if not place.distributed:
        return order
    length = len(order)
    # The most, and by its negative the least: one collective.
    ends = torch.tensor([length, -length], dtype=torch.int64, device=place.device)
    peers.all_reduce(ends, op=dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if not 0 <= least <= length <= most < _MOST_SAMPLES:  # another exchange's numbers
        raise TargetError(
            "this worker begins an epoch, and another is elsewhere in the script",
            hint="call job.batches, job.evaluation, job.predict and job.checkpoint on all workers "
            "alike, not under `if rank == 0`",
        )
    if most != least:
        raise TargetError(
            f"the dataset has {length} samples here, and {least} to {most} on the workers",
            hint="give every worker the same whole dataset; hetflow shares it out",
        )
    return order
