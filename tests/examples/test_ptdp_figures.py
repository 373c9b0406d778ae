"""The shapes of PTD-P's figures (thesis 4.3, 4.5), out of the cost model of parallel plans."""

import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hetflow.examples

SCRIPT = Path(hetflow.examples.__file__).parent / "ptdp_figures" / "figures.py"


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def figures(module: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By the number that a figure's title begins with."""
    return {
        name.split(maxsplit=1)[0].strip(":"): found for name, found in module["figures"]().items()
    }


def falls(values: list[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


def test_4_8_neither_the_smallest_nor_the_largest_microbatch(figures: dict[str, Any]) -> None:
    small, large = figures["4.8"]["batch 128"], figures["4.8"]["batch 512"]
    for rates in (small, large):
        assert 0 < rates.index(max(rates)) < len(rates) - 1
    # The bubble of a large batch is small, so large microbatches cost it less.
    assert large.index(max(large)) >= small.index(max(small))
    assert large[-1] > small[-1]


def test_4_12_interleaving_wins_and_the_gap_closes(figures: dict[str, Any]) -> None:
    plain, interleaved, unscattered = figures["4.12"].values()
    gains = [a / b for a, b in zip(interleaved, plain, strict=True)]
    assert min(gains) > 1
    assert falls(gains)
    # 4.18: less than the thesis's 11 % by scatter/gather, as passes hide most messages.
    saved = [a / b - 1 for a, b in zip(interleaved, unscattered, strict=True)]
    assert 0.01 < min(saved)
    assert max(saved) < 0.11
    assert falls(saved)


def test_4_13_to_4_15_which_degrees_win(figures: dict[str, Any]) -> None:
    by_batch = figures["4.13"]
    assert by_batch["batch 32"].index(max(by_batch["batch 32"])) == 2  # (p, t) = (8, 8)
    assert by_batch["batch 128"][2] > 0.95 * max(by_batch["batch 128"])
    assert all(falls(rates) for rates in figures["4.14"].values())
    for rates in figures["4.15"].values():
        assert falls(rates)
        assert rates[2] > 3 * rates[3]  # a group of 16 spans two servers
    for name in ("4.14", "4.15"):
        small, middle, large = figures[name].values()
        assert all(a < b < c for a, b, c in zip(small, middle, large, strict=True))


def test_4_16_the_best_microbatch_is_2(figures: dict[str, Any]) -> None:
    """At batch 512 a microbatch of 4 is as good to 0.1 %."""
    for rates in figures["4.16"].values():
        assert rates[1] > 0.999 * max(rates)
        assert rates[1] > rates[0]
        assert rates[1] > rates[3]


def test_4_17_recomputation_costs_up_to_a_third(figures: dict[str, Any]) -> None:
    again, once = figures["4.17"].values()
    assert 0.2 < 1 - again[0] / once[0] < 0.33


@pytest.mark.slow
def test_the_planner_interleaves_where_the_batch_is_small(module: dict[str, Any]) -> None:
    """4.12, where the planner may choose all degrees itself: p, t and d are the figure's."""
    plan = module["solve"](module["problem_of"](module["GPT_3"], 96, 24))
    group = plan.stages[0].replicas[0]
    degrees = (plan.num_positions, group.tensor_parallel_size, group.num_replicas)
    assert (degrees, plan.num_model_chunks) == ((12, 8, 1), 4)
    assert plan.proof.termination == "optimal"
