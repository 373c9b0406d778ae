"""Find what a mean loss is the mean over, where autograd's graph shows it.

A loss without a weight counts by its samples. It may be the mean over something else: targets that
are not ignored, class weights, tokens of sequences of different lengths. If that is not
proportional to samples, the step's mean is not the mean over the global batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MOST_TERMS = 4  # of a loss that are inspected
_MOST_NODES = 200
_MEAN, _SUM = 1, 2  # torch's numbers for reductions
_DIFFERS = 1e-6  # relative difference
_TARGETS = "targets that are not ignored, by class weight"
_ELEMENTS = "elements"
_DIVISOR = "what its sum is divided by"
_KINDS = (_TARGETS, _ELEMENTS, _DIVISOR)
_NUM_EACH = 5
NUM_RANGES = _NUM_EACH * _MOST_TERMS
"""How many numbers per step and worker describe what the means are taken over."""
# Operators between a mean and the loss that keep it a single number.
_PASSES_ON = (
    "AddBackward",
    "SubBackward",
    "MulBackward",
    "DivBackward",
    "NegBackward",
    "ToCopyBackward",
    "CloneBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "ViewBackward",
    "ReshapeAliasBackward",
    "SelectBackward",
    "StackBackward",
    "CatBackward",
    "WhereBackward",
)
_JOINS = ("StackBackward", "CatBackward")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean within a loss: the number of things (or sum of weights) it is over, and their kind."""

    kind: str
    over: float | Tensor


def means_in(loss: Tensor) -> Iterator[Mean]:
    """Yield the means that a loss consists of, as far as autograd's graph shows, in graph order.

    Waits for nothing: a number that is on the device stays a tensor.
    """
    ahead, seen = [loss.grad_fn], set[Any]()
    while ahead and len(seen) < _MOST_NODES:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = _mean_at(node)
        if found is not None:
            yield found
        elif node.name().startswith(_PASSES_ON) or _is_joined_mean(node):
            ahead += [source for source, _ in reversed(node.next_functions)]


def _mean_at(node: Any) -> Mean | None:
    name = node.name()
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith("NllLoss"):
        total = _saved(node, "total_weight") if reduction == _MEAN else None
        return None if total is None else Mean(_TARGETS, total)
    if reduction == _MEAN:
        elements = _saved(node, "self")
        return None if elements is None else Mean(_ELEMENTS, float(elements.numel()))
    if name == "MeanBackward0" and not _is_joined_mean(node):
        return Mean(_ELEMENTS, float(node._saved_self_sym_numel))
    if name.startswith("DivBackward") and _is_sum(node.next_functions[0][0]):
        is_trained = any(source is not None for source, _ in node.next_functions[1:])
        divisor = None if is_trained else _saved(node, "other")
        if divisor is not None and divisor.numel() == 1:
            return Mean(_DIVISOR, divisor.detach())
    return None


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node has saved, without unpacking it.

    Unpacking would run hooks, such as those that recompute a checkpointed part.
    """
    raw: Any = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return None
    found = raw.data if hasattr(raw, "data") else _shown(raw)
    return found if isinstance(found, Tensor) else None


def _shown(raw: Any) -> Tensor | None:
    """The same in torch 2.9, which shows a saved tensor to nobody but a hook that packs it.

    None where it has hooks already.
    """
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    try:
        raw.register_hooks(pack, lambda tensor: tensor)
    except RuntimeError:
        return None
    return seen[0]


def _is_joined_mean(node: Any) -> bool:
    """Whether a node is the mean (or sum) of a few losses combined."""
    source = node.next_functions[0][0] if node.next_functions else None
    reduces = node.name() in ("MeanBackward0", "SumBackward0")
    return reduces and source is not None and source.name().startswith(_JOINS)


def _is_sum(node: Any) -> bool:
    if node is None:
        return False
    return node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM


class MeansOfStep:
    """Collects what the passes of one step take their means over."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, list[Mean]]] = []

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Note the loss [] of a pass without a weight."""
        means = [mean for mean, _ in zip(means_in(loss), range(_MOST_TERMS), strict=False)]
        self._passes.append((num_samples, means))

    def ranges(self) -> list[float]:
        """[NUM_RANGES] for each term: least and most things, least and most per sample, and kind.

        NaN where there is no such term. Waits for the device.
        """
        found: list[float] = []
        for term in range(_MOST_TERMS):
            pairs = [(n, means[term]) for n, means in self._passes if term < len(means)]
            if not pairs:
                found += [math.nan] * _NUM_EACH
                continue
            overs = [float(mean.over) for _, mean in pairs]
            ratios = [over / n for over, (n, _) in zip(overs, pairs, strict=True)]
            kind = float(_KINDS.index(pairs[0][1].kind))
            found += [min(overs), max(overs), min(ratios), max(ratios), kind]
        return found


@dataclass(frozen=True, slots=True)
class Uneven:
    """A term of a loss that is no mean over samples; the numbers count things per sample."""

    kind: str
    least_per_sample: float
    most_per_sample: float


def uneven(ranges: list[list[float]]) -> Uneven | None:
    """The first term of the loss that is not proportional to samples; None if all are.

    Args:
        ranges: [workers, NUM_RANGES] ``MeansOfStep.ranges`` of each worker, for one step.
    """
    for term in range(_MOST_TERMS):
        own = [row[_NUM_EACH * term : _NUM_EACH * (term + 1)] for row in ranges]
        known = [entry for entry in own if not any(math.isnan(value) for value in entry)]
        if not known:
            continue
        fewest, most = min(entry[0] for entry in known), max(entry[1] for entry in known)
        least, greatest = min(entry[2] for entry in known), max(entry[3] for entry in known)
        # A constant, such as a penalty on parameters, is equal for every virtual node's share.
        if _apart(fewest, most) and _apart(least, greatest):
            return Uneven(_KINDS[int(known[0][4])], least, greatest)
    return None


def _apart(least: float, most: float) -> bool:
    return most - least > _DIFFERS * abs(most)
