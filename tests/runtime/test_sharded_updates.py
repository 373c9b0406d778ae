"""Sharded optimizer state on replicas that are threads: bits, shares, bytes and refusals."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from queue import SimpleQueue
from threading import local
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hetflow.runtime import peers
from hetflow.runtime.group import Place
from hetflow.runtime.pipeline import optimizer as pipeline_optimizer
from hetflow.runtime.pipeline.optimizer import OwnShare, ShardedUpdates, check_shardable, keepers_of
from hetflow.runtime.pipeline.ownership import Ownership
from hetflow.runtime.protocol.environment import Start
from hetflow.runtime.tensor.roles import Lanes, ParameterCut
from hetflow.schema.errors import TargetError
from hetflow.tests.profiles import examples

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
STEPS, LATE = 4, "3.bias"  # the parameter that has no gradient in the first steps
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, amsgrad=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02),
}


def model_of() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5))
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay and vectors do not, each group with a rate of its own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 0.05},
    ]


def ownership_of(model: nn.Module, rank: int, number: int) -> Ownership:
    ranks = tuple(range(number))
    return Ownership(
        dict(model.named_parameters()),
        [set(model.parameters())],
        [ranks],
        Place(Start(), None, torch.device("cpu"), rank=rank, world_size=number),
        Lanes([(rank,) for rank in ranks], {}),
    )


class Broadcasts:
    """Stands in for the collectives between threads, and counts their bytes."""

    def __init__(self) -> None:
        self.here = local()
        self.num_bytes = 0
        self._sent: dict[tuple[object, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def __call__(self, tensor: Tensor, *, src: int, group: Any) -> None:
        if self.here.rank == src:
            self.num_bytes += tensor.nbytes
            for rank in group:
                if rank != src:
                    self._sent[group, src, rank].put(tensor.clone())
        else:
            received = self._sent[group, src, self.here.rank].get(timeout=20)
            assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(received)


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> Broadcasts:
    made = Broadcasts()
    monkeypatch.setattr(peers, "broadcast", made)
    monkeypatch.setattr(pipeline_optimizer, "BUCKET_BYTES", 100)  # some buckets of several
    return made


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = STEPS
) -> None:
    """Steps with gradients that depend on the step only, a schedule, clipping and a scaler."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if name == LATE and step < 2 else 4.0 * drawn
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


class Replicas:
    """Sharded replicas of the model, one a thread."""

    def __init__(self, make: Make, number: int, broadcasts: Broadcasts) -> None:
        self.models = [model_of() for _ in range(number)]
        self.optimizers = [make(groups_of(model)) for model in self.models]
        self.shares = []
        self.broadcasts = broadcasts
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            ownership = ownership_of(model, rank, number)
            share = OwnShare(optimizer, ownership, rank=rank, is_sharded=True)
            ShardedUpdates(optimizer, ownership, share.keepers, rank, lambda ranks: ranks)  # type: ignore[arg-type, return-value]
            self.shares.append(share)

    def each(self, function: Callable[[int], object]) -> None:
        def run(rank: int) -> None:
            self.broadcasts.here.rank = rank
            function(rank)

        with ThreadPoolExecutor(len(self.models)) as pool:
            list(pool.map(run, range(len(self.models))))

    def train(self, first: int = 0) -> None:
        self.each(lambda rank: train(self.models[rank], self.optimizers[rank], first))

    def saved(self) -> dict[str, Any]:
        """The whole optimizer's state, from the parts of all workers."""
        parts = [share.state_dict(lambda _, value: value) for share in self.shares]
        numbers = [index for part in parts for index in part["state"]]
        assert len(set(numbers)) == len(numbers)  # each kept once
        state = {index: values for part in parts for index, values in part["state"].items()}
        return {"state": state, "param_groups": parts[0]["param_groups"]}


def plain(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    return model, make(groups_of(model))


def bytes_of(states: Sequence[dict[str, Any]]) -> int:
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replicas_end_with_the_bits_of_an_unsharded_run(kind: str, broadcasts: Broadcasts) -> None:
    model, optimizer = plain(OPTIMIZERS[kind])
    train(model, optimizer)
    replicas = Replicas(OPTIMIZERS[kind], 3, broadcasts)
    replicas.train()
    expected = dict(model.named_parameters())
    for own in replicas.models:
        assert all(torch.equal(p, expected[name]) for name, p in own.named_parameters())
    # Every parameter crosses once a step, whoever has updated it.
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert broadcasts.num_bytes == STEPS * whole
    kept = [bytes_of(list(own.state.values())) for own in replicas.optimizers]
    all_kept = bytes_of(list(optimizer.state.values()))
    assert sum(kept) == all_kept
    if kind != "adafactor":  # it keeps little of large parameters
        assert max(kept) < all_kept / 2
    for own in replicas.optimizers:  # outside of a step each sees all of its parameters
        assert sum(len(group["params"]) for group in own.param_groups) == len(expected)


@pytest.mark.parametrize("number", [1, 2])
def test_state_goes_on_under_other_replicas(number: int, broadcasts: Broadcasts) -> None:
    """From three sharded replicas to ``number``, and to one that is not sharded, and back."""
    make = OPTIMIZERS["adamw"]
    model, optimizer = plain(make)
    train(model, optimizer)
    three = Replicas(make, 3, broadcasts)
    three.train()
    saved = three.saved()
    whole = optimizer.state_dict()
    assert saved["param_groups"] == whole["param_groups"]
    assert saved["state"].keys() == whole["state"].keys()
    for index, values in whole["state"].items():
        assert all(torch.equal(values[key], saved["state"][index][key]) for key in values)
    later = Replicas(make, number, broadcasts)
    for share in later.shares:
        share.load_state_dict(deepcopy(saved))
    again, alone = plain(make)
    alone.load_state_dict(deepcopy(saved))
    for own in (*later.models, again):
        own.load_state_dict(model.state_dict())
    later.train(STEPS)
    train(again, alone, STEPS)
    train(model, optimizer, STEPS)
    for own in (*later.models, again):
        for name, parameter in model.named_parameters():
            assert torch.equal(own.get_parameter(name), parameter)


def test_a_closure_has_gradients_of_all_parameters(broadcasts: Broadcasts) -> None:
    replicas = Replicas(OPTIMIZERS["momentum"], 2, broadcasts)
    losses = {}

    def step(rank: int) -> None:
        model, optimizer = replicas.models[rank], replicas.optimizers[rank]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 6)).square().sum()
            loss.backward()
            assert all(p.grad is not None for g in optimizer.param_groups for p in g["params"])
            return loss

        losses[rank] = optimizer.step(closure).item()  # type: ignore[arg-type, attr-defined]

    replicas.each(step)
    assert losses[0] == losses[1]
    one, other = replicas.models
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in one.named_parameters())


def test_what_cannot_be_sharded_is_refused(
    broadcasts: Broadcasts, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pipeline_optimizer.log, "warning", said.append)
    replicas = Replicas(OPTIMIZERS["momentum"], 1, broadcasts)
    (optimizer,) = replicas.optimizers
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(TargetError, match="SGD has hooks on its steps"):
        optimizer.step()
    with pytest.raises(TargetError, match="Wrapper cannot be sharded: it is no torch"):
        check_shardable(type("Wrapper", (), {})(), is_main=True)
    check_shardable(optimizer, is_main=True)
    foreign = type("Sophia", (torch.optim.SGD,), {})(model_of().parameters(), lr=0.1)
    check_shardable(foreign, is_main=False)
    assert not said
    check_shardable(foreign, is_main=True)
    assert "Sophia is not one of torch's optimizers" in said[0]


@st.composite
def owned(draw: st.DrawFn) -> tuple[Ownership, list[tuple[int, ...]]]:
    """Parameters of two stages, some of them cut and one tied; the ranks of each stage."""
    degrees = draw(st.sampled_from([(1,), (1, 1), (1, 1, 1), (2, 2), (2, 1), (2, 2, 1), (4, 4)]))
    groups: list[tuple[int, ...]] = []
    for degree in (*degrees, *degrees):
        rank = groups[-1][-1] + 1 if groups else 0
        groups.append(tuple(range(rank, rank + degree)))
    half = len(degrees)
    ranks = [tuple(r for group in part for r in group) for part in (groups[:half], groups[half:])]
    sizes = draw(st.lists(st.integers(1, 60), min_size=2, max_size=14))
    made = {f"p{n}": nn.Parameter(torch.zeros(4 * size, 1)) for n, size in enumerate(sizes)}
    cuts = {name: ParameterCut(0) for name in made if draw(st.booleans())}
    first = {parameter for parameter in made.values() if draw(st.booleans())}
    second = {parameter for parameter in made.values() if parameter not in first} | {made["p0"]}
    place = Place(Start(), None, torch.device("cpu"), world_size=groups[-1][-1] + 1)
    return Ownership(made, [first, second], ranks, place, Lanes(groups, cuts)), ranks


@settings(max_examples=examples(60))
@given(owned(), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.booleans())
def test_state_is_kept_once_and_shared_as_planned(
    given: tuple[Ownership, list[tuple[int, ...]]], drawn: list[int], is_unlike: bool
) -> None:
    ownership, stages = given
    names = list(ownership.parameters)
    shares: dict[int, float] = {}
    for ranks in stages:
        replicas = sorted({ownership.lanes.group(rank) for rank in ranks})
        if is_unlike and len({len(each) for each in replicas}) == 1:
            parts = drawn[: len(replicas)]
            parts = parts if any(parts) else [1] * len(parts)
            shares |= {
                r: n / sum(parts) for n, each in zip(parts, replicas, strict=True) for r in each
            }
    keepers = keepers_of(ownership, names, shares)
    kept: dict[int, int] = defaultdict(int)
    held: dict[int, list[int]] = defaultdict(list)
    for name in names:
        for rank, size in ownership.held_bytes(name).items():
            held[rank].append(size)
        for _, alike in ownership.lanes.alike(name, ownership.holders[name]):
            assert len(set(alike) & set(keepers[name])) == 1  # one of those with equal values
        for rank in keepers[name]:
            kept[rank] += ownership.held_bytes(name)[rank]
            # All parts of a replica are kept together, so its group can join them.
            group = ownership.lanes.group(rank)
            if ownership.lanes.is_cut(name, rank):
                assert set(group) <= set(keepers[name])
    for ranks in stages:
        degrees = {ownership.lanes.degree(rank) for rank in ranks}
        if len(degrees) == 1:  # the bound that the planner counts
            d = len(ranks) // degrees.pop()
            for rank in ranks:
                total, largest = sum(held[rank]), max(held[rank], default=0)
                share = shares.get(rank, 1 / d)
                most = share * total + (d - 1) * largest / d
                assert kept[rank] <= (most if share else 0.0) * (1 + 1e-12)
