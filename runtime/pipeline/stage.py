"""One stage's passes over microbatches, and the tensors kept between forward and backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from .cores import AttentionCores
from .cut import StageModule
from .layered import writes

Weights = dict[str, Tensor]
# Each a tensor or a GradientEdge; torch's stubs only know lists of one kind.
Roots = list[Any]

# Before torch 2.7 a backward pass can start from tensors only.
_TAKES_EDGES = "GradientEdge" in str(torch.autograd.backward.__annotations__)


@dataclass(slots=True)
class _Kept:
    """A microbatch in flight: its inputs as leaves, and the results that are differentiated."""

    inputs: list[Tensor]
    results: Roots
    gradients: list[Tensor] | None = None  # of the results; None: ones, of a loss


class Stage:
    """Runs one stage, and holds the activations of the microbatches in flight.

    Args:
        part: The stage's part of the model.
        recompute: Whether activations are recomputed in the backward pass.
        recompute_cores: Whether those of attention cores are (cores.py).
        device: The device of its passes.
        passing: Makes a context for every forward or backward pass, and inside a backward pass for
            each recomputation of the stage.
    """

    def __init__(
        self,
        part: StageModule,
        *,
        recompute: bool,
        recompute_cores: bool = False,
        device: torch.device,
        passing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.part, self._passing = part, passing
        self.parameters = dict(part.module.named_parameters())
        self._recompute, self._device = recompute, device
        self._cores = AttentionCores if recompute_cores else nullcontext
        self._in_flight: dict[int, _Kept] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        self.most_in_flight = 0
        modules = list(part.module.modules())
        self._in_place = any(getattr(module, "inplace", False) for module in modules) or any(
            writes(node) for node in part.nodes
        )
        self._buffered = [m for m in modules if any(b is not None for b in m._buffers.values())]

    def forward(
        self,
        microbatch: int,
        arguments: dict[str, Any],
        received: tuple[tuple[Any, ...], tuple[bool, ...]],
        weights: Weights | None,
    ) -> Any:
        """Run the stage on one microbatch; then ``keep`` takes what is to be differentiated."""
        leaves, values = self._leaves_of(*received)
        own = [arguments[name] for name in self.part.arguments]
        self._leaves[microbatch] = leaves
        self.part.refresh_buffers()
        inputs = (*own, *values)
        if self._recompute:
            call = partial(self._call, weights)
            return checkpoint(call, *inputs, use_reentrant=False, context_fn=self._contexts)
        return self._call(weights, *inputs)

    def _leaves_of(
        self, values: tuple[Any, ...], wants: tuple[bool, ...]
    ) -> tuple[list[Tensor], list[Any]]:
        leaves, passed = [], []
        for value, wanted in zip(values, wants, strict=True):
            if isinstance(value, Tensor):
                value = value.to(self._device)
                if wanted:
                    leaf = value.detach().requires_grad_()
                    leaves.append(leaf)
                    value = leaf
            passed.append(value)
        return leaves, passed

    def _call(self, weights: Weights | None, *inputs: Any) -> Any:
        part = self.part
        # In-place layers must not write to a leaf, or to inputs that are recomputed from.
        own = tuple(_copied(value) for value in inputs) if self._in_place else inputs
        with self._cores(), self._passing():
            if weights is None:
                return part.answer(part.module(*own))
            return part.answer(torch.func.functional_call(part.module, weights, own))

    def _contexts(self) -> tuple[Any, Any]:
        return nullcontext(), _KeptBuffers(self._buffered)

    def keep(self, microbatch: int, results: tuple[Any, ...]) -> None:
        """Keep the start of a microbatch's backward pass; the outputs' values can be freed."""
        roots = [_root(r) for r in results if isinstance(r, Tensor) and r.requires_grad]
        self._in_flight[microbatch] = _Kept(self._leaves.pop(microbatch), roots)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def backward(self, microbatch: int, gradients: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Run the whole backward pass; parameters' gradients add up in their leaves.

        Args:
            microbatch: Number of the microbatch.
            gradients: Gradients of the results, in order; None for a loss.

        Returns:
            Gradients of the stage's inputs, in order; None for an input without one.
        """
        kept = self._in_flight.pop(microbatch)
        with self._passing():
            torch.autograd.backward(*self._start(kept, gradients))
        return tuple(leaf.grad for leaf in kept.inputs)

    def backward_input(self, microbatch: int, gradients: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Compute only the inputs' gradients (zero-bubble schedules); see ``backward``."""
        kept = self._in_flight[microbatch]
        kept.results, kept.gradients = self._start(kept, gradients)
        if not kept.inputs or not kept.results:
            return tuple(None for _ in kept.inputs)
        with self._passing():
            return torch.autograd.grad(
                kept.results, kept.inputs, kept.gradients, retain_graph=True, allow_unused=True
            )

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weights' gradients of a microbatch whose input gradients are done."""
        kept = self._in_flight.pop(microbatch)
        leaves = [p for p in self.parameters.values() if p.requires_grad]
        if kept.results and leaves:
            with self._passing():
                torch.autograd.backward(kept.results, kept.gradients, inputs=leaves)

    def _start(
        self, kept: _Kept, gradients: tuple[Any, ...] | None
    ) -> tuple[Roots, list[Tensor] | None]:
        if gradients is None:
            return kept.results, None
        pairs = [
            (result, gradient.to(self._device))
            for result, gradient in zip(kept.results, gradients, strict=True)
            if gradient is not None
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def parameters_of(stages: "list[StageModule]") -> list[set[nn.Parameter]]:
    """[stages] the parameters that each uses; one that is in several stages is tied."""
    return [set(stage.module.parameters()) for stage in stages]


class _KeptBuffers:
    """Restores batch-norm's statistics after a recomputation, which would count them twice.

    Enter it once for each recomputation: a backward pass in two halves recomputes twice.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._before: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [dict(module._buffers) for module in self._modules]
        for module in self._modules:
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.clone()

    def __exit__(self, *raised: object) -> None:
        for module, buffers in zip(self._modules, self._before, strict=True):
            module._buffers.update(buffers)


def _root(result: Tensor) -> Tensor | GradientEdge:
    """The start of a backward pass: a loss, or the graph's edge of an output without its values."""
    return get_gradient_edge(result) if _TAKES_EDGES and result.numel() > 1 else result


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
