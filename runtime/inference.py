"""Inference with virtual nodes (VirtualFlow 1.3): a large batch on few devices, outputs in order.

Each global batch is cut into the virtual nodes' shares, as in training. So a device holds the
activations of one share at a time, and the passes and their bits are equal on every mapping.
Each worker runs its own shares of a global batch; then their outputs are sent, one pass after
another, to the workers on which the script reads them.

A global batch is one operation of all workers (elastic/member.py). If a worker dies, the survivors
run its virtual nodes' shares again. An operation begins with an agreement on the batch's number: a
worker that replaces a dead main worker has received no outputs, so all begin at batch 0 again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..schema.errors import TargetError
from . import peers
from .buffers import VirtualNodeBuffers
from .data import PassSampler, feed
from .gathering import Encoded, encoded, in_order
from .runner import Runner
from .session import Session
from .streams import seed_streams
from .virtual_nodes import share_out

# Random streams of samples are keyed by epoch; predictions draw the same in every call.
PREDICTION_EPOCH = -1

_LEAVES = -1  # in place of a step: a worker has left its loop over the outputs


class Prediction:
    """One call of ``job.predict``: iterate it once, on all workers.

    Args:
        session: The state that the parts of the job share.
        runner: Runs operations that need all workers.
        buffers: The virtual nodes' buffers; the model gets their merged values.
        sampler: This worker's passes, in order.
        passes: The loader of these passes.
        function: The script's function; it computes the outputs of a pass.
        on_all: Whether every worker gets the outputs; else only the main worker does.
    """

    def __init__(
        self,
        session: Session,
        runner: Runner,
        buffers: VirtualNodeBuffers,
        sampler: PassSampler,
        passes: Iterable[Any],
        function: Callable[..., Any],
        *,
        on_all: bool,
    ) -> None:
        self._session, self._runner, self._buffers = session, runner, buffers
        self._sampler, self._passes = sampler, passes
        self._function, self._on_all = function, on_all
        self._place = session.place
        self._merged = {slot.name: slot.current() for slot in buffers.slots}
        self._steps = session.num_steps
        self._given, self._got_outputs = 0, False
        self._source: Iterator[Any] = iter(())
        self._source_step: int | None = None
        self._own: dict[tuple[int, int], Encoded] = {}
        self._outputs: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        num_steps = self._sampler.num_steps
        # The other workers also loop, so that they can take over if the main worker dies.
        while num_steps and 0 <= (step := self._take_part()) < num_steps:
            try:
                yield from self._outputs
            except GeneratorExit:
                self._take_part(leaves=True)
                raise
            if self._session.num_steps != self._steps:
                raise TargetError(
                    "the job took a step inside a loop over job.predict",
                    hint="finish the loop first; list(job.predict(...)) does",
                )
            if self._got_outputs:
                self._given = step + 1

    @property
    def _wants_outputs(self) -> bool:
        return self._on_all or self._session.is_main

    def _take_part(self, *, leaves: bool = False) -> int:
        """Run a global batch with the others; return its number, or one out of range at the end."""
        return self._runner.run(lambda: self._run_batch(leaves=leaves))

    def _run_batch(self, *, leaves: bool) -> int:
        if self._place is not self._session.place:  # of a new generation
            self._place, self._source_step = self._session.place, None
            self._buffers.install(self._merged)
        # A worker that wants no outputs follows the number of the one that does.
        wanted = self._given if self._wants_outputs else self._sampler.num_steps
        step = self._least(_LEAVES if leaves else wanted)
        if 0 <= step < self._sampler.num_steps:
            self._got_outputs, self._outputs = self._wants_outputs, self._gather(step)
            if self._runner.changes:
                self._least(step)  # a barrier: all outputs have arrived before anyone continues
        return step

    def _least(self, number: int) -> int:
        """The minimum of a number over the workers."""
        if not self._place.distributed or self._session.is_finished:
            return number
        least = torch.tensor(number, device=self._session.device)
        with self._runner.waiting():
            peers.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def _gather(self, step: int) -> list[Any]:
        """The outputs of a global batch in order of its samples; empty where not wanted."""
        session, sampler = self._session, self._sampler
        num_samples, passes = sampler.passes(step)
        if self._source_step != step:
            sampler.first_step, self._source = step, feed(iter(self._passes), session.device)
        self._source_step = None
        own = {key: output for key, output in self._own.items() if key[0] == step}
        self._own = own
        with self._evaluating():
            for item in passes:
                inputs, key = next(self._source), (step, item.virtual_node)
                if key not in own:  # else it was computed before another worker was lost
                    own[key] = self._run(step, item.virtual_node, inputs)
        self._source_step = step + 1
        # The workers ran different passes; seed again, because the script may draw now.
        seed_streams(session.seed, "predicted", session.num_steps, step)
        shares = share_out(num_samples, sampler.batch_sizes)
        return in_order(
            {node: output for (_, node), output in own.items()},
            [node for node, share in enumerate(shares) if share],
            session.holders,
            self._place,
            waiting=self._runner.waiting,
            on_all=self._on_all,
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model = self._session.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train(training)

    def _run(self, step: int, node: int, inputs: Any) -> Encoded:
        seed_streams(self._session.seed, "predict", step, node)
        many = isinstance(inputs, tuple | list)
        answer = self._function(*inputs) if many else self._function(inputs)
        return encoded(answer)
