"""Sums of gradients over replicas: when they begin, in which order, and where gradients are."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetflow.runtime import peers
from hetflow.runtime.group import Place
from hetflow.runtime.pipeline import replica_sums
from hetflow.runtime.pipeline.ownership import Ownership
from hetflow.runtime.pipeline.replica_sums import Hook, ReplicaSums
from hetflow.runtime.protocol.environment import Start
from hetflow.runtime.tensor.roles import Lanes, ParameterCut
from hetflow.schema.errors import TargetError
from hetflow.schema.schedule import Kind, Operation

MICROBATCHES, WIDTH = 3, 8
LIKE, LANES, UNLIKE = ((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (2,))  # groups of two replicas


class Fake:
    """Stands in for collectives: a sum doubles its values; notes what happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sizes: list[int] = []
        self.under_way: list[int] = []
        self.most_whole = 0  # sums of whole weights that were under way at once

    def all_reduce(self, flat: Tensor, *, group: Any, async_op: bool) -> "Sum":
        assert async_op
        flat.mul_(2)
        self.events.append("sum")
        self.sizes.append(flat.numel())
        self.under_way.append(flat.numel())
        whole = sum(size > WIDTH * WIDTH for size in self.under_way)
        self.most_whole = max(self.most_whole, whole)
        return Sum(self, flat.numel())


class Sum:
    """A sum under way."""

    def __init__(self, fake: Fake, size: int) -> None:
        self._fake, self._size = fake, size

    def wait(self) -> None:
        self._fake.under_way.remove(self._size)


class Worker:
    """A worker with two stages of a model, each of three linear layers, on two replicas.

    Stage 1 runs first in a backward pass, as in an interleaved schedule.
    """

    def __init__(
        self,
        fake: Fake,
        groups: Sequence[tuple[int, ...]],
        rank: int,
        *,
        overlaps: bool = True,
        ties: bool = False,
    ) -> None:
        torch.manual_seed(5)
        self.stages = [
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double() for _ in range(2)
        ]
        if ties:
            self.stages[1][0].weight = self.stages[0][0].weight
        self.model, self.fake = nn.ModuleList(self.stages), fake
        ranks = tuple(rank for group in groups for rank in group)
        parameters = dict(self.model.named_parameters())
        cuts = (
            {name: ParameterCut(0) for name in parameters if "weight" in name}
            if groups != LIKE
            else {}
        )
        ownership = Ownership(
            parameters,
            [set(stage.parameters()) for stage in self.stages],
            [ranks, ranks],
            Place(Start(), None, torch.device("cpu"), rank=rank, world_size=len(ranks)),
            Lanes(groups, cuts),
        )
        sets = {found for sums in ownership.sums.values() for found in sums}
        group_of: dict[Any, Any] = {ranks: ranks for ranks in sets if len(ranks) > 1}
        self.sums = ReplicaSums(ownership, rank, group_of, None, {}, overlaps=overlaps)
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: fake.events.append(name)
            )
        ownership.strip()
        self.parameters = parameters

    def step(
        self, *, halves: bool = False, used: range = range(MICROBATCHES), twice: bool = False
    ) -> None:
        """Passes of all microbatches; those that are not ``used`` leave stage 0's layer 1 out."""
        kind = Kind.BACKWARD_WEIGHT if halves else Kind.BACKWARD
        operations = [
            Operation(kind=kind, stage=stage, microbatch=microbatch)
            for microbatch in range(MICROBATCHES)
            for stage in (1, 0)
        ]
        generator = torch.Generator().manual_seed(6)
        self.sums.begin(operations)
        for operation in operations:
            stage = self.stages[operation.stage]
            x = torch.randn(4, WIDTH, generator=generator).double()
            leaves_out = operation.stage == 0 and operation.microbatch not in used
            losses = [
                (x @ layer.weight.t()).square().mean() + (x + layer.bias).square().mean()
                for place, layer in enumerate(stage)
                if not (leaves_out and place == 1)
            ]
            self.sums.enter(operation, is_stretched=False)
            for _ in range(1 + twice):
                inputs = list(stage.parameters()) if halves else None
                torch.stack(losses).sum().backward(inputs=inputs, retain_graph=True)
            self.sums.leave()
        self.fake.events.append("passed")
        self.sums.finish()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def memories(self) -> set[int]:
        return {
            p.grad.untyped_storage().data_ptr()
            for p in self.parameters.values()
            if p.grad is not None
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(peers, "all_reduce", made.all_reduce)
    monkeypatch.setattr(replica_sums, "LEAST_BUCKET_BYTES", 1)
    return made


def plain(
    fake: Fake, groups: Sequence[tuple[int, ...]], rank: int, **how: Any
) -> dict[str, Tensor]:
    """The gradients of the same step without other workers, and without sums."""
    alone = Worker(fake, groups, rank)
    alone.sums = ReplicaSums(alone.sums._ownership, rank, {}, None, {}, overlaps=True)
    alone.step(**how)
    fake.events.clear()
    return alone.gradients()


@pytest.mark.parametrize("halves", [False, True])
def test_sums_begin_while_the_last_passes_run(fake: Fake, halves: bool) -> None:
    expected = plain(fake, LIKE, 0, halves=halves)
    worker = Worker(fake, LIKE, 0)
    for _ in range(2):
        fake.events.clear()
        worker.step(halves=halves)
        events = fake.events
        # Twelve gradients a microbatch. Stage 1's sums follow its last pass at once.
        sums = [place for place, event in enumerate(events) if event == "sum"]
        before = [sum(e != "sum" for e in events[:place]) for place in sums]
        passes = 12 * (MICROBATCHES - 1)
        assert min(before) > passes
        assert sum(number <= passes + 6 for number in before) == len(sums) / 2
        assert sum(number < passes + 12 for number in before) == len(sums) - 1
        assert len(sums) > 4
        for name, gradient in worker.gradients().items():
            assert torch.equal(gradient, 2 * expected[name])
        memories = worker.memories()
        assert len(memories) == len(sums)  # gradients are views of the buffers
        for parameter in worker.parameters.values():
            parameter.grad = None
    worker.step()
    assert worker.memories() == memories


def test_without_overlap_all_sums_follow_the_passes(fake: Fake) -> None:
    late, early = Worker(fake, LIKE, 0, overlaps=False), Worker(fake, LIKE, 0)
    late.step()
    number = fake.events.count("sum")
    assert fake.events[-number:] == ["sum"] * number
    early.step()
    for name, gradient in early.gradients().items():
        assert torch.equal(gradient, late.gradients()[name])


def test_a_layer_that_is_not_always_used_changes_no_order(fake: Fake) -> None:
    """Whoever lacks it in the last pass sums it, and what comes after it, behind the passes."""
    sizes = []
    for used in (range(MICROBATCHES), range(1), range(1, 2), range(0)):
        expected = plain(fake, LIKE, 0, used=used)
        worker = Worker(fake, LIKE, 0)
        fake.sizes = []
        worker.step(used=used)
        sizes.append(fake.sizes)
        assert worker.gradients().keys() == expected.keys()
        assert ("0.1.weight" in expected) == bool(used)
        for name, gradient in worker.gradients().items():
            assert torch.equal(gradient, 2 * expected[name])
        assert len(worker.memories()) <= len(fake.sizes)  # gradients are views of the buffers
    assert all(found == sizes[0] for found in sizes)


def test_hooks_are_called_in_the_first_and_last_pass_of_a_stage(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python between kernels is slow, and a stage may have many passes in a step."""
    called: Counter[str] = Counter()
    hook_of = ReplicaSums._hook

    def counted(sums: ReplicaSums, name: str, *rest: Any) -> Hook:
        hook = hook_of(sums, name, *rest)

        def fired(parameter: Tensor) -> None:
            called[name] += 1
            hook(parameter)

        return fired

    monkeypatch.setattr(ReplicaSums, "_hook", counted)
    worker = Worker(fake, LIKE, 0)
    for _ in range(3):
        called.clear()
        worker.step()
        assert called == dict.fromkeys(worker.parameters, 2)
        for parameter in worker.parameters.values():
            parameter.grad = None


@pytest.mark.parametrize("groups", [LANES, UNLIKE])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_group_contributes_once(
    fake: Fake, groups: Sequence[tuple[int, ...]], rank: int
) -> None:
    worker = Worker(fake, groups, rank)
    expected = plain(fake, groups, rank)
    worker.step()
    is_whole = groups == UNLIKE and rank == 2
    for name, gradient in worker.gradients().items():
        is_cut = "weight" in name and not is_whole
        assert gradient.shape[0] == (WIDTH // 2 if is_cut else WIDTH)
        # Of a whole bias, the second worker of a group leaves its gradient out.
        counts = is_cut or (groups == LANES and rank != 1) or rank % 2 == 0
        assert torch.equal(gradient, 2 * expected[name] * counts)
    lent = groups == UNLIKE and not is_whole
    assert fake.most_whole == (replica_sums.MOST_LENT if lent else 6 if is_whole else 0)
    for name, parameter in worker.parameters.items() if lent else ():
        if "weight" in name and parameter.grad is not None:  # not a view of the whole gradient
            assert parameter.grad.untyped_storage().nbytes() == parameter.nbytes
    assert not fake.under_way


@pytest.mark.parametrize(("groups", "late"), [(LIKE, 0), (UNLIKE, 1)])
def test_no_pass_waits_for_the_sum_of_a_tied_weight(
    fake: Fake, groups: Sequence[tuple[int, ...]], late: int
) -> None:
    """Others can only begin it when they have the gradients of this worker's pass."""
    worker = Worker(fake, groups, 0, ties=True)
    worker.step()
    passed = fake.events.index("passed")
    assert fake.events[passed + 1 :] == ["sum"] * late


def test_gradients_of_an_earlier_step_are_kept_apart(fake: Fake) -> None:
    worker = Worker(fake, LIKE, 0)
    worker.step()
    held = {name: p.grad for name, p in worker.parameters.items() if p.grad is not None}
    kept = {name: worker.sums.apart(gradient) for name, gradient in held.items()}
    before = worker.gradients()
    for parameter in worker.parameters.values():
        parameter.grad = None
    worker.step(used=range(1))
    assert any(not torch.equal(g, before[name]) for name, g in worker.gradients().items())
    assert all(torch.equal(kept[name], before[name]) for name in before)
    own = torch.ones(3)
    assert worker.sums.apart(own) is own


def test_a_gradient_that_comes_twice_is_refused(fake: Fake) -> None:
    with pytest.raises(TargetError, match=r"1\.2\.\w+ got its gradient twice"):
        Worker(fake, LIKE, 0).step(twice=True)
    Worker(fake, LIKE, 0, overlaps=False).step(twice=True)
