"""Predicted against measured: runs of Sailor on GH200, of vTrain and Megatron on A100.

Sailor's 15 runs are of OPT-350M on 1 to 32 nodes of 4 GH200. Predictions use its profiles by layer
alone; two of them differ in what crosses a boundary between stages; the last scales its terms by
three factors fitted on the other 14 runs.

vTrain's 1,440 runs are of GPT models on one server of 2, 4 or 8 A100. Times of a block and of the
rest (embedding, logits, loss) by microbatch size and tensor-parallel degree are fitted to the runs
of four (hidden, layers), and the other four are judged: predicted by the checker's count of a
plan's step, as the planner's own plans are.

Of each of two Megatron models one published run calibrates and the other is predicted.
"""

import argparse
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hetflow.papers import ptdp as parallel
from hetflow.papers.sailor import read_problem
from hetflow.planning.checks.parallel import counted_memory, counted_step
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.schema.plan import Plan, ReplicaGroup, Stage
from hetflow.tests.data import sailor_plans
from hetflow.tests.data.reference import planners

MODEL = "OPT-350"
FITTED = ((1024, 12), (1024, 20), (2048, 16), (2048, 24))  # (hidden, layers); the others are judged
VOCABULARY = 51_200  # vTrain's file does not state it; it counts in gradients and updates alone
SIZES = DEGREES = (1, 2, 4, 8)
LINKED = (1, 2, 4)  # degrees of runs with more than one stage or replica


@dataclass(frozen=True)
class MeasuredRun:
    """One of Sailor's runs: the plan, what was measured, and the terms of the prediction."""

    name: str
    plan: Plan
    problem: ParallelProblem
    measured_seconds: float
    measured_memory_bytes: float

    @property
    def terms(self) -> tuple[float, float, float]:
        """Passes with the update, messages and the all-reduce by hetflow's rule, seconds."""
        whole = counted_step(self.plan, self.problem)
        no_links = _without_links(self.problem)
        passes = counted_step(self.plan, no_links)
        one = replace(self.problem, output_bytes=(0,) * len(self.problem.layers))
        reduced = counted_step(self.plan, one) - passes
        return passes, whole - passes - reduced, reduced


def _without_links(problem: ParallelProblem) -> ParallelProblem:
    """The same with nothing to send or to reduce."""
    sizes = tuple(replace(size, weight_bytes=(0,) * len(problem.layers)) for size in problem.sizes)
    return replace(problem, output_bytes=(0,) * len(problem.layers), sizes=sizes)


def measured_runs() -> list[MeasuredRun]:
    """All 15."""
    runs = []
    for path in sorted((planners() / "sailor" / "validation_gh200_opt350").glob("*/*.json")):
        run = json.loads(path.read_text())
        problem = read_problem(
            planners() / "sailor",
            MODEL,
            {"GH-96": 4 * run["N"]},
            global_batch_size=run["gbs"],
            cost_rule="hetflow",
        )
        runs.append(
            MeasuredRun(path.stem, _plan_of(run), problem, run["real"], float(run["max_mem"]))
        )
    return runs


def _plan_of(run: dict[str, Any]) -> Plan:
    pipeline = run["pipeline_list"][0]
    return sailor_plans.plan_of(
        MODEL,
        pipeline["layers_per_stage"],
        pipeline["tmp_per_stage"],
        global_batch_size=run["gbs"],
        microbatch_size=run["mbs"],
        data_parallel_size=pipeline["dp"][0],
    )


def against_gh200() -> dict[str, Any]:
    """Errors of time and memory, each run's and the mean of their absolute values."""
    runs = measured_runs()
    measured = np.array([run.measured_seconds for run in runs])
    sailor = [
        counted_step(run.plan, replace(run.problem, cost_rule="sailor")) / run.measured_seconds - 1
        for run in runs
    ]
    terms = np.array([run.terms for run in runs])
    relative = terms / measured[:, None]
    fitted = []
    for left_out in range(len(runs)):
        others = [i for i in range(len(runs)) if i != left_out]
        factors = np.linalg.lstsq(relative[others], np.ones(len(others)), rcond=None)[0]
        fitted.append(float(relative[left_out] @ factors) - 1)
    memory = [
        max(max(counted_memory(r.plan, r.problem, i)) for i in range(len(r.plan.stages)))
        / r.measured_memory_bytes
        - 1
        for r in runs
    ]
    by_boundary = {
        rule: [
            counted_step(run.plan, replace(run.problem, boundary_rule=rule)) / run.measured_seconds
            - 1
            for run in runs
        ]
        for rule in ("whole", "blocking")
    }
    errors = {
        "sailor_rule": sailor,
        "hetflow_rule_whole_boundaries": by_boundary["whole"],
        "hetflow_rule_blocking_boundaries": by_boundary["blocking"],
        "hetflow_rule": [float(each) for each in terms.sum(axis=1) / measured - 1],
        "hetflow_fitted_leave_one_out": fitted,
        "memory": memory,
    }
    for name, found in errors.items():
        print(f"GH200, {name}: {_summary(found)}")
    return {"runs": [run.name for run in runs], **errors}


def _summary(errors: list[float]) -> str:
    size = np.abs(errors)
    return f"mean {100 * size.mean():.1f} %, largest {100 * size.max():.1f} %"


@dataclass(frozen=True)
class ServerRun:
    """One of vTrain's runs: a GPT on one server of A100."""

    num_devices: int
    batch: int
    microbatch: int
    hidden: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def rounds(self) -> int:
        """Microbatches of each pipeline, m."""
        return self.batch // (self.microbatch * self.data)

    @property
    def is_fitted(self) -> bool:
        """Whether it may be fitted to; the others are judged."""
        return (self.hidden, self.layers) in FITTED

    @property
    def group(self) -> tuple[int, int, int, int]:
        """What a planner would be asked: devices, batch and model."""
        return self.num_devices, self.batch, self.hidden, self.layers

    @property
    def boundary_bytes(self) -> int:
        """Of one microbatch, 2 bytes an element."""
        return 2 * self.microbatch * self.sequence * self.hidden

    @property
    def last_stage_weights(self) -> float:
        """Bytes on a device of the last stage: its blocks and the embedding, 2 a weight."""
        blocks = 12 * self.hidden**2 * self.layers / self.pipeline
        return 2 * (blocks + VOCABULARY * self.hidden) / self.tensor


@cache
def server_runs() -> tuple[ServerRun, ...]:
    """All 1,440."""
    path = planners() / "vtrain" / "ground_truth_single.csv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return tuple(
        ServerRun(
            num_devices=int(row[0]),
            batch=int(row[1]),
            microbatch=int(row[2]),
            hidden=int(row[3]),
            layers=int(row[5]),
            sequence=int(row[6]),
            tensor=int(row[7]),
            data=int(row[8]),
            pipeline=int(row[9]),
            seconds=float(row[10]) / 1e3,
        )
        for row in rows
    )


@dataclass(frozen=True)
class FittedTimes:
    """What a server's runs at one hidden size say of it; seconds and bytes.

    ``block`` and ``rest`` are passes, forward and backward, of one block and of all else, by
    (microbatch size, degree).
    """

    block: dict[tuple[int, int], float]
    rest: dict[tuple[int, int], float]
    latency: dict[int, float]
    per_byte: dict[int, float]
    update: float
    update_per_byte: float


def fit(runs: list[ServerRun]) -> FittedTimes:
    """Non-negative least squares on relative errors, of the terms that a step adds up.

    The slowest stage is taken to be the last one, which has the logits.
    """
    cases = [(size, degree) for size in SIZES for degree in DEGREES]
    places = {case: number for number, case in enumerate(cases)}
    rows = np.zeros((len(runs), 2 * len(cases) + 2 * len(LINKED) + 2))
    links = 2 * len(cases)
    for row, run in zip(rows, runs, strict=True):
        place = places[run.microbatch, run.tensor]
        row[place] = (run.rounds + run.pipeline - 1) * run.layers / run.pipeline
        row[len(cases) + place] = run.rounds
        if run.pipeline > 1:
            link = links + 2 * LINKED.index(run.tensor)
            messages = run.rounds - 1 + 2 * (run.pipeline - 1)
            row[link : link + 2] += messages * np.array([1.0, run.boundary_bytes])
        if run.data > 1:
            share = run.last_stage_weights / run.data
            row[links : links + 2] += 2 * (run.data - 1) * np.array([1.0, share])
        row[-2:] = 1.0, run.last_stage_weights
    rows /= np.array([[run.seconds] for run in runs])
    scales = np.maximum(rows.max(axis=0), 1e-30)
    found = nnls(rows / scales, np.ones(len(runs)))[0] / scales
    return FittedTimes(
        block=dict(zip(cases, found, strict=False)),
        rest=dict(zip(cases, found[len(cases) :], strict=False)),
        latency=dict(zip(LINKED, found[links:-2:2], strict=True)),
        per_byte=dict(zip(LINKED, found[links + 1 : -2 : 2], strict=True)),
        update=float(found[-2]),
        update_per_byte=float(found[-1]),
    )


def predicted_seconds(run: ServerRun, times: FittedTimes) -> float:
    """The step of a run as a plan of a problem, counted by the checker."""
    names = (*(f"block{i}" for i in range(run.layers)), "rest")
    weights = (*(2 * 12 * run.hidden**2,) * run.layers, 2 * VOCABULARY * run.hidden)
    shards = tuple(weight // run.tensor for weight in weights)
    case = run.microbatch, run.tensor
    shard = ShardTimes(
        tensor_parallel_size=run.tensor,
        microbatch_size=run.microbatch,
        forward_seconds=(*(times.block[case],) * run.layers, times.rest[case]),
        backward_seconds=(0.0,) * len(names),
        update_seconds=tuple(
            times.update_per_byte * own + (times.update if name == "rest" else 0.0)
            for own, name in zip(shards, names, strict=True)
        ),
    )
    links = tuple(
        DegreeLink(
            tensor_parallel_size=degree,
            curve=LinkCurve(
                coefficients=(1 / max(times.per_byte[degree], 1e-15),),
                latency_seconds=times.latency[degree],
            ),
        )
        for degree in LINKED
    )
    pool = ParallelPool(
        device_type="A100",
        num_devices=run.num_devices,
        devices_per_server=run.num_devices,
        times=(shard,),
        links=links,
    )
    nothing = (0.0,) * len(names)
    degrees = sorted({1, run.tensor})
    problem = ParallelProblem(
        model=MODEL,
        global_batch_size=run.batch,
        layers=names,
        output_bytes=(run.boundary_bytes // run.microbatch,) * len(names),
        pools=(pool,),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=degree,
                weight_bytes=tuple(weight // degree for weight in weights),
                stashed_bytes=nothing,
            )
            for degree in degrees
        ),
    )
    return counted_step(_plan_of_server(run, names), problem)


def _plan_of_server(run: ServerRun, names: tuple[str, ...]) -> Plan:
    group = ReplicaGroup(
        device_type="A100",
        tensor_parallel_size=run.tensor,
        num_replicas=run.data,
        samples=run.batch,
        virtual_nodes=run.rounds,
        virtual_node_batch_size=run.microbatch,
    )
    starts = range(0, run.layers, run.layers // run.pipeline)
    stages = [
        Stage(layers=names[start:end], recompute="none", replicas=(group,))
        for start, end in zip(starts, [*starts[1:], len(names)], strict=True)
    ]
    return sailor_plans.unjudged(MODEL, run.batch, run.microbatch, run.rounds, stages)


def against_a100() -> dict[str, Any]:
    """Errors and regret of what was fitted and of what is judged."""
    runs = server_runs()
    fitted = {
        hidden: fit([run for run in runs if run.is_fitted and run.hidden == hidden])
        for hidden in {run.hidden for run in runs}
    }
    predicted = {run: predicted_seconds(run, fitted[run.hidden]) for run in runs}
    answer: dict[str, Any] = {"fitted_on": FITTED}
    for name, is_fitted in (("fitted", True), ("judged", False)):
        own = [run for run in runs if run.is_fitted == is_fitted]
        errors = [predicted[run] / run.seconds - 1 for run in own]
        regrets = _regrets(own, lambda run: predicted[run])
        answer[name] = {
            "runs": len(own),
            "mean_error": float(np.abs(errors).mean()),
            "largest_error": float(np.abs(errors).max()),
            "groups": len(regrets),
            "mean_regret": float(np.mean(regrets)),
            "largest_regret": max(regrets),
        }
        print(
            f"A100, {name}: {_summary(errors)} of {len(own)} runs; the plan predicted best is "
            f"{100 * np.mean(regrets):.2f} % slower than the best measured (mean of "
            f"{len(regrets)} groups), at most {100 * max(regrets):.1f} %"
        )
    return answer


def _regrets(runs: list[ServerRun], predicted: Callable[[ServerRun], float]) -> list[float]:
    """How much slower the plan predicted fastest is than the fastest, of groups with a choice."""
    groups: dict[tuple[int, ...], list[ServerRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return [
        min(group, key=predicted).seconds / min(run.seconds for run in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]


# Megatron's runs as listed with Calculon (SC'23): layers, hidden size, batch, seconds a step with
# full recomputation, and with sequence parallelism and selective recomputation.
MEGATRON = {"175B": (96, 12288, 64, 18.13, 13.75), "1T": (128, 25600, 512, 94.42, 71.49)}


def against_megatron() -> dict[str, float]:
    """Steps with selective recomputation, from the fully recomputing run of the same model.

    Equation 4.1 is proportional to the passes' time, so the two differ by their FLOPs.
    """
    errors = {}
    for name, (layers, hidden, batch, full, selective) in MEGATRON.items():
        model = (batch, 2048, layers, hidden, VOCABULARY)
        fewer = parallel.flops_without_full_recomputation(*model, selective=True)
        predicted = full * fewer / parallel.flops_per_batch(*model)
        errors[name] = predicted / selective - 1
        print(f"Megatron {name}: {predicted:.2f} s, measured {selective} ({errors[name]:+.1%})")
    return errors


def main() -> None:
    """Print all; ``--json FILE`` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = {
        "sailor_gh200": against_gh200(),
        "vtrain_a100": against_a100(),
        "megatron": against_megatron(),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
