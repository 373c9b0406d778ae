"""How long spot machines last: a published example, censoring, and intervals that hold."""

import numpy as np
import pytest

from hetflow.schema.errors import ProblemError
from hetflow.solvers.market.odds import Lifetime, Survival, lifetimes, rate, rates_by_age, survival

# Freireich et al. 1963, remission of leukaemia under 6-MP in weeks, the textbooks' example.
ENDED = (6, 6, 6, 7, 10, 13, 16, 22, 23)
CENSORED = (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35)


def seen(*, has_age: bool = True) -> list[Lifetime]:
    return [
        *(Lifetime(float(weeks), True, has_age) for weeks in ENDED),
        *(Lifetime(float(weeks), False, has_age) for weeks in CENSORED),
    ]


def bounds(curve: Survival) -> list[tuple[float, float, float]]:
    return [(one.part, one.low, one.high) for one in curve.survivors]


def test_lifetimes_of_a_window() -> None:
    """Begun with the window; seen whole; ended by what is unknown; ended by the window."""
    window = (1, 1, 0, 1, 1, 1, 0, 0, 1, None, 1, 0, 1)
    assert lifetimes(window, 10.0) == [
        Lifetime(20.0, True, has_age=False),
        Lifetime(30.0, True, has_age=True),
        Lifetime(10.0, False, has_age=True),
        Lifetime(10.0, True, has_age=False),
        Lifetime(10.0, False, has_age=True),
    ]
    assert lifetimes((0, 0), 10.0) == []


def test_the_published_example() -> None:
    curve = survival(seen(), (6.0, 10.0, 23.0, 40.0))
    assert curve is not None
    ages = {one.age_seconds: (one.part, (one.low, one.high)) for one in curve.survivors}
    assert ages[6.0][0] == pytest.approx(0.857, abs=5e-4)
    assert ages[10.0][0] == pytest.approx(0.753, abs=5e-4)
    assert ages[10.0][1] == pytest.approx((0.503, 0.889), abs=1e-3)
    assert ages[23.0][0] == pytest.approx(0.448, abs=5e-4)
    assert 40.0 not in ages
    assert (curve.num_lifetimes, curve.num_censored, curve.horizon_seconds) == (21, 12, 35.0)
    assert curve.median_seconds == 23.0
    assert curve.mean_seconds == pytest.approx(23.29, abs=5e-3)
    half = (curve.mean_high_seconds - curve.mean_low_seconds) / 2
    assert half / 1.959964 == pytest.approx(2.83, abs=5e-3)


def test_what_is_not_known() -> None:
    assert survival(seen(has_age=False), (6.0,)) is None
    never = survival([Lifetime(5.0, False, True)] * 3, (4.0,))
    assert never is not None
    assert never.median_seconds is None
    assert bounds(never) == [(1.0, pytest.approx(0.025 ** (1 / 3)), 1.0)]
    always = survival([Lifetime(5.0, True, True)] * 3, (4.0, 5.0))
    assert always is not None
    assert bounds(always)[1] == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 3)))
    assert (always.mean_low_seconds, always.mean_high_seconds) == (5.0, 5.0)
    # Of a hundred, 98 were not watched for so long: what two did says little.
    few = survival([Lifetime(1.0, False, True)] * 98 + [Lifetime(5.0, False, True)] * 2, (4.0,))
    assert few is not None
    assert bounds(few) == [(1.0, pytest.approx(0.025 ** (1 / 2)), 1.0)]
    one = rate([Lifetime(100.0, False, False)])
    assert one.mean_seconds is one.high_seconds is None
    assert one.low_seconds == pytest.approx(100.0 / -np.log(0.025))
    with pytest.raises(ProblemError, match="never was a spot machine"):
        rate([])


def test_rates_by_age() -> None:
    """Two hours and a preemption at half an hour; nobody gets six hours old."""
    each = [Lifetime(1800.0, True, True), Lifetime(7200.0, False, True),
            Lifetime(1e6, True, False)]  # fmt: skip
    young, older = rates_by_age(each)
    assert (young.from_age_seconds, older.from_age_seconds) == (0.0, 3600.0)
    assert (young.at_risk_seconds, young.num_preemptions) == (5400.0, 1)
    assert (older.at_risk_seconds, older.num_preemptions) == (3600.0, 0)


def test_intervals_hold_what_they_promise() -> None:
    """Of 300 drawn samples with censoring, about 95 % have the true mean in their interval."""
    random = np.random.default_rng(0)
    hits = aged = 0
    for _ in range(300):
        lasts, watched = random.exponential(10.0, 40), random.uniform(0, 20, 40)
        drawn = [Lifetime(min(a, b), a <= b, True) for a, b in zip(lasts, watched, strict=True)]
        found = rate(drawn)
        assert found.high_seconds is not None
        hits += found.low_seconds <= 10.0 <= found.high_seconds
        curve = survival(drawn, (5.0,))
        assert curve is not None
        ((_, low, high),) = bounds(curve)
        aged += low <= np.exp(-0.5) <= high
    assert 0.92 <= hits / 300 <= 0.99
    assert 0.92 <= aged / 300 <= 0.99
