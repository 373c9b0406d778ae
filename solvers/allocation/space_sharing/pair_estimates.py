"""Estimate the pairs of a throughput table that were not measured (thesis 5.3.3, 5.6).

Pairs that the table holds are known, also those of rate 0 (they do not fit together); pairs that
it lacks are not. For each scale factor and device type the reference models are those whose pairs
with each other are all known; any other model needs one known pair with a reference at least.
"""

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from ....schema.jobs import PairThroughput, Throughputs
from ..program import Bools, Floats
from .estimate import estimate

FEWEST = 3  # references, for a nearest one to mean something


def fill_pairs(throughputs: Throughputs, *, rank: int = 3) -> Throughputs:
    """Estimate the unknown pairs of each model with the reference models.

    The model's own rate beside a reference is measured or estimated; the reference's beside it is
    that beside the model's nearest reference. Pairs of two models that are both no references
    stay unknown, as do those of models without any known pair.

    Args:
        throughputs: A table with some pairs; pairs that do not fit must stand there with rates 0.
        rank: Of the matrix completion.

    Returns:
        The table with more pairs; what was known is unchanged.
    """
    found: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {
        (*pair.models, pair.scale_factor): dict(pair.steps_per_second) for pair in throughputs.pairs
    }
    for scale in sorted({entry.scale_factor for entry in throughputs.models}):
        entries = [entry for entry in throughputs.models if entry.scale_factor == scale]
        for device in dict.fromkeys(t for entry in entries for t in entry.steps_per_second):
            alone = {e.model: e.steps_per_second.get(device, 0.0) for e in entries}
            alone = {model: rate for model, rate in alone.items() if rate > 0}
            _fill(found, alone, scale, device, rank)
    pairs = tuple(
        PairThroughput(models=(a, b), scale_factor=scale, steps_per_second=rates)
        for (a, b, scale), rates in found.items()
    )
    return replace(throughputs, pairs=pairs)


def _fill(
    found: dict[tuple[str, str, int], dict[str, tuple[float, float]]],
    alone: dict[str, float],
    scale: int,
    device: str,
    rank: int,
) -> None:
    names = list(alone)
    beside, known = _table(found, alone, scale, device)
    references = _references(known)
    if len(references) < FEWEST:
        return
    square = beside[np.ix_(references, references)]
    for new in range(len(names)):
        measured = known[new, references]
        if new in references or not measured.any() or measured.all():
            continue
        guess = estimate(square, beside[new, references], measured, rank=rank)
        for place in np.flatnonzero(~measured).tolist():
            other = references[place]
            own = float(guess.throughputs[place]) * alone[names[new]]
            theirs = float(square[place, guess.reference]) * alone[names[other]]
            fits = own > 0 and theirs > 0
            key, rates = (names[new], names[other], scale), (own, theirs)
            if (names[other], names[new], scale) in found:
                key, rates = (names[other], names[new], scale), (theirs, own)
            found.setdefault(key, {})[device] = rates if fits else (0.0, 0.0)


def _table(
    found: dict[tuple[str, str, int], dict[str, tuple[float, float]]],
    alone: dict[str, float],
    scale: int,
    device: str,
) -> tuple[Floats, Bools]:
    """Rate of each model beside each, relative to alone, and which are known [models, models]."""
    names = list(alone)
    beside = np.full((len(names), len(names)), np.nan)
    for i, j in combinations_with_replacement(range(len(names)), 2):
        for a, b in ((i, j), (j, i)):
            rates = found.get((names[a], names[b], scale), {}).get(device)
            if rates is not None:
                beside[a, b] = rates[0] / alone[names[a]]
                beside[b, a] = rates[1] / alone[names[b]]
    return beside, ~np.isnan(beside)


def _references(known: Bools) -> list[int]:
    """Models that know all pairs among them: those that lack most leave, of equals the last."""
    kept = list(range(len(known)))
    while kept:
        lacking = [int((~known[i, kept]).sum()) for i in kept]
        if not any(lacking):
            break
        kept.pop(max(range(len(kept)), key=lambda i: (lacking[i], i)))
    return kept
