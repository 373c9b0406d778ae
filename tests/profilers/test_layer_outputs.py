"""Layers that give and take more than tensors: dicts, dataclasses, nests with other values."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hetflow.profilers.bench import Bench
from hetflow.profilers.layers import graph_of, measure_layers
from hetflow.profilers.targets import Workload
from hetflow.runtime.nested_tensors import mapped, tensors_in


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    number: int = 3


class Named(NamedTuple):
    hidden: Tensor
    number: int


class Output(dict):
    """As the outputs of transformers: a dict whose entries are attributes, and no plain dict."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def output_of(hidden: Tensor) -> Output:
    made = Output()
    made["hidden"] = hidden
    return made


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], int]] = {
    "dict": (lambda t: {"a": t, "n": 3}, lambda v: v["a"], 1),
    "tuple": (lambda t: (t, 3, None, "s"), lambda v: v[0], 1),
    "nest": (lambda t: {"x": [t, (t * 2, {"a": t + 1})]}, lambda v: v["x"][1][1]["a"], 3),
    "dataclass": (Frozen, lambda v: v.hidden, 1),
    "named tuple": (lambda t: Named(t, 2), lambda v: v.hidden, 1),
    "output": (output_of, lambda v: v.hidden, 1),
}


class Gives(nn.Module):
    """Cannot be traced, so it stays whole, and what it gives crosses to the next layer."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return self.make(y if bool(y.sum() < 1e9) else y * 2)


class Takes(nn.Module):
    def __init__(self, take: Callable[[Any], Tensor], make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.take, self.make = nn.Linear(4, 1), take, make

    def forward(self, value: Any) -> Any:
        y = self.inner(self.take(value))
        return self.make(y if bool(y.sum() < 1e9) else y * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_measured_whatever_crosses_between_them(kind: str) -> None:
    make, take, num_tensors = KINDS[kind]
    workload = Workload(
        model=nn.Sequential(Gives(make), Takes(take, make)),
        make_batch=lambda size: torch.randn(size, 4),
        loss=lambda model, x: take(model(x)).square().mean(),
    )
    measured = measure_layers(Bench(workload, "cpu", "sgd"), 4, 2)
    graph = graph_of(measured)
    assert measured["trace"]["way"] == "fx"
    sizes = [4 * 4 * 4 * num_tensors, 4 * 1 * 4 * num_tensors]
    assert [node.activation_bytes for node in graph.nodes] == sizes
    assert graph.edges == (("0", "1"),)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_value_has_its_form_and_leaves_the_first_alone(kind: str) -> None:
    make, take, num_tensors = KINDS[kind]
    value = make(torch.ones(2))
    made = mapped(lambda tensor: tensor + 1, value)
    assert type(made) is type(value)
    assert torch.equal(take(made), take(value) + 1)
    assert len(tensors_in(made)) == len(tensors_in(value)) == num_tensors
