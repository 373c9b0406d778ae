"""Test a loss function before an update: is its loss a mean over samples?

A step is cut into virtual nodes, and its gradient is put together as the mean of theirs, weighted
by samples or as the function states. That is the gradient of the global batch only if the loss is
such a mean. So the function is called on a few samples of the batch together and in unequal parts:
the mean of the parts must be the loss of the whole. A sum, a logarithm of a mean, a loss that
compares samples with each other all differ there::

    16 samples together, 10 + 1 + 5 of them           the mean of the parts is the whole
    the 1 once more                                   the loss depends on no earlier call
    the 16 repeated to the size of the global batch   it chooses no samples of a large batch

The model answers the whole and the one sample. Where the one sample's answer is the same by itself,
the answers to the others are known by then. So a test takes 18 passes of a sample; the first test
takes 20, as it calls the function twice in training mode, too.

What matters only later (a mask, where padding comes first in a later batch) no first batch shows.
So every loss is looked at: what it divides by, for each sample (``Counts``). Where that is another
number than before, the function is tested again on these very samples. Beside that it is tested
again in its steps 2, 4, 8 and so on, in a pipeline in its microbatches 2, 4, 8.

The calls have no gradients, and run in evaluation mode: dropout and batch-norm are defined by
virtual node. They leave nothing behind that Python can see: random streams, buffers, variables of
the script are put back. In the first tests every worker has the same samples and comes to the same
answer, so no exchange is needed. Workers that share the model's weights (``JointCalls``) call it
together: then all make a later test that one of them wants.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...devices.backend import backend_of, is_out_of_memory
from ...schema.errors import TargetError
from ..data import Batch, Pass, called
from ..determinism import streams_kept
from ..totals import LateValues, loss_and_weight
from ..virtual_nodes import slices
from .trial import Cut, LossTrial, ReturnForm, cut_of, has_rows, ranges_of

_MOST_SAMPLES = 16  # called together: a third of targets ignored is then seen almost surely
_MOST_TRIES = 5

# What a loss divides by, as the graph shows that autograd keeps of it.
#
# The gradients of a share get the weight of its samples. That is right where the loss is a mean to
# which each sample counts alike. The last operations of its graph show what it divides by. Where
# this changes, a function is tested again, on the samples of that pass.

_SINK = "_DDPSinkBackward"
FACTORS = {
    "MulBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0",
    "AliasBackward0", _SINK,
}  # fmt: skip
QUOTIENTS = {"DivBackward0", "DivBackward1"}
TERMS = {"AddBackward0", "SubBackward0"}
SUM, MEAN = "SumBackward0", "MeanBackward0"
_AVERAGED, SUMMED = 1, 2  # torch's numbers of reduction="mean" and "sum"
_NODES = 48  # of a loss's graph that are looked at
_NODES_OF_ANSWERS = 12  # of the graph of a loss that a model returns
_VIEWS = (
    "AccumulateGrad", "Alias", "AsStrided", "Clone", "Expand", "NoneType", "Permute", "Reshape",
    "Squeeze", "TBackward", "ToCopy", "Transpose", "Unsafe", "Unsqueeze", "View",
)  # fmt: skip
_CLOSE = 1e-6  # relative difference of numbers that are equal
Number = float | Tensor
"""A number that is known, or one [] on a device."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a loss divides by, as its last operations show.

    Attributes:
        of_all: Shares of what it sums or could count (targets, entries): 1 if nothing is left out.
        of_samples: Numbers for each of its samples, where it is not seen what could be counted.
    """

    of_all: tuple[Number, ...]
    of_samples: tuple[Number, ...]

    @property
    def on_device(self) -> list[Tensor]:
        """The numbers that are on a device."""
        return [n for n in (*self.of_all, *self.of_samples) if isinstance(n, Tensor)]

    def with_numbers(self, ahead: Iterator[float]) -> "Counts":
        """The counts with numbers from the host in place of those ``on_device``."""
        rows = (self.of_all, self.of_samples)
        return Counts(
            *(tuple(next(ahead) if isinstance(n, Tensor) else n for n in r) for r in rows)
        )

    def are_like(self, usual: "Counts | None", first: "Counts") -> bool:
        """Whether they are those of other losses of the function: earlier, and in this step."""
        pairs = [(self.of_all, usual.of_all if usual else ()), (self.of_samples, first.of_samples)]
        return all(
            len(own) == len(other)
            and all(
                math.isclose(a, b, rel_tol=_CLOSE) or a != a and b != b
                for a, b in zip(own, other, strict=True)
            )
            for own, other in pairs
        )


def counts_of(loss: Tensor, num_samples: int) -> Counts:
    """What a loss of so many samples divides by.

    Example:
        >>> import torch
        >>> z, mask = torch.ones(4, requires_grad=True), torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> counts_of((z * mask).sum() / mask.sum(), 4)
        Counts(of_all=(0.75,), of_samples=())
        >>> counts_of(z[mask > 0].mean(), 4)
        Counts(of_all=(0.75,), of_samples=())
    """
    of_all: list[Number] = []
    of_samples: list[Number] = []
    waiting: list[Any] = [loss.grad_fn]
    seen = 0
    while waiting and seen < _NODES:
        node, seen = waiting.pop(), seen + 1
        name = type(node).__name__
        is_quotient = name in QUOTIENTS
        if is_quotient or name == "MulBackward0":
            other, summed = getattr(node, "_saved_other", None), num_summed(_source(node))
            number = None if other is None else _number(other)
            if number is not None and summed:
                of_all.append(number / summed if is_quotient else number * summed)
            elif number is not None and is_quotient:
                of_samples.append(number / num_samples)
        elif name == MEAN:
            sizes = getattr(_source(node), "_saved_self_sym_sizes", None)
            number = float(node._saved_self_sym_numel)
            if type(_source(node)).__name__.startswith("Index") and sizes is not None:
                of_all.append(number / max(math.prod(sizes), 1))
            else:
                of_samples.append(number / num_samples)
        elif (total := _total_weight(node)) is not None:
            number = _number(total)
            assert number is not None
            of_all.append(number / max(node._saved_target.numel(), 1))
        if is_quotient or name in FACTORS or name in TERMS:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return Counts(tuple(of_all), tuple(of_samples))


def _source(node: Any) -> Any:
    """The node of what an operation was given first."""
    return node.next_functions[0][0] if node.next_functions else None


def _number(value: Any) -> Number | None:
    """A number of the graph; None where it is several."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        return None
    return float(value) if backend_of(value.device).is_host else value.detach().reshape(())


def _total_weight(node: Any) -> Tensor | None:
    """What a node divides by that is a cross entropy's mean."""
    if getattr(node, "_saved_reduction", None) != _AVERAGED:
        return None
    total: Tensor | None = getattr(node, "_saved_total_weight", None)
    return total


def chain(loss: Tensor) -> Iterable[Any]:
    """A loss's node, and those before it, through what only changes its factor."""
    node: Any = loss.grad_fn
    output = loss.output_nr
    while node is not None:
        yield node
        name, following = type(node).__name__, node.next_functions
        if name == _SINK:  # it passes all that a model returns
            following = following[output : output + 1]
        entries = [entry for entry in following if entry[0] is not None]
        passes = name in FACTORS | {"DivBackward0"} and len(entries) == 1
        node, output = entries[0] if passes else (None, 0)


def _nodes(root: Any, ends: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes of a graph, breadth first, not beyond ``ends``; None for what needs no gradient."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        yield node
        if node not in ends:
            waiting += [following for following, _ in getattr(node, "next_functions", ())]


def signature_of(loss: Tensor, answers: Collection[Any] = ()) -> int:
    """What a loss is known by: the first names of its graph, without views.

    PyTorch takes other views while operators are recorded, and other forms of CTC's operator.

    Args:
        loss: The loss.
        answers: Nodes of what models returned. What they ran may differ between workers, as the
            steps of a loop over a sequence do, so names end there. A few names behind tell what a
            model computes that returns its loss.
    """
    is_answer = loss.grad_fn in answers
    nodes = _nodes(loss.grad_fn, () if is_answer else answers)
    names = (type(node).__name__ for node in nodes)
    names = (name if name in QUOTIENTS else name.rstrip("01") for name in names)
    most = _NODES_OF_ANSWERS if is_answer else _NODES
    told = islice((name for name in names if not name.startswith(_VIEWS)), most)
    return crc32(" ".join(told).encode())


def targets_of(loss: Tensor) -> list[tuple[Tensor, int]]:
    """(weight of the targets that count, all targets) of each mean cross entropy of a loss."""
    found = ((_total_weight(node), node) for node in islice(_nodes(loss.grad_fn), _NODES))
    return [(total, node._saved_target.numel()) for total, node in found if total is not None]


def ignores_targets(loss: Tensor) -> bool:
    """Whether a loss is seen to hold a cross entropy that ignores targets or weights classes."""
    return any(float(total) != count for total, count in targets_of(loss))


def last_divisors_of(loss: Tensor) -> list[Tensor]:
    """What a loss is divided by, from the last division on."""
    found = []
    for at in chain(loss):
        for name in ("_saved_total_weight", "_saved_other"):
            value = getattr(at, name, None)
            if isinstance(value, Tensor) and "Mul" not in type(at).__name__:
                found.append(value)
    return found


def divisors_of(loss: Tensor) -> list[Tensor]:
    """[n] what a loss is divided by at last, and the targets that its cross entropies count."""
    found = [*last_divisors_of(loss), *(total for total, _ in targets_of(loss))]
    return [divisor.detach() for divisor in found if divisor.numel() == 1]


def num_summed(node: Any) -> int | None:
    """The entries that a sum is of; None for what is no sum."""
    if type(node).__name__ == SUM:
        return int(math.prod(node._saved_self_sym_sizes))
    if getattr(node, "_saved_reduction", None) != SUMMED:
        return None
    target = getattr(node, "_saved_target", None)
    return None if target is None else int(target.numel())


# When a function is tested: in steps 1, 2, 4, 8, and where its losses divide by another number.


@dataclass(slots=True)
class _Tests:
    """The tests of one function."""

    steps: int = 0  # steps in which it was used; in a pipeline, microbatches
    due: int = 1  # the one of its next test, from 1
    tries: int = 0  # tests so far
    samples: int = 0  # samples in them
    is_told: bool = False  # whether their losses could tell
    usual: Counts | None = None  # what its losses are divided by; None before the first
    unusual: int = 0  # tests because of another number

    def note(self, num_samples: int, *, is_told: bool) -> None:
        """Note a test; where the losses of all parts were equal, the samples said little."""
        self.samples, self.tries = self.samples + num_samples, self.tries + 1
        self.is_told = self.is_told or is_told
        is_done = self.is_told and self.samples >= _MOST_SAMPLES or self.tries >= _MOST_TRIES
        self.due = 2 * self.steps if is_done else self.steps + 1

    def are_usual(self, looked: Sequence[tuple[int, Counts]]) -> bool:
        """Whether all passes of a step are seen to divide by the usual numbers, as a rule."""
        usual = self.usual
        if usual is None:
            return False
        for _, own in looked:
            # A comparison with what is on a device would wait for it.
            if Tensor in map(type, own.of_all) or Tensor in map(type, own.of_samples):
                return False
            if own.of_all != usual.of_all or own.of_samples != usual.of_samples:
                return False
        return True

    def unlike(self, counts: Sequence[Counts]) -> int | None:
        """The first pass of a step whose loss is divided by another number; None if none is."""
        if self.usual is None and counts:
            self.usual = counts[0]
        found = (n for n, own in enumerate(counts) if not own.are_like(self.usual, counts[0]))
        number = next(found, None)
        if number is None or self.unusual >= _MOST_TRIES:
            return None
        self.unusual += 1
        return number


@dataclass(frozen=True, slots=True)
class _Step:
    """The passes of a step on this worker, and what their losses are divided by."""

    tests: _Tests
    function: Callable[..., Any]
    batch: Batch
    form: ReturnForm
    looked: tuple[tuple[int, Counts], ...]  # the virtual node of each pass

    @property
    def on_device(self) -> list[Tensor]:
        """The numbers that are on a device."""
        return [number for _, own in self.looked for number in own.on_device]

    def with_numbers(self, numbers: Sequence[float]) -> "list[Counts]":
        """The counts, with numbers in place of what is on a device."""
        ahead = iter(numbers)
        return [own.with_numbers(ahead) for _, own in self.looked]


class JointCalls(Protocol):
    """Workers that call the model together, because each has only a part of it.

    Attributes:
        moves: How often other workers have come; they have tested nothing yet.
    """

    moves: int

    def trying(self) -> AbstractContextManager[None]:
        """A context in which all call the function on the same samples, one call after another."""

    def largest(self, number: float) -> Tensor:
        """[] float64: the largest number of all workers, on this worker's device."""


class Promise:
    """The functions of one job that have been tested.

    Args:
        model: The job's model.
        batch_sizes: [virtual nodes] samples of each; empty where there is one for the batch. No
            more than the smallest has are called together where memory has no room for more.
        together: Calls the model where no worker can by itself; else None. Memory may then lack
            on one worker alone, so never more are called together.
        fits_passes: Whether a plan fills the device's memory by these passes: never more either.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_sizes: Sequence[int],
        together: JointCalls | None = None,
        *,
        fits_passes: bool = False,
    ) -> None:
        self._model, self._sizes, self._together = model, tuple(batch_sizes), together
        self._is_tight = fits_passes or together is not None
        self._forget()

    def _forget(self) -> None:
        """Begin anew, alike on all workers that call the model together."""
        self._moves = 0 if self._together is None else self._together.moves
        self._tests: dict[Any, _Tests] = {}
        self._looked: list[tuple[int, Counts]] = []
        self._late, self._late_wishes = LateValues(), LateValues()
        self._before: _Step | None = None  # whose numbers are still on a device
        self._wished: _Step | None = None  # of which all workers' wishes are still on a device
        self._said: _Step | None = None  # whose wish is on its way
        self._asked: _Step | None = None  # whose function all test again
        self._asked_node: int | None = None  # and the virtual node that asks for it
        self._form: tuple[_Tests, Callable[..., Any], Batch, ReturnForm] | None = (
            None  # of this step
        )
        self._nothing = torch.zeros(())  # on this worker's device
        self._is_late: bool | None = None  # whether a worker reads numbers late; all alike

    def _of(self, function: Callable[..., Any]) -> _Tests:
        key = _key(function)
        found = self._tests.get(key)
        if found is None:
            found = self._tests[key] = _Tests()
        return found

    def test(
        self, function: Callable[..., Any], batch: Batch, form: ReturnForm
    ) -> TargetError | None:
        """Test a function on a batch's first samples, if that is due in this step.

        Returns:
            What to raise after the step, where the function fails on a few samples: if it fails
            on all of the batch too, its own error comes first.

        Raises:
            TargetError: Its loss is not the mean of the losses of its parts.
        """
        if self._together is not None and self._together.moves != self._moves:
            self._forget()
        tests = self._of(function)
        tests.steps += 1
        self._looked.clear()
        self._form = tests, function, batch, form
        if tests.steps < tests.due or batch.num_samples < 2 or batch.first_samples is None:
            return None
        most = min(batch.num_samples, _MOST_SAMPLES)
        if self._is_tight:
            most = min(most, max(2, min(self._sizes, default=most)))
        return self._test(function, batch, form, 0, cut_of(most))

    def look(self, loss: Tensor, item: Pass) -> None:
        """Look at the loss of a pass, before its backward pass."""
        self._looked.append((item.virtual_node, counts_of(loss, item.num_samples)))

    def wishes(self) -> list[float]:
        """[virtual nodes] 1 for a pass of this worker after which its loss is to be tested again.

        Call it at the end of a step's passes; the sums of all workers' are to be heard by ``hear``.
        On a device the numbers are read in the next step, so that the host need not wait.
        """
        together, own = self._together, self._step()
        assert together is not None
        if self._is_late is None:
            self._nothing = together.largest(0)
            is_host = backend_of(self._nothing.device).is_host
            self._is_late = bool(together.largest(not is_host))
        arrived: Sequence[float] | None = ()
        self._said = own
        if self._is_late:
            waiting = own.on_device or [self._nothing]
            arrived = self._late.exchange(_row_of(waiting))
            self._said, self._before = self._before, own
        node = self._unlike(self._said, arrived)
        return [float(number == node) for number in range(max(len(self._sizes), 1))]

    def hear(self, wishes: Sequence[float] | Tensor) -> None:
        """Take the sums of all workers' wishes; on devices those of the step before."""
        self._asked, told = self._said, wishes
        # On devices a function is tested again two steps after the pass that was unlike: its number
        # is read one step late, and the sum of the wishes another. All workers are late alike, so
        # they call the model for the test in the same step.
        if self._is_late:
            self._asked, self._wished = self._wished, self._said
            told = self._late_wishes.exchange(torch.as_tensor(wishes).double()) or ()
        self._asked_node = next((node for node, flag in enumerate(told) if flag), None)

    def _step(self) -> _Step:
        assert self._form is not None
        step = _Step(*self._form, tuple(self._looked))
        self._looked.clear()
        return step

    def check(self) -> None:
        """Test a function again where a loss of the step was divided by another number.

        On a device these numbers are read in the next step, so that the host need not wait.

        Raises:
            TargetError: The loss of these samples is not the mean of the losses of its parts.
        """
        if self._together is not None:
            self._form = None
            self._test_again(self._asked, self._asked_node)
            return
        assert self._form is not None
        if self._form[0].are_usual(self._looked):
            self._form = None
            self._looked.clear()
            return
        step = self._step()
        self._form = None  # a batch holds its loader's processes
        if not step.on_device:
            self._test_again(step, self._unlike(step, ()))
        else:
            arrived = self._late.exchange(_row_of(step.on_device))
            before, self._before = self._before, step
            self._test_again(before, self._unlike(before, arrived))

    def finish(self) -> None:
        """Check the last step's numbers, where they are still on a device.

        Raises:
            TargetError: As ``check``.
        """
        arrived, before, together = self._late.take(), self._before, self._together
        node = self._unlike(before, arrived)
        # On devices two tests may be left: of the wishes that were summed last, and of the numbers
        # of the last step, of which nobody has heard yet.
        if together is not None and self._is_late:
            wished = self._late_wishes.take() or ()
            asked = next((number for number, flag in enumerate(wished) if flag), None)
            self._test_again(self._wished, asked)
            node = int(together.largest(-1 if node is None else node))
            node = None if node < 0 else node
        if together is None or self._is_late:
            self._test_again(before, node)

    def _unlike(self, step: _Step | None, arrived: Sequence[float] | None) -> int | None:
        """The first virtual node whose loss was divided by another number, if that is known."""
        if step is None or arrived is None or not step.looked:
            return None
        number = step.tests.unlike(step.with_numbers(arrived))
        return None if number is None else step.looked[number][0]

    def _test_again(self, step: _Step | None, node: int | None) -> None:
        if step is None or node is None or step.batch.first_samples is None:
            return
        batch = step.batch
        # As training cuts: with the virtual node beside it.
        cuts = slices(batch.num_samples, self._sizes or (batch.num_samples,))
        own, taken = cuts[node], [cut for cut in cuts if cut[1] > cut[0]]
        first = max(taken.index(own) - 1, 0)
        (start, middle), (_, end) = taken[first], taken[min(first + 1, len(taken) - 1)]
        if end - start < 2:
            return
        cut = cut_of(end - start, middle - start)
        failure = self._test(step.function, batch, step.form, start, cut)
        if failure is not None:
            raise failure

    def _test(
        self, function: Callable[..., Any], batch: Batch, form: ReturnForm, start: int, cut: Cut
    ) -> TargetError | None:
        try:
            failure = lacking = self._tried(function, batch, form, start, cut)
        except TargetError as error:
            lacking = error
            if not self._tries_fewer or not _lacks_memory(error):
                raise
        if self._tries_fewer and lacking is not None and _lacks_memory(lacking):
            # Passes without gradients over more samples than a virtual node has may not fit.
            cut = cut_of(min(sum(cut), max(2, min(self._sizes))))
            failure = self._tried(function, batch, form, start, cut)
        return failure

    @property
    def _tries_fewer(self) -> bool:
        return bool(self._sizes) and not self._is_tight

    def _tried(
        self, function: Callable[..., Any], batch: Batch, form: ReturnForm, start: int, cut: Cut
    ) -> TargetError | None:
        assert batch.first_samples is not None
        together = self._together
        with streams_kept(), nullcontext() if together is None else together.trying():
            ranges = ranges_of(cut)
            found = batch.first_samples([(start + a, start + b) for a, b in ranges])
            inputs = dict(zip(ranges, found, strict=True))
            calls = LossTrial(function, self._model, inputs, form, partial(called, function))
            is_first = self._of(function).tries == 0
            is_telling, failure = calls.judge(cut, batch.num_samples, in_training=is_first)
        if together is not None:  # unlike devices round, and the next test is due on all alike
            is_telling = not bool(together.largest(not is_telling))
        self._of(function).note(sum(cut), is_told=is_telling)
        return failure

    def test_after_model(
        self,
        function: Callable[..., Any],
        inputs: Any,
        outputs: Any,
        num_samples: int,
        answer: Any,
        answering: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    ) -> None:
        """Test a function on the model's outputs of a microbatch: a pipeline's last stage has them.

        Samples are rows there. Where an input or output has no row for each sample, nothing is
        tested; neither where the function fails on fewer rows. What is divided by on a device is
        not looked at, for the host would wait.

        Raises:
            TargetError: Its loss is not the mean of the losses of its parts.
        """
        tests = self._of(function)
        tests.steps += 1
        counts = counts_of(loss_and_weight(answer)[0], num_samples)
        is_unlike = not counts.on_device and tests.unlike([counts]) is not None
        is_due = tests.steps >= tests.due or is_unlike
        if num_samples < 2 or not is_due:
            return
        if not all(has_rows(leaf, num_samples) for leaf in tree_leaves((inputs, outputs))):
            return

        def call(given: tuple[Any, Any]) -> Any:
            with answering(lambda *_, **__: given[1]):
                return called(function, given[0])

        cut = cut_of(min(num_samples, _MOST_SAMPLES) if not is_unlike else num_samples)
        with streams_kept():
            given = {
                part: tree_map(lambda t, rows=slice(*part): t[rows].detach(), (inputs, outputs))
                for part in ranges_of(cut)
            }
            calls = LossTrial(function, self._model, given, ReturnForm(), call)
            is_telling, _ = calls.judge(cut, num_samples)
        tests.note(_MOST_SAMPLES, is_told=is_telling)


def _row_of(numbers: Sequence[Tensor]) -> Tensor:
    """[numbers] on their device; one alone takes no kernel."""
    return numbers[0].reshape(1) if len(numbers) == 1 else torch.stack([*numbers]).double()


def _lacks_memory(error: TargetError) -> bool:
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _key(function: Any) -> Any:
    """What stands for a function that the script may define anew in every step."""
    while (inner := getattr(function, "__func__", getattr(function, "func", None))) is not None:
        function = inner
    if hasattr(function, "__wrapped__"):
        function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or type(function)
