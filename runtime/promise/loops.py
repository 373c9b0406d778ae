"""Check the losses of a script's own loop: shares of other losses would not add up to the batch's.

Such a loss cannot be called on a few samples for a trial. So a loss of a new form is recorded and
run again on other samples of its part, beginning with what the model returned for them. Of all
losses, what the graph shows is checked: sums, and what they divide by.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...schema.errors import TargetError
from ..log import log
from .draws import eagerly
from .promise import (
    FACTORS,
    MEAN,
    QUOTIENTS,
    SUM,
    SUMMED,
    TERMS,
    counts_of,
    num_summed,
    signature_of,
)
from .recording import Recording, Replays, Slice

_ROWS = 32  # samples of which a loss is tried
_ROWS_OF_MODEL = 3  # where the model must be run for each
_UNTRIED = (
    "whether the loss of the loop is a mean over samples could not be tried: it cannot be computed "
    "again from what the model returned; job.backward(function, batch) tests it"
)
_CLOSE = 1e-6  # relative difference of shares that are equal
WEIGHT = (
    "give job.backward(loss, weight=number of what it is the mean over); or "
    "per_virtual_node=True, for a loss that is meant to be each virtual node's own"
)
_OTHERS = (
    "give a function in place of the loop: job.backward(outputs, batch, over_batch=loss_of_outputs)"
    "; docs/training.md, Losses; or per_virtual_node=True, for a loss that is meant to be each "
    "virtual node's own"
)


class LoopLosses:
    """The losses of a job whose script has a loop of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tried: set[int] = set()  # signatures of losses
        self._shares: dict[int, tuple[float, ...]] = {}
        self._has_unknown = True  # the first
        self._recording: Recording | None = None
        self._inputs: list[Tensor] = []
        self._running = ExitStack()

    def begin(self, inputs: Any, num_samples: int) -> None:
        """Begin a part: record what the loop does with it, where a loss is yet to be tried."""
        self.leave()
        self._recording = None
        if not self._has_unknown or num_samples < 2:
            return
        self._inputs = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._recording = Recording()
        is_called = not isinstance(self._model, nn.ModuleList | nn.ModuleDict)
        for module in [self._model] if is_called else self._model.children():
            handle = module.register_forward_hook(self._answered)
            self._running.callback(handle.remove)
        self._running.enter_context(eagerly())
        self._running.enter_context(self._recording)

    def _answered(self, _: nn.Module, __: Any, answer: Any) -> None:
        if self._recording is not None:
            self._recording.end_at(answer)

    def leave(self) -> None:
        """Record nothing from here."""
        self._running.close()

    def ignore(self) -> None:
        """Check nothing of a loss, and record no other until one is to be checked."""
        self.leave()
        self._recording, self._has_unknown = None, False

    def check(self, loss: Tensor, sizes: tuple[int, int], *, has_weight: bool) -> None:
        """Check the loss of a part before its backward pass.

        Raises:
            TargetError: It is a sum over samples, a mean in which samples count unlike, or depends
                on several samples.
        """
        self.leave()
        recording, self._recording = self._recording, None
        if not has_weight:
            check_loss(loss, WEIGHT, sizes)
        signature = signature_of(loss)
        if signature not in self._tried:
            self._has_unknown = recording is None
            if recording is not None:
                self._tried.add(signature)
                self._try(recording, loss, sizes[0], has_weight=has_weight)
        if not has_weight:
            self._check_shares(signature, loss, sizes[0])

    def _check_shares(self, signature: int, loss: Tensor, num_samples: int) -> None:
        """Refuse a mean that leaves out another share of what it could count than before."""
        found = counts_of(loss, num_samples).of_all
        shares = tuple(share for share in found if isinstance(share, float))
        usual = self._shares.setdefault(signature, shares)
        for own, other in zip(shares, usual, strict=False):
            if abs(own - other) > _CLOSE * abs(other):
                raise TargetError(
                    f"the loss is a mean over {own:.3g} of what a part holds, and was one over "
                    f"{other:.3g} of another part, so parts count unlike",
                    hint=WEIGHT,
                )

    def _try(
        self, recording: Recording, loss: Tensor, num_samples: int, *, has_weight: bool
    ) -> None:
        recorded = recording.slice_of(loss, whole=False)
        if recorded is None or recorded.uses("batch_norm"):  # whose statistics are the part's own
            return
        dims = _dims_of(recorded, recording.numbers_of(self._inputs), num_samples)
        number = _ROWS_OF_MODEL if recorded.reads(self._model.parameters()) else _ROWS
        replays = Replays(recorded, num_samples, dims)
        verdict = replays.verdict(loss, number)
        if not (verdict.is_refuted or verdict.is_mean or verdict.is_divided) or not (
            replays.is_faithful(loss)
        ):
            log.warning(_UNTRIED)
            return
        if verdict.is_refuted or (not verdict.is_mean and verdict.is_divided and not has_weight):
            counts = verdict.is_divided
            raise TargetError(
                f"the loss of {num_samples} samples is not the mean of theirs ({verdict.figures}), "
                f"so virtual nodes would train on another loss: it is a mean over something else "
                f"than samples{'' if counts else ', or the loss of a sample depends on others'}",
                hint=WEIGHT if counts else _OTHERS,
            )


def _dims_of(recorded: Slice, inputs: set[int], num_samples: int) -> dict[int, int]:
    """Id of each tensor that holds samples -> its dimension of them."""
    # What the part gave, what the model returned, and what was drawn; and nothing else, because a
    # constant may have as many entries as there are samples.
    leaves = [recorded.leaves[number] for number in inputs & recorded.leaves.keys()]
    dims = {id(leaf): 0 for leaf in leaves if leaf.dim() and len(leaf) == num_samples}
    drawn = [tensor for operator in recorded.operators for tensor in operator.drawn or ()]
    for tensor in (*(recorded.leaves[number] for number in recorded.answers), *drawn):
        sizes = list(tensor.shape)
        if num_samples in sizes:
            dims[id(tensor)] = sizes.index(num_samples)
        elif sizes and sizes[0] % num_samples == 0:  # samples and positions in one
            dims[id(tensor)] = 0
    return dims


def check_loss(loss: Tensor, hint: str, sizes: tuple[int, int] | None = None) -> None:
    """Check a loss before its backward pass.

    Args:
        loss: What the script computed.
        hint: What to do where samples count unlike.
        sizes: Samples that the loss is of, and of the global batch; None if that is not known.

    Raises:
        TargetError: It is a sum over samples, or a mean in which samples count unlike.

    Example:
        >>> import torch
        >>> z = torch.ones(4, requires_grad=True)
        >>> check_loss((z * z).sum() / 4, "", sizes=(4, 32))
        >>> check_loss((z * z).sum() / 32, "", sizes=(4, 32))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        hetflow.schema.errors.TargetError: the loss of 4 samples is a sum divided by 32...
    """
    if loss.numel() != 1:
        raise TargetError(
            f"the loss has {loss.numel()} elements; a plan's shares need the mean over samples",
            hint="call backward on the loss's mean()",
        )
    _Graph(hint, sizes).check(loss.grad_fn, is_whole=True)


class _Graph:
    """The last operations of a loss."""

    def __init__(self, hint: str, sizes: tuple[int, int] | None) -> None:
        self._hint, self._sizes = hint, sizes

    def check(self, node: Any, *, is_whole: bool) -> None:
        """Check the operations from a node on; it is the whole loss, or one of its terms.

        A sum beside another term may be a penalty on parameters, equal on every worker.
        """
        if node is None:
            return
        name = type(node).__name__
        if name in FACTORS or name in TERMS:
            for following, _ in node.next_functions:
                self.check(following, is_whole=is_whole and name in FACTORS)
        elif name in QUOTIENTS:
            divided = node.next_functions[0][0]
            if not _is_sum(divided):
                self.check(divided, is_whole=is_whole)
            elif is_whole:
                self._check_quotient(divided, node)
        elif _is_sum(node) and (is_whole or name != SUM):
            raise TargetError(
                "the loss is a sum over samples, and a plan's shares need their mean",
                hint='use reduction="mean", or divide by the number of samples of the batch',
            )
        elif name == MEAN and is_whole:
            number = node._saved_self_sym_numel
            if self._sizes is not None and number % self._sizes[0]:
                raise TargetError(
                    f"the loss of {self._sizes[0]} samples is a mean over {number} things",
                    hint=self._hint,
                )
        elif hasattr(node, "_saved_total_weight") and (
            float(node._saved_total_weight) != node._saved_target.numel()
        ):
            raise TargetError(
                "the cross entropy ignores some targets or weights classes: its mean over a share "
                "counts samples unlike one process does",
                hint=self._hint,
            )

    def _check_quotient(self, summed: Any, node: Any) -> None:
        if self._sizes is None or node._saved_other is None:
            return
        (own, whole), divisor = self._sizes, float(node._saved_other)
        is_fixed = divisor == whole != own
        if divisor == num_summed(summed) or not (divisor % own or is_fixed):
            return
        raise TargetError(
            f"the loss of {own} samples is a sum divided by {divisor:g}",
            hint=f"divide by the number of samples, {own} here; {self._hint}",
        )


def _is_sum(node: Any) -> bool:
    return type(node).__name__ == SUM or getattr(node, "_saved_reduction", None) == SUMMED
