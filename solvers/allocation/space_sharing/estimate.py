"""Throughputs of pairs that were not measured (thesis 5.3.3, 5.6).

A new job is measured beside a few reference jobs. Matrix completion fills in the rest of its
row from the reference jobs' rows, which have low rank; the completed row is the job's
fingerprint, and the nearest reference job's measured row is the first estimate of its own.
"""

from dataclasses import dataclass

import numpy as np

from ....schema.errors import ProblemError
from ..program import Bools, Floats

_ROUNDS = 500
_SETTLED = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is known of a new job.

    ``reference`` is the index of the nearest reference job and ``distance`` the root mean
    square between the two fingerprints; ``completed`` [references] is the fingerprint and
    ``throughputs`` [references] the estimate: measured where measured, else the reference's.
    """

    reference: int
    distance: float
    completed: Floats
    throughputs: Floats


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


def estimate(references: Floats, measured: Floats, known: Bools, *, rank: int = 3) -> Estimate:
    """Estimate a new job's normalised throughputs beside every reference job.

    Args:
        references: Throughput of each reference job beside each other, relative to alone
            [references, references].
        measured: The new job's, relative to alone [references]; those not known are ignored.
        known: Which were measured [references].
        rank: Rank of the completion.

    Raises:
        ProblemError: Nothing was measured, a value is not finite, or shapes disagree.
    """
    number = len(references)
    if references.shape != (number, number) or measured.shape != (number,):
        raise ProblemError(
            f"references must be square and measured as long, got {references.shape} and "
            f"{measured.shape}"
        )
    matrix = np.vstack((references, measured))
    seen = np.vstack((np.ones((number, number), dtype=bool), known))
    completed = complete(matrix, seen, rank=rank)[-1]
    # Measured entries are compared as measured, completed ones as completed.
    distances = np.sqrt(((references - completed) ** 2).mean(axis=1))
    nearest = int(np.argmin(distances))
    return Estimate(
        reference=nearest,
        distance=float(distances[nearest]),
        completed=completed,
        throughputs=np.where(known, measured, references[nearest]),
    )
