"""One stage's passes over microbatches, and the tensors kept between forward and backward.

Each worker holds the buffers that its own stages use, and no others. A microbatch's buffers belong
to the stage that writes them. A buffer of other stages is replaced by a stand-in of its shape that
takes no memory. Replicas of a stage run different microbatches, so they merge their values with
each other; a worker without the buffer takes no part in that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ...devices.collectives import wire_device
from .. import peers
from ..buffers import AllReduce, BufferSlot, VirtualNodeBuffers, buffer_places, buffers_apart
from ..group import Place, subgroup
from ..nested_tensors import InPieces, storage_key, zeros_for
from .cores import AttentionCores
from .cut import StageModule, may_be_written
from .ownership import Elsewhere, Holders, broadcast, sent_by

# A backward pass in two halves, as zero-bubble schedules run it (Qi et al. 2024, section 2).
#
# The first half computes the gradients of a stage's inputs. Where it passes an operator that
# weights hang on, it keeps the gradient that arrives there. The second half starts at these
# operators, so it computes the weights' gradients and nothing that the first half has computed.


Gradients = tuple[Tensor | None, ...]
# Each a tensor or a GradientEdge; torch's stubs only know lists of one kind.
Roots = list[Any]


@dataclass(slots=True, eq=False)
class _Start:
    """An operator at which the second half starts, and the gradients of its results."""

    node: Node
    weights: set[Tensor] = field(default_factory=set)
    arrived: Gradients = ()

    def keep(self, arrived: Gradients) -> None:
        """Note what arrives in the first half."""
        self.arrived = arrived

    def again(self, _: Gradients) -> Gradients:
        """What arrived, in place of what comes from another start."""
        return self.arrived

    @property
    def edges(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Each result with a gradient, and that gradient."""
        for number, gradient in enumerate(self.arrived):
            if gradient is not None:
                yield GradientEdge(self.node, number), gradient


@dataclass(frozen=True, slots=True)
class WeightHalf:
    """What the second half needs: groups of starts that lead to other weights each."""

    _groups: tuple[tuple[_Start, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that wait for it."""
        waiting = [gradient for group in self._groups for one in group for _, gradient in one.edges]
        kept = {storage_key(each): each.untyped_storage().nbytes() for each in waiting}
        return sum(kept.values())

    def run(self) -> None:
        """Add the weights' gradients to ``grad``."""
        for starts in self._groups:
            found = [pair for start in starts for pair in start.edges]
            if not found:
                continue
            edges, gradients = zip(*found, strict=True)
            # Of weights that are used twice: one start may lead to another, which already has all.
            several = starts if len(starts) > 1 else ()
            hooks = [start.node.register_prehook(start.again) for start in several]
            try:
                weights = set().union(*(start.weights for start in starts))
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=list(weights))
            finally:
                _remove(hooks)


def backward_input(
    roots: Roots,
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Gradients, WeightHalf | None]:
    """Compute the inputs' gradients alone.

    Returns:
        The inputs' gradients (None where no result depends on one), and the second half; None where
        no result depends on any input, so that the second half is the whole pass.
    """
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    above = _Above([edge.node for edge in edges], inputs, weights)
    if not above.nodes:
        return (None,) * len(inputs), None
    # The operators that lead to an input, and beside that to weights.
    starts = {n: _Start(n, above.weights[n]) for n in above.nodes if above.weights[n]}
    # A result that depends on weights but on no input is not reached by the first half: its given
    # gradient is noted here, at its place among the operator's results.
    for edge, gradient in zip(edges, gradients or (), strict=False):
        if edge.node not in above.nodes and above.weights[edge.node]:
            own = starts.setdefault(edge.node, _Start(edge.node, above.weights[edge.node]))
            own.arrived += (None,) * (edge.output_nr - len(own.arrived)) + (gradient,)
    hooks = [node.register_prehook(starts[node].keep) for node in starts if node in above.nodes]
    try:
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        _remove(hooks)
    return found, WeightHalf(_grouped(list(starts.values())))


class _Above:
    """The operators between results and inputs, and the weights that each operator leads to.

    Attributes:
        nodes: Operators that lead to an input.
        weights: For every operator, the weights that it leads to, without those behind ``nodes``.
    """

    def __init__(
        self, roots: Sequence[Node], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        self.nodes: set[Node] = set()
        self.weights: dict[Node, set[Tensor]] = {
            get_gradient_edge(leaf).node: {leaf} for leaf in weights
        }
        for node in _leaves_first(roots):
            behind = [other for other, _ in node.next_functions if other is not None]
            if node in ends or any(other in self.nodes for other in behind):
                self.nodes.add(node)
            led = [self.weights[other] for other in behind if other not in self.nodes]
            self.weights.setdefault(node, set()).update(*led)


def _leaves_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Each operator of a graph once, after all that it leads to."""
    # With a stack of its own: a graph of thousands of operators in a row exceeds Python's.
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(other, False) for other, _ in node.next_functions if other is not None]


def _grouped(starts: Sequence[_Start]) -> tuple[tuple[_Start, ...], ...]:
    """The nodes, with those that lead to the same weights together."""
    # One backward call for each group: a call adds to the ``grad`` of all weights that it reaches,
    # so a weight that two calls reach would get its gradient in two sums.
    groups: list[tuple[set[Tensor], list[_Start]]] = []
    for start in starts:
        weights, members = set(start.weights), [start]
        for group in [group for group in groups if group[0] & weights]:
            groups.remove(group)
            weights |= group[0]
            members += group[1]
        groups.append((weights, members))
    return tuple(tuple(members) for _, members in groups)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


Places = Mapping[str, list[tuple[nn.Module, str]]]
"""The modules that have a buffer, and its name in each, by its name in the model."""


def buffer_holders(
    model: nn.Module, parts: Sequence[StageModule], ranks: Sequence[Holders]
) -> dict[str, Holders]:
    """The ranks that hold each buffer, by name; all hold what no stage uses (a loss may use it).

    ``ranks`` are [stages] those of each.
    """
    found: dict[str, Holders] = {}
    everyone = tuple(sorted({rank for of_stage in ranks for rank in of_stage}))
    users = [_users(part) for part in parts]
    for name, places in buffer_places(model).items():
        held = {
            rank
            for used, of_stage in zip(users, ranks, strict=True)
            if any(_uses(used, module, key) for module, key in places)
            for rank in of_stage
        }
        found[name] = tuple(sorted(held)) or everyone
    return found


def _users(part: StageModule) -> tuple[set[int], set[tuple[int, str]]]:
    """The modules that a stage calls, and the buffers that its graph reads by name."""
    called = {id(module) for module in part.module.modules()}
    return called, {(id(owner), name) for _, (owner, name) in part.buffers}


def _uses(used: tuple[set[int], set[tuple[int, str]]], module: nn.Module, key: str) -> bool:
    return id(module) in used[0] or (id(module), key) in used[1]


def hold_own(model: nn.Module, holders: Mapping[str, Holders], place: Place) -> None:
    """Move this worker's buffers to its device; the others stay as they are."""
    for name, places in buffer_places(model).items():
        if place.rank in holders[name]:
            module, key = places[0]
            value = module._buffers[key]
            assert value is not None
            _put(places, value.to(place.device))


def _put(places: Sequence[tuple[nn.Module, str]], value: Tensor) -> None:
    for module, key in places:
        module._buffers[key] = value


class StageBuffers(VirtualNodeBuffers):
    """The buffers of one worker of a pipeline.

    ``tells`` is False where another worker runs the same passes and has the same buffers.

    Attributes:
        is_readable: Whether every buffer of the model has its value on this worker.
    """

    def __init__(
        self,
        model: nn.Module,
        local: Sequence[int],
        batch_sizes: Sequence[int],
        holders: Mapping[str, Holders],
        own: Sequence[tuple[StageModule, Sequence[int]]],
        place: Place,
        *,
        tells: bool,
    ) -> None:
        self._places = buffer_places(model)
        slots = [
            BufferSlot(name, places)
            for name, places in self._places.items()
            if place.rank in holders[name]
        ]
        super().__init__(model, local, batch_sizes, slots)
        self._holders, self._place, self._tells = dict(holders), place, tells
        self._own = {slot.name: slot for slot in self.slots}
        others = {name: value for name, value in self.all().items() if name not in self._own}
        zeros = zeros_for(others.values(), place.device)
        self._stand_ins = {
            name: Elsewhere.of(zero, name, others[name].shape)
            for name, zero in zip(others, zeros, strict=True)
        }
        self.is_readable = True
        self.strip()
        # Where two pipelines run in opposite directions, stages run different microbatches.
        self._nodes_of: dict[str, set[int]] = {}
        for part, microbatches in own:
            used = _users(part)
            for slot in self.slots:
                if any(_uses(used, module, key) for module, key in slot.owners):
                    self._nodes_of.setdefault(slot.name, set()).update(microbatches)
        self._groups: dict[Holders, dist.ProcessGroup] = {}
        for ranks in sorted(set(self._holders.values())):
            if 1 < len(ranks) < place.world_size:
                self._groups[ranks] = subgroup(place, ranks)

    def all(self) -> dict[str, Tensor]:
        """See ``VirtualNodeBuffers``."""
        found = {}
        for name, ((module, key), *_) in self._places.items():
            value = module._buffers[key]
            assert value is not None
            found[name] = value
        return found

    @property
    def names(self) -> set[str]:
        """See ``VirtualNodeBuffers``."""
        return set(self._own)

    def strip(self) -> None:
        """Replace the buffers of other stages by stand-ins."""
        if self.is_readable:
            for name, stand_in in self._stand_ins.items():
                _put(self._places[name], stand_in)
        self.is_readable = not self._stand_ins

    def gather(self, device: torch.device) -> None:
        """Bring the buffers of all stages to a device of every worker. Call it on all workers."""
        if not self._place.distributed or not dist.is_initialized():
            return
        wire, values = wire_device(self._place.device), self.all()
        for name, ranks in self._holders.items():
            value, sends = values[name], self._place.rank == ranks[0]
            keeps = name not in self._own
            if keeps:
                value = torch.empty(value.shape, dtype=value.dtype, device=device)
            broadcast(value, wire, src=ranks[0], sends=sends, keeps=keeps)
            if keeps:
                _put(self._places[name], value)
        self.is_readable = True

    def values_of(self, name: str) -> InPieces:
        """A buffer's values, sent by its first holder. Iterate them on all workers."""
        value = self.all()[name]
        return sent_by(self._holders[name][0], name, value, value.shape, self._place)

    def merged(self, all_reduce: AllReduce | None) -> dict[str, Tensor]:
        """The merged values of this worker's buffers that a pass has changed on any worker."""
        if not self._holders:
            return {}
        # Flags of all buffers on all workers, held or not: one collective. The sums that follow are
        # of each buffer's holders, who know by the flags which come, and in what order.
        changed = [name in self._own and bool(self._own[name].own) for name in self._holders]
        flags = torch.tensor(changed, dtype=torch.float32, device=self._place.device)
        if all_reduce is not None:
            all_reduce(flags)
        names = [name for name, flag in zip(self._holders, flags.tolist(), strict=True) if flag]
        return {
            name: self._merged(self._own[name], self._sums_over(self._holders[name], all_reduce))
            for name in names
            if name in self._own
        }

    def _sums_over(self, ranks: Holders, all_reduce: AllReduce | None) -> AllReduce | None:
        if len(ranks) == 1 or all_reduce is None:
            return None
        if len(ranks) == self._place.world_size:
            return all_reduce
        sums: Callable[[Tensor], object] = partial(peers.all_reduce, group=self._groups[ranks])
        return sums

    def capture_own(self) -> dict[str, Any]:
        """This worker's part of ``capture``."""
        self.begin_step()
        # A split plan with one virtual node has the model's own buffers only.
        alone = len(self._batch_sizes) == 1
        return {
            "base": {
                slot.name: slot.value_of(0) if alone and self._is_used(slot) else slot.base
                for slot in self.slots
            },
            "nodes": []
            if alone
            else [
                {slot.name: slot.own[node] for slot in self.slots if node in slot.own}
                for node in range(len(self._batch_sizes))
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take buffers back from ``capture``, or from all workers' parts joined."""
        super().restore({**state, "nodes": state["nodes"] or [{} for _ in self._batch_sizes]})
        for slot in self.slots:
            if not self._is_used(slot):
                slot.own.clear()

    def _is_used(self, slot: BufferSlot) -> bool:
        return slot.name in self._nodes_of

    def _merged(self, slot: BufferSlot, all_reduce: AllReduce | None) -> Tensor:
        local = self._local
        # Of a tensor-parallel group all workers have a microbatch's values, and one of them tells:
        # else the sum would count the microbatch several times.
        self._local = tuple(sorted(self._nodes_of.get(slot.name, ()))) if self._tells else ()
        try:
            return super()._merged(slot, all_reduce)
        finally:
            self._local = local


Weights = dict[str, Tensor]


@dataclass(slots=True)
class _Kept:
    """A microbatch in flight: its inputs as leaves, and the results that are differentiated."""

    inputs: list[Tensor]
    results: Roots
    gradients: list[Tensor] | None = None  # of the results; None: ones, of a loss
    half: WeightHalf | None = None  # of the backward pass, once the inputs' gradients are there


class StageRunner:
    """Runs one stage, and holds the activations of the microbatches in flight.

    ``passing`` makes a context for every pass, and for each recomputation in a backward pass.
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
        self._recomputes = recompute or recompute_cores
        self._cores = AttentionCores if recompute_cores else nullcontext
        self._in_flight: dict[int, _Kept] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        self.most_in_flight = 0
        modules = list(part.module.modules())
        # [inputs] whether each is copied ahead, as layers may write to it; empty for a whole model.
        self._written = [may_be_written(n) for n in part.nodes if n.op == "placeholder"]
        self._is_written = any(getattr(module, "inplace", False) for module in modules)
        self._buffered = [m for m in modules if any(b is not None for b in m._buffers.values())]

    def forward(
        self,
        microbatch: int,
        arguments: dict[str, Any],
        received: tuple[tuple[Any, ...], tuple[bool, ...]],
        weights: Weights | None,
    ) -> Any:
        """Run the stage on one microbatch; then ``keep`` takes what is to be differentiated."""
        leaves: list[Tensor] = []
        values: list[Any] = []
        for value, wanted in zip(*received, strict=True):
            if isinstance(value, Tensor):
                value = value.to(self._device)
                if wanted:
                    # A leaf: this stage's graph ends here, and the leaf's gradient is sent back.
                    value = value.detach().requires_grad_()
                    leaves.append(value)
            values.append(value)
        own = [arguments[name] for name in self.part.arguments]
        self._leaves[microbatch] = leaves
        self.part.refresh_buffers()
        inputs = (*own, *values)
        if self._recompute:
            call = partial(self._call, weights)
            # For the first pass, and for a recomputation of it.
            contexts = lambda: (nullcontext(), _KeptBuffers(self._buffered))  # noqa: E731
            return checkpoint(call, *inputs, use_reentrant=False, context_fn=contexts)
        return self._call(weights, *inputs)

    def _call(self, weights: Weights | None, *inputs: Any) -> Any:
        part = self.part
        # In-place layers must not write to a leaf, or to inputs that are recomputed from.
        written = self._written or [self._is_written] * len(inputs)
        own = list(inputs)
        for number, value in enumerate(inputs):
            if written[number] and isinstance(value, Tensor):
                own[number] = value.clone()
                if number >= len(part.arguments) and not self._recompute:
                    # Held for its gradient alone until the backward pass: without its memory.
                    value.data = value.new_zeros(()).expand(value.shape)
        with self._cores(), self._passing():
            if weights is None:
                return part.answer(part.module(*own))
            return part.answer(torch.func.functional_call(part.module, weights, tuple(own)))

    def keep(self, microbatch: int, results: tuple[Any, ...]) -> None:
        """Keep the start of a microbatch's backward pass; the outputs' values can be freed."""
        roots = [_root(r) for r in results if isinstance(r, Tensor) and r.requires_grad]
        self._in_flight[microbatch] = _Kept(self._leaves.pop(microbatch), roots)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def backward(self, microbatch: int, gradients: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Run the whole backward pass; parameters' gradients add up in their leaves.

        The gradients are of the results, in order; None for a loss.

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
            if self._recomputes:  # once in each backward pass, however short
                return torch.autograd.grad(
                    kept.results, kept.inputs, kept.gradients, retain_graph=True, allow_unused=True
                )
            found, kept.half = backward_input(
                kept.results, kept.gradients, kept.inputs, self._trained
            )
            if kept.half is not None:
                kept.gradients = None  # it has those that it needs
            return found

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weights' gradients of a microbatch whose input gradients are done."""
        kept = self._in_flight.pop(microbatch)
        with self._passing():
            if kept.half is not None:
                kept.half.run()
            elif kept.results and self._trained:
                torch.autograd.backward(kept.results, kept.gradients, inputs=self._trained)

    @property
    def _trained(self) -> list[Tensor]:
        return [p for p in self.parameters.values() if p.requires_grad]

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
    """Restores batch-norm's statistics after a recomputation, which would count them twice."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def __enter__(self) -> None:  # again for each of several backward passes
        self._apart = buffers_apart(self._modules)
        self._apart.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._apart.__exit__(*raised)


def _root(result: Tensor) -> Tensor | GradientEdge:
    """The start of a backward pass: a loss, or the graph's edge of an output without its values."""
    return get_gradient_edge(result) if result.numel() > 1 else result
