"""Clusters of two papers that share states on unlike devices: their rules' plans beside hetflow's.

Cephalo (Guo et al., ICS 2025) shares compute by speed and states by memory, and gathers a layer
once a step for all microbatches. Its rule is that of its published planner (``dp_ga``, then
``min_params``; repository benson-guo/cephalo). Poplar (Zhang et al., AAAI 2025) gives unlike
batches to devices with even shares, for each ZeRO stage; its code is not public, so its rule is
taken at its best: the batches whose slowest device ends first, in rounds where passes exchange.

All plan the same estimated profiles. Every plan is judged by ``hetflow.check``, which shares no
code with solvers, and a step is what the judge counts. Cephalo's v microbatches of b samples are
judged as one pass of v b samples with the memory of b, which is what its accumulation is meant to
be. What the sources do not tell, and was chosen here, is in ``Case.chosen``.

    python benchmarks/mixed_clusters.py
"""

import argparse
import json
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hetflow
from hetflow.planning.costs.compute import point_at
from hetflow.planning.costs.device_table import spec_of
from hetflow.planning.costs.sharding import in_rounds, peak_bytes, predict
from hetflow.planning.split_problem import split_problem
from hetflow.profilers import targets
from hetflow.profilers.estimate import EstimateOptions, estimate_target
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.options import Activations, Shard
from hetflow.schema.plan import Plan, Proof, passes_of
from hetflow.schema.problem import Problem, ShardedProblem
from hetflow.schema.profile import BatchPoint, Profile, changed_curves
from hetflow.solvers.split.feasible import group_on

TARGET = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from hetflow import runtime as hf

VOCABULARY = 49152  # of Cephalo's models

def trained(build, tokens):
    with hf.deferred():
        model = build()
    def loss(model, ids):
        return model(input_ids=ids, labels=ids).loss
    return model, lambda size: torch.randint(VOCABULARY, (size, tokens)), loss

def gpt():  # 2,770,621,440 parameters, as in the repository's data/model_memory.json
    config = GPT2Config(
        n_layer=32, n_embd=2560, n_head=80, n_positions=512, vocab_size=VOCABULARY,
        tie_word_embeddings=False, use_cache=False,
    )
    return trained(lambda: GPT2LMHeadModel(config), 512)

def llama():  # 1,331,783,680 parameters, as there
    config = LlamaConfig(
        num_hidden_layers=22, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
        vocab_size=VOCABULARY, use_cache=False,
    )
    return trained(lambda: LlamaForCausalLM(config), 2048)
"""
SIZES, FEW_SIZES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
LINKS = {"100 Gbit/s": 12.5e9, "10 Gbit/s": 1.25e9}
CEPHALO_MEMORY = 0.75  # of a device's, that its planner fills (max_alloc_frac)
STAGES: tuple[Shard, ...] = ("optimizer", "gradients", "all")  # ZeRO-1 to ZeRO-3


@dataclass(frozen=True, slots=True)
class Case:
    """A paper's cluster and a training on it."""

    paper: str
    devices: dict[str, int]  # rows of the device table, how many
    model: str
    batch: int
    chosen: str  # what the sources do not tell


CASES = (
    Case("cephalo", {"L4-24GB": 2, "RTX-A6000-48GB": 1, "P40-24GB": 1}, "gpt", 64, "the links"),
    Case(
        "cephalo",
        {"V100-SXM2-16GB": 8, "A10G-24GB": 8},
        "gpt",
        128,
        "the links; the batch is the planner's default",
    ),
    *(
        Case("poplar", devices, "llama", 1024, "the numbers of devices, model, tokens and links")
        for devices in (
            {"A100-SXM4-80GB": 4, "A100-SXM4-40GB": 4},
            {"V100-SXM2-16GB": 4, "T4-16GB": 4},
            {"A800-SXM4-80GB": 4, "V100S-PCIE-32GB": 4},
            {"A800-SXM4-80GB": 4, "V100S-PCIE-32GB": 1},
        )
    ),
)


class Share(NamedTuple):
    """What a device does in a step, and the bytes of weights of which it keeps the states."""

    device_type: str
    passes: int
    size: int
    share: int
    activations: Activations


Work = Counter[Share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Cephalo's small cluster, few sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    asked = parser.parse_args()
    results = []
    columns = "".join(
        f"{name:>11}" for name in ("theirs", "hetflow", "ratio", "any states", "ratio")
    )
    print(f"{'cluster':<42}{'link':<12}{'states':<10}{columns}")
    for case, profiles in estimated(FEW_SIZES if asked.quick else SIZES, asked.quick):
        for link, rate in LINKS.items():
            for row in compared(case, profiles, rate):
                results.append({**row, "link": link})
                print(line(results[-1]), flush=True)
    if asked.json:
        document = {"benchmark": "mixed_clusters", "sizes": SIZES, "results": results}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    # Cephalo's accumulation is no way to share that hetflow's plans have, but for plans of any way.
    slower = [
        row
        for row in results
        if min(ratios(row)[row["paper"] == "cephalo" :], default=1.0) < 1 - 1e-9
    ]
    if slower:
        sys.exit(f"hetflow's plan is slower: {slower}")


def ratios(row: dict[str, Any]) -> list[float]:
    """Their step over hetflow's with the same states shared, and with any; none without a plan."""
    theirs, ours = row["their_step_seconds"], (row["step_seconds"], row["any_step_seconds"])
    return [] if theirs is None else [theirs / (each or float("inf")) for each in ours]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    same, anyhow = [f"{each:>11.3f}" for each in ratios(row)] or [f"{'':>11}"] * 2
    theirs, ours, best = [
        f"{'no plan' if row[name] is None else f'{row[name]:.3f} s':>11}"
        for name in ("their_step_seconds", "step_seconds", "any_step_seconds")
    ]
    pool = " + ".join(f"{number} {name}" for name, number in row["devices"].items())
    return f"{pool:<42}{row['link']:<12}{row['shard']:<10}{theirs}{ours}{same}{best}{anyhow}"


def estimated(sizes: Sequence[int], quick: bool) -> Iterator[tuple[Case, tuple[Profile, ...]]]:
    """Each case with the profiles of its devices, estimated from data sheets."""
    cases = CASES[:1] if quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mixed.py")
        path.write_text(TARGET, encoding="utf-8")
        for model in dict.fromkeys(case.model for case in cases):
            names = sorted({n for case in cases if case.model == model for n in case.devices})
            options = EstimateOptions(
                sizes=tuple(sizes),
                layers_at=(1,),
                optimizer="adamw",
                precision="float16",
                activations=("recomputed",),
            )
            target = targets.parse(f"{path}:{model}")
            made = estimate_target(target, [spec_of(name) for name in names], options)
            found: dict[str, Profile] = {}
            for name, profile in zip(names, made, strict=True):  # forms of a type are told apart
                assert profile.estimate is not None
                estimate = replace(profile.estimate, device_type=name)
                found[name] = filled(replace(profile, device_type=name, estimate=estimate))
            for case in cases:
                if case.model == model:
                    yield case, tuple(found[name] for name in case.devices)


def filled(profile: Profile) -> Profile:
    """A profile with passes of all sizes, on straight lines between those that were counted."""
    return replace(
        profile,
        **changed_curves(
            profile,
            lambda how, curve: (
                tuple(
                    point_at(curve, size)
                    for size in range(curve[0].batch_size, curve[-1].batch_size + 1)
                )
                if curve
                else ()
            ),
        ),
    )


def compared(case: Case, profiles: tuple[Profile, ...], rate: float) -> Iterator[dict[str, Any]]:
    """Their plan and hetflow's that shares the same states, and hetflow's that may share any."""
    pool = Cluster.parse(",".join(f"{number}x{name}" for name, number in case.devices.items()))
    (server,) = pool.servers
    pool = replace(pool, servers=(replace(server, intra_bytes_per_second=rate),))
    problem = Problem(profiles, pool, case.batch)

    def solved(shard: str) -> Plan | None:
        try:
            return hetflow.solve(
                profiles,
                pool,
                batch_size=case.batch,
                strategy="split",
                shard=shard,
            )
        except InfeasibleError:
            return None

    def step_of(plan: Plan | None, of: Sequence[Profile] = profiles) -> float | None:
        if plan is None:
            return None
        faults = hetflow.check(plan, of, pool)
        if faults:
            sys.exit(f"{case}: {faults}")
        return plan.predicted.step_seconds

    began = time.process_time()
    best = solved("auto")
    seconds = time.process_time() - began
    if best is None:
        sys.exit(f"{case} has no plan")
    for shard in STAGES if case.paper == "poplar" else STAGES[-1:]:
        if case.paper == "poplar":
            theirs = step_of(poplar(best, problem, shard))
        else:
            work, of = cephalo(problem)
            theirs = step_of(plan_of(best, replace(problem, profiles=of), shard, work), of)
        yield {
            "paper": case.paper,
            "devices": case.devices,
            "model": case.model,
            "batch": case.batch,
            "chosen": case.chosen,
            "shard": shard,
            "their_step_seconds": theirs,
            "step_seconds": step_of(solved(shard)),
            "any_step_seconds": step_of(best),
            "any_shard": best.shard,
            "termination": best.proof.termination,
            "solve_cpu_seconds": seconds,
        }


def view_of(problem: Problem, shard: Shard) -> ShardedProblem:
    """What a solver of plans that share states sees of a problem."""
    view = split_problem(problem, shards=(shard,))
    assert isinstance(view, ShardedProblem)
    return view


def plan_of(like: Plan, problem: Problem, shard: Shard, work: Work) -> Plan | None:
    """A plan of that work, which says the rest as another one; None: it does not fit a device."""
    is_kept = any(one.activations == "kept" for one in work)
    view = view_of(problem, shard)
    kinds = {kind.device_type: kind for kind in view.devices}
    groups = []
    for one, number in work.items():
        kind = kinds[one.device_type]
        curve = kind.batch_curve if is_kept else kind.recomputed_curve
        point = next(point for point in curve if point.batch_size == one.size)
        held = peak_bytes(view, point, shard, one.passes if in_rounds(shard) else None, one.share)
        if held > kind.memory_bytes:
            return None
        group = group_on(kind, number, one.passes, point)
        groups.append(
            replace(
                group,
                exposed_seconds=None,
                activations=None if is_kept else one.activations,
                state_share_bytes=one.share,
                memory_bytes=held,
            )
        )
    predicted = predict(view, shard, groups)
    step = predicted.step_seconds
    proof = Proof(
        termination="feasible", objective=step, lower_bound=None, gap=None, method="a paper's rule"
    )
    stage = replace(like.stages[0], replicas=tuple(groups), shard=shard, copied_ratio=None)
    estimates = tuple(p.estimate for p in problem.used if p.estimate is not None)
    return replace(
        like,
        stages=(stage,),
        predicted=predicted,
        proof=proof,
        estimates=estimates,
        restrictions=None,
        **passes_of(groups),
    )


# Cephalo's rule.


def cephalo(problem: Problem) -> tuple[Work, tuple[Profile, ...]]:
    """Its plan, in which a device makes one pass, and profiles that have these passes.

    Microbatches and their numbers take the least time of the slowest device, among those whose
    activations fit all memory together with the states. Then states are as even as memory allows.
    """
    view = view_of(problem, "all")
    devices = [kind for kind in view.devices for _ in range(kind.num_devices)]
    ratio = 2 + view.optimizer.state_bytes_per_weight_byte
    states = ratio * view.weight_bytes
    rooms = [CEPHALO_MEMORY * kind.memory_bytes for kind in devices]
    options = [
        [
            (passes, point)
            for point in kind.recomputed_curve
            if point.peak_memory_bytes - states <= room
            for passes in range(1, view.global_batch_size // point.batch_size + 1)
        ]
        for kind, room in zip(devices, rooms, strict=True)
    ]
    best: tuple[float, list[tuple[int, BatchPoint]]] | None = None
    for seconds, chosen in ways(options, view.global_batch_size):
        held = states + sum(point.peak_memory_bytes - states for _, point in chosen)
        if (best is None or seconds < best[0]) and held < sum(rooms):
            best = seconds, chosen
    if best is None:
        raise SystemExit("Cephalo's rule finds no microbatches that fit")
    caps = [
        max(0.0, room - (point.peak_memory_bytes - states)) / ratio
        for room, (_, point) in zip(rooms, best[1], strict=True)
    ]
    level = next(  # the least limit on a share with which all shares hold all weights
        limit
        for limit in np.linspace(view.weight_bytes / len(caps), view.weight_bytes, 1 << 16)
        if sum(min(cap, limit) for cap in caps) >= view.weight_bytes
    )
    work: Work = Counter(
        Share(
            kind.device_type, 1, passes * point.batch_size, int(min(cap, level)) + 1, "recomputed"
        )
        for kind, (passes, point), cap in zip(devices, best[1], caps, strict=True)
    )
    made = {
        (kind.device_type, passes * point.batch_size): (passes, point.batch_size)
        for kind, (passes, point) in zip(devices, best[1], strict=True)
    }
    return work, tuple(with_passes(profile, made) for profile in problem.profiles)


def ways(
    options: Sequence[Sequence[tuple[int, BatchPoint]]], batch: int
) -> Iterator[tuple[float, list[tuple[int, BatchPoint]]]]:
    """The fastest way for each sum of all devices' microbatch sizes, by dynamic programming."""
    most = min(batch, sum(max(point.batch_size for _, point in own) for own in options))
    least = np.full((batch + 1, most + 1), np.inf)  # seconds, by samples and sum of sizes
    least[0, 0] = 0.0
    taken = []
    for own in options:
        best, choice = np.full_like(least, np.inf), np.full(least.shape, -1)
        for index, (passes, point) in enumerate(own):
            size = point.batch_size
            done = passes * size
            seconds = np.maximum(
                least[: batch + 1 - done, : most + 1 - size], passes * point.step_seconds
            )
            target = best[done:, size:]
            better = seconds < target
            target[better], choice[done:, size:][better] = seconds[better], index
        least = best
        taken.append(choice)
    for total in range(1, most + 1):
        if np.isinf(least[batch, total]):
            continue
        at, left, chosen = batch, total, []
        for own, choice in zip(reversed(options), reversed(taken), strict=True):
            passes, point = own[choice[at, left]]
            chosen.append((passes, point))
            at, left = at - passes * point.batch_size, left - point.batch_size
        yield float(least[batch, total]), chosen[::-1]


def with_passes(profile: Profile, made: dict[tuple[str, int], tuple[int, int]]) -> Profile:
    """A profile whose recomputed passes are several microbatches, with the memory of one."""
    sizes = {point.batch_size: point for point in profile.recomputed_curve}
    curve = [
        replace(sizes[size], batch_size=total, step_seconds=passes * sizes[size].step_seconds)
        for (name, total), (passes, size) in sorted(made.items())
        if name == profile.device_type
    ]
    return replace(profile, recomputed_curve=tuple(curve))


# Poplar's rule.


def poplar(like: Plan, problem: Problem, shard: Shard) -> Plan | None:
    """Its fastest plan: even shares, and batches by speed, in rounds where passes exchange."""
    view = view_of(problem, shard)
    share = -(-view.weight_bytes // view.num_devices)
    devices = [kind for kind in view.devices for _ in range(kind.num_devices)]
    plans = []
    for rounds in (1, 2) if in_rounds(shard) else (None,):  # memory of one round is another
        fitting = {
            kind.device_type: {
                point.batch_size: point.step_seconds
                for point in kind.batch_curve
                if peak_bytes(view, point, shard, rounds, share) <= kind.memory_bytes
            }
            for kind in view.devices
        }
        if not all(fitting.values()):
            continue
        make = by_rounds if in_rounds(shard) else by_speed
        for loads in make([fitting[kind.device_type] for kind in devices], view.global_batch_size):
            work: Work = Counter(
                Share(kind.device_type, passes, size, share, "kept")
                for kind, (passes, size) in zip(devices, loads, strict=True)
            )
            plans.append(plan_of(like, problem, shard, work))
    made = [plan for plan in plans if plan is not None]
    return min(made, key=lambda plan: plan.predicted.step_seconds, default=None)


Curve = dict[int, float]
"""Seconds of a pass by its samples."""


def by_rounds(curves: Sequence[Curve], batch: int) -> Iterator[list[tuple[int, int]]]:
    """For each bound on a round's time, the most samples of each device, in equally many rounds."""
    for bound in sorted({seconds for curve in curves for seconds in curve.values()}):
        sizes = [max((b for b, s in c.items() if s <= bound), default=0) for c in curves]
        if not all(sizes):
            continue
        rounds = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= sum(sizes))
        if batch // rounds < len(sizes):
            continue
        while sum(sizes) > batch // rounds:  # the longest pass gives samples up
            longest = max(
                (at for at, size in enumerate(sizes) if size > 1),
                key=lambda at: curves[at][sizes[at]],
            )
            sizes[longest] = max(size for size in curves[longest] if size < sizes[longest])
        if sum(sizes) == batch // rounds:
            yield [(rounds, size) for size in sizes]


def by_speed(curves: Sequence[Curve], batch: int) -> Iterator[list[tuple[int, int]]]:
    """Passes of each device alone, whose slowest device ends first, that fill the batch exactly."""
    loads: list[dict[int, tuple[float, int, int]]] = []
    for curve in curves:
        own: dict[int, tuple[float, int, int]] = {}
        for size, seconds in curve.items():
            for passes in range(1, batch // size + 1):
                load = passes * seconds, passes, size
                own[passes * size] = min(load, own.get(passes * size, load))
        loads.append(own)

    def reached(limit: float) -> list[int]:
        """Sums of samples of the first devices within a time, as the bits of a number."""
        rows = [1]
        for own in loads:
            sums = [rows[-1] << done for done, (seconds, *_) in own.items() if seconds <= limit]
            rows.append(reduce(or_, sums, 0) & (2 << batch) - 1)
        return rows

    times = sorted({seconds for own in loads for seconds, *_ in own.values()})
    at = bisect_left(times, True, key=lambda limit: bool(reached(limit)[-1] >> batch & 1))
    if at == len(times):
        return
    rows, left, found = reached(times[at]), batch, []
    for row, own in zip(rows[-2::-1], reversed(loads), strict=True):
        done = next(n for n in own if n <= left and own[n][0] <= times[at] and row >> left - n & 1)
        found.append(own[done][1:])
        left -= done
    yield found[::-1]


if __name__ == "__main__":
    main()
