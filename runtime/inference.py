"""Inference with virtual nodes (VirtualFlow 1.3): a large batch on few devices, outputs in order.

Each global batch is cut into the virtual nodes' shares, as in training, so a device holds the
activations of one share at a time, and the passes (and their bits) are the same on any mapping.
Each worker runs its own shares of a global batch; then their outputs travel, one pass after
another, to where the script reads them.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schema.errors import TargetError
from . import checkpoint
from .data import PassSampler, feed
from .shares import share_out
from .streams import seed_streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from .group import Place
    from .job import Job

# Streams of samples are keyed by epoch; predictions draw alike in every call.
PREDICTION_EPOCH = -1


class Prediction:
    """One call of ``job.predict``: iterate it once, on all workers.

    Args:
        job: The job; its merged buffers are in the model.
        sampler: This worker's passes, with their order.
        passes: The loader of these passes.
        function: What the script computes of a pass.
        on_all: Whether every worker gets the outputs, or the main one only.
    """

    def __init__(
        self,
        job: "Job",
        sampler: PassSampler,
        passes: "DataLoader[Any]",
        function: Callable[..., Any],
        *,
        on_all: bool,
    ) -> None:
        self._job, self._sampler, self._passes = job, sampler, passes
        self._function, self._on_all = function, on_all
        self._place = job._place
        self._steps = job.num_steps

    def __iter__(self) -> Iterator[Any]:
        source = feed(iter(self._passes), self._job.device)
        for step in range(self._sampler.num_steps):
            if not self._all_go_on(True):
                return
            outputs = self._outputs(step, source)
            try:
                for item in outputs:
                    if self._on_all or self._job.is_main:
                        yield item
            except GeneratorExit:
                for _ in outputs:  # what the others send of this batch
                    pass
                self._all_go_on(False)
                raise
            if self._job.num_steps != self._steps:
                raise TargetError(
                    "the job took a step inside a loop over job.predict",
                    hint="finish the loop first; list(job.predict(...)) does",
                )

    def _all_go_on(self, own: bool) -> bool:
        """Whether no worker has left the loop: who leaves ends it for all."""
        if not self._place.distributed or self._job._finished:
            return own
        flag = torch.tensor(int(own), device=self._job.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _outputs(self, step: int, source: Iterator[Any]) -> Iterator[Any]:
        """The outputs of a global batch in order of its samples, wherever they are wanted."""
        job, sampler = self._job, self._sampler
        num_samples, passes = sampler.passes(step)
        own: dict[int, tuple[bytes, list[Tensor]]] = {}
        with self._evaluating():
            for item in passes:
                own[item.virtual_node] = self._run(step, item.virtual_node, next(source))
        # The workers ran unlike passes, and the script may draw now.
        seed_streams(job._seed, "predicted", job.num_steps, step)
        shares = share_out(num_samples, sampler.batch_sizes)
        for node in (node for node, share in enumerate(shares) if share):
            header, tensors = own.pop(node, (b"", []))
            holder = job._place_of_nodes[node]
            if self._place.distributed:
                header, tensors = deliver(header, tensors, holder, self._place, on_all=self._on_all)
            if header:
                yield checkpoint.decode(json.loads(header)["outputs"], tensors)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model, training = self._job._model, self._job._model.training
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train(training)

    def _run(self, step: int, node: int, inputs: Any) -> tuple[bytes, list[Tensor]]:
        seed_streams(self._job._seed, "predict", step, node)
        many = isinstance(inputs, tuple | list)
        answer = self._function(*inputs) if many else self._function(inputs)
        tensors: list[Tensor] = []
        encoded = checkpoint.encode(answer, tensors, "output")
        kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        for kind, _ in kinds:
            if kind not in checkpoint.DTYPES:
                raise TargetError(f"job.predict cannot carry a tensor of dtype {kind}")
        return json.dumps({"outputs": encoded, "tensors": kinds}).encode(), tensors


def deliver(
    header: bytes, tensors: list[Tensor], holder: int, place: "Place", *, on_all: bool
) -> tuple[bytes, list[Tensor]]:
    """Bring a pass's outputs from the worker that ran it to the main one, or to all.

    Returns:
        The outputs; nothing where they are not wanted.
    """
    if not on_all and holder == 0:
        return header, tensors
    if not on_all and place.rank not in (0, holder):
        return b"", []
    on_wire = place.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def carry(tensor: Tensor) -> Tensor:
        tensor = tensor.to(on_wire)
        if on_all:
            dist.broadcast(tensor, src=holder)
        elif place.rank == holder:
            dist.send(tensor, dst=0)
        else:
            dist.recv(tensor, src=holder)
        return tensor.cpu()

    if place.rank == holder:
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        parts += [_as_bytes(tensor) for tensor in tensors]
        # Gloo takes a message of another length than its buffer for an error, or for none.
        carry(torch.tensor([len(header), sum(len(part) for part in parts)]))
        carry(torch.cat(parts))
        return (header, tensors) if on_all else (b"", [])
    lengths = carry(torch.zeros(2, dtype=torch.int64)).tolist()
    message = carry(torch.empty(lengths[1], dtype=torch.uint8))
    header = message[: lengths[0]].numpy().tobytes()
    return header, _split(message[lengths[0] :], json.loads(header)["tensors"])


def _split(data: Tensor, kinds: list[tuple[str, list[int]]]) -> list[Tensor]:
    tensors, at = [], 0
    for name, shape in kinds:
        tensor = torch.empty(shape, dtype=checkpoint.DTYPES[name])
        size = tensor.numel() * tensor.element_size()
        _as_bytes(tensor).copy_(data[at : at + size])
        tensors.append(tensor)
        at += size
    return tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
