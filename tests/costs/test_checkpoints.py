"""How often to write a checkpoint: Young and Daly against the exact expected time."""

from math import exp

import pytest
from scipy.optimize import minimize_scalar

from hetflow.schema.errors import ProblemError
from hetflow.solvers.market.odds import daly_seconds, lost_share, young_seconds


@pytest.mark.parametrize(("delta", "mean"), [(30.0, 9000.0), (300.0, 86400.0), (600.0, 3600.0)])
def test_daly_is_near_the_exact_optimum(delta: float, mean: float) -> None:
    """Daly's complete model: time M (e^((tau + delta) / M) - 1) / tau of work."""

    def wasted(interval: float) -> float:
        return mean * (exp((interval + delta) / mean) - 1) / interval

    best = minimize_scalar(wasted, bounds=(delta / 10, 2 * mean), method="bounded")
    assert wasted(daly_seconds(delta, mean)) <= wasted(best.x) * (1 + 1e-4)
    assert daly_seconds(delta, mean) == pytest.approx(best.x, rel=0.01)
    assert wasted(daly_seconds(delta, mean)) <= wasted(young_seconds(delta, mean))


def test_figures() -> None:
    assert young_seconds(60.0, 1200.0) == pytest.approx(379.47, abs=0.01)
    assert daly_seconds(100.0, 50.0) == 50.0
    # A checkpoint of 36 s every 720 s, a loss every 10 hours: 5 %, and 378 s of 36,000.
    assert lost_share(720.0, 36.0, 36000.0) == pytest.approx(0.05 + 378 / 36000)
    with pytest.raises(ProblemError, match="checkpoint must be finite and > 0"):
        young_seconds(0.0, 5.0)
