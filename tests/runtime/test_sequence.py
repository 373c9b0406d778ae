"""Sequence parallelism: equal results, what is exchanged, what is kept between the passes."""

import copy
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, local
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetflow.planning.costs.tensor_layers import sequence_layers, sharded_layers
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.profilers.zoo.models import BERT, GPT
from hetflow.runtime import peers, tensor_parallel
from hetflow.runtime.tensor.operators import TensorGroup
from hetflow.runtime.tensor.regions import dropped_tokens
from hetflow.runtime.tensor.roles import SharedParts, sharing_of
from hetflow.runtime.tensor.sharded import ShardedModel
from hetflow.schema.errors import TargetError

CHANNELS, TOKENS, BATCH, HEADS = 16, 8, 3, 4
FULL = BATCH * TOKENS * CHANNELS * 8  # bytes of an activation that is whole


class Threads:
    """A group whose workers are threads; counts collectives and the bytes that one worker sends."""

    def __init__(self, degree: int, patch: pytest.MonkeyPatch) -> None:
        self.degree, self.lane = degree, local()
        self.barrier, self.rows = Barrier(degree), [torch.empty(0)] * degree
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        for name in ("all_reduce", "all_gather", "all_to_all_single"):
            patch.setattr(peers, name, partial(self.collective, name))

    def collective(self, name: str, into: Tensor, row: Tensor | None = None, **more: Any) -> None:
        self.rows[self.lane.number] = (into if row is None else row).clone()
        if self.barrier.wait(20) == 0:
            size, others = self.rows[0].nbytes, self.degree - 1
            self.calls[name] += 1
            # A ring all-reduce sends 2 (t - 1) / t of its bytes, an all-gather of parts t - 1.
            factor = {"all_reduce": 2 / self.degree, "all_to_all_single": 1 / self.degree}
            self.num_bytes[name] += int(size * others * factor.get(name, 1))
        if name == "all_reduce":
            rows = torch.stack(self.rows)
            is_largest = more.get("op") == torch.distributed.ReduceOp.MAX
            into.copy_(rows.amax(0) if is_largest else rows.sum(0))
        elif name == "all_gather":
            into.copy_(torch.cat(self.rows))
        else:
            chunks = [row.chunk(self.degree)[self.lane.number] for row in self.rows]
            into.copy_(torch.cat(chunks))
        self.barrier.wait(20)

    def run(self, function: Callable[[TensorGroup], Any]) -> list[Any]:
        def on(lane: int) -> Any:
            self.lane.number = lane
            ranks = tuple(range(self.degree))
            return function(TensorGroup(self.degree, lane, ranks, object()))  # type: ignore[arg-type]

        with ThreadPoolExecutor(self.degree) as pool:
            return list(pool.map(on, range(self.degree)))


def gpt() -> GPT:
    torch.manual_seed(1)
    model = GPT(vocabulary=9, max_tokens=TOKENS, depth=2, num_heads=HEADS, channels=CHANNELS)
    return model.double()


def shared(model: nn.Module, *, spreads: bool) -> SharedParts:
    sharing = sharing_of(model)
    return sharing.over_sequences(model) if spreads else sharing


def passes(model: nn.Module, group: TensorGroup, *, spreads: bool) -> dict[str, Any]:
    """One worker's pass: what comes out, gradients, and the bytes kept for the backward pass."""
    own = copy.deepcopy(model)
    sharing = shared(own, spreads=spreads)
    sharded = ShardedModel(own, sharing, group, sequence_parallel=spreads)
    parameters = dict(own.named_parameters())
    for name, cut in sharing.cuts.items():
        parameters[name].data = cut.own(parameters[name].data, group.lane, group.degree)
    sharded.install()
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in own.parameters()}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 9
    with saved_tensors_hooks(pack, lambda value: value), sharded.passing():
        answer = own(ids)
    (answer * torch.linspace(0, 1, 9, dtype=torch.float64)).square().sum().backward()
    sharded.remove()
    return {
        "answer": answer.detach(), "sharing": sharing, "kept": sum(kept.values()),
        "gradients": {name: parameter.grad for name, parameter in parameters.items()},
    }  # fmt: skip


@pytest.mark.parametrize("degree", [2, 4])
def test_a_pass_equals_that_of_one_worker(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    expected = passes(model, TensorGroup(), spreads=False)
    world = Threads(degree, monkeypatch)
    found = world.run(partial(passes, model, spreads=True))
    for one in found:
        torch.testing.assert_close(one["answer"], expected["answer"], rtol=1e-10, atol=1e-10)
    sharing = found[0]["sharing"]
    for name, whole in expected["gradients"].items():
        parts = [one["gradients"][name] for one in found]
        if name in sharing.cuts:
            total = sharing.cuts[name].whole(parts)
        else:  # a share of each worker, or the same gradient on all
            total = sum(parts) if name in sharing.inner else parts[-1]
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-10)


def test_as_many_bytes_are_exchanged_and_one_more_gather_for_each_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    degree, pairs = 2, 4  # of a column and a row layer
    share = FULL * (degree - 1) // degree
    plain = Threads(degree, monkeypatch)
    plain.run(partial(passes, gpt(), spreads=False))
    assert plain.calls == {"all_reduce": 2 * pairs}
    assert plain.num_bytes == {"all_reduce": 2 * 2 * pairs * share}
    spread = Threads(degree, monkeypatch)
    spread.run(partial(passes, gpt(), spreads=True))
    # For each pair: forward and backward a gather and a reduce-scatter; backward, the input of the
    # column layer is gathered again. Once: the gradient of what is spread, and the last norm.
    gathers = 3 * pairs + 2
    assert spread.calls == {"all_gather": gathers, "all_to_all_single": 2 * pairs}
    assert spread.num_bytes == {
        "all_gather": gathers * share, "all_to_all_single": 2 * pairs * share,
    }  # fmt: skip


def test_a_block_keeps_a_share_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {}
    for depth in (1, 2):
        model = gpt()
        model.blocks = model.blocks[:depth]
        kept[depth, 1] = passes(model, TensorGroup(), spreads=False)["kept"]
        for degree in (2, 4):
            for spreads in (False, True):
                world = Threads(degree, monkeypatch)
                found = world.run(partial(passes, model, spreads=spreads))
                kept[depth, degree, spreads] = found[0]["kept"]
    whole = kept[2, 1] - kept[1, 1]
    for degree in (2, 4):
        plain, spread = (kept[2, degree, s] - kept[1, degree, s] for s in (False, True))
        assert spread == whole // degree
        assert plain > whole // degree + FULL


COUNTED = """
import torch
from hetflow.tests.runtime import test_sequence

def workload():
    ids = lambda n: torch.zeros(n, test_sequence.TOKENS, dtype=torch.int64)
    return test_sequence.gpt(), ids, lambda model, x: model(x).sum()
"""


@pytest.mark.slow
def test_the_cost_model_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    file.write_text(COUNTED)
    counts = count_model(targets.parse(f"{file}:workload"), (BATCH,), (BATCH,), "sgd")
    whole = sum(layer.stashed_bytes for layer in counts.tables[0].layers)
    kept = passes(gpt(), TensorGroup(), spreads=False)["kept"]
    for degree in (2, 4):
        for spreads, share in ((False, sharded_layers), (True, sequence_layers)):
            world = Threads(degree, monkeypatch)
            found = world.run(partial(passes, gpt(), spreads=spreads))[0]["kept"]
            predicted = sum(each.counts.stashed_bytes for each in share(counts.tables[0], degree))
            # The mean and the deviation of the last norm are counted whole.
            statistics = 2 * BATCH * TOKENS * 8
            missing = statistics - statistics // degree if spreads else 0
            assert kept - found == whole - predicted + missing


def test_dropout_of_tokens_has_the_mask_of_all() -> None:
    dropout, x = nn.Dropout(0.4), torch.randn(3, 8, 5)
    torch.manual_seed(2)
    expected, following = dropout(x), torch.rand(1)
    for degree in (2, 4):
        parts = []
        for lane in range(degree):
            torch.manual_seed(2)
            group = TensorGroup(degree, lane, tuple(range(degree)))
            parts.append(dropped_tokens(dropout, group, x.chunk(degree, 1)[lane]))
            assert torch.equal(torch.rand(1), following)
        torch.testing.assert_close(torch.cat(parts, 1), expected)
    assert dropped_tokens(dropout.eval(), group, x) is x


def test_models_that_cannot_be_spread_are_refused() -> None:
    sizes = {"vocabulary": 8, "max_tokens": 4, "depth": 1, "num_heads": 2, "channels": 8}
    bert = BERT(**sizes)
    with pytest.raises(TargetError, match="BERT normalises after each part"):
        shared(bert, spreads=True)
    plain = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    tensor_parallel(plain, {"0": "column", "2": "row"})
    with pytest.raises(TargetError, match="not known where the sequences of Sequential"):
        shared(plain, spreads=True)
    model = GPT(**sizes)
    model.blocks[0].feed_forward.append(nn.Dropout(0.1))
    with pytest.raises(TargetError, match=r"not known whether blocks\.0\.feed_forward\.3 drops"):
        shared(model, spreads=True)
    model.blocks[0].feed_forward[3].p = 0.0
    shared(model, spreads=True)
    roles = {"0": "column", "2": "row", "1": "residual", "3": "begin", "4": "norm"}
    other = nn.Sequential(*plain, nn.Identity(), nn.LayerNorm(6))
    tensor_parallel(other, roles)
    with pytest.raises(TargetError, match="1 is a GELU, which cannot be 'residual'"):
        shared(other, spreads=True)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    model = gpt()
    sharing = shared(model, spreads=True)
    sharded = ShardedModel(model, sharing, TensorGroup(3, 0, (0, 1, 2)), sequence_parallel=True)
    sharded.install()
    with pytest.raises(TargetError, match="a sequence of 8 tokens does not divide among the 3"):
        model(torch.zeros(1, TOKENS, dtype=torch.int64))


def test_forwards_that_a_script_has_set_come_back() -> None:
    model = gpt()
    sharing = shared(model, spreads=True)
    own = {name: model.get_submodule(name) for name in (*sharing.roles, *sharing.sequence)}
    forwards = {name: partial(type(module).forward, module) for name, module in own.items()}
    for name, module in [*own.items()][::2]:
        module.forward = forwards[name]
    sharded = ShardedModel(model, sharing, TensorGroup(2, 0, (0, 1)), sequence_parallel=True)
    with sharded.traceable():
        pass
    sharded.install()
    sharded.remove()
    for number, (name, module) in enumerate(own.items()):
        found = vars(module).get("forward")
        assert found is (None if number % 2 else forwards[name]), name


def test_a_declared_model_names_its_norms() -> None:
    model = gpt()
    roles = {
        "blocks.*.project_in": "column:3", "blocks.*.project_out": "row",
        "blocks.*.feed_forward.0": "column", "blocks.*.feed_forward.2": "row",
        "blocks.0": "begin", "*norm*.?": "norm", "norm": "norm",
    }  # fmt: skip
    known = sharing_of(model)
    tensor_parallel(model, roles)
    declared = sharing_of(model)
    assert (declared.roles, declared.cuts) == (known.roles, known.cuts)
    assert declared.sequence == known.sequence
