"""Pipelines train as one process does: real workers on gloo against the one-process run."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage, split_plan, whole_group

from . import pipeline_cases as cases
from .gloo_workers import run_workers

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "pipeline_cases.py"

PREDICTED = Prediction(step_seconds=0.1, samples_per_second=240.0)
PROOF = Proof(termination="feasible", objective=0.1, lower_bound=None, gap=None, method="by hand")
CHAIN2 = (("0", "1", "2"), ("3", "4", "5", "6"))
CHAIN3 = (("0",), ("1", "2", "3"), ("4", "5", "6"))
CHAIN4 = (("0", "1"), ("2", "3"), ("4", "5"), ("6",))
BRANCH2 = (("first", "second"), ("third", "last"))
BRANCH3 = (("first",), ("second",), ("third", "last"))
NORM3 = (("0", "1"), ("2", "3"), ("4", "5"))
BRANCH4 = (("first",), ("second",), ("third",), ("last",))
NORM2 = (("0", "1", "2"), ("3", "4", "5"))

# number: (case, schedule, stages, replicas, microbatches, recompute)
WORLDS = {
    2: {
        "gpipe": ("chain:momentum:clip", "gpipe", CHAIN2, (1, 1), 6, False),
        "flush": ("chain:adam:clip", "1f1b", CHAIN2, (1, 1), 8, True),
        "weighted": ("chain:momentum:weighted-far", "1f1b", CHAIN2, (1, 1), 6, False),
        "interleaved": ("chain:momentum:whole", "interleaved", CHAIN4, (1, 1), 6, False),
        "zb": ("chain:adam:clip", "zb-h1", CHAIN2, (1, 1), 6, False),
        "branches": ("branches:momentum:clip", "1f1b", BRANCH2, (1, 1), 4, False),
        "tied-chunks": ("branches:adam:clip-weighted", "interleaved", BRANCH4, (1, 1), 6, False),
        "normed": ("normed:momentum:", "1f1b", NORM2, (1, 1), 4, True),
        "apart": ("branches:adam:clip-weighted-apart", "1f1b", BRANCH2, (1, 1), 6, False),
        "zb-h2-again": ("chain:momentum:clip", "zb-h2", CHAIN2, (1, 1), 6, True),
        "zb-v": ("chain:adam:clip", "zb-v", CHAIN4, (1, 1), 6, False),
        "tied-v": ("branches:adam:clip", "zb-v", BRANCH4, (1, 1), 6, False),
        "dualpipe": ("chain:adam:clip", "dualpipe", CHAIN2, (1, 1), 6, False),
        "normed-both-ways": ("normed:momentum:", "dualpipe", NORM2, (1, 1), 4, False),
        "dualpipe-v": ("chain:momentum:clip", "dualpipe-v", CHAIN4, (1, 1), 6, False),
    },
    3: {
        "three": ("chain:momentum:clip-calls", "1f1b", CHAIN3, (1, 1, 1), 6, False),
        "2-1": ("chain:momentum:clip-calls", "1f1b", CHAIN2, (2, 1), 6, False),
        "1-2": ("branches:adam:clip", "gpipe", BRANCH2, (1, 2), 6, True),
        "skip": ("branches:momentum:clip-deferred", "1f1b", BRANCH3, (1, 1, 1), 6, False),
        "normed-2-1": ("normed:momentum:deferred", "1f1b", NORM2, (2, 1), 4, False),
        "stash": ("chain:momentum:whole", "pipedream", CHAIN3, (1, 1, 1), 6, False),
        "stash-adam": ("chain:adam:whole", "pipedream", CHAIN3, (1, 1, 1), 6, True),
        "vertical": ("chain:adam:whole", "pipedream-vertical-sync", CHAIN3, (1,) * 3, 6, False),
        "stash-2-1": ("chain:momentum:whole", "pipedream", CHAIN2, (2, 1), 6, False),
        "stash-1-2": ("chain:adam:whole", "pipedream", CHAIN2, (1, 2), 6, False),
        "apart-2-1": ("chain:momentum:clip-apart", "1f1b", CHAIN2, (2, 1), 6, False),
        "zb-h2": ("chain:adam:clip", "zb-h2", CHAIN3, (1, 1, 1), 8, False),
        "2bw-adam": ("chain:adam:whole", "2bw", CHAIN3, (1, 1, 1), 6, True),
        "tied-stash": ("branches:adam:whole", "pipedream", BRANCH3, (1, 1, 1), 6, False),
        "other-model": ("branches:adam:whole", "1f1b", CHAIN3, (1, 1, 1), 6, False),
        "backwards": ("chain:adam:whole", "1f1b", CHAIN3[::-1], (1, 1, 1), 6, False),
    },
    4: {
        "four": ("chain:momentum:clip", "1f1b", CHAIN4, (1, 1, 1, 1), 8, True),
        "2-2": ("chain:adam:clip", "1f1b", CHAIN2, (2, 2), 6, False),
        "shared-adam": ("chain:adam:clip-weighted", "1f1b", CHAIN2, (2, 2), 6, False, (1, 3)),
        "shared-tied": ("branches:adam:clip-deferred", "1f1b", BRANCH2, (2, 2), 6, True, (3, 1)),
        "shared-gpipe": ("branches:momentum:clip", "gpipe", BRANCH2, (2, 2), 6, False, (0, 1)),
        "shared-padded-again": ("chain:adam:clip-padded", "1f1b", CHAIN2, (2, 2), 6, True, (1, 3)),
        "shared-chunks": ("chain:adam:clip-whole", "interleaved", CHAIN4, (2, 2), 8, True, (1, 3)),
        "shared-tied-chunks": (
            "branches:adam:clip-weighted-whole", "interleaved", BRANCH4, (2, 2), 8, False, (0, 1),
        ),
        "shared-padded-chunks": (
            "chain:momentum:clip-padded-whole", "interleaved", CHAIN4, (2, 2), 8, True, (1, 1),
        ),
        "shared-normed": ("normed:momentum:clip", "1f1b", NORM2, (2, 2), 4, True, (1, 1)),
        "3-1": ("branches:momentum:clip", "1f1b", BRANCH2, (3, 1), 6, False),
        "1-2-1": ("normed:momentum:", "gpipe", NORM3, (1, 2, 1), 4, True),
        "interleaved-2": ("chain:adam:whole", "interleaved", CHAIN4, (2, 2), 8, False),
        "zb-h1": ("chain:momentum:clip", "zb-h1", CHAIN4, (1, 1, 1, 1), 8, False),
        "zb-h2": ("branches:adam:clip", "zb-h2", BRANCH4, (1, 1, 1, 1), 8, False),
        "zb-v": ("chain:momentum:whole", "zb-v", CHAIN4, (2, 2), 8, False),
        "dualpipe": ("chain:adam:clip", "dualpipe", CHAIN4, (1, 1, 1, 1), 8, False),
        "stash-2-2": ("chain:adam:whole", "pipedream", CHAIN2, (2, 2), 6, False),
        "stash-1-3": ("chain:momentum:whole", "pipedream", CHAIN2, (1, 3), 6, False),
    },
}  # fmt: skip
PLACES = {"interleaved": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0), "dualpipe-v": (0, 1, 1, 0)}
FOUR_ARE_SLOW = {4: (pytest.mark.slow,)}
FLUSHING = [
    pytest.param(size, name, marks=FOUR_ARE_SLOW.get(size, ()))
    for size, world in WORLDS.items()
    for name, case in world.items()
    if case[1] not in ("pipedream", "pipedream-vertical-sync", "2bw")
    and name not in ("other-model", "backwards")
]


def make_plan(schedule, stages, replicas, microbatches, recompute=False, shares=()) -> Plan:
    if shares:
        return sharing(make_plan(schedule, stages, replicas, microbatches, recompute), shares)
    size = len(stages)
    on = PLACES.get(schedule, range(size))
    return pipeline_plan(
        model="m",
        global_batch_size=24,
        microbatch_size=24 // microbatches,
        num_microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        stages=tuple(
            pipeline_stage(
                layers=layers,
                num_replicas=(replicas * size)[number],
                device_type="cpu:x",
                first_device=on[number] * replicas[0],
                num_in_flight=1,
                weight_versions=1,
                seconds_per_input=0.0,
                compute_seconds=0.0,
                output_seconds=0.0,
                memory_bytes=1,
            )
            for number, layers in enumerate(stages)
        ),
        predicted=PREDICTED,
        proof=PROOF,
        noam=1,
        stage_cost="ring",
        solved="flat",
    )


def sharing(plan: Plan, shares) -> Plan:
    """The plan with stages whose replicas share weights: one group for each of the shares."""
    stages = []
    for stage in plan.stages:
        (group,) = stage.replicas
        groups = tuple(
            replace(
                group,
                num_replicas=1,
                samples=group.samples // len(shares),
                first_device=group.first_device + n,
                state_share_bytes=share,
            )
            for n, share in enumerate(shares)
        )
        stages.append(replace(stage, replicas=groups, shard="all"))
    return replace(plan, stages=tuple(stages))


def run_world(folder: Path, size: int) -> list[dict]:
    """All cases of one number of workers, in one set of processes."""
    for name, (_, *plan) in WORLDS[size].items():
        files.write(folder / f"{name}.json", make_plan(*plan))
    asked = [f"{name}={case[0]}" for name, case in WORLDS[size].items()]
    run_workers(SCRIPT, size, folder, *asked, seconds=120)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


class Worlds(dict[int, list[dict]]):
    """What came out of each number of workers; run when first asked for."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self.folder, self.failed = folder, set()

    def __missing__(self, size: int) -> list[dict]:
        assert size not in self.failed, "failed before"
        self.failed.add(size)
        self[size] = run_world(self.folder(f"world{size}"), size)
        return self[size]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict]:
    """The same training in this process, by case and microbatches; each run once."""
    folder = tmp_path_factory.mktemp("one")

    @cache
    def train(case: str, microbatches: int) -> dict:
        group = whole_group(
            device_type="cpu",
            num_devices=1,
            device_batch_size=24,
            virtual_nodes=microbatches,
            virtual_node_batch_size=24 // microbatches,
        )
        plan = split_plan(
            model="m", global_batch_size=24, groups=(group,), predicted=PREDICTED, proof=PROOF
        )
        files.write(folder / "plan.json", plan, force=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HETFLOW_PLAN", str(folder / "plan.json"))
            return cases.train(case)

    return train


@pytest.mark.parametrize(("size", "name"), FLUSHING)
def test_flushing_schedules_equal_one_process(size, name, worlds, one_process) -> None:
    case, _, _, _, microbatches, *_ = WORLDS[size][name]
    expected = one_process(case, microbatches)
    for answer in worlds[size]:
        found = answer[name]
        assert "error" not in found, found
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-10, atol=1e-12)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)


@pytest.mark.parametrize("name", ["three", "2-1"])
def test_workers_evaluate_with_calls_of_their_own(name, worlds) -> None:
    x, stage = cases.data().tensors[0], [0, 0, 1] if name == "2-1" else [0, 1, 2]
    for rank, answer in enumerate(worlds[3]):
        model, found = cases.build("chain"), answer[name]["calls"]
        model.load_state_dict(answer[name]["state"])
        rows = {"alone": slice(5)} if rank == 1 else {}
        rows |= {"own": slice(rank, rank + 2)} if rank else {}
        for call, own in rows.items():
            torch.testing.assert_close(found[call], model(x[own]).detach(), rtol=1e-10, atol=1e-12)
        # Of each epoch's four calls one is made by all workers, and runs once.
        assert found["runs"] == (cases.EPOCHS - 1) * 4 + 1
        refusal = "0 is called by itself, but its parameters are on another worker"
        assert found["first layer"] == (refusal if stage[rank] else None)
        assert "model.state_dict() is read between steps" in found["saving"]
        said = found["saving the first layer"]
        assert ("model.0.state_dict() is read" in said) if stage[rank] else said is None
        assert "optimizer.state_dict() has this worker's share" in found["saving the optimizer"]
        assert "is in training mode" in found["training"]


@pytest.mark.parametrize("name", ["three", "2-1"])
def test_numbers_of_other_stages_are_never_read(name, worlds) -> None:
    stage = [0, 0, 1] if name == "2-1" else [0, 1, 2]
    for rank, answer in enumerate(worlds[3]):
        found = answer[name]["looks"]
        assert found.pop("shape") == ((8, 6), 48, (8, 6))
        refusal = "weight is {}, and only the workers of another stage have it"
        for look, said in found.items():
            if stage[rank] == 0 and look != "list":
                assert said is None
            else:
                assert refusal.format("saved" if look == "saved" else "read") in said


def test_workers_hold_the_buffers_of_their_stages_only(worlds) -> None:
    norm, stand_ins = 8 * (8 + 8 + 1), 8 * 3
    for rank, answer in enumerate(worlds[3]):
        found = answer["normed-2-1"]
        assert found["buffers"] == norm + stand_ins
        assert bool(found["reads"]) == (rank == 2)
        assert rank < 2 or "1.running_mean is read, and only" in found["reads"]


def test_workers_own_their_stages_only(worlds) -> None:
    owned = [answer["three"]["owned"] for answer in worlds[3]]
    whole = sum(p.numel() for p in cases.build("chain").parameters())
    assert sum(owned) == whole
    assert max(owned) < whole


def reference(case: str, stages, replicas, microbatches: int, version) -> dict[str, torch.Tensor]:
    """The update equations of 2.4.3 and 3.2.1, microbatch by microbatch, in one process.

    Stage s has R replicas, each with d microbatches in flight (2.4.2), and updates after every R.
    """
    name, kind, _ = case.split(":")
    model, p = cases.build(name), len(stages)
    x, y = cases.data(48).tensors
    size = 24 // microbatches
    named = [
        {n: p for n, p in model.named_parameters() if n.split(".")[0] in layers}
        for layers in stages
    ]
    optimizers = [cases.OPTIMIZERS[kind](list(part.values())) for part in named]
    depth = [-(-sum(replicas[s:]) // replicas[s]) for s in range(p)]
    per_update = [microbatches if version == "2bw" else r for r in replicas]
    reads = {
        "stash": lambda s, k: max(0, k // replicas[s] - depth[s] + 1),
        "vertical": lambda s, k: max(0, k - p + 1),
        "2bw": lambda s, k: max(0, k // microbatches - 1),
    }[version]
    for _ in range(cases.EPOCHS):
        history = [[snapshot(part)] for part in named]
        gradients = [[] for _ in stages]
        for k in range(48 // size):
            weights = {n: w for s in range(p) for n, w in history[s][reads(s, k)].items()}
            answer = torch.func.functional_call(model, weights, (x[k * size : (k + 1) * size],))
            loss = nn.functional.cross_entropy(answer, y[k * size : (k + 1) * size])
            made = dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))
            for s, part in enumerate(named):
                gradients[s].append(made)
                if len(gradients[s]) < per_update[s]:
                    continue
                for n, parameter in part.items():
                    parameter.grad = sum(g[n] for g in gradients[s]) / per_update[s]
                optimizers[s].step()
                history[s].append(snapshot(part))
                gradients[s] = []
    return dict(model.state_dict())


def snapshot(part):
    return {n: p.detach().clone().requires_grad_() for n, p in part.items()}


STALE = [
    (3, "stash", "stash"), (3, "stash-adam", "stash"), (3, "vertical", "vertical"),
    (3, "2bw-adam", "2bw"), (3, "stash-2-1", "stash"), (3, "stash-1-2", "stash"),
    (4, "stash-2-2", "stash"), (4, "stash-1-3", "stash"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "name", "version"),
    [pytest.param(*entry, marks=FOUR_ARE_SLOW.get(entry[0], ())) for entry in STALE],
)
def test_stale_weights_follow_the_equations(size, name, version, worlds) -> None:
    case, _, stages, replicas, microbatches, _ = WORLDS[size][name]
    expected = reference(case, stages, replicas, microbatches, version)
    # Three replicas' gradients are added in another order; all else is the same arithmetic.
    exact = {"rtol": 0, "atol": 0} if max(replicas) < 3 else {"rtol": 1e-12, "atol": 1e-14}
    for answer in worlds[size]:
        assert "error" not in answer[name], answer[name]
        torch.testing.assert_close(answer[name]["state"], expected, **exact)


def test_no_more_versions_and_activations_than_the_schedule_says(worlds) -> None:
    def held(name: str) -> list[tuple[int, int]]:
        return [answer[name]["held"] for answer in worlds[3]]

    assert [versions for versions, _ in held("stash")] == [3, 2, 1]
    assert all(versions <= 3 for versions, _ in held("vertical"))
    assert all(versions <= 2 for versions, _ in held("2bw-adam"))
    assert [activations for _, activations in held("stash")] == [3, 2, 1]
    assert [activations for _, activations in held("three")] == [3, 2, 1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tied-stash", "first.weight is shared by several stages"),
        ("other-model", "no layer '0'"),
        ("backwards", "cannot be cut like this: tensor"),
    ],
)
def test_what_cannot_run_says_why(name, said, worlds) -> None:
    assert said in worlds[3][0][name]["error"]
