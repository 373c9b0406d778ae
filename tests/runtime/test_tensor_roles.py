"""What a tensor-parallel group shares of a model, how it is cut, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from hetflow.profilers.zoo.models import GPT
from hetflow.runtime import tensor_parallel
from hetflow.runtime.group import Place
from hetflow.runtime.pipeline.norms import NORMS, Columns, NormOnly, PartGradient, ToldNorms
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.runtime.protocol.environment import Start
from hetflow.runtime.tensor.operators import TensorGroup, bounds
from hetflow.runtime.tensor.roles import Lanes, ParameterCut, SharedParts, check_degree, sharing_of
from hetflow.runtime.tensor.sharded import ShardedModel
from hetflow.schema.errors import TargetError


def pair(inner: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, inner), nn.GELU(), nn.Linear(inner, 6))


@pytest.mark.parametrize(
    ("cut", "degree"),
    [(ParameterCut(0), 3), (ParameterCut(1, 3), 2), (ParameterCut(0), 5), (ParameterCut(1), 4)],
)
def test_parts_put_together_are_the_whole(cut: ParameterCut, degree: int) -> None:
    whole = torch.randn(12, 12)
    parts = [cut.own(whole, lane, degree) for lane in range(degree)]
    assert sum(part.numel() for part in parts) == whole.numel()
    assert torch.equal(cut.whole(parts), whole)


def test_fused_layers_are_cut_each_for_itself() -> None:
    assert ParameterCut(0, 3).own(torch.arange(12), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


def test_parts_of_a_dimension_are_as_torch_cuts_it() -> None:
    for degree in (1, 2, 3, 4, 5):
        parts = torch.arange(17).tensor_split(degree)
        found = [bounds(17, lane, degree) for lane in range(degree)]
        assert [(int(part[0]), int(part[-1]) + 1) for part in parts] == found


def test_the_zoos_gpt_is_known_by_its_names() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=4, channels=8)
    sharing = sharing_of(model)
    assert {name: role.style for name, role in sharing.roles.items()} == {
        "blocks.0.attention.project_in": "column",
        "blocks.0.attention.project_out": "row",
        "blocks.0.feed_forward.0": "column",
        "blocks.0.feed_forward.2": "row",
    }
    assert sharing.cuts["blocks.0.attention.project_in.bias"] == ParameterCut(0, 3)
    assert "blocks.0.attention.project_out.bias" not in sharing.cuts


class Traced(nn.Linear):
    """A layer whose own forward a tracer goes into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_shared_layer_that_torch_fx_goes_into_is_refused(degree: int) -> None:
    """On workers of each degree; a step ended in a traceback."""
    model = nn.Sequential(Traced(6, 12), nn.GELU(), Traced(12, 6))
    tensor_parallel(model, {"0": "column", "2": "row"}, known=True)
    group = TensorGroup(degree, 0, tuple(range(degree)))
    sharded = ShardedModel(model, sharing_of(model), group)
    with (
        sharded.traceable(),
        pytest.raises(TargetError, match="^0 is cut over .* traces into"),
    ):
        layers_of(model)


def test_a_degree_that_does_not_divide_names_the_nearest_that_do() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=12, channels=24)
    with pytest.raises(TargetError, match=r"degree of 5 does not divide the 12 \(num_heads\)") as e:
        check_degree(model, sharing_of(model), 5)
    assert e.value.hint == "degrees that do: 4 and 6"
    check_degree(model, sharing_of(model), 6)


def test_a_model_says_itself_what_is_shared() -> None:
    model = pair(10)
    with pytest.raises(TargetError, match="no layers of Sequential are known"):
        sharing_of(model)
    tensor_parallel(model, {"0": "column", "2": "row"})
    assert sorted(sharing_of(model).cuts) == ["0.bias", "0.weight", "2.weight"]
    with pytest.raises(TargetError, match="degree of 4 does not divide the 10 outputs of 0"):
        check_degree(model, sharing_of(model), 4)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"0": "sideways"}, "'sideways' is no way to share a layer"),
        ({"0": "row:2"}, "'row:2' is no way"),
        ({"3": "row"}, "has no module '3'"),
        ({"1": "column", "2": "row"}, "1 is a GELU, which cannot be shared by column"),
        ({"0": "vocabulary", "2": "row"}, "0 is a Linear, which cannot be shared by vocabulary"),
    ],
)
def test_what_cannot_be_shared(roles: dict[str, str], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        shared(pair(), roles)


def shared(model: nn.Module, roles: dict[str, str]) -> SharedParts:
    tensor_parallel(model, roles)
    return sharing_of(model)


def test_a_tied_weight_is_cut_by_all_or_by_none() -> None:
    model = pair()
    model.append(nn.Linear(6, 12, bias=False))
    model[3].weight = model[0].weight
    tensor_parallel(model, {"0": "column", "2": "row"})
    with pytest.raises(TargetError, match=r"0\.weight is cut over the group, and 3 reads it whole"):
        sharing_of(model)
    tensor_parallel(model, {"0": "column", "2": "row", "3": "output"})
    assert sharing_of(model).cuts["0.weight"] == ParameterCut(0)


def share(lanes: Lanes, name: str, part: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """What a worker adds to the sum of a parameter [size]."""
    made = torch.zeros(size)
    lanes.put(name, part, made, rank)
    return made


def test_gradients_are_added_by_those_who_have_the_same_part() -> None:
    lanes = Lanes([(0, 1), (2, 3), (4,)], {"w": ParameterCut(0)})
    assert lanes.sums("w", (0, 1, 2, 3)) == ((0, 2), (1, 3))
    assert lanes.sums("w", (0, 1, 4)) == ((0, 1, 4),)  # unlike degrees add whole gradients
    assert lanes.sums("w", (4,)) == ((4,),)
    whole = torch.arange(4.0)
    shares = [share(lanes, "w", lanes.part("w", whole, rank), 4, rank) for rank in (0, 1)]
    assert torch.equal(shares[0] + shares[1], whole)
    # A whole parameter has the gradient of one worker of each group, to the last bit on all.
    assert lanes.sums("bias", (0, 1, 2, 3)) == ((0, 1, 2, 3),)
    shares = [share(lanes, "bias", torch.ones(2), 2, rank) for rank in range(4)]
    assert torch.equal(sum(shares), torch.full((2,), 2.0))
    assert [label for label, _ in lanes.alike("w", (0, 1, 4))] == [
        "w (part 1 of 2)", "w (part 2 of 2)", "w",
    ]  # fmt: skip
    assert lanes.alike("bias", (0, 1, 2, 3)) == [("bias", (0, 1, 2, 3))]


def test_what_no_name_explains_beside_cut_layers_is_refused() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=4, channels=8)
    model.blocks[0].attention.scale = nn.LayerNorm(2)
    with pytest.raises(TargetError, match=r"attention\.scale stands beside layers"):
        sharing_of(model)


def test_a_norm_of_each_head_gets_a_share_of_its_gradient_from_every_worker() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=4, channels=8)
    model.blocks[0].attention.q_norm = nn.LayerNorm(2)
    sharing = sharing_of(model)
    names = {f"blocks.0.attention.q_norm.{kind}" for kind in ("weight", "bias")}
    assert sharing.inner == names
    lanes = Lanes([(0, 1)], sharing.cuts, sharing.inner)
    for name in names:
        assert lanes.sums(name, (0, 1)) == ((0, 1),)
        shares = [share(lanes, name, torch.ones(2), 2, rank) for rank in (0, 1)]
        assert torch.equal(shares[0] + shares[1], torch.full((2,), 2.0))


def test_a_norm_that_was_told_is_answered_to_the_last_bit() -> None:
    two, largest = 1.2, 0.7
    assert two * (largest / two) != largest  # what a ratio alone would give
    columns = Columns([[0]], torch.device("cpu"))
    table = columns.table(np.array([[1.0], [two], [0.9], [largest]]))
    told = ToldNorms(lambda: table, Place(Start(), None, torch.device("cpu")))
    told.take(table, set(NORMS))
    stand_in = NormOnly.of(torch.tensor([two], dtype=torch.float64), told, 0)
    part = PartGradient.of(torch.ones(3, dtype=torch.float64), stand_in)
    assert [float(torch.linalg.vector_norm(part, n)) for n in NORMS] == [two, 0.9, largest]
    torch._foreach_mul_([part, stand_in.clone()], 0.5)
    assert float(torch.linalg.vector_norm(part)) == two / 2
    assert float(torch.linalg.vector_norm(part, NORMS[2])) == pytest.approx(largest / 2, rel=1e-12)
    assert torch.equal(part.as_subclass(torch.Tensor), torch.full((3,), 0.5, dtype=torch.float64))
