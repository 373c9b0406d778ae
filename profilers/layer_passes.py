"""Run one layer alone, forward and backward, from the tensors that really reach it.

Alone, because hooks on the whole model time the first layer's backward as nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from ..runtime.nested_tensors import mapped, storage_key, tensors_in
from .bench import Bench
from .layer_memory import BLOCK_BYTES, Footprint, StorageLedger, buffer_bytes, footprint, in_blocks

if TYPE_CHECKING:
    from ..runtime.pipeline.cores import Between
    from ..runtime.pipeline.cut import LayeredModel, StageModule


# What selective recomputation changes in each layer: attention cores, found as a stage finds them.
#
# All layers run once, one after another, without the loss. What autograd keeps of them is counted
# by storages, each for the layer that made it, with cores recomputed and without.


@dataclass(frozen=True, slots=True)
class FoundCore:
    """A core: the layer in which it begins, what is made again of it, and a call that does that."""

    layer: str
    made_bytes: int
    run_again: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class FoundCores:
    """All cores, and by layer how many bytes less its pass keeps if they are recomputed.

    A layer may keep more: what a core reads is kept for it, whether or not autograd would.
    """

    cores: tuple[FoundCore, ...]
    freed_bytes: Mapping[str, int]

    def of_layer(self, layer: str) -> list[FoundCore]:
        """The cores of attention that begin in a layer."""
        return [core for core in self.cores if core.layer == layer]

    def changes(self, layer: str) -> bool:
        """Whether a layer keeps something else, or has something to compute again."""
        return bool(self.freed_bytes.get(layer) or self.of_layer(layer))


def find_cores(
    layered: "LayeredModel", parts: "list[StageModule]", arguments: Mapping[str, Any]
) -> FoundCores:
    """Find the cores of a model."""
    import torch

    from ..runtime.pipeline.cores import AttentionCores

    account = _Account([*layered.model.parameters(), *layered.model.buffers(), *arguments.values()])
    values = dict(arguments)
    cores = AttentionCores(account.cut)
    hooks = torch.autograd.graph.saved_tensors_hooks(account.saved, lambda tensor: tensor)
    with hooks, cores:
        for layer, part in zip(layered.layers, parts, strict=True):
            account.layer = layer.id
            answer = part(*(values[name] for name in (*part.arguments, *part.inputs)))
            account.end_layer(tensors_in(answer), cores.between)
            values.update(zip(part.outputs, answer if part.outputs else (), strict=True))
    return account.found()


class _Account:
    """Who made which storage, and who keeps it; storages have numbers while they live."""

    def __init__(self, standing: list[Any]) -> None:
        self.layer = ""
        self._standing = {storage_key(tensor) for tensor in tensors_in(standing)}
        self._alive: list[Any] = []
        self._maker: dict[int, tuple[str, int]] = {}
        self._plain: set[int] = set()
        self._selective: set[int] = set()
        self._begun: str | None = None
        self._cores: list[tuple[str, set[int], Between]] = []

    def saved(self, tensor: Any) -> Any:
        """Note what autograd saves outside of cores."""
        key = self._noted(tensor)
        self._plain.add(key)
        self._selective.add(key)
        return tensor.detach()

    def cut(self, between: "Between") -> None:
        """Note what autograd saves between two cuts."""
        keys = {self._noted(saved.value) for saved in between.saved if saved.value is not None}
        self._plain |= keys
        if between.is_core:
            given = {self._noted(each.value): each.wants_gradient for each in between.given}
            # What has no gradient, such as a mask, is there anyway unless autograd alone keeps it.
            self._selective |= {key for key, wants in given.items() if wants or key in keys}
            self._cores.append((self._begun or self.layer, keys, between))
        else:
            self._selective |= keys
        self._begun = None

    def end_layer(self, made: list[Any], between: "Between") -> None:
        """Note what a layer has made, and what of it is between two cuts."""
        for tensor in made:
            self._noted(tensor)
        for saved in between.saved:
            self._noted(saved.value)
        for given in between.given:
            self._noted(given.value)
        if between.has_begun and self._begun is None:
            self._begun = self.layer

    def _noted(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._maker:
            self._alive.append(storage)
            self._maker[key] = self.layer, storage.nbytes()
        return key

    def found(self) -> FoundCores:
        """The cores, and what they free."""
        freed: dict[str, int] = {}
        for keys, sign in ((self._plain, 1), (self._selective, -1)):
            for key in keys - self._standing:
                layer, size = self._maker[key]
                freed[layer] = freed.get(layer, 0) + sign * size
        return FoundCores(
            tuple(
                FoundCore(
                    layer,
                    sum(self._maker[key][1] for key in keys - self._selective - self._standing),
                    between.run_again,
                )
                for layer, keys, between in self._cores
            ),
            freed,
        )


Row = dict[str, Any]
_EMPTY_PASSES = 30


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """A layer to run: ``call(*values)`` on detached values; ``made(answer)`` are its tensors.

    ``before`` names the layer that a tensor of unknown origin counts for.
    """

    id: str
    call: Callable[..., Any]
    values: Sequence[Any]
    made: Callable[[Any], list[Any]]
    before: str | None = None

    def results(self, answer: Any) -> list[Any]:
        """What a backward pass begins at."""
        return [tensor for tensor in self.made(answer) if tensor.requires_grad]

    def made_bytes(self, answer: Any) -> int:
        """Of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.made(answer))


def measuring_seconds(bench: Bench) -> tuple[float, float]:
    """What timing an empty layer takes, forward and backward: the clock and autograd's start."""
    import torch

    empty = LayerPiece("", torch.neg, [torch.zeros(1, device=bench.device)], tensors_in)
    timed = [_timed_passes(bench, empty) for _ in range(_EMPTY_PASSES)]
    return median(forward for forward, _ in timed), median(backward for _, backward in timed)


def measure_piece(
    bench: Bench,
    ledger: StorageLedger,
    piece: LayerPiece,
    repeats: int,
    empty: tuple[float, float] = (0.0, 0.0),
) -> tuple[Row, Any]:
    """Time a layer and account for its memory.

    Returns:
        Medians and bytes as LayerNode names them (stashes stay in the ledger), and its answer.
    """
    inputs = PassInputs(piece.values)
    # The first pass, for the ledger, is the warm-up too.
    answer = ledger.record(
        piece.id, lambda: piece.call(*inputs.copies), piece.made, inputs.pairs, piece.before
    )
    _backward(piece.results(answer))
    timed = [_timed_passes(bench, piece) for _ in range(repeats)]
    return {
        "forward_seconds": max(0.0, median(forward for forward, _ in timed) - empty[0]),
        "backward_seconds": max(0.0, median(backward for _, backward in timed) - empty[1]),
        "activation_bytes": piece.made_bytes(answer),
        "workspace_bytes": _workspace_bytes(bench, piece),
    }, answer


def _timed_passes(bench: Bench, piece: LayerPiece) -> tuple[float, float]:
    inputs = PassInputs(piece.values)
    kept: list[Any] = []
    forward, _ = bench.timed(lambda: kept.append(piece.call(*inputs.copies)))
    results = piece.results(kept[0])
    gradients = _ones(results)
    backward = bench.timed(lambda: _backward(results, gradients))[0] if results else 0.0
    bench.optimizer.zero_grad(set_to_none=False)
    return forward, backward


class PassInputs:
    """One pass's inputs: leaves that get gradients, and copies that in-place layers may write."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.leaves: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

        def copied(tensor: Any) -> Any:
            leaf = tensor.detach().requires_grad_(tensor.is_floating_point())
            self.leaves.append(leaf)
            self.pairs.append((leaf.clone(), tensor))
            return self.pairs[-1][0]

        self.copies = [mapped(copied, value) for value in values]

    @property
    def gradient_bytes(self) -> int:
        """Of all inputs that got a gradient."""
        grads = [leaf.grad for leaf in self.leaves]
        return sum(g.numel() * g.element_size() for g in grads if g is not None)


def _workspace_bytes(bench: Bench, piece: LayerPiece) -> int | None:
    """The most over inputs, outputs and stashes (forward), and over new gradients (backward)."""
    inputs = PassInputs(piece.values)
    kept: list[Any] = []
    forward = footprint(lambda: kept.append(piece.call(*inputs.copies)), bench.device)
    results = piece.results(kept[0])
    gradients = _ones(results)
    kept.clear()  # only the graph holds what it needs from here on, as in a step
    backward: Footprint | None = Footprint(0, 0)
    if results:
        backward = footprint(lambda: _backward(results, gradients), bench.device)
    bench.optimizer.zero_grad(set_to_none=False)
    if forward is None or backward is None:
        return None
    return max(
        0, forward.peak_bytes - forward.end_bytes, backward.peak_bytes - inputs.gradient_bytes
    )


def _backward(results: list[Any], gradients: list[Any] | None = None) -> None:
    import torch

    if results:
        torch.autograd.backward(results, _ones(results) if gradients is None else gradients)


def _ones(results: list[Any]) -> list[Any]:
    import torch

    return [torch.ones_like(result) for result in results]


def detached(value: Any) -> Any:
    """A value cut from its graph, on the same memory."""
    return mapped(lambda tensor: tensor.detach(), value)


def walked(
    layered: "LayeredModel",
    parts: "Sequence[StageModule]",
    arguments: Mapping[str, Any],
    block_bytes: int,
    look: Callable[[LayerPiece, list[Any]], tuple[Row, Any]],
) -> list[Row]:
    """Look at the layers of a traced model in order, each with what those before it made.

    ``look`` is given a layer and its trained weights; its row is joined by their bytes.
    """
    values = dict(arguments)
    held: dict[int, str] = {}
    rows = []
    for layer, part in zip(layered.layers, parts, strict=True):
        own = [name not in part.inputs for name in part.outputs]
        made = partial(_chosen, own) if own else tensors_in
        given = [values[name] for name in (*part.arguments, *part.inputs)]
        trained = [weight for weight in part.module.parameters() if weight.requires_grad]
        row, answer = look(LayerPiece(layer.id, part, given, made), trained)
        values.update(
            (name, detached(value))
            for name, value, is_own in zip(part.outputs, answer if own else (), own, strict=True)
            if is_own
        )
        row |= weight_row(layer.id, part.module.parameters(), held, block_bytes)
        row |= buffer_row(part.module, block_bytes, part.buffers)
        rows.append({"id": layer.id, "op": layer.op, **row})
    return rows


def traced_rows(
    bench: Bench,
    ledger: StorageLedger,
    layered: "LayeredModel",
    arguments: dict[str, Any],
    repeats: int,
) -> tuple[list[Row], list[list[str]]]:
    """Measure the layers of a traced model: their rows, and edges."""
    from ..runtime.pipeline.cut import cut

    parts = cut(layered, [[layer.id] for layer in layered.layers])
    empty = measuring_seconds(bench)

    def measured(piece: LayerPiece, trained: list[Any]) -> tuple[Row, Any]:
        row, answer = measure_piece(bench, ledger, piece, repeats, empty)
        return row | _halves(bench, piece, trained, repeats, empty[1]), answer

    rows = walked(layered, parts, arguments, block_bytes_of(bench), measured)
    return rows, [list(edge) for edge in layered.edges]


def _halves(
    bench: Bench, piece: LayerPiece, trained: list[Any], repeats: int, empty_seconds: float
) -> Row:
    """Time the halves of a layer's backward pass, as zero-bubble schedules run them."""
    try:
        timed = [_timed_halves(bench, piece, trained) for _ in range(max(3, repeats // 4))]
    except RuntimeError:  # a graph that cannot be walked twice, or does not fit twice
        return {}
    first, second = (
        max(0.0, median(each[half] for each in timed) - empty_seconds) for half in (0, 1)
    )
    # Only their ratio: one layer alone is too short to tell what both compute.
    share = first / (first + second) if first else 0.0
    return {"input_gradient_share": share, "halved_bytes": max(each[2] for each in timed)}


def _timed_halves(bench: Bench, piece: LayerPiece, weights: list[Any]) -> tuple[float, float, int]:
    """Seconds of both halves, and bytes of the gradients that wait in between."""
    import torch

    from ..runtime.pipeline.stage import WeightHalf, backward_input

    inputs = PassInputs(piece.values)
    results = piece.results(piece.call(*inputs.copies))
    leaves = [leaf for leaf in inputs.leaves if leaf.requires_grad]
    gradients, kept = _ones(results), list[WeightHalf | None]()
    if not results:
        return 0.0, 0.0, 0

    def second() -> None:
        (half,) = kept
        if half is not None:
            half.run()
        elif weights:
            torch.autograd.backward(results, gradients, inputs=weights)

    first = lambda: kept.append(backward_input(results, gradients, leaves, weights)[1])  # noqa: E731
    ahead = bench.timed(first)[0]
    (half,) = kept
    waiting = sum(each.nbytes for each in gradients) if weights else 0
    waiting = waiting if half is None else half.num_bytes
    seconds = ahead, bench.timed(second)[0], waiting
    bench.optimizer.zero_grad(set_to_none=False)
    return seconds


def core_rows(
    bench: Bench, layered: "LayeredModel", arguments: dict[str, Any], repeats: int
) -> dict[str, tuple[int, Row]]:
    """By layer, what recomputed attention cores change in it (LayerCore).

    Returns:
        The bytes that its pass keeps less, and the time and the bytes of what is made again.
    """
    from ..runtime.pipeline.cut import cut

    parts = cut(layered, [[layer.id] for layer in layered.layers])
    found = find_cores(layered, parts, arguments)
    rows: dict[str, tuple[int, Row]] = {}
    for layer in layered.layers:
        if found.changes(layer.id):
            begun = found.of_layer(layer.id)
            seconds = sum(
                median(bench.timed(core.run_again)[0] for _ in range(repeats)) for core in begun
            )
            most = max((core.made_bytes for core in begun), default=0)
            row = {"forward_seconds": seconds, "made_bytes": most}
            rows[layer.id] = found.freed_bytes.get(layer.id, 0), row
    return rows


def _chosen(own: list[bool], answer: Any) -> list[Any]:
    """The tensors that a layer made itself, of all that its part answers with."""
    return tensors_in([value for value, is_own in zip(answer, own, strict=True) if is_own])


def weight_row(layer: str, parameters: Any, held: dict[int, str], block_bytes: int) -> Row:
    """A layer's weight bytes; what an earlier layer holds (``held``, by identity) is shared.

    The allocator gives memory in blocks of ``block_bytes``.
    """
    given = list(parameters)
    used = {id(p): p for p in given if p.requires_grad}
    frozen = {id(p): p for p in given if not p.requires_grad and id(p) not in held}
    held.update(dict.fromkeys(frozen, layer))
    shared = {key: held[key] for key in used if key in held}
    held.update((key, layer) for key in used if key not in held)

    def size(keys: Any) -> int:
        return sum(used[key].numel() * used[key].element_size() for key in keys)

    own = used.keys() - shared.keys()
    row: Row = {"weight_bytes": size(own)}
    padded = sum(in_blocks(size([key]), block_bytes) for key in own)
    row["padding_bytes"] = padded - row["weight_bytes"]
    if frozen:
        row["frozen_weight_bytes"] = sum(p.nbytes for p in frozen.values())
    if shared:
        row |= {
            "shared_with": list(dict.fromkeys(shared.values())),
            "shared_weight_bytes": size(shared),
        }
    return row


def block_bytes_of(bench: Bench) -> int:
    """In what blocks the allocator of a device gives memory: a host's nearly to the byte."""
    return 1 if bench.backend.is_host else BLOCK_BYTES


def buffer_row(module: Any, block_bytes: int, read: Iterable[Any] = ()) -> Row:
    """A layer's buffers; of those that it reads by name, ``StageModule.buffers`` say the owners."""
    found, changed = buffer_bytes(module, block_bytes, [owner for _, (owner, _) in read])
    return {"buffer_bytes": found, "statistics_bytes": changed}
