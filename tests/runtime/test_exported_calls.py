"""Which calls an exported model takes, what it answers, and which buffers a stage reads."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetflow.runtime.pipeline.cut import LayeredModel, StageModule, cut
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.schema.errors import TargetError
from hetflow.schema.layers import LayerTrace, TracedInput


class Cache:
    """An object with tensors in it that no training step reads."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Named(dict):
    """A mapping that pytree does not know."""


@dataclass(frozen=True)
class Answer:
    parts: Named
    sizes: tuple[int, ...]
    cache: Cache


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.register_buffer("gain", torch.ones(()))

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0, mode: str | None = None
    ) -> Answer:
        if ids.shape[1] > 12:
            raise ValueError("too long")
        if ids.shape[0] > 100:
            scale = -scale
        real = (ids >= 0).unsqueeze(-1)
        x = self.tokens(ids) * real
        y = self.head(x if mask is None else x * mask) * real * scale * self.gain
        return Answer(parts=Named(y=y, n=3), sizes=(*y.shape[2:],), cache=Cache(x))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture(scope="module")
def layered(model: Model) -> LayeredModel:
    ids = TracedInput(name="ids", shape=(4, 6), dtype="int64")
    given = {"mask": None, "scale": 2.0, "mode": None}
    return layers_of(model, LayerTrace(way="export", inputs=(ids,), constants=given))


@pytest.fixture(scope="module")
def parts(layered: LayeredModel) -> list[StageModule]:
    return cut(layered, [["tokens"], ["head"]])


def call(**changed: Any) -> dict[str, Any]:
    ids = torch.zeros(3, 6, dtype=torch.int64)
    return {"ids": ids, "mask": None, "scale": 2.0, "mode": None, **changed}


@pytest.mark.parametrize("shape", [(4, 6), (3, 6), (1, 6), (7, 9), (2, 12)])
def test_sizes_that_the_code_leaves_open_are_open(layered: LayeredModel, shape: Any) -> None:
    layered.check_call(call(ids=torch.zeros(shape, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scale": 3.0}, r"with scale=3.0, and was traced with 2.0"),
        ({"mode": "fast"}, r"with mode='fast', and was traced with None"),
        ({"mask": torch.ones(1)}, r"with mask=a tensor, and was traced with None"),
        ({"bias": torch.ones(1)}, r"with argument bias, which the traced call did not have"),
        ({"ids": None}, r"with ids=None, and was traced with a tensor"),
        ({"ids": torch.zeros(3, 6)}, r"with ids as float32 \[3, 6\], and was traced with int64"),
        ({"ids": torch.zeros(3, 13, dtype=torch.int64)}, r"sizes it was not traced for .*12"),
        ({"ids": torch.zeros(101, 6, dtype=torch.int64)}, r"sizes it was not traced for .*100"),
    ],
)
def test_a_call_that_would_go_another_way_is_refused(
    layered: LayeredModel, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(TargetError, match=said) as caught:
        layered.check_call(call(**changed))
    assert "\n" not in caught.value.message


def test_a_call_without_a_traced_argument_is_refused(layered: LayeredModel) -> None:
    with pytest.raises(TargetError, match="without ids"):
        layered.check_call({"mask": None})


def test_an_answer_has_its_form_and_leaves_out_what_cannot_be_handed_over(
    model: Model, parts: list[StageModule]
) -> None:
    ids = torch.randint(20, (3, 9))
    crossing = parts[0](*({"ids": ids}[name] for name in parts[0].arguments))
    assert all(isinstance(value, Tensor) for value in crossing)
    answer = parts[1](*({"ids": ids}[name] for name in parts[1].arguments), *crossing)
    whole = model(ids, scale=2.0)
    assert type(answer) is Answer
    assert type(answer.parts) is Named
    assert torch.equal(answer.parts["y"], whole.parts["y"])
    assert (answer.parts["n"], answer.sizes) == (3, (8,))
    with pytest.raises(TargetError, match="the model's answer holds a Cache"):
        answer.cache.keys  # noqa: B018


def test_what_follows_from_the_inputs_crosses_no_cut(
    layered: LayeredModel, parts: list[StageModule]
) -> None:
    assert len(parts[0].outputs) == 1
    assert parts[1].arguments == ("ids",)
    assert "ge" in {node.name for node in layered.shared}


def test_a_stage_reads_the_buffer_that_stands_in_the_model(
    model: Model, parts: list[StageModule]
) -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    given = [{"ids": ids}[name] for name in parts[1].arguments]
    crossing = parts[0](ids)
    before = parts[1](*given, *crossing).parts["y"]
    kept = model._buffers["gain"]
    try:
        # As the buffers of another virtual node are put in place.
        model._buffers["gain"] = torch.full((), 3.0, dtype=torch.float64)
        assert torch.equal(parts[1](*given, *crossing).parts["y"], before * 3)
    finally:
        model._buffers["gain"] = kept


class Counts(nn.Module):
    """It counts its calls, and at the other end of the model reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0].add_(1)
        return self.last(self.first(x)) / self.calls[0]


def test_a_buffer_that_several_layers_share_may_not_be_written() -> None:
    with pytest.raises(TargetError, match="writes buffer 'calls' in one layer and reads it in"):
        layers_of(Counts())


class Assigns(nn.Module):
    """It counts its calls by making a new tensor of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


def test_a_module_that_assigns_its_buffer_stays_whole() -> None:
    """A trace left a symbol in the model's buffer, and its call was in no layer."""
    model = nn.Sequential(nn.Linear(4, 4), Assigns(), nn.Linear(4, 4))
    found = layers_of(model)
    assert [layer.id for layer in found.layers] == ["0", "1", "2"]
    assert torch.equal(model[1].calls, torch.zeros(()))
    model(torch.ones(2, 4))
    assert model[1].calls == 1
    with pytest.raises(TargetError, match="assigns a new tensor to a buffer"):
        layers_of(Assigns())
