"""Test a loss function before the first update: is its loss a mean over samples?

A step is cut into virtual nodes, and its gradient is put together as the mean of theirs, weighted
by samples or as the function states. That is the gradient of the global batch only if the loss is
such a mean. So the function is called on a few samples of the batch together and in unequal parts:
the mean of the parts must be the loss of the whole. A sum, a logarithm of a mean, a loss that
compares samples with each other all differ there.

The calls have no gradients, run in evaluation mode (dropout and batch-norm are defined by virtual
node), and leave nothing behind that Python can see: random streams, buffers, variables of the
script are put back. Every worker tests the same samples and comes to the same answer, so no
exchange is needed.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...devices.backend import backend_of
from ...devices.out_of_memory import is_out_of_memory
from ...schema.errors import TargetError
from ..agreement.strangers import leaves_of
from ..data import Batch, copied
from ..losses import loss_and_rest, loss_and_weight, outputs_in
from ..streams import streams_kept
from .draws import Draws
from .untouched import Untouched

_MOST_SAMPLES = 8  # called together
_ENOUGH_SAMPLES = 16  # tested in all: a third of targets ignored is then seen almost surely
_MOST_TRIES = 5
# Relative difference of means by rounding, by the coarsest dtype computed in; an accelerator's
# float32 may be TF32 inside products.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_ROUNDING_OF_TF32 = 5e-3
_REPEATED = 0.1  # of it between two calls on the same samples, which run the same kernels
_OWN_WAY = "or say per_virtual_node=True, for a loss that is meant to be each virtual node's own"
_OVER_BATCH = (
    "give what it computes for each sample, and the rest as over_batch=: "
    "job.backward(outputs, batch, over_batch=loss_of_outputs); docs/training.md, Losses"
)

Cut = tuple[int, ...]
"""[parts] samples of each part."""


@dataclass(frozen=True, slots=True)
class Form:
    """How ``job.backward`` was asked to read what its function returns.

    Attributes:
        has_aux: The function returns (loss, other values).
        gives_outputs: It returns outputs of each sample, which a second function makes a loss of.
    """

    has_aux: bool = False
    gives_outputs: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """One call: the function's loss or outputs, and how much it counts."""

    value: Tensor  # [] a loss, or [samples, ...] outputs; float64 on the host
    weight: float | None
    num_samples: int


class Promise:
    """The functions of one job that have been tested.

    Args:
        model: The job's model.
        least_samples: Samples of the smallest virtual node; 0 where there is one for the batch. No
            more are called together on a device that has no memory for ``_MOST_SAMPLES``.
    """

    def __init__(self, model: nn.Module, least_samples: int) -> None:
        self._model, self._least = model, least_samples
        self._tries: dict[Any, int] = {}
        self._seen: dict[Any, int] = {}  # samples
        self._told: dict[Any, bool] = {}

    def is_due(self, function: Callable[..., Any], num_samples: int) -> bool:
        """Whether a function has yet to be tested, and a batch has samples to test it on."""
        return num_samples > 1 and self._tries.get(_key(function), 0) < _MOST_TRIES

    def test(self, function: Callable[..., Any], batch: Batch, form: Form) -> TargetError | None:
        """Test a function on a batch's first samples, unless it was tested.

        Returns:
            What to raise after the step, where the function fails on a few samples: if it fails
            on all of the batch too, its own error comes first.

        Raises:
            TargetError: Its loss is not the mean of the losses of its parts.
        """
        if not self.is_due(function, batch.num_samples) or batch.first_samples is None:
            return None
        cuts = cuts_of(batch.num_samples)
        try:
            failure = self._test(function, batch, form, cuts)
            lacking = failure
        except TargetError as error:
            lacking = error
            if not self._least or not _lacks_memory(error):
                raise
        if self._least and lacking is not None and _lacks_memory(lacking):
            # Passes without gradients over more samples than a virtual node has may not fit.
            cuts = cuts_of(min(batch.num_samples, max(2, self._least)))
            failure = self._test(function, batch, form, cuts)
        return failure

    def _test(
        self, function: Callable[..., Any], batch: Batch, form: Form, cuts: Sequence[Cut]
    ) -> TargetError | None:
        assert batch.first_samples is not None
        number, is_told, failure = sum(cuts[0]), False, None
        most = _ENOUGH_SAMPLES if batch.num_samples >= 2 * _ENOUGH_SAMPLES else number
        starts = range(0, min(batch.num_samples, most) - number + 1, number)
        with streams_kept():
            for start in starts:
                own = cuts if start == 0 else cuts[-1:]
                ranges = _ranges(own)
                found = batch.first_samples([(start + a, start + b) for a, b in ranges])
                inputs = dict(zip(ranges, found, strict=True))
                calls = _Calls(function, self._model, inputs, form, partial(_called, function))
                is_telling, failure = calls.judge(own, repeats=start == 0)
                is_told = is_told or is_telling
                if failure is not None:
                    break
        self._note(function, is_told=is_told, num_samples=number * len(starts))
        return failure

    def test_after_model(
        self,
        function: Callable[..., Any],
        inputs: Any,
        outputs: Any,
        num_samples: int,
        answering: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    ) -> None:
        """Test a function on the model's outputs of a microbatch: a pipeline's last stage has them.

        Samples are rows there. Where an input or output has no row for each sample, nothing is
        tested; neither where the function fails on fewer rows.

        Args:
            function: The script's function.
            inputs: Its arguments for the microbatch.
            outputs: What the model gave it.
            num_samples: Samples of the microbatch.
            answering: A context in which calls of the model go to another function.

        Raises:
            TargetError: Its loss is not the mean of the losses of its parts.
        """
        if not self.is_due(function, num_samples) or not all(
            type(leaf) is Tensor and leaf.dim() > 0 and len(leaf) == num_samples
            for leaf in tree_leaves((inputs, outputs))
        ):
            return

        def call(given: tuple[Any, Any]) -> Any:
            with answering(lambda *_, **__: given[1]):
                return _called(function, given[0])

        cuts = cuts_of(num_samples)
        with streams_kept():
            given = {
                part: tree_map(lambda t, rows=slice(*part): t[rows].detach(), (inputs, outputs))
                for part in _ranges(cuts)
            }
            calls = _Calls(function, self._model, given, Form(), call)
            is_telling, _ = calls.judge(cuts, repeats=True)
        self._note(function, is_told=is_telling, num_samples=_ENOUGH_SAMPLES)

    def _note(self, function: Callable[..., Any], *, is_told: bool, num_samples: int) -> None:
        """Note a test; where the losses of all parts were equal, the samples said little."""
        key = _key(function)
        self._seen[key] = self._seen.get(key, 0) + num_samples
        self._told[key] = is_told or self._told.get(key, False)
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._told[key] and self._seen[key] >= _ENOUGH_SAMPLES:
            self._tries[key] = _MOST_TRIES


def cuts_of(num_samples: int) -> tuple[Cut, ...]:
    """The parts in which so many samples are tested, at most ``_MOST_SAMPLES`` of them.

    All calls on 8 samples take 25 passes of a sample without gradients. A step of 16 samples takes
    about 48; the second 8 are tested with the first only where a batch has 32.

    Example:
        >>> cuts_of(8)
        ((1, 7), (5, 3))
        >>> cuts_of(2)
        ((1, 1),)
    """
    number = min(num_samples, _MOST_SAMPLES)
    if number < 4:
        return ((1, number - 1),)
    return ((1, number - 1), (number - 3, 3))


def _ranges(cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """The whole, and all parts: (first sample, end)."""
    number = sum(cuts[0])
    return [(0, number), *(part for cut in cuts for part in pairwise([0, *accumulate(cut)]))]


def _called(function: Callable[..., Any], inputs: Any) -> Any:
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)


class _Calls:
    """The calls of one function in one test.

    Args:
        function: The script's function.
        model: The job's model.
        inputs: What to call it with, by (first sample, end).
        form: How to read what it returns.
        call: Calls it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        inputs: dict[tuple[int, int], Any],
        form: Form,
        call: Callable[[Any], Any],
    ) -> None:
        self._call_with, self._inputs, self._form = call, inputs, form
        num_samples = max(end for _, end in inputs)
        self._untouched = Untouched(function, model)
        self._draws = Draws(num_samples)
        self._num_samples = num_samples
        self._training, self._grad = False, False
        self._own = {id(parameter) for parameter in model.parameters()}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._really_backward = torch.autograd.backward

    def judge(self, cuts: Sequence[Cut], *, repeats: bool) -> tuple[bool, TargetError | None]:
        """Compare the whole with its parts.

        Args:
            cuts: How the samples are cut into parts.
            repeats: Also call the function twice in a row on a part.

        Returns:
            Whether the samples could tell; and what is wrong if the function failed on the whole.

        Raises:
            TargetError: They differ.
        """
        with (
            self._draws.replaced(),
            mock.patch.object(torch.autograd, "backward", self._backward),
        ):
            whole = self._whole()
            if isinstance(whole, TargetError):
                return True, whole
            is_telling = False
            for cut in cuts:
                parts = [self._part(start, end) for start, end in pairwise([0, *accumulate(cut)])]
                verdict = Comparison(whole, parts, rounding=self._rounding())
                if self._form.gives_outputs:
                    verdict.check_outputs()
                else:
                    verdict.check_losses()
                is_telling = is_telling or verdict.is_telling
            if repeats:
                self._check_repeats(cuts[0][0])
        torch.clear_autocast_cache()  # else casts of weights made here would have no graph later
        return is_telling, None

    def _whole(self) -> Found | TargetError:
        """Call the function on all samples, as much as in training as it needs to run at all."""
        ways = ((False, False), (False, True), (True, True))  # (training mode, gradients)
        for training, grad in ways:
            self._training, self._grad = training, grad
            try:
                return self._call(0, self._num_samples, keeps=True)
            except TargetError:
                raise
            except Exception as caught:
                error = caught
        refusal = _unable(self._num_samples, error)
        refusal.__cause__ = error
        return refusal

    def _part(self, start: int, end: int, *, leaves: bool = False) -> Found:
        try:
            with warnings.catch_warnings():  # of so few samples: the script did not ask for them
                warnings.simplefilter("ignore")
                return self._call(start, end, leaves=leaves)
        except TargetError:
            raise
        except Exception as error:
            raise _unable(end - start, error) from error

    def _check_repeats(self, end: int) -> None:
        """Refuse a function whose loss depends on how often it was called before.

        Raises:
            TargetError: On the same samples a second call has another loss than the first.
        """
        first, second = self._part(0, end, leaves=True), self._part(0, end)
        scale = float(first.value.abs().nan_to_num().max())
        difference = float((first.value - second.value).abs().nan_to_num().max())
        if difference <= _REPEATED * self._rounding() * scale:
            return
        value = "the loss" if first.value.dim() == 0 else "an output"
        raise TargetError(
            f"{value} of the same samples differs by {difference:.3g} when the function is called "
            f"again, and it is called once for each virtual node: it depends on its earlier calls "
            f"(a counter of steps, a hidden state that is carried on, next(iterator))",
            hint=f"take job.num_steps for a schedule, and keep other state out of it; {_OWN_WAY}",
        )

    def _call(self, start: int, end: int, *, keeps: bool = False, leaves: bool = False) -> Found:
        inputs = copied(self._inputs[start, end])
        with (
            self._untouched.calling(training=self._training, leaves=leaves),
            self._draws.of(start, end, keeps=keeps),
            torch.set_grad_enabled(self._grad),
            _eagerly(),
        ):
            try:
                answer = self._call_with(inputs)
            finally:
                for leaf, gradient in reversed(self._gradients):
                    leaf.grad = gradient
                self._gradients.clear()
        number = end - start
        if self._form.gives_outputs:
            return Found(_as_rows(outputs_in(answer, number)), None, number)
        loss, weight = loss_and_weight(loss_and_rest(answer)[0] if self._form.has_aux else answer)
        return Found(_on_host(loss).reshape(()), weight, number)

    def _backward(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        """Stands for ``torch.autograd.backward``, by which the function trains something else.

        Raises:
            TargetError: It adds to the gradients of the job's model.
        """
        given = options.get("inputs")
        leaves = list(leaves_of(tensors)) if given is None else list(tree_leaves(given))
        if any(id(leaf) in self._own for leaf in leaves):
            raise TargetError(
                "the loss function calls backward() itself, which adds to the gradients of the "
                "model beside the gradient that job.backward makes",
                hint="return the sum of all losses; for gradients by something else than "
                "parameters (a penalty, an attack) use torch.autograd.grad",
            )
        self._gradients += [(t, None if t.grad is None else t.grad.clone()) for t in leaves]
        self._really_backward(tensors, *arguments, **options)

    def _rounding(self) -> float:
        return rounding_of(self._draws.coarsest, next(iter(self._inputs.values())))


def rounding_of(coarsest: float, inputs: Any) -> float:
    """The relative difference by rounding that a mean over samples may have.

    Args:
        coarsest: The largest ``eps`` of the dtypes in which it was computed.
        inputs: What it was computed from.
    """
    coarsest = max(coarsest, torch.finfo(torch.float64).eps)
    known = [r for dtype, r in _ROUNDING.items() if torch.finfo(dtype).eps >= coarsest]
    rounding = min(known, default=0.1)
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    on_host = all(backend_of(tensor.device).is_host for tensor in tensors)
    is_single = rounding == _ROUNDING[torch.float32]
    return _ROUNDING_OF_TF32 if is_single and not on_host else rounding


class Comparison:
    """The loss of some samples together beside those of their parts.

    Args:
        whole: The call on all samples.
        parts: The calls on their parts, in order.
        rounding: Relative difference that counts as equal.
    """

    def __init__(self, whole: Found, parts: Sequence[Found], *, rounding: float) -> None:
        self._whole, self._parts, self._rounding = whole, parts, rounding

    @property
    def is_telling(self) -> bool:
        """Whether an unlike whole could have been seen: losses are finite and not all equal."""
        counted = self._counted()
        values = [found.value for found in counted]
        if len(values) < 2 or not bool(self._whole.value.isfinite().all()):
            return False
        if self._whole.weight is not None and 1 == len(
            {_weight(found) / found.num_samples for found in counted}
        ):
            return False  # another weight than that of samples would have been the same
        return self._whole.value.dim() > 0 or any(
            not self._equal(float(value), float(values[0])) for value in values[1:]
        )

    def check_losses(self) -> None:
        """Raise TargetError where the mean of the parts is not the whole."""
        whole, parts = float(self._whole.value), self._counted()
        if not parts or not math.isfinite(whole):
            return
        weights = [_weight(found) for found in parts]
        losses = [float(found.value) for found in parts]
        if not all(math.isfinite(loss) for loss in losses):
            raise self._refusal(losses, math.nan, *self._of_nothing())
        mean = math.fsum(w * x for w, x in zip(weights, losses, strict=True)) / math.fsum(weights)
        if not self._equal(whole, mean):
            raise self._refusal(losses, mean, *self._likely(whole, losses))

    def check_outputs(self) -> None:
        """Raise TargetError where the outputs of the parts are not those of the whole."""
        whole = self._whole.value
        together = torch.cat([found.value for found in self._parts])
        difference = float((whole - together).abs().nan_to_num().max())
        if difference <= self._rounding * float(whole.abs().nan_to_num().max()):
            return
        raise TargetError(
            f"the outputs of {self._sizes} differ by up to {difference:.3g} from those of the same "
            f"{self._whole.num_samples} samples together: with over_batch=, the first function "
            f"must treat each sample by itself",
            hint="move what looks at several samples into the function given as over_batch=",
        )

    def _counted(self) -> list[Found]:
        return [found for found in self._parts if _weight(found) > 0]

    def _equal(self, one: float, other: float) -> bool:
        scale = max(abs(one), *(abs(float(found.value)) for found in self._counted()))
        return abs(one - other) <= self._rounding * scale

    @property
    def _sizes(self) -> str:
        return " + ".join(str(found.num_samples) for found in self._parts) + " samples"

    def _of_nothing(self) -> tuple[str, str]:
        kind = "the mean is probably over nothing in one of the parts (an empty mask)"
        fix = (
            "return hf.Weighted(sum / max(count, 1), count): a weight of 0 leaves a virtual node "
            "out"
        )
        bad = [found for found in self._counted() if not math.isfinite(float(found.value))]
        if any(found.num_samples > 1 for found in bad):
            return kind, fix
        return (
            f"{kind}, or the loss uses a statistic of the batch (a standard deviation of 1 sample)",
            f"for a mask {fix}; for a statistic {_OVER_BATCH}",
        )

    def _likely(self, whole: float, losses: Sequence[float]) -> tuple[str, str]:
        """The likely kind of the loss, and what to do."""
        if self._equal(whole, math.fsum(losses)):
            return (
                "the loss is a sum over samples, or such a sum divided by a fixed number",
                'use reduction="mean", or divide by the number of samples that the function gets',
            )
        if min(losses) <= whole <= max(losses):
            return (
                "the loss is a mean over something else than samples (tokens, targets that are not "
                "ignored, class weights), or a function of a mean (a logarithm, a square root)",
                "for such a mean return hf.Weighted(mean loss, what it is the mean over); for a "
                f"function of a mean {_OVER_BATCH}",
            )
        return (
            "the loss of a sample depends on the other samples of the batch (as in contrastive "
            "losses, batch statistics, the hardest examples of a batch)",
            f"{_OVER_BATCH}; {_OWN_WAY}",
        )

    def _refusal(self, losses: Sequence[float], mean: float, kind: str, fix: str) -> TargetError:
        each = ", ".join(f"{loss:.6g}" for loss in losses)
        weighted = "weighted " if self._whole.weight is not None else ""
        return TargetError(
            f"the loss of {self._whole.num_samples} samples is {float(self._whole.value):.6g}, but "
            f"the {weighted}mean of their parts ({self._sizes}: {each}) is {mean:.6g}, so virtual "
            f"nodes would train on another loss: {kind}",
            hint=fix,
        )


def _as_rows(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_on_host(tensor).reshape(len(tensor), -1) for tensor in tensors], dim=1)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)


def _weight(found: Found) -> float:
    return float(found.num_samples) if found.weight is None else found.weight


def _lacks_memory(error: TargetError) -> bool:
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _unable(num_samples: int, error: Exception) -> TargetError:
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    number = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    return TargetError(
        f"the loss function fails on {number} of the batch ({said}), so it cannot be tested "
        f"whether its loss is a mean over samples, and a virtual node may have as few",
        hint=f"let it take any number of samples; if it compares samples, {_OVER_BATCH}; "
        f"{_OWN_WAY}",
    )


def _eagerly() -> Any:
    """Let compiled parts run as they were written: new shapes would be compiled at great cost."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _key(function: Any) -> Any:
    """What stands for a function that the script may define anew in every step."""
    while (inner := getattr(function, "__func__", getattr(function, "func", None))) is not None:
        function = inner
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or type(function)
