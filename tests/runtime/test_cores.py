"""Selective recomputation: the bits of a pass that keeps everything, and what is kept."""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetflow.planning.costs.tensor_layers import sequence_layers, sharded_layers
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model, tallied
from hetflow.profilers.zoo.models import BERT, GPT
from hetflow.runtime import peers
from hetflow.runtime.pipeline.cores import AttentionCores, Between
from hetflow.runtime.pipeline.cut import cut
from hetflow.runtime.pipeline.stage import StageRunner
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.runtime.tensor.operators import TensorGroup
from hetflow.runtime.tensor.roles import sharing_of
from hetflow.runtime.tensor.sharded import ShardedModel
from hetflow.schema.errors import TargetError
from hetflow.schema.layers import LayerCounts

from .tensor_cases import MODELS, data, drop_weights, logits_of

BATCH, TOKENS, DEPTH = 3, 8, 2
SIZES = {"vocabulary": 9, "max_tokens": TOKENS, "depth": DEPTH, "num_heads": 4, "channels": 16}


def dropping() -> GPT:
    """The zoo's GPT with dropout of attention weights, so a CPU computes them one by one."""
    torch.manual_seed(1)
    model = GPT(**SIZES).double()
    for block in model.blocks:
        block.attention.forward = partial(drop_weights, block.attention)
    return model


def bert() -> BERT:
    torch.manual_seed(1)
    return BERT(**SIZES).double()


def trained(
    model: nn.Module, answer_of: Callable[[nn.Module], Tensor], context: AbstractContextManager
) -> tuple[list[Tensor], Tensor]:
    """The answer, all gradients, and what the random stream draws behind them."""
    own = copy.deepcopy(model).train()
    torch.manual_seed(5)
    with context:
        answer = answer_of(own)
    torch.manual_seed(6)
    answer.square().sum().backward()
    return [answer.detach(), *(p.grad for p in own.parameters())], torch.rand(1)


def compare(model: nn.Module, answer_of: Callable[[nn.Module], Tensor], num_cores: int) -> None:
    seen: list[bool] = []
    expected, following = trained(model, answer_of, nullcontext())
    found, drawn = trained(model, answer_of, AttentionCores(lambda b: seen.append(b.is_core)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(drawn, following)
    assert sum(seen) == num_cores


@pytest.mark.parametrize("make", [dropping, bert])
def test_results_have_the_same_bits(make: Callable[[], nn.Module]) -> None:
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 9
    compare(make(), lambda model: model(ids), DEPTH)
    with torch.autocast("cpu", torch.bfloat16):
        compare(make().float(), lambda model: model(ids), DEPTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-drop", "gpt2-eager", "llama", "qwen"])
def test_models_of_transformers_have_the_same_bits(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(2)
    ids = data().tensors[0][:BATCH]
    model = MODELS[name]().double()
    compare(model, lambda model: logits_of(model, ids), model.config.num_hidden_layers)


class Attention(nn.Module):
    """One head, with something done to its scores."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.inside, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).chunk(3, -1)
        out: Tensor = self.out(self.change(q @ k.mT).softmax(-1) @ v)
        return out


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda scores: scores.add_(1.0).mul_(2.0),
    "drawn": lambda scores: scores + torch.rand(5, 5),
    "drawn and dropped": lambda scores: functional.dropout(scores * torch.rand(5, 5), 0.5),
    "set": lambda scores: scores.index_fill(-1, torch.tensor([1]), -9.0),
    "no gradient": lambda scores: scores - scores.detach().amax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_done_to_the_scores_is_done_again(name: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 5, 4)
    compare(Attention(CHANGES[name]), lambda model: model(x), 1)


def test_what_is_no_attention_or_writes_on_what_it_reads_is_kept() -> None:
    x = torch.randn(2, 5, 4)
    gate = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    compare(gate, lambda model: model(x), 0)

    class Writes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            qkv = self.inside(x)
            q, k, v = qkv.mul_(2.0).chunk(3, -1)
            out: Tensor = self.out((q @ k.mT).softmax(-1) @ v)
            return out

    compare(Writes(torch.sin), lambda model: model(x), 0)


def test_a_tensor_that_is_written_to_before_the_backward_pass_is_refused() -> None:
    bias = torch.zeros(5, 5)
    model, x = Attention(lambda scores: scores + bias), torch.randn(2, 5, 4)
    with AttentionCores():
        loss = model(x).sum()
    bias.add_(1.0)
    with pytest.raises(TargetError, match="core of an attention reads a tensor that is written"):
        loss.backward()


def test_a_stage_recomputes_its_cores_and_repeats_them_once() -> None:
    model = dropping()
    layered = layers_of(model)
    parts = cut(layered, [[layer.id for layer in layered.layers]])
    kept = []
    for recomputes in (False, True):
        stage = StageRunner(
            parts[0],
            recompute=False,
            recompute_cores=recomputes,
            device=torch.device("cpu"),
        )
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
        with tallied() as tally:
            loss = stage.forward(0, {"ids_BT": ids}, ((), ()), None).sum()
            kept.append(tally.live_bytes)
            stage.keep(0, (loss,))
            stage.backward(0, None)
        products = sum(op.count for op in tally.operators if op.name == "_safe_softmax")
        assert products == DEPTH * (1 + recomputes)
    weights = BATCH * 4 * TOKENS * TOKENS * 8
    assert kept[0] - kept[1] > 2 * DEPTH * weights


def test_the_last_product_of_a_core_is_not_computed_again() -> None:
    torch.manual_seed(3)
    model, x = Attention(torch.sin), torch.randn(2, 5, 4)
    products = []
    for context in (nullcontext(), AttentionCores()):
        with tallied() as tally:
            with context:
                answer = model(x)
            answer.sum().backward()
        products.append(sum(op.count for op in tally.operators if op.name == "bmm"))
    # Forward, and of each product two gradients; with cores the scores again, not the context.
    assert products == [6, 7]


def weighed() -> GPT:
    """The zoo's GPT with attention from its weights: with each degree the same functions."""
    model = dropping()
    for block in model.blocks:
        block.attention.forward = partial(weigh, block.attention)
    return model


def weigh(attention: nn.Module, x: Tensor) -> Tensor:
    qkv = attention.project_in(x).view(BATCH, TOKENS, 3, -1, attention.head_channels)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    scores = (q @ k.mT * 0.5).masked_fill(~causal, -torch.inf)
    made = functional.dropout(scores.softmax(-1), 0.3) @ v
    out: Tensor = attention.project_out(made.transpose(1, 2).flatten(2))
    return out


COUNTED = """
import torch
from hetflow.tests.runtime import test_cores as cases

def workload():
    ids = lambda n: torch.zeros(n, cases.TOKENS, dtype=torch.int64)
    return cases.weighed(), ids, lambda model, x: model(x).sum()
"""


def kept_bytes(group: TensorGroup, *, spreads: bool, recomputes: bool) -> int:
    """What the forward pass of a worker of a group leaves, by the allocations that live on."""
    model = weighed()
    sharing = sharing_of(model)
    sharing = sharing.over_sequences(model) if spreads else sharing
    sharded = ShardedModel(model, sharing, group, sequence_parallel=spreads)
    for name, parameter in model.named_parameters():
        if name in sharing.cuts:
            parameter.data = sharing.cuts[name].own(parameter.data, group.lane, group.degree)
    sharded.install()
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    cores = AttentionCores() if recomputes else nullcontext()
    with tallied() as tally:
        with cores, sharded.passing():
            answer = model(ids)
        found = tally.live_bytes
    answer.sum().backward()
    return found


@pytest.mark.slow
def test_the_cost_model_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes on each worker, predicted from one device's counts and measured."""
    file = tmp_path / "train.py"
    file.write_text(COUNTED)
    counts = count_model(targets.parse(f"{file}:workload"), (BATCH,), (BATCH,), "sgd")
    (table,) = counts.tables

    def freed(layers: Iterable[LayerCounts]) -> int:
        return sum(layer.stashed_bytes - layer.core.stashed_bytes for layer in layers if layer.core)

    # The other workers of a group might as well send the same.
    monkeypatch.setattr(peers, "all_reduce", lambda total, **_: None)
    monkeypatch.setattr(peers, "all_to_all_single", lambda into, row, **_: into.copy_(row))
    monkeypatch.setattr(
        peers, "all_gather", lambda into, row, **_: into.view(-1, len(row)).copy_(row)
    )
    measured = [kept_bytes(TensorGroup(), spreads=False, recomputes=each) for each in (False, True)]
    assert freed(table.layers) == measured[0] - measured[1] > 0
    made = [layer.core.made_bytes for layer in table.layers if layer.core]
    assert sum(made) >= measured[0] - measured[1]
    for degree in (2, 4):
        for spreads, share in ((False, sharded_layers), (True, sequence_layers)):
            group = TensorGroup(degree, 0, tuple(range(degree)), object())  # type: ignore[arg-type]
            found = [kept_bytes(group, spreads=spreads, recomputes=each) for each in (False, True)]
            predicted = freed(each.counts for each in share(table, degree))
            assert predicted == found[0] - found[1]


def test_between_two_cuts_nothing_is_known_yet() -> None:
    """A pass may end inside a core: the stage is cut there."""
    seen: list[Between] = []
    model, x = Attention(torch.sin), torch.randn(2, 5, 4)
    with AttentionCores(seen.append):
        q, k, v = model.inside(x).chunk(3, -1)
        made = (q @ k.mT).softmax(-1) @ v
    assert [between.is_core for between in seen] == [True]
    made.sum().backward()
    found = model.inside.weight.grad
    model.inside.weight.grad = None
    q, k, v = model.inside(x).chunk(3, -1)
    ((q @ k.mT).softmax(-1) @ v).sum().backward()
    assert torch.equal(found, model.inside.weight.grad)
