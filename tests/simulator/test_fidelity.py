"""Against the published simulator's stored results, by its own conventions."""

import json
from pathlib import Path

import pytest

from hetflow.clusters.simulator.cases import Case, report, run_case
from hetflow.formats.importers.gavel import read_gavel_trace
from hetflow.schema.jobs import Throughputs

POLICIES = {
    "max_min_fairness": ("las", True),
    "max_min_fairness_perf": ("las", False),
    "fifo_perf": ("fifo_greedy", False),
    "max_min_fairness_water_filling_perf": ("las_water_filling", False),
    "finish_time_fairness_perf": ("finish_time_fairness", False),
    "finish_time_fairness": ("finish_time_fairness", True),
}
# Counting t^isolated at the rates that jobs have, not at those the policy sees, gives +1.6 %.
WITHIN = {"finish_time_fairness": 0.01}
SMALL = [
    ("small_single_n60_lam1800_seed0.trace", policy, WITHIN.get(policy, 0.03))
    for policy in POLICIES
]
LARGE = [
    ("cont_single_n1000_lam640_seed0.trace", "fifo_perf", 0.01),
    ("cont_multi_n1000_lam1385_seed0.trace", "fifo_perf", 0.01),
    ("static_multi_n300_seed0.trace", "fifo_perf", 0.01),
    ("static_multi_n300_seed0.trace", "max_min_fairness", 0.02),
    ("static_multi_n300_seed0.trace", "max_min_fairness_perf", 0.02),
]
SLOW = [
    ("cont_single_n1000_lam640_seed0.trace", "max_min_fairness", 0.03),
    ("cont_single_n1000_lam640_seed0.trace", "max_min_fairness_perf", 0.03),
    ("cont_multi_n1000_lam1385_seed0.trace", "max_min_fairness", 0.03),
    # Which of LAS's optima is taken counts most here: see docs/benchmarks/simulator.md.
    ("cont_multi_n1000_lam1385_seed0.trace", "max_min_fairness_perf", 0.06),
]
CASES = SMALL + LARGE + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("trace", "policy", "within"), CASES)
@pytest.mark.slow
def test_agrees_with_the_published_simulator(
    gavel: Path, gavel_table: Throughputs, trace: str, policy: str, within: float
) -> None:
    rows = json.loads((gavel / "simulated.json").read_text())
    [row] = [r for r in rows if (r["trace"], r["policy"]) == (trace, policy) and not r["options"]]
    numbers = [int(number) for number in row["cluster"].split(":")]
    name, agnostic = POLICIES[policy]
    case = Case(
        throughputs=gavel_table,
        num_devices=dict(zip(("v100", "p100", "k80"), numbers, strict=True)),
        scheduler="published-rounds",
        policy=name,
        agnostic=agnostic,
    )
    run = run_case(case, read_gavel_trace(gavel / "traces" / trace))
    figures = report(case, run, trace).metrics
    assert figures.num_jobs == row["njobs"]
    assert figures.average_jct_seconds == pytest.approx(row["avg_jct_s"], rel=within)
    assert figures.makespan_seconds == pytest.approx(row["total_duration_s"], rel=within)
    assert figures.utilisation == pytest.approx(row["utilization"], rel=within)


@pytest.mark.parametrize("policy", ["min_total_duration", "min_total_duration_perf"])
def test_makespan_agrees_with_the_published_simulator(
    gavel: Path, gavel_table: Throughputs, policy: str
) -> None:
    """With jobs of several devices: +8.2 % (aware) where their time counts once for each."""
    trace = "static_multi_n300_seed0.trace"
    rows = json.loads((gavel / "simulated.json").read_text())
    [row] = [r for r in rows if (r["trace"], r["policy"]) == (trace, policy) and not r["options"]]
    case = Case(
        throughputs=gavel_table,
        num_devices={"v100": 36, "p100": 36, "k80": 36},
        scheduler="published-rounds",
        policy="makespan",
        agnostic=not policy.endswith("perf"),
    )
    run = run_case(case, read_gavel_trace(gavel / "traces" / trace))
    assert run.end_seconds == pytest.approx(row["total_duration_s"], rel=0.01)
