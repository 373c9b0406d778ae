"""Estimate the pairs of a throughput table that were not measured (thesis 5.3.3, 5.6).

Pairs that the table holds are known, also those of rate 0 (they do not fit together); pairs that
it lacks are not. For each scale factor and device type the reference models are those whose pairs
with each other are all known; any other model needs one known pair with a reference at least.
"""

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from ....schema.errors import ProblemError
from ....schema.jobs import PairThroughput, Throughputs
from ..program import Bools, Floats

# Throughputs of pairs that were not measured (thesis 5.3.3, 5.6).
#
# A new job is measured beside a few reference jobs. Matrix completion fills in the rest of its
# row from the reference jobs' rows, which have low rank; the completed row is the job's
# fingerprint, and the nearest reference job's measured row is the first estimate of its own.

_ROUNDS = 500
_SETTLED = 1e-10


def complete(
    matrix: Floats, known: Bools, *, rank: int = 3, regularisation: float = 1e-3
) -> Floats:
    """Complete a low-rank matrix by alternating ridge regressions.

    Deterministic: starts from the singular vectors of the matrix with row means filled in.

    Args:
        matrix: Values [rows, columns]; those not known are ignored.
        known: Which are known [rows, columns].
        rank: Rank of the completion.
        regularisation: Ridge of the factors, relative to the mean square of known values.

    Raises:
        ProblemError: A known value is not finite, or a row or column has none known.
    """
    if not np.isfinite(matrix[known]).all():
        raise ProblemError("a known throughput is not finite; measure it again")
    if not (known.any(axis=1).all() and known.any(axis=0).all()):
        raise ProblemError("every row and column needs at least one known throughput")
    rank = min(rank, *matrix.shape)
    mean = np.where(known, matrix, 0.0).sum(axis=1) / known.sum(axis=1)
    filled = np.where(known, matrix, mean[:, None])
    u, s, vt = np.linalg.svd(filled, full_matrices=False)
    left, right = u[:, :rank] * np.sqrt(s[:rank]), vt[:rank].T * np.sqrt(s[:rank])
    ridge = regularisation * float((matrix[known] ** 2).mean()) ** 0.5 * np.eye(rank)
    old = filled
    for _ in range(_ROUNDS):
        left = _regress(matrix, known, right, ridge)
        right = _regress(matrix.T, known.T, left, ridge)
        new = left @ right.T
        if np.abs(new - old).max() <= _SETTLED * max(np.abs(new).max(), 1e-300):
            break
        old = new
    completed: Floats = np.where(known, matrix, left @ right.T)
    return completed


def _regress(matrix: Floats, known: Bools, other: Floats, ridge: Floats) -> Floats:
    rows = np.empty((len(matrix), other.shape[1]))
    for i, seen in enumerate(known):
        basis = other[seen]
        rows[i] = np.linalg.solve(basis.T @ basis + ridge, basis.T @ matrix[i, seen])
    return rows


def estimate(
    references: Floats, measured: Floats, known: Bools, *, rank: int = 3
) -> tuple[int, Floats]:
    """Estimate a new job's throughputs beside every reference job, relative to alone.

    Args:
        references: Of each reference job beside each other [references, references].
        measured: The new job's [references]; those not known are ignored.
        known: Which were measured [references].
        rank: Rank of the completion.

    Returns:
        The nearest reference job, and the new job's throughputs [references]: measured where
        measured, else those of the nearest.

    Raises:
        ProblemError: Nothing was measured, or a value is not finite.
    """
    seen = np.vstack((np.ones_like(references, dtype=bool), known))
    completed = complete(np.vstack((references, measured)), seen, rank=rank)[-1]
    # Measured entries are compared as measured, completed ones as completed.
    nearest = int(np.argmin(((references - completed) ** 2).mean(axis=1)))
    return nearest, np.where(known, measured, references[nearest])


FEWEST = 3  # references, for a nearest one to mean something


def fill_pairs(throughputs: Throughputs, *, rank: int = 3) -> Throughputs:
    """Estimate the unknown pairs of each model with the reference models.

    The model's own rate beside a reference is measured or estimated; the reference's beside it is
    that beside the model's nearest reference. Pairs of two models that are both no references
    stay unknown, as do those of models without any known pair.

    Pairs that do not fit must stand in the table with rates 0.

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
        nearest, guess = estimate(square, beside[new, references], measured, rank=rank)
        for place in np.flatnonzero(~measured).tolist():
            other = references[place]
            own = float(guess[place]) * alone[names[new]]
            theirs = float(square[place, nearest]) * alone[names[other]]
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
