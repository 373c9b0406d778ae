"""Models built without memory: their values are the bits of models built the usual way."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow import runtime as hf
from hetflow.runtime import initial_values
from hetflow.schema.errors import TargetError


class Odd(nn.Module):
    """What constructors do beside drawing weights."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.order = torch.randperm(5).tolist()
        self.embedding = nn.Embedding(7, 6, padding_idx=1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.arange(8).unsqueeze(1) * torch.exp(torch.arange(0, 6, 2) * -0.5)
        table = torch.zeros(8, 6)
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("table", table)
        self.register_buffer("given", torch.tensor([1.5, 2.5]))
        self.caches = [torch.ones(2), {"mask": torch.ones(3, 3).tril()}]
        self.square = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.square)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.3))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(3, 50), std=0.02))
        self.legacy = nn.Parameter(torch.Tensor(2, 3).normal_())
        self.mixed = nn.Parameter(torch.rand(6) + self.embedding.weight.detach().mean(0))
        if self.mixed.sum() > 100:
            raise AssertionError
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GroupNorm(1, 5), nn.PReLU(), nn.Flatten()
    ),
    "recurrent": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "transformer": lambda: nn.Transformer(16, 2, 2, 1, 24, batch_first=True),
    "odd": Odd,
}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach() for name, value in named.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_deferred_model_gets_the_bits_of_one_built_the_usual_way(name: str) -> None:
    torch.manual_seed(5)
    usual = MODELS[name]()
    after = torch.rand(3)
    torch.manual_seed(5)
    with hf.deferred():
        model = MODELS[name]()
    assert torch.equal(torch.rand(3), after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert all(p.is_meta or name == "odd" for p in model.parameters())
    hf.prepare(model, optimizer, device="cpu").abandon()
    expected = tensors_of(usual)
    for key, value in tensors_of(model).items():
        assert torch.equal(value, expected[key]), key
    assert list(tensors_of(model)) == list(expected)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]
    if name == "odd":
        assert model.head.weight is model.embedding.weight
        assert [drop.p for drop in model.drops] == [drop.p for drop in usual.drops]
        assert model.order == usual.order
        assert torch.equal(model.caches[1]["mask"], usual.caches[1]["mask"])


def test_one_value_needs_its_own_operations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with hf.deferred():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    initial_values.settle(model, [])
    run, sizes = initial_values._run, list[int]()

    def counted(*given: object) -> list[torch.Tensor]:
        made = run(*given)
        sizes.extend(tensor.numel() for tensor in made)
        return made

    monkeypatch.setattr(initial_values, "_run", counted)
    value = initial_values.initial_value(model[7].weight)
    assert value.shape == (4, 4)
    assert sizes == [16, 16]  # made, then filled
    assert model[7].weight.untyped_storage().nbytes() == 4
    initial_values.fill(model[7].weight, torch.device("cpu"), computes=True)
    assert torch.equal(model[7].weight, value)


def test_values_of_a_file_are_taken_inside_the_block(tmp_path: Path) -> None:
    saved = nn.Linear(600, 600)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    with hf.deferred():
        model = nn.Linear(600, 600)
        model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True))
    hf.prepare(model, device="cpu").abandon()
    assert torch.equal(model.weight, saved.weight)
    with hf.deferred():
        model, values = nn.Linear(600, 600), saved.state_dict()
        model.load_state_dict(values)
    values["weight"].zero_()
    with pytest.raises(TargetError, match="was written later"):
        hf.prepare(model, device="cpu")


def changed(model: nn.Module) -> nn.Module:
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed, "bias was written after the block"),
        (nn.Module.half, "weight is on the meta device, so it has no value"),
        (lambda model: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    ],
)
def test_what_has_no_record_is_refused(change: Callable[..., nn.Module], said: str) -> None:
    with hf.deferred():
        model = nn.Linear(2, 2)
    with pytest.raises(TargetError, match=said):
        hf.prepare(change(model), device="cpu")


def test_a_state_that_an_optimizer_made_outside_is_refused() -> None:
    with hf.deferred():
        model = nn.Linear(2, 2)
    with pytest.raises(TargetError, match="state of weight is on the meta") as refused:
        hf.prepare(model, torch.optim.Adagrad(model.parameters()), device="cpu")
    assert "build the optimizer inside" in str(refused.value.hint)


def test_a_meta_tensor_from_outside_is_refused() -> None:
    outside = torch.empty(2, device="meta")
    with pytest.raises(TargetError, match="was made before"), hf.deferred():
        nn.Parameter(outside + 1)
