"""The passes that a script's own loop runs: the parts of a batch, one round after another.

In a round the script gets each part of a batch that this worker has, one for each virtual node,
and gives its loss back. The last one's backward pass overlaps with the sums over the workers, as in
a step that calls a function. A batch may have several rounds, as for a GAN's models or for SAM: the
first counts as a step.

Under all this the script's loop runs once. So a round cannot be repeated when another worker is
lost, and a loss cannot be called on a few samples for a trial: see promise/loops.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..schema.errors import TargetError
from .agreement.agreement import Agreement
from .data import Batch, Pass
from .engine import Runner, Step
from .promise.loops import LoopLosses
from .session import Session
from .split_engine import SplitEngine
from .totals import Weighted, loss_and_weight

_PARTS = "for x, y in job.parts(batch): job.backward(criterion(model(x), y))"


@dataclass(slots=True)
class _Round:
    """A round that has begun."""

    step: Step
    is_whole: bool  # whether the script took the batch as one part, without ``job.parts``
    given: int = 0  # the parts whose losses have come
    item: Pass | None = None  # the pass that runs; None on a worker without samples
    running: ExitStack = field(default_factory=ExitStack)  # what is undone when the pass ends
    runs: bool = False
    seen: list[object] = field(default_factory=list)  # of the gradients when the runtime left them

    @property
    def num_parts(self) -> int:
        # A worker without samples has one too: the script's loop runs on it all the same.
        return max(len(self.step.batch.passes), 1)


class JobRounds:
    """The rounds of one job."""

    def __init__(
        self,
        session: Session,
        engine: SplitEngine | None,
        runner: Runner,
        agreement: Agreement,
        begin_step: Callable[[], None],
        *,
        tests: bool,
    ) -> None:
        self._session, self._split, self._runner = session, engine, runner
        self._agreement, self._begin_step = agreement, begin_step
        self._losses = LoopLosses(session.model) if tests else None
        self._open: _Round | None = None

    @property
    def _engine(self) -> SplitEngine:
        if self._split is None:
            raise TargetError(
                "under a pipeline no worker runs whole passes, so a loop of the script's own "
                "cannot run them",
                hint="for batch in job.batches(loader): job.backward(lambda x, y: loss(model(x), "
                "y), batch); or solve for a split plan",
            )
        return self._split

    def parts(self, batch: Batch) -> Iterator[Any]:
        """Yield this worker's parts of a batch; the loop's body gives the loss of each."""
        self._engine.check_loops()
        self._runner.runs_passes(resizes=True)
        return self._each(batch)

    def _each(self, batch: Batch) -> Iterator[Any]:
        held = self._begin(batch, is_whole=False)
        for item, inputs in self._passes_of(batch):
            self._enter(held, item, inputs)
            # The script's loop body runs at the yield, with the pass open. ``backward`` ends it.
            try:
                yield inputs
            finally:  # the loop may be left here
                self._leave_losses()
            if held.runs:
                raise TargetError(
                    "a part of job.parts(batch) has no loss: the other workers would wait for it",
                    hint="call job.backward(loss) once for each part; hf.Weighted(loss, 0) leaves "
                    "one out",
                )

    def samples(self, batch: Batch) -> Any:
        """A batch's samples, where every worker has one part of it: its pass begins."""
        self._engine.check_loops()
        most = max(Counter(self._session.holders).values())
        if most > 1:
            raise TargetError(
                f"a device of this plan has {most} virtual nodes, so its batch comes in as many "
                f"parts",
                hint=_PARTS,
            )
        self._runner.runs_passes(resizes=False)
        held = self._begin(batch, is_whole=True)
        item, inputs = next(self._passes_of(batch))
        self._enter(held, item, inputs)
        return inputs

    def _passes_of(self, batch: Batch) -> Iterator[tuple[Pass | None, Any]]:
        if batch.passes:
            yield from batch.again()
            return
        # A worker without samples runs the script's loop too, on samples that do not count. Two,
        # because a batch norm cannot take one.
        assert batch.first_samples is not None
        yield None, batch.first_samples([(0, min(2, batch.num_samples))])[0]

    def _begin(self, batch: Batch, *, is_whole: bool) -> _Round:
        agreement = self._agreement
        self._begin_step()
        if self._open is not None:
            raise self._unfinished()
        if batch.is_over:
            raise TargetError(
                "this batch is over: the loop has gone on to the next one",
                hint="run its passes in the body of: for batch in job.batches(loader)",
            )
        agreement.begin_step(self._session.num_steps, batch.epoch)
        # Until ``close``, gradients are of some parts: an optimizer that steps now is refused.
        agreement.withhold()
        step = Step(_no_function, batch, None, agreement, round=batch.num_rounds, has_run=True)
        self._engine.begin(step)
        self._open, batch.is_open = _Round(step, is_whole), True
        return self._open

    def _unfinished(self) -> TargetError:
        return TargetError(
            "the loop over job.parts(batch) was left before its last part",
            hint="give every part's loss: the other workers wait for it",
        )

    def _enter(self, held: _Round, item: Pass | None, inputs: Any) -> None:
        engine = self._engine
        self._check_untouched(held)
        held.item, held.runs = item, True
        held.running.enter_context(
            engine.looping_idly() if item is None else engine.looping(held.step, item)
        )
        # A pass that begins moves sums by itself, or makes room where gradients were reduced.
        held.seen = engine.reducer.seen
        if self._losses is not None:
            self._losses.begin(inputs, item.num_samples if item is not None else 0)

    def _check_untouched(self, held: _Round) -> None:
        """Refuse gradients that are others than those that the runtime left in this round."""
        if held.given and held.seen != self._engine.reducer.seen:
            raise TargetError(
                "the script clears or changes gradients between two parts of a batch",
                hint="call optimizer.zero_grad() before the loop over job.parts(batch), or after "
                "optimizer.step()",
            )

    def backward(
        self,
        answer: Any,
        *,
        scaler: "torch.amp.GradScaler | None",
        weight: Any,
        per_virtual_node: bool,
    ) -> tuple[Tensor, Step | None]:
        """Take the loss of the pass that runs; see ``Job.backward``.

        Returns:
            The mean loss so far [], and the step if this was its last pass; ``close`` ends that.
        """
        held = self._open
        if held is None or not held.runs:
            raise TargetError(
                "job.backward got a loss, and no part of a batch waits for one",
                hint="each part takes one: add losses up; for several backward passes on a batch "
                f"(a GAN, SAM, LBFGS) loop over its parts for each: {_PARTS}",
            )
        if weight is not None:
            answer = Weighted(answer, weight)
        self._leave_losses()
        loss, stated = loss_and_weight(answer)
        engine, item = self._engine, held.item
        self._check_untouched(held)
        if not held.given:
            engine.reducer.take_earlier()
        held.given, held.runs = held.given + 1, False
        held.step = replace(held.step, scaler=scaler)
        is_last = held.given == held.num_parts
        if item is None:
            held.running.close()
            mean = loss.detach().double()
        else:
            if self._losses is not None and per_virtual_node:
                self._losses.ignore()
            elif self._losses is not None:
                sizes = (item.num_samples, held.step.batch.num_samples)
                self._losses.check(loss, sizes, has_weight=stated is not None)
            # The pass's contexts end with its backward pass, or with the error that it raises.
            with held.running.pop_all():
                mean = engine.give(held.step, item, answer, last=is_last)
        if not is_last:
            held.seen = engine.reducer.seen
            return mean, None
        engine.end(held.step)
        return mean, held.step

    def close(self, step: Step) -> None:
        """End a round whose gradients are there."""
        step.batch.num_rounds += 1
        self._open, step.batch.is_open = None, False
        self._agreement.release()

    def _leave_losses(self) -> None:
        if self._losses is not None:
            self._losses.leave()

    def leave(self) -> None:
        """Leave a batch: drop the pass of one that was only looked at.

        Raises:
            TargetError: Only some of its parts have losses.
        """
        held, self._open = self._open, None
        if held is None:
            return
        self._leave_losses()
        if not held.is_whole:
            raise self._unfinished()
        self._engine.drop()


def _no_function(*_: Any) -> Any:
    raise AssertionError("the script's loop has run the passes")
