"""Thesis 5.5: priorities, algorithm 2, and the same by type."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.pool import NOWHERE
from hetflow.clusters.mechanisms.rounds import (
    NEVER_RAN,
    choose,
    choose_by_type,
    fill_idle,
    priorities,
    take,
)
from hetflow.tests.profiles import examples

EXAMPLE = np.array([[0.6, 0.2, 0.2], [0.4, 0.6, 0.0], [0.0, 0.2, 0.8]])  # types x jobs


def test_priorities_of_figure_5_5() -> None:
    rounds = np.array([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    found = priorities(EXAMPLE, rounds, np.ones(3))
    never = NEVER_RAN * 0.2
    expected = [[0.2, 0.2, never], [0.4, 0.2, 0.0], [0.0, never, 0.2]]
    np.testing.assert_allclose(found, expected)


def test_highest_priority_goes_first_and_nobody_runs_twice() -> None:
    rounds = np.array([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    found = priorities(EXAMPLE, rounds, np.ones(3))
    ones = np.ones(3, dtype=np.int64)
    assert choose(found, ones, ones).tolist() == [1, 2, 0]


def test_rounds_realise_the_allocation() -> None:
    received = np.zeros((3, 3))
    ones = np.ones(3, dtype=np.int64)
    for _ in range(500):
        ranked = priorities(EXAMPLE, received, received.sum(axis=1))
        ranked = np.where(EXAMPLE > 0, ranked, -np.inf)
        chosen = choose(ranked, ones, ones)
        for job, kind in enumerate(chosen):
            if kind != NOWHERE:
                received[kind, job] += 1
    np.testing.assert_allclose(received / received.sum(axis=1)[:, None], EXAMPLE, atol=0.02)


def test_job_that_does_not_fit_is_passed() -> None:
    ranked = np.array([[9.0, 5.0, 1.0]])
    chosen = choose(ranked, np.array([2, 4, 1]), np.array([3]))
    assert chosen.tolist() == [0, NOWHERE, 0]
    assert take(np.array([0, 1, 2]), np.array([2, 4, 1]), 3).tolist() == [0, 2]


def test_priorities_matter_only_where_devices_are_short() -> None:
    ranked = np.array([[3.0, 1.0, -np.inf], [2.0, 5.0, 1.0]])
    chosen = choose_by_type(ranked, None, np.ones(3, int), np.array([2, 1]), [0, 1])
    assert chosen.tolist() == [0, 0, 1]
    chosen = choose_by_type(ranked, None, np.ones(3, int), np.array([1, 2]), [0, 1])
    assert chosen.tolist() == [0, 1, 1]


def test_idle_devices_go_to_the_relatively_fastest() -> None:
    ranked = fill_idle(np.array([[0.0, 0.0, 0.5]]), np.array([[0.3, 1.0, 0.1]]))
    assert np.argsort(-ranked[0]).tolist() == [2, 1, 0]


@st.composite
def _rounds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    jobs, types = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    level = st.one_of(st.just(-np.inf), st.floats(0, 10))
    ranked = [[draw(level) for _ in range(jobs)] for _ in range(types)]
    scale = [draw(st.sampled_from([1, 1, 2, 4, 8])) for _ in range(jobs)]
    free = [draw(st.integers(0, 9)) for _ in range(types)]
    return np.array(ranked), np.array(scale), np.array(free)


@settings(max_examples=examples(300))
@given(_rounds())
def test_no_device_is_oversubscribed_and_none_left_idle(
    case: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    ranked, scale, free = case
    order = list(range(len(free)))
    for chosen in (
        choose(ranked, scale, free),
        choose_by_type(ranked, None, scale, free, order),
        choose_by_type(ranked, -ranked, scale, free, order),
    ):
        used = np.array([scale[chosen == kind].sum() for kind in order])
        assert (used <= free).all()
        for job, kind in enumerate(chosen):
            if kind != NOWHERE:
                assert ranked[kind, job] > -np.inf
                continue
            fits = [k for k in order if scale[job] <= free[k] - used[k]]
            assert all(ranked[k, job] == -np.inf for k in fits)
