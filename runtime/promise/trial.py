"""One test of a loss function: calls on a few samples, whole and in parts, and their comparison.

promise.py says when a function is tested, and how it is called.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from ..agreement.agreement import leaves_of
from ..data import copied
from ..totals import loss_and_rest, loss_and_weight, outputs_in, weight_number
from .draws import Draws, eagerly
from .untouched import Untouched

_MOST_BYTES = 1 << 27  # of samples and answers that are repeated to the size of a batch
_MOST_UNKNOWN = 32  # samples that are repeated where the model has to answer them all
# Relative difference of means by rounding, by the coarsest dtype computed in; an accelerator's
# float32 may be TF32 inside products.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_ROUNDING_OF_TF32 = 5e-3
_REPEATED = 0.1  # of it between two calls on the same samples, which run the same kernels
_PLAIN = (int, float, str, type(None))
_OWN_WAY = "or say per_virtual_node=True, for a loss that is meant to be each virtual node's own"
_OVER_BATCH = (
    "give what it computes for each sample, and the rest as over_batch=: "
    "job.backward(outputs, batch, over_batch=loss_of_outputs); docs/training.md, Losses"
)

Cut = tuple[int, ...]
"""[parts] samples of each part; the second has one."""


@dataclass(frozen=True, slots=True)
class ReturnForm:
    """How ``job.backward`` was asked to read what its function returns.

    Attributes:
        has_aux: The function returns (loss, other values).
        gives_outputs: It returns outputs of each sample, which a second function makes a loss of.
    """

    has_aux: bool = False
    gives_outputs: bool = False


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """One call: the function's loss or outputs, and how much it counts."""

    value: Tensor  # [] a loss, or [samples, ...] outputs; float64 on the host
    weight: float | None
    num_samples: int


def cut_of(num_samples: int, first: int = 0) -> Cut:
    """The unequal parts in which samples are tested; the first may be given.

    Example:
        >>> cut_of(16)
        (10, 1, 5)
        >>> cut_of(2)
        (1, 1)
        >>> cut_of(8, first=4)
        (4, 1, 3)
    """
    first = first if 0 < first < num_samples else max(1, num_samples * 5 // 8)
    rest = num_samples - first - 1
    return (first, 1, rest) if rest else (first, 1)


def ranges_of(cut: Cut) -> list[tuple[int, int]]:
    """The whole, and all parts: (first sample, end)."""
    return [(0, sum(cut)), *pairwise([0, *accumulate(cut)])]


def has_rows(leaf: Any, num_samples: int) -> bool:
    """Whether it is a tensor with a row for each sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num_samples


class _Unknown(Exception):
    """The model was asked what it was not asked before."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """One call of the model: its arguments and answer, taken apart, and the draws inside."""

    arguments: list[Any]
    form: Any
    leaves: list[Any]
    tree: Any
    num_draws: int


class _Answers:
    """What the model answers to all samples; some of them it need not be asked again.

    Attributes:
        known: Its answers, of tensors with a row for each sample.
    """

    def __init__(self, model: nn.Module, draws: Draws, num_samples: int) -> None:
        self._model, self._draws, self._num_samples = model, draws, num_samples
        self.known: list[_Answer] = []
        self._num_checked = 0
        self._way: Callable[[Callable[[], Any], Any], Any] | None = None

    @property
    def are_checked(self) -> bool:
        """Whether the model's answer to one sample was the same beside others."""
        return 0 < len(self.known) <= self._num_checked

    @contextmanager
    def between(self) -> Iterator[None]:
        """Stand between the function and the model in the body."""
        kind, inside = type(self._model), False
        original = kind.__call__

        def call(module: nn.Module, *values: Any, **named: Any) -> Any:
            nonlocal inside
            if module is not self._model or inside or self._way is None:
                return original(module, *values, **named)
            inside = True
            try:
                return self._way(lambda: original(module, *values, **named), (values, named))
            finally:
                inside = False

        # On the class: Python looks ``__call__`` up there, never on the instance.
        with mock.patch.object(kind, "__call__", call):
            yield

    @contextmanager
    def _answered(self, way: Callable[[Callable[[], Any], Any], Any]) -> Iterator[None]:
        """Let another function answer calls of the model in the body; it can ask the model."""
        self._way = way
        try:
            yield
        finally:
            self._way = None

    def noting(self) -> AbstractContextManager[None]:
        """Note the answers in the body, where all samples are."""
        self.known.clear()

        def answer(ask: Callable[[], Any], given: Any) -> Any:
            before, made = self._draws.taken, ask()
            leaves, tree = tree_flatten(made)
            if any(isinstance(leaf, Tensor) for leaf in leaves) and all(
                has_rows(leaf, self._num_samples) or isinstance(leaf, _PLAIN) for leaf in leaves
            ):
                kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                number = self._draws.taken - before
                self.known.append(_Answer(*tree_flatten(given), kept, tree, number))
            return made

        return self._answered(answer)

    def checking(self, rows: Sequence[int], rounding: float) -> AbstractContextManager[None]:
        """Compare the answers in the body, to some samples, with those that are known."""
        self._num_checked = 0

        def answer(ask: Callable[[], Any], given: Any) -> Any:
            made, known = ask(), self._of(rows, given)
            if known is None or not _are_close(made, known[0], rounding):
                self.known.clear()
            self._num_checked += 1
            return made

        return self._answered(answer)

    def giving(self, rows: Sequence[int], *, asks: bool) -> AbstractContextManager[None]:
        """Give the answers to these samples, where they are known; ``asks`` the model if not."""

        def answer(ask: Callable[[], Any], given: Any) -> Any:
            known = self._of(rows, given)
            if known is None:
                if not asks:
                    raise _Unknown
                return ask()
            self._draws.skip(known[1])
            return known[0]

        return self._answered(answer) if self.are_checked else nullcontext()

    def _of(self, rows: Sequence[int], given: Any) -> tuple[Any, int] | None:
        """(the answer to these samples, the draws inside); None where it is not known."""
        (arguments, form), index = tree_flatten(given), torch.tensor(rows)
        for known in self.known:
            if known.form == form and all(
                map(partial(self._equal, index), known.arguments, arguments)
            ):
                leaves = [
                    leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in known.leaves
                ]
                return tree_unflatten(leaves, known.tree), known.num_draws
        return None

    def _equal(self, index: Tensor, known: Any, asked: Any) -> bool:
        if not isinstance(known, Tensor) or not isinstance(asked, Tensor):
            return known is asked or (isinstance(known, _PLAIN) and bool(known == asked))
        if has_rows(known, self._num_samples) and has_rows(asked, len(index)):
            known = known[index]
        return (
            known.shape == asked.shape and known.dtype == asked.dtype and torch.equal(known, asked)
        )


def _are_close(one: Any, other: Any, rounding: float) -> bool:
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(a, Tensor):
            if a.shape != b.shape:
                return False
            a, b = _on_host(a), _on_host(b)
            if float((a - b).abs().nan_to_num().max()) > rounding * float(
                a.abs().nan_to_num().max()
            ):
                return False
    return True


class LossTrial:
    """The calls of one function in one test: on some samples whole, and on parts of them."""

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        inputs: dict[tuple[int, int], Any],
        form: ReturnForm,
        call: Callable[[Any], Any],
    ) -> None:
        self._call_with, self._inputs, self._form = call, inputs, form
        self._num_samples = max(end for _, end in inputs)
        self._untouched = Untouched(function, model)
        self._draws = Draws(self._num_samples)
        self._answers = _Answers(model, self._draws, self._num_samples)
        self._training, self._grad = False, False
        self._own = {id(parameter) for parameter in model.parameters()}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._really_backward = torch.autograd.backward

    def judge(
        self, cut: Cut, batch_samples: int, *, in_training: bool = False
    ) -> tuple[bool, TargetError | None]:
        """Compare the whole with its parts.

        Args:
            cut: How the samples are cut into parts.
            batch_samples: Samples of the batch.
            in_training: Whether to look for what counts its calls in training mode, too.

        Returns:
            Whether the samples could tell; and what is wrong if the function failed on the whole.

        Raises:
            TargetError: They differ.
        """
        with (
            self._draws.replaced(),
            self._answers.between(),
            mock.patch.object(torch.autograd, "backward", self._backward),
        ):
            whole = self._whole()
            if isinstance(whole, TargetError):
                return True, whole
            before, single, *after = ranges_of(cut)[1:]
            alone = self._alone(single)
            if in_training and not self._training:
                self._alone_in_training(single)
            parts = [self._part(before), alone, *(self._part(part) for part in after)]
            verdict = Comparison(whole, parts, rounding=self._rounding())
            if self._form.gives_outputs:
                verdict.check_outputs()
            else:
                verdict.check_losses()
                self._check_repeated(verdict, batch_samples)
        torch.clear_autocast_cache()  # else casts of weights made here would have no graph later
        return verdict.is_telling, None

    def _whole(self) -> CallAnswer | TargetError:
        """Call the function on all samples, as much as in training as it needs to run at all."""
        ways = ((False, False), (False, True), (True, True))  # (training mode, gradients)
        part = (0, self._num_samples)
        for training, grad in ways:
            self._training, self._grad = training, grad
            # An answer that was made before has no graph to go back in.
            noting = nullcontext() if grad else self._answers.noting()
            try:
                return self._call(range(*part), self._inputs[part], noting, keeps=True)
            except TargetError:
                raise
            except Exception as caught:
                error = caught
                self._answers.known.clear()
        refusal = _unable(self._num_samples, error)
        refusal.__cause__ = error
        return refusal

    def _part(
        self,
        part: tuple[int, int],
        model: AbstractContextManager[None] | None = None,
        *,
        leaves: bool = False,
    ) -> CallAnswer:
        rows = range(*part)
        try:
            with warnings.catch_warnings():  # of so few samples: the script did not ask for them
                warnings.simplefilter("ignore")
                model = self._answers.giving(rows, asks=True) if model is None else model
                return self._call(rows, self._inputs[part], model, leaves=leaves)
        except TargetError:
            raise
        except Exception as error:
            raise _unable(len(rows), error) from error

    def _alone(self, single: tuple[int, int]) -> CallAnswer:
        """Call the function on one sample, twice: its loss must not depend on earlier calls."""
        checking = self._answers.checking(range(*single), self._rounding())
        first = self._part(single, checking, leaves=True)
        self._check_same(first, self._part(single, nullcontext()))
        return first

    def _alone_in_training(self, single: tuple[int, int]) -> None:
        """Each part alone in training mode, where a model may count its steps in a plain number."""
        self._training = True
        try:
            first, second = (self._part(single, nullcontext(), leaves=one) for one in (True, False))
        except TargetError:  # of one sample the model does not train
            return
        finally:
            self._training = False
        self._check_same(first, second)

    def _check_same(self, first: CallAnswer, second: CallAnswer) -> None:
        scale = float(first.value.abs().nan_to_num().max())
        difference = float((first.value - second.value).abs().nan_to_num().max())
        if difference <= _REPEATED * self._rounding() * scale:
            return
        value = "the loss" if first.value.dim() == 0 else "an output"
        raise TargetError(
            f"{value} of the same samples differs by {difference:.3g} when the function is called "
            f"again, and it is called once for each virtual node: it depends on its earlier calls "
            f"(a counter of steps, a hidden state that is carried on, next(iterator))",
            hint="take job.num_steps for a schedule; keep other state out of it, or in a buffer of "
            f"the model; {_OWN_WAY}",
        )

    def _check_repeated(self, verdict: "Comparison", batch_samples: int) -> None:
        """Compare the loss with that of the same samples repeated, as many as the batch has."""
        # So a loss shows that chooses samples where there are many, as ``topk(min(64, len(x)))``.
        number, inputs = self._num_samples, self._inputs[0, self._num_samples]
        leaves = tree_leaves(inputs)
        if not all(has_rows(leaf, number) or isinstance(leaf, _PLAIN) for leaf in leaves):
            return
        leaves += [leaf for known in self._answers.known for leaf in known.leaves]
        size = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))
        times = min(-(-batch_samples // number), _MOST_BYTES // max(size, 1))
        if not self._answers.are_checked:
            times = min(times, _MOST_UNKNOWN // number)
        if times < 2:
            return
        rows = [*range(number)] * times
        index = torch.tensor(rows)
        repeated = tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, inputs)
        try:
            found = self._call(rows, repeated, self._answers.giving(rows, asks=False), fresh=True)
        except Exception:  # nothing can be said: memory, or a function of few samples
            return
        verdict.check_repeated(found, times)

    def _call(
        self,
        rows: Sequence[int],
        inputs: Any,
        model: AbstractContextManager[None],
        *,
        keeps: bool = False,
        leaves: bool = False,
        fresh: bool = False,
    ) -> CallAnswer:
        inputs = inputs if fresh else copied(inputs)
        with (
            self._untouched.calling(training=self._training, leaves=leaves),
            self._draws.of(rows, keeps=keeps),
            torch.set_grad_enabled(self._grad),
            eagerly(),
            model,
        ):
            try:
                answer = self._call_with(inputs)
            finally:
                # From the last to the first: a leaf that was noted twice gets its first one back.
                for leaf, gradient in reversed(self._gradients):
                    leaf.grad = gradient
                self._gradients.clear()
        if self._form.gives_outputs:
            held = [_on_host(rows).reshape(len(rows), -1) for rows in outputs_in(answer, len(rows))]
            return CallAnswer(torch.cat(held, dim=1), None, len(rows))
        loss, weight = loss_and_weight(loss_and_rest(answer)[0] if self._form.has_aux else answer)
        number = None if weight is None else weight_number(weight)
        return CallAnswer(_on_host(loss).reshape(()), number, len(rows))

    def _backward(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        """Stands for ``torch.autograd.backward``, by which the function trains something else."""
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
    """The loss of some samples together beside those of their parts."""

    def __init__(self, whole: CallAnswer, parts: Sequence[CallAnswer], *, rounding: float) -> None:
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

    def check_repeated(self, found: CallAnswer, times: int) -> None:
        """Raise TargetError where the samples, each so many times, have another loss."""
        whole, other = float(self._whole.value), float(found.value)
        if math.isfinite(whole) and _weight(found) and not self._equal(whole, other):
            raise TargetError(
                f"the loss of {self._whole.num_samples} samples is {whole:.6g}, but that of the "
                f"same samples {times} times, as many as the batch has, is {other:.6g}, so virtual "
                f"nodes would train on another loss: it depends on the number of samples (as the "
                f"hardest examples of a batch do)",
                hint=f"{_OVER_BATCH}; {_OWN_WAY}",
            )

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

    def _counted(self) -> list[CallAnswer]:
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
                "ignored, class weights, the hardest samples), or a function of a mean (a "
                "logarithm, a square root)",
                "for a mean over what can be counted return hf.Weighted(mean loss, its number); "
                f"for the rest {_OVER_BATCH}",
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


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)


def _weight(found: CallAnswer) -> float:
    return float(found.num_samples) if found.weight is None else found.weight


def _unable(num_samples: int, error: Exception) -> TargetError:
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    number = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    return TargetError(
        f"the loss function fails on {number} of the batch ({said}), so it cannot be tested "
        f"whether its loss is a mean over samples, and a virtual node may have as few",
        hint=f"let it take any number of samples; if it compares samples, {_OVER_BATCH}; "
        f"{_OWN_WAY}",
    )
