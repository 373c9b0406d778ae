"""How a batch's loss is made of the losses of the workers' shares, found by a trial.

Each worker computes the script's loss of its own share. What it counts in the batch's depends on
the kind of loss. It is the share of the samples for a mean, 1 for a sum, the share of the divisor
for a mean over a mask. A script's own loop cannot be run on parts of a batch, as hf.prepare does.
So the operators of its first step are recorded, and run again before the backward pass. There
samples are replaced by others of the batch, and shapes stay:

- The loss must be the mean, over all samples, of what it is for a batch of this one sample
  repeated. That fails for a root of a mean, a contrast, a choice of hard samples, a mean over a
  mask. A mean over a mask is then tried with the weight that its divisor gives each sample.
- A batch of one sample repeated must give the same loss on each worker, whatever its number of
  samples. Where it grows with the number, the loss is a sum. What a script keeps of its batches, as
  a queue, differs between workers from the second batch on.

A loss is known by the names in its graph, and each new one is tried. Passes 2, 4, 8 and so on try
it again: a mask, a threshold or a choice of experts may depend on values that come later.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...devices.backend import backend_of
from ...devices.collectives import wire_device
from ...schema.errors import TargetError
from .. import peers
from ..group import Place, gathered
from ..nested_tensors import plain
from ..promise.promise import chain, last_divisors_of, signature_of, targets_of
from ..promise.recording import LossVerdict, Recording, Replays, Slice
from ..sharding.sliced import plain as as_slices
from ..sharding.sliced import plainly
from ..totals import LateValues

# What a loss is divided by, as a share counts it: before a script keeps it from being nothing.
#
# ``(each * mask).sum() / mask.sum().clamp(min=1)`` divides by 1 where a share's mask hides all. The
# batch's divisor is the sum of the masks, kept from nothing once. So what such a call was given is
# remembered for what it returned.

_KEPT: Any = WeakTensorKeyDictionary()  # a number -> what it was before, and the least it may be
_LEAST = ("clamp", "clamp_min", "clip")  # each takes the least as ``min``, or second


def adapt() -> None:
    """Change torch's functions in this process."""
    for kind in (torch, Tensor):
        for name in _LEAST:
            setattr(kind, name, _noting(getattr(kind, name)))


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def method(*values: Any, **options: Any) -> Any:
        made = original(*values, **options)
        if torch.compiler.is_compiling() or not isinstance(made, Tensor) or made.dim():
            return made
        given = values[0] if values else None
        least = values[1] if len(values) > 1 else options.get("min")
        if isinstance(given, Tensor) and isinstance(least, int | float) and given.numel() == 1:
            _KEPT[made] = (given.detach(), float(least))
        return made

    return method


def before(divisor: Tensor) -> Tensor:
    """[] a divisor before it was kept from being nothing."""
    found: Tensor = _KEPT.get(divisor, (divisor, 0.0))[0]
    return found


_UNLIKE_TARGETS, _IGNORES, _NOTHING = 1, 2, 4
_FAULTS = {
    _UNLIKE_TARGETS: (
        "the cross entropies of one loss count unlike targets, so they have no common weight",
        "call backward for each by itself, or use hf.prepare with hf.Weighted",
    ),
    _IGNORES: (
        "a cross entropy ignores some targets or weights classes, and beside it the loss counts "
        "samples: their shares have no common weight",
        "call backward for each by itself, or use hf.prepare with hf.Weighted",
    ),
    _NOTHING: (
        "the loss of a share is 0, and it is not known if anything counts in what divides it",
        "keep a mask's sum from being 0 by mask.sum().clamp(min=1)",
    ),
}


def _refuse(faults: int) -> None:
    for fault, (said, hint) in _FAULTS.items():
        if faults & fault:
            raise TargetError(said, hint=hint)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What counts in a share's loss; numbers that a device has may stay there, as []."""

    own: float | Tensor  # the share's samples, 1 for a sum, or its divisor
    # Its part of what divides that in the batch, before a script keeps it from being 0.
    given: float | Tensor
    least: float = 0.0  # what the script keeps it from falling below
    faults: int | Tensor = 0  # the sum of what is wrong


def _divided(loss: Tensor, divisor: Tensor, *, counts: bool) -> _Counted:
    """What counts in a loss that is divided so; ``counts`` says whether the share's samples do."""
    given, least = _KEPT.get(divisor, (divisor, 0.0))
    if not counts:
        return _Counted(0.0, 0.0, least)
    faults = _NOTHING * (loss.detach() == 0).reshape(()) if given is divisor else 0
    return _Counted(divisor, given, least, faults)


def share_of(
    loss: Tensor, divisor: Tensor, *, counts: bool, sum_of: Callable[[Tensor], Tensor]
) -> float:
    """What a share's loss [] counts in the batch's; call it on all workers.

    Returns:
        The divisor over that of the batch; no number where that is nothing.

    Raises:
        TargetError: The loss is nothing, as where the script itself keeps a divisor from being so.
    """
    counted = _divided(loss, divisor, counts=counts)
    given = torch.as_tensor(counted.given, dtype=torch.float64, device=loss.device)
    summed = sum_of(given.detach().reshape(()))
    faults, total, own = plain((counted.faults, summed, counted.own))
    _refuse(int(faults))
    total = max(total, counted.least)
    return own / total if total else math.nan


_ROWS = 32  # samples that are tried one by one
_ROWS_OF_MODEL = 3
_PADDINGS = 8  # batches of unlike lengths that are recorded until one shows what pads
_HINT = (
    "compute a mean over samples; or train with hf.prepare, whose over_batch= takes losses that "
    "see the whole batch, and hf.Weighted other means"
)


class _Piece(Protocol):
    @property
    def own_samples(self) -> int:
        """This worker's samples of the batch."""


class WeighedTraining(Protocol):
    """What is needed of a worker's training."""

    models: nn.ModuleList
    optimizers: list[torch.optim.Optimizer]
    place: Place
    loader_batch_size: int

    @property
    def piece(self) -> _Piece | None:
        """This worker's part of the batch; None before the first."""

    @property
    def world_size(self) -> int:
        """The number of workers."""

    @property
    def has_samples(self) -> bool:
        """Whether this worker's samples count in the pass that runs."""

    def weight(self) -> float:
        """What this worker's samples count in the workers' plain mean."""

    def compare(self) -> None:
        """Refuse to go on where the workers' models or settings differ; call it on all workers."""


class Known(torch.autograd.Function):
    """A loss whose value was replaced by the global batch's; its gradients stay the share's."""

    @staticmethod
    def of(loss: Tensor, share: float | Tensor, value: Callable[[], Tensor]) -> Tensor:
        """The loss, of which the share is known too."""
        made: Tensor = Known.apply(loss, value(), share)  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, share: float | Tensor) -> Tensor:
        """The value, in the loss's type."""
        ctx.share = share
        return value.to(loss.dtype).view_as(loss)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the loss, unchanged."""
        return gradient, None, None


@dataclass(frozen=True, slots=True)
class _Form:
    """What the loss of a share counts."""

    # As its samples; as the whole, which is a sum; as the targets of its cross entropies; or as its
    # divisor.
    kind: Literal["samples", "sum", "targets", "divisor"]
    divisor: int = 0  # where the divisor is among those of the loss's graph


@dataclass(frozen=True, slots=True)
class _Found:
    """What all workers have found of a loss."""

    are_means: bool  # whether it is a mean on all of them
    are_divided: bool  # whether it is a weighted mean on all of them
    are_refuted: bool  # whether it is not what it was on any of them
    losses: Sequence[float]  # [workers] of a batch of one sample repeated
    rows: Sequence[float]  # [workers] how often it is repeated
    close: float  # the relative difference by rounding that they may have

    @property
    def per_row(self) -> list[float]:
        """[workers] the losses by the number of samples."""
        return [value / number for value, number in zip(self.losses, self.rows, strict=True)]


class _Told:
    """What all workers tell each other of a pass's loss: it is on its way until it is read.

    A row has seven numbers: what the loss is known by, a digest of the optimizers' rates, the
    faults, a checksum of shapes, ``given`` and ``own`` (``_Counted``), and the loss of the share.
    Where something is compiled, -1 stands for the checksum.

    Attributes:
        share: What this share counts in the batch's loss.
    """

    WIDTH = 7

    def __init__(
        self, loss: Tensor, known: tuple[int, int], counted: _Counted, training: WeighedTraining
    ) -> None:
        self.known_by, self._least = known[0], counted.least
        self.share: float | Tensor = 0.0
        rates = [g["lr"] for optimizer in training.optimizers for g in optimizer.param_groups]
        digest = crc32(repr([rate for rate in rates if not isinstance(rate, Tensor)]).encode())
        numbers = (known[0], digest, counted.faults, known[1], counted.given, counted.own, loss)
        self._row = torch.zeros(self.WIDTH, dtype=torch.float64, device=loss.device)
        for at, number in enumerate(numbers):
            given = number.detach().reshape(()) if isinstance(number, Tensor) else None
            self._row[at].fill_(number) if given is None else self._row[at].copy_(given)
        sent = self._row.to(wire_device(training.place.device))
        self._found = sent.new_empty(training.world_size * self.WIDTH)
        self._coming = peers.all_gather(self._found, sent, async_op=True)

    def rows(self) -> Tensor:
        """[workers, 7] the rows of all; on a device with NCCL the host does not wait."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return self._found.view(-1, self.WIDTH)

    def own_share(self) -> Tensor:
        """[] what counts of this share over what divides the batch's loss."""
        return self._row[5] / self._total().to(self._row.device)

    def value(self) -> Tensor:
        """[] the loss of the batch."""
        own, losses = self.rows()[:, 5], self.rows()[:, 6]
        # What nothing is the mean of is no number.
        return torch.where(own == 0, 0.0, own * losses).sum() / self._total()

    def _total(self) -> Tensor:
        return self.rows()[:, 4].sum().clamp(min=self._least)


class _Recording(Recording):  # type: ignore[no-untyped-call]
    """A recording to which slices of parameters are plain tensors."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Note an operator."""
        with as_slices():
            return super().__torch_dispatch__(function, types, arguments, named)


class Losses:
    """The losses of a script, and what the share of each counts.

    Attributes:
        is_untried: Whether a loss is to be tried, and none was.
    """

    def __init__(self, training: WeighedTraining) -> None:
        self._training = training
        self._forms: dict[int, _Form] = {}  # alike on all workers, as what each loss is known by
        self._guessed: set[int] = set()  # losses that have counted as means before they were tried
        self._recording: Recording | None = None
        self._is_entered = False
        self._has_unknown = True  # the first
        self._answers: set[Any] = set()  # nodes of autograd's graph that models returned
        self._num_passes, self._paddings_left = 0, _PADDINGS
        self.shapes = 0  # a checksum of this share's, without the number of samples
        self._late: LateValues | None = None  # where a device is ahead of the host
        self._is_due = False  # whether known losses are to be tried again; alike on all workers
        self.is_untried = True

    # Recording

    def begin(self) -> None:
        """Begin to record, where there is a loss to be tried: the script has taken a batch."""
        self.end()
        if self._has_unknown or self._is_due:
            self._recording = _Recording()
            self.enter()

    def enter(self) -> None:
        """Record from here."""
        if self._recording is not None and not self._is_entered:
            self._recording.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def leave(self) -> None:
        """Record nothing from here."""
        if self._recording is not None and self._is_entered:
            self._is_entered = False
            self._recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the body."""
        was_entered = self._is_entered
        self.leave()
        yield
        if was_entered:
            self.enter()

    def end(self) -> None:
        """Forget what was recorded."""
        self.leave()
        self._recording = None
        self._answers.clear()

    def skip(self) -> None:
        """Try no losses: a library's own step weighs its parts."""
        self.end()
        self._has_unknown = self._is_due = self.is_untried = False

    @property
    def is_recording(self) -> bool:
        """Whether the operators of this step are recorded."""
        return self._recording is not None

    def made(self, outputs: Any) -> None:
        """Note what a wrapped model returned."""
        leaves = (leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor))
        self._answers.update(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None)
        if self._recording is not None:
            self._recording.end_at(outputs)

    # Shares

    @plainly
    def weighed(self, loss: Tensor) -> tuple[float | Tensor, Callable[[], Tensor]]:
        """Weigh the loss of this worker's share, before its backward pass; call it on all workers.

        Returns:
            What it counts in the global batch's, and a function that gives the batch's loss [].

        Raises:
            TargetError: It is not made of the shares' losses in a known way.
        """
        known = _known(loss)
        if known is not None:
            return known.share, lambda: loss.detach()
        if self._late is not None:
            self._check(self._late.take())
        with self.paused():
            told = self._told(loss)
            self._count_pass()
        return told.share, lambda: self._value(told)

    def _told(self, loss: Tensor) -> "_Told":
        """Tell the other workers what counts in this share's loss, and wait for it if need be."""
        if loss.numel() != 1:
            raise TargetError(
                f"the loss has {loss.numel()} elements; a plan's shares need the mean over samples",
                hint="call backward on the loss's mean()",
            )
        training, known_by = self._training, signature_of(loss, self._answers)
        if self._recording is not None:  # on all workers: what follows exchanges more
            _check_forms(_of_all(training, [known_by]).flatten().tolist())
        form = self._form(loss, known_by)
        counted = self._counted(loss, form)
        told = _Told(loss, (known_by, -1 if _is_compiled() else self.shapes), counted, training)
        if form.kind == "sum":
            told.share = float(training.has_samples)
        elif form.kind == "samples":
            told.share = training.weight() / training.world_size
        else:
            told.share = told.own_share()
            if backend_of(loss.device).is_host:
                self._check(told.rows().flatten().tolist())
                told.share = float(told.share)
        return told

    def _value(self, told: "_Told") -> Tensor:
        """The batch's loss [], once all workers have told what theirs is."""
        value, rows = told.value(), told.rows().flatten()
        if self._late is None and not backend_of(rows.device).is_host:
            self._late = LateValues()
        self._check(rows.tolist() if self._late is None else self._late.exchange(rows))
        if told.known_by not in self._forms:
            self._has_unknown = True
            self._guessed.add(told.known_by)
        return value

    def _check(self, numbers: Sequence[float] | None) -> None:
        """Check what all workers have told of a pass: in the next one where a device is ahead."""
        if numbers is None:
            return
        # Forms, optimizers' rates, faults, shapes (``_Told``): each [workers].
        columns = [numbers[at :: _Told.WIDTH] for at in range(4)]
        _check_forms(columns[0])
        _refuse(int(max(columns[2])))
        if len(set(columns[1])) > 1:
            self._training.compare()
        if len(set(columns[3])) > 1 and min(columns[3]) >= 0 and self._paddings_left:
            self._is_due, self._paddings_left = True, self._paddings_left - 1

    def _count_pass(self) -> None:
        """Let losses be tried again in the batch after 1, 3, 7, ... passes."""
        # All workers must do it together. So passes are counted, which all run, and no batches, of
        # which one may read more; and one worker's compiled function is every worker's.
        self._num_passes += 1
        self._is_due = self._is_due and self._recording is None
        if (self._num_passes + 1).bit_count() == 1:  # a power of two
            self._is_due = not bool(_of_all(self._training, [_is_compiled()]).any())

    def _form(self, loss: Tensor, known_by: int) -> _Form:
        """What a share of a loss counts: known, tried now, or guessed until it comes again."""
        form = self._forms.get(known_by)
        if form is not None and self._recording is not None:
            self._try_again(loss, form)
        if form is None and self._recording is not None:
            form = self._forms[known_by] = self._tried(loss)
            if known_by in self._guessed and form.kind in ("sum", "divisor"):
                raise TargetError(
                    "a loss that came after the first batch is no mean over samples, as which it "
                    "has counted until it could be tried",
                    hint="compute it from the first batch on; or train with hf.prepare",
                )
            self._has_unknown = self.is_untried = False
        # A sum of a cross entropy divides by no targets.
        return form or _Form("targets" if targets_of(loss) else "samples")

    def _counted(self, loss: Tensor, form: _Form) -> _Counted:
        """What counts in this share's loss, if it has this form."""
        has_samples = self._training.has_samples
        if form.kind == "sum":
            return _Counted(float(has_samples), float(self._training.place.rank == 0))  # over 1
        targets = targets_of(loss)
        if form.kind == "samples" or (form.kind == "targets" and not targets):
            samples = self._training.weight()
            ignored = sum(total != count for total, count in targets) > 0
            return _Counted(samples, samples, faults=_IGNORES * ignored)
        if form.kind == "divisor":
            divisor = last_divisors_of(loss)[form.divisor]
            return _divided(loss, divisor, counts=has_samples)
        total = targets[0][0]
        unlike = sum(other != total for other, _ in targets[1:]) > 0
        counted = _divided(loss, total, counts=has_samples)
        return replace(counted, faults=counted.faults + _UNLIKE_TARGETS * unlike)

    # The trial

    def _tried(self, loss: Tensor) -> _Form:
        assert self._recording is not None
        ours = self._recording.slice_of(loss, whole=False)
        trial = None if ours is None else _Trial(self._training, ours)
        heads = _of_all(self._training, [0 if trial is None else trial.num_tensors])
        if len(set(heads.flatten().tolist())) > 1:
            raise TargetError(
                "the workers compute losses of unlike forms, so these do not add up to one",
                hint="compute the same loss on every worker",
            )
        if ours is None or trial is None:
            raise TargetError(
                "the loss was not computed within the step from its batch, so it cannot be tried",
                hint=_HINT,
            )
        form = trial.form(loss)
        whole = self._recording.slice_of(loss, whole=True)
        has_model = whole is not None and len(whole.operators) > len(ours.operators)
        if bool(_of_all(self._training, [has_model]).all()):
            assert whole is not None
            trial = _Trial(self._training, whole)
            self._check_model(trial, loss)
        self._check_padding(trial, loss, form)
        return form

    def _try_again(self, loss: Tensor, form: _Form) -> None:
        """Try a loss of a known form on a later batch, which may show what the first has hidden."""
        # Such as a mask, a choice or a threshold that depends on values.
        assert self._recording is not None
        ours = self._recording.slice_of(loss, whole=False)
        trial = None if ours is None else _Trial(self._training, ours)
        piece = self._training.piece
        own = 0 if trial is None or piece is None or piece.own_samples < 2 else trial.num_tensors
        heads = _of_all(self._training, [own])
        if trial is None or len(set(heads.flatten().tolist())) > 1 or not own:
            return
        verdict = trial.verdict(loss, _ROWS)
        is_as_known = verdict.is_mean or form.kind in ("targets", "divisor")
        refuted = verdict.is_refuted or (verdict.is_divided and not is_as_known)
        found = trial.of_workers(loss, verdict, refuted)
        if found.are_refuted:
            raise TargetError(
                f"the loss was the mean of its samples' losses in earlier batches, and is not in "
                f"this one: {verdict.figures}",
                hint=_HINT,
            )
        losses = found.per_row if form.kind == "sum" else found.losses
        if all(map(math.isfinite, losses)) and not _are_close(losses, found.close):
            raise TargetError(
                "the loss of one sample was the same on all workers in earlier batches, and is "
                f"{_listed(found)} now: something in it follows from a worker's own share",
                hint="sum over workers what the script keeps of batches (a queue, a mean, a count)",
            )
        whole = self._recording.slice_of(loss, whole=True)
        self._check_padding(trial if whole is None else _Trial(self._training, whole), loss, form)

    def _check_padding(self, trial: "_Trial", loss: Tensor, form: _Form) -> None:
        """Check that a sample's loss is the same among samples to whose length it is padded."""
        # Each share is padded to a length of its own, so what reads padding differs from one
        # process.
        counts = _of_all(self._training, [trial.num_tensors])
        if len(set(counts.flatten().tolist())) > 1:
            return
        found = trial.padded(loss)
        if found is not None:
            self._paddings_left = 0
        losses = [] if found is None else found.per_row if form.kind == "sum" else found.losses
        if found is not None and all(map(math.isfinite, losses)):
            if not _are_close(losses, found.close):
                raise TargetError(
                    "the model or the loss reads padding: of one sample the loss is "
                    f"{_listed(found)}, and shares are padded to lengths of their own",
                    hint="mask the padding; or pad to one length in all batches",
                )

    def _check_model(self, trial: "_Trial", loss: Tensor) -> None:
        """Check that what the model returns for a sample depends on this sample alone."""
        counts = _of_all(self._training, [trial.num_tensors])
        if len(set(counts.flatten().tolist())) > 1:
            return  # the model takes unlike ways; the loss itself was tried
        verdict = trial.verdict(loss, _ROWS_OF_MODEL)
        if bool(_of_all(self._training, [verdict.is_refuted]).any()):
            raise TargetError(
                f"the model mixes the samples of a batch: {verdict.figures}",
                hint="a plan's shares would be mixed by themselves; replace this part of the model",
            )


class _Trial:
    """Runs the operators of a loss on other samples of its batch."""

    def __init__(self, training: WeighedTraining, recorded: Slice) -> None:
        self._training, self._recorded = training, recorded
        piece = training.piece
        assert piece is not None
        self._num_rows = max(piece.own_samples, 1)
        own = (*training.models.parameters(), *training.models.buffers())
        self._tensors = recorded.tensors(own)
        self._dims: dict[int, int] = {}  # id of a tensor -> its dimension of samples
        self._replays = Replays(recorded, self._num_rows, self._dims)
        self._others: dict[int, list[int]] = {}  # its dimensions of other unlike sizes
        self._sizes: dict[int, list[int]] = {}  # the least size of each dimension

    @property
    def num_tensors(self) -> int:
        """Tensors that may hold samples."""
        return len(self._tensors)

    def form(self, loss: Tensor) -> _Form:
        """What a share's loss counts; call it on all workers."""
        if self._recorded.uses("c10d"):
            raise TargetError(
                "the loss uses tensors of other workers, which have shares of unlike sizes",
                hint=_HINT,
            )
        verdict = self.verdict(loss, _ROWS)
        found = self.of_workers(loss, verdict, False)
        if max(found.rows) == 1:
            raise TargetError(
                "each worker has one sample, and a trial of the loss needs two",
                hint="solve for a larger batch",
            )
        is_scaled = _are_close(found.losses, found.close)
        if is_scaled and found.are_divided:
            if self._recorded.divides_by_targets:
                is_alone = self._recorded.divides_at_last
                if targets_of(loss) and (is_alone or not found.are_means):
                    return _Form("targets")
            else:
                return _Form("divisor", self._place_of_divisor(loss))
        if found.are_means and is_scaled:
            return _Form("samples")
        if found.are_means and _are_close(found.per_row, found.close):
            self._check_sum()
            return _Form("sum")
        raise TargetError(
            f"a batch's loss is not the mean of its samples' losses: {verdict.figures}"
            if not found.are_means
            else "the loss is neither a mean over the samples nor their sum: of one sample it is "
            + _listed(found),
            hint=_HINT,
        )

    def of_workers(self, loss: Tensor, verdict: LossVerdict, refuted: bool) -> "_Found":
        """What all workers have found, and the losses of one sample; call it on all of them."""
        own = [
            float(verdict.is_mean),
            float(verdict.is_divided),
            float(refuted),
            self._same_sample(verdict.best, 0),
            float(self._num_rows),
            self._replays.close(loss),  # larger where only one worker's can be run in more bits
        ]
        sent = torch.tensor(own, dtype=torch.float64, device=self._training.place.device)
        columns = zip(*gathered(sent, place=self._training.place).tolist(), strict=True)
        are_means, are_divided, are_refuted, losses, rows, close = columns
        return _Found(all(are_means), all(are_divided), any(are_refuted), losses, rows, max(close))

    def verdict(self, loss: Tensor, num_rows: int) -> LossVerdict:
        """Try the share's loss with so many of its samples; call it on all workers."""
        self._find_dims()
        return self._replays.verdict(loss, num_rows)

    def _find_dims(self) -> None:
        """Find the dimensions of samples, and those of other unlike sizes; call it on all."""
        table = [size for t in self._tensors for size in [*t.shape, *[-1] * 8][:8]]
        found = _of_all(self._training, [self._num_rows, *table])
        rows, sizes = found[:, 0].tolist(), found[:, 1:].view(len(found), -1, 8).tolist()
        for at, tensor in enumerate(self._tensors):
            columns = list(zip(*(of_worker[at] for of_worker in sizes), strict=True))[
                : tensor.dim()
            ]
            per_row = [
                len({s / n for s, n in zip(column, rows, strict=True)}) == 1
                and column[0] % rows[0] == 0
                for column in columns
            ]
            unlike = [d for d, column in enumerate(columns) if len(set(column)) > 1]
            if any(per_row):
                self._dims[id(tensor)] = per_row.index(True)
            self._others[id(tensor)] = [d for d in unlike if d != self._dims.get(id(tensor))]
            self._sizes[id(tensor)] = [int(min(column)) for column in columns]

    def padded(self, loss: Tensor) -> "_Found | None":
        """The losses of one sample that each worker pads as its share; call it on all workers.

        It is the longest of the shortest share; the others pad it as they pad their own.

        Returns:
            None where all are as long, or it is not seen what pads.
        """
        self._find_dims()
        if not any(self._others.values()):
            return None
        # Code that has read lengths would read others; one worker may have read them alone.
        reads = any(map(self._recorded.uses, ("_pack_padded_sequence", "_local_scalar_dense")))
        told = _of_all(self._training, (False, 0, -1) if reads else self._padding()).tolist()
        source = next((rank for rank, found in enumerate(told) if found[0]), None)
        if source is None or any(padding < 0 for _, _, padding in told):
            return None
        place, padding = self._training.place, told[self._training.place.rank][2]
        value = self._same_sample(told[source][1], source, padding=padding)
        own = torch.tensor([value, self._num_rows, self._replays.close(loss)], dtype=torch.float64)
        losses, rows, close = gathered(own.to(place.device), place=place).T.tolist()
        return _Found(True, True, False, losses, rows, max(close))

    def _padding(self) -> tuple[bool, int, int]:
        """(whether no share is shorter, its longest sample, one that ends in padding or -1)."""
        is_shortest, runs, seen = True, [], []
        for tensor in self._recorded.leaves.values():
            dim = self._dims.get(id(tensor))
            for d in self._others.get(id(tensor), ()):
                if dim is None or tensor.shape[dim] != self._num_rows:
                    return False, 0, -1
                is_shortest = is_shortest and tensor.shape[d] == self._sizes[id(tensor)][d]
                entries = tensor.detach().movedim((dim, d), (0, 1))
                entries = entries.reshape(*entries.shape[:2], -1)
                ends = _run_at_end((entries == entries[:, -1:]).all(-1))
                same = (entries == entries[ends.argmax(), -1]).all(-1)
                run = _run_at_end(same)
                # What pads ends several samples, not all, and stands within none; else it may be a
                # token that ends texts.
                is_end = 1 < int((run > 0).sum()) < len(run) and bool((same.sum(1) == run).all())
                runs.append(run)
                seen += [run] if is_end else []
        if not runs:
            return False, 0, -1
        longest = int(torch.stack(seen).sum(0).argmin()) if seen else 0
        shared = torch.stack(runs).amin(0)
        ends_so = int(shared.argmax()) if seen and int(shared.max()) > 1 else int(is_shortest) - 1
        return is_shortest, longest, ends_so

    def _check_sum(self) -> None:
        """Refuse a sum with a worker's batch size or the workers' number in it."""
        # One process has not the one, and DistributedDataParallel's mean is what the other undoes:
        # a plan adds sums up.
        size, workers = self._training.loader_batch_size, self._training.world_size
        if size and workers in self._recorded.whole_factors:
            raise TargetError(
                f"the loss is a sum that is multiplied by {workers}, which is the number of "
                "workers: a plan adds sums up, as one process does",
                hint="leave the number of workers (num_processes, world_size) out of it",
            )
        for factor in self._recorded.factors:
            times = max(abs(factor), 1 / abs(factor)) / size if size else 0.0
            if size > 1 and times >= 1 and abs(times - round(times)) < 1e-9:
                raise TargetError(
                    f"the loss is a sum that is divided by a multiple of {size}, the batch size of "
                    "a DataLoader, and the shares of workers have other sizes",
                    hint="compute the mean, or divide by the length of the batch",
                )

    def _place_of_divisor(self, loss: Tensor) -> int:
        number = self._recorded.divisor
        assert number is not None
        replays = Replays(self._recorded, self._num_rows, self._dims, widens=False)
        value = replays.of_rows(range(self._num_rows), self._recorded.leaves, number)[1]
        found = last_divisors_of(loss)
        for at, divisor in enumerate(found):
            if divisor.numel() == 1 and float(divisor) == value:
                return at
        raise TargetError("what the loss is divided by is not kept in its graph", hint=_HINT)

    def _same_sample(self, best: int, source: int, *, padding: int | None = None) -> float:
        """The loss of a batch of one worker's one sample, repeated; call it on all.

        Args:
            best: The sample.
            source: The worker.
            padding: A sample of this worker whose end pads it; None repeats its first entry.
        """
        place, rows = self._training.place, self._num_rows

        def repeated(tensor: Tensor) -> Tensor:
            dim = self._dims.get(id(tensor))
            if dim is None:
                return tensor.detach()
            each, others = tensor.shape[dim] // rows, self._others[id(tensor)]
            entry = tensor.detach().narrow(dim, best * each if place.rank == source else 0, each)
            for d in others:
                entry = entry.narrow(d, 0, 1 if padding is None else self._sizes[id(tensor)][d])
            # A script may have moved it to its device after the batch was read.
            sent = entry.to(wire_device(place.device), torch.float64, copy=True).contiguous()
            peers.broadcast(sent, src=source)
            for d in others if padding is not None else ():
                end = tensor.detach().narrow(dim, (padding or 0) * each, each).narrow(d, -1, 1)
                end = end.to(sent)
                for other in others:
                    end = end if other == d else end.narrow(other, 0, sent.shape[other])
                sizes = [tensor.shape[d] - n if at == d else -1 for at, n in enumerate(sent.shape)]
                sent = torch.cat([sent, end.expand(sizes)], d)
            repeats = [rows if d == dim else 1 for d in range(tensor.dim())]
            return torch.empty_like(tensor).copy_(sent.to(tensor.dtype).repeat(repeats))

        # First all broadcasts: an operator that fails must leave no worker alone in one.
        made = {id(tensor): repeated(tensor) for tensor in self._tensors}

        def change(tensor: Tensor) -> Tensor:
            found = made.get(id(tensor))
            return tensor.detach() if found is None else found.clone()

        try:
            return self._replays.evaluated(change, self._recorded.leaves, None)[0]
        except Exception:
            return math.nan


def _run_at_end(found: Tensor) -> Tensor:
    """[rows] how many of each row's [rows, entries] last entries are true."""
    return found.flip(1).cumprod(1).sum(1)


def _is_compiled() -> bool:
    """Whether torch.compile has compiled anything: it would compile again while one records."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])


def _of_all(training: WeighedTraining, numbers: Sequence[int]) -> Tensor:
    """[workers, n] the whole numbers of every worker."""
    own = torch.tensor(numbers, dtype=torch.int64, device=training.place.device)
    return gathered(own, place=training.place)


def _check_forms(known_by: Sequence[float]) -> None:
    if len(set(known_by)) > 1:
        raise TargetError(
            "the workers compute losses of unlike forms, so these do not add up to one",
            hint="compute the same loss on every worker, whatever is in its share of a batch",
        )


def _listed(found: _Found) -> str:
    of_workers = zip(found.losses, found.rows, strict=True)
    return " and ".join(f"{value:.6g} among {int(n)}" for value, n in of_workers)


def _are_close(values: Sequence[float], close: float) -> bool:
    return all(math.isfinite(value) for value in values) and (
        max(values) - min(values) <= close * max(map(abs, values))
    )


def _known(loss: Tensor) -> Any:
    """The node of a loss whose value is the batch's by now, of which this is a multiple."""
    for node in chain(loss):
        if isinstance(node, Known._backward_cls):
            return node
    return None
