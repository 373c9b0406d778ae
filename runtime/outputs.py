"""What virtual nodes' passes give besides gradients, brought together in order of the samples.

So that other workers read it: predictions (``job.predict``), a loss over the outputs of a whole
batch (``over_batch=``), other values (``has_aux=``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..devices.collectives import wire_device
from ..schema.errors import TargetError
from . import peers
from .buffers import VirtualNodeBuffers
from .data import PassSampler, called, feed, to_device
from .determinism import seed_streams
from .engine import Runner
from .group import Place
from .session import Session
from .totals import check_has_graph, loss_and_weight
from .virtual_nodes import share_out
from .wire import Message, carried

# Bring what each virtual node's pass gave to other workers, in order of the samples.


def message_of(value: Any) -> Message:
    """The tensors and plain values that a pass gave, ready to be sent.

    Raises:
        TargetError: A value is no plain data, or a tensor has a dtype that cannot be sent.
    """
    return Message.of(
        value, "output", strange="a virtual node's output cannot be a tensor of dtype {}"
    )


def in_order(
    own: Mapping[int, Message],
    nodes: Sequence[int],
    holders: Sequence[int],
    place: Place,
    *,
    waiting: Callable[[], AbstractContextManager[None]],
    on_all: bool = True,
) -> list[Any]:
    """Bring what virtual nodes gave to all workers, or to the main one. Call it on all workers.

    ``own`` are by virtual node. ``nodes`` are those that gave something on any worker, in order of
    their samples, and ``holders`` [virtual nodes] the rank that ran each.

    Returns:
        What each node gave, in order, with tensors on the host; empty where not wanted.
    """
    found = []
    for node in nodes:
        message = own.get(node)
        if place.distributed:
            with waiting():
                message = _delivered(message, holders[node], place, on_all=on_all)
        if message is not None:
            found.append(message.value())
    return found


def _delivered(
    message: Message | None, holder: int, place: Place, *, on_all: bool
) -> Message | None:
    """Send a pass's outputs from the worker that ran it to the main worker, or to all."""
    if not on_all and (holder == 0 or place.rank not in (0, holder)):
        return message
    on_wire = wire_device(place.device)

    def carry(tensor: Tensor) -> Tensor:
        tensor = tensor.to(on_wire)
        if on_all:
            peers.broadcast(tensor, src=holder)
        elif place.rank == holder:
            peers.send(tensor, dst=0)
        else:
            peers.receive(tensor, src=holder)
        return tensor.cpu()

    if place.rank == holder:
        assert message is not None
        carried(message, carry)
        return message if on_all else None
    found = carried(None, carry)
    # The script keeps outputs: one of them must not keep the memory of all.
    return Message(found.header, [tensor.clone() for tensor in found.tensors])


# Inference with virtual nodes (VirtualFlow 1.3): a large batch on few devices, outputs in order.
#
# Each global batch is cut into the virtual nodes' shares, as in training. So a device holds the
# activations of one share at a time, and the passes and their bits are equal on every mapping. Each
# worker runs its own shares of a global batch; then their outputs are sent, one pass after another,
# to the workers on which the script reads them.
#
# A global batch is one operation of all workers (elastic/member.py). If a worker dies, the
# survivors run its virtual nodes' shares again. An operation begins with an agreement on the
# batch's number: a worker that replaces a dead main worker has received no outputs, so all begin at
# batch 0 again.

# Random streams of samples are keyed by epoch; predictions draw the same in every call.
PREDICTION_EPOCH = -1

_LEAVES = -1  # in place of a step: a worker has left its loop over the outputs


@contextmanager
def evaluating(model: nn.Module, calls: AbstractContextManager[None]) -> Iterator[nn.Module]:
    """Enter a model in evaluation mode, without gradients, with a context for its calls."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), calls:
            yield model
    finally:
        model.train(training)


class PredictedOutputs:
    """One call of ``job.predict``: iterate it once, on all workers.

    ``together`` is for workers that call the model together: a context for these calls, and the
    first sample of a global batch, for a worker that has fewer passes of it than another.
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
        together: tuple[Callable[[], AbstractContextManager[None]], Callable[[int], Any]] | None,
    ) -> None:
        self._together = together
        self._session, self._runner, self._buffers = session, runner, buffers
        self._sampler, self._passes = sampler, passes
        self._function, self._on_all = function, on_all
        self._place = session.place
        self._merged = {slot.name: slot.current() for slot in buffers.slots}
        self._steps = session.num_steps
        self._given, self._got_outputs = 0, False
        self._source: Iterator[Any] = iter(())
        self._source_step: int | None = None
        self._own: dict[tuple[int, int], Message] = {}
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
        if not self._place.distributed or self._session.is_finished:
            return number
        least = torch.tensor(number, device=self._session.device)
        with self._runner.waiting():
            peers.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def _gather(self, step: int) -> list[Any]:
        """The outputs of a global batch in order of its samples; empty where not wanted."""
        session, sampler = self._session, self._sampler
        num_samples, _, passes, _ = sampler.cut(step)
        if self._source_step != step:
            sampler.first_step, self._source = step, feed(iter(self._passes), session.device)
        self._source_step = None
        own = {key: output for key, output in self._own.items() if key[0] == step}
        self._own = own
        shares = share_out(num_samples, sampler.batch_sizes)
        calls = self._together[0]() if self._together else nullcontext()
        with evaluating(session.model, calls):
            for item in passes:
                inputs, key = next(self._source), (step, item.virtual_node)
                if key not in own:  # else it was computed before another worker was lost
                    own[key] = self._run(step, item.virtual_node, inputs)
            # Each call has collectives, so all workers call equally often; what a worker calls
            # beyond its own passes is dropped.
            if self._together is not None:
                numbers = Counter(compress(session.holders, shares))
                for _ in range(max(numbers.values()) - len(passes)):
                    self._run(step, 0, self._together[1](step))
        self._source_step = step + 1
        # The workers ran different passes; seed again, because the script may draw now.
        seed_streams(session.seed, "predicted", session.num_steps, step)
        return in_order(
            {node: output for (_, node), output in own.items()},
            [node for node, share in enumerate(shares) if share],
            session.holders,
            self._place,
            waiting=self._runner.waiting,
            on_all=self._on_all,
        )

    def _run(self, step: int, node: int, inputs: Any) -> Message:
        seed_streams(self._session.seed, "predict", step, node)
        return message_of(called(self._function, inputs))


# The loss of a whole batch's outputs, in two passes (gradient caching, Gao et al. 2021).
#
# A loss that compares samples with each other is no mean over samples. Its gradient is exact by the
# chain rule: ``d loss / d parameters`` is the sum over samples of ``d loss / d outputs`` times ``d
# outputs / d parameters``. The first pass computes every virtual node's outputs without graphs. All
# workers get all outputs, in order of the samples, and compute the loss and its gradient by them.
# The second pass runs each virtual node again, with the same random draws, and goes back from its
# outputs with its slice of that gradient.


class OutputsOfBatch:
    """The outputs of a global batch on this worker, and the gradient of the loss by them.

    Args:
        outputs: [virtual nodes with samples] what the function gave for each, in order.
        device: Where the loss is computed.

    Raises:
        TargetError: The outputs of virtual nodes cannot be joined.
    """

    def __init__(self, outputs: Sequence[Any], device: torch.device) -> None:
        rows = [tree_flatten(to_device(output, device)) for output in outputs]
        self._spec = rows[0][1]
        try:
            joined = [
                torch.cat(column) if isinstance(column[0], Tensor) else column[0]
                for column in zip(*(leaves for leaves, _ in rows), strict=True)
            ]
        except (RuntimeError, ValueError, TypeError) as error:
            raise TargetError(
                f"the outputs of virtual nodes cannot be joined: {error}",
                hint="with over_batch=, outputs have one shape for each sample, whatever the batch",
            ) from None
        self._leaves = [
            leaf.requires_grad_()
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            else leaf
            for leaf in joined
        ]
        self._gradients: list[Tensor | None] = []

    def differentiate(
        self, over_batch: Any, scaler: "torch.amp.GradScaler | None", *, keeps: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of all outputs, and its gradient by them.

        With a scaler gradients are those of the scaled loss. ``keeps`` says whether ``backward`` of
        the returned loss follows.

        Returns:
            The loss [], detached; and the (scaled) loss with its graph, for the gradients of
            parameters that ``over_batch`` itself reads.

        Raises:
            TargetError: The function returned no scalar loss, or one without a gradient.
        """
        outputs = tree_unflatten(self._leaves, self._spec)
        loss, weight = loss_and_weight(called(over_batch, outputs))
        if weight is not None:
            raise TargetError("the loss over a whole batch has no weight: return the loss alone")
        check_has_graph(loss)
        scaled = scaler.scale(loss) if scaler is not None else loss
        wanted = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = iter(torch.autograd.grad(scaled, wanted, retain_graph=keeps, allow_unused=True))
        self._gradients = [
            next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            for leaf in self._leaves
        ]
        return loss.detach(), scaled

    def roots(self, answer: Any, start: int) -> tuple[list[Tensor], list[Tensor]]:
        """What to go back from in a virtual node's second pass, and the gradients there.

        ``start`` is where its samples begin among those of the batch.
        """
        roots, gradients = [], []
        for leaf, gradient in zip(tree_flatten(answer)[0], self._gradients, strict=True):
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                roots.append(leaf)
                gradients.append(gradient[start : start + len(leaf)].to(leaf.dtype))
        return roots, gradients
