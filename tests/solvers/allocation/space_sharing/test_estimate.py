"""The throughput estimator: matrix completion and the nearest reference (5.3.3, 5.6)."""

import numpy as np
import pytest

from hetflow.schema.errors import ProblemError
from hetflow.solvers.allocation.space_sharing.pair_estimates import complete, estimate


def low_rank(seed, rows=20, columns=15, rank=2):
    rng = np.random.default_rng(seed)
    return rng.uniform(0.3, 1, (rows, rank)) @ rng.uniform(0.2, 0.6, (rank, columns))


@pytest.mark.parametrize("seed", range(5))
def test_a_low_rank_matrix_is_recovered_from_two_thirds(seed):
    matrix = low_rank(seed)
    known = np.random.default_rng(seed + 100).random(matrix.shape) < 0.67
    completed = complete(np.where(known, matrix, np.nan), known, rank=2, regularisation=1e-8)
    assert np.abs(completed - matrix).max() < 0.02
    assert (completed[known] == matrix[known]).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_a_job_like_a_reference_is_mapped_to_it(seed):
    references = low_rank(seed, 12, 12, 3)
    rng = np.random.default_rng(seed)
    twin = int(rng.integers(12))
    known = np.zeros(12, dtype=bool)
    known[rng.permutation(12)[:5]] = True
    measured = references[twin] * (1 + rng.normal(0, 0.002, 12))
    nearest, found = estimate(references, np.where(known, measured, np.nan), known)
    assert nearest == twin
    assert found[~known] == pytest.approx(references[twin][~known])
    assert found[known] == pytest.approx(measured[known])


def test_what_cannot_be_estimated_is_refused():
    references = low_rank(0, 4, 4)
    nothing = np.zeros(4, dtype=bool)
    with pytest.raises(ProblemError, match="at least one known"):
        estimate(references, np.ones(4), nothing)
    with pytest.raises(ProblemError, match="not finite"):
        estimate(references, np.full(4, np.nan), np.ones(4, dtype=bool))
