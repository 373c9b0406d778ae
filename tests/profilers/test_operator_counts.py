"""Operators counted on tensors without values."""

from pathlib import Path

import pytest
import torch

from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model, tallied
from hetflow.schema.errors import TargetError
from hetflow.schema.layers import ModelCounts, Operator
from hetflow.schema.options import Precision

LINEAR = """
import torch
from torch import nn
from hetflow import runtime as hf

def workload():
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    return model, lambda n: torch.randn(n, 100), lambda m, x: m(x).sum()

def attending():
    layers = nn.Linear(100, 400), nn.GELU(), nn.Linear(400, 100), nn.Softmax(-1)
    model = nn.Sequential(*layers, nn.Linear(100, 100))
    return model, lambda n: torch.randn(n, 100), lambda m, x: m(x).square().mean()

def repeated():
    def block():
        return nn.Sequential(nn.Linear(100, 400), nn.GELU(), nn.Linear(400, 100))
    return nn.Sequential(*(block() for _ in range(4))), *attending()[1:]

class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        heads = self.product(self.norm(x)).unflatten(-1, (4, 16)).transpose(1, 2)
        attention = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return x + attention.transpose(1, 2).flatten(2)

def dropping():
    model = nn.Sequential(*(Attending() for _ in range(3)))
    return model, lambda n: torch.randn(n, 32, 64), lambda m, x: m(x).square().mean()

def under_autocast():
    model, make, loss = attending()
    def cast(m, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss(m, x)
    return model, make, cast

def huge():
    model = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(20)))
    return model, lambda n: torch.randn(n, 100_000), lambda m, x: m(x).sum()

def converted_huge():
    model, make, loss = huge()
    return model.to(torch.bfloat16), lambda n: make(n).to(torch.bfloat16), loss

def scaled():
    model, make, loss = workload()
    mean = float(make(1000).mean())  # no tensor has a value while it is counted
    return model, lambda n: make(n) - mean, loss

def deferred_workload():
    with hf.deferred():
        return workload()

def deferred_huge():
    with hf.deferred():
        return huge()

def deferred_scaled():
    make, loss = workload()[1:]
    mean = float(make(1000).mean())
    with hf.deferred():
        model = workload()[0]
    return model, lambda n: make(n) - mean, loss

class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.samples = torch.randn(64, 100)

    def __getitem__(self, index):
        sample = self.samples[index]
        if torch.rand(()) < 0.5:  # a random augmentation
            sample = sample.flip(-1)
        return sample / float(sample.abs().max())  # and one that needs the sample's values

def augmented():
    model, _, loss = workload()
    data = Augmented()
    return model, lambda n: torch.stack([data[i % 64] for i in range(n)]), loss

def flipped():
    model, make, loss = huge()
    return model, lambda n: make(n).flip(-1) if torch.rand(()) < 0.5 else make(n), loss

class Experts(nn.Module):
    def __init__(self, even):
        super().__init__()
        self.weights, self.even = nn.Parameter(torch.randn(4, 100, 200)), even

    def forward(self, x):
        if self.even:
            return x.view(4, len(x) // 4, 100) @ self.weights
        product = getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm
        return product(x, self.weights, offs=torch.arange(1, 5, dtype=torch.int32) * len(x) // 4)

def mixture(even=False):
    return Experts(even), lambda n: torch.randn(n, 100), lambda m, x: m(x).sum()

def even_mixture():
    return mixture(even=True)

def unsteady():
    model, make, loss = workload()
    return model, make, lambda m, x: m(x).sum() * (2 if m(x).sum() > 0 else 1)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counts") / "train.py"
    path.write_text(LINEAR)
    return path


def counted(file: Path, name: str, size: int, precision: Precision | None = None) -> ModelCounts:
    return count_model(targets.parse(f"{file}:{name}"), (size,), (), "sgd", precision=precision)


def flops(operators: tuple[Operator, ...]) -> float:
    return sum(operator.flops * operator.count for operator in operators)


def test_flops_memory_and_layers_of_two_linear_layers(file: Path) -> None:
    found = count_model(targets.parse(f"{file}:workload"), (8, 16), (8,), "adam")
    weights = 100 * 200 + 200 + 200 * 10 + 10
    assert found.weight_bytes == 4 * weights
    assert found.standing_bytes == 4 * 4 * weights  # weights, gradients, two moments
    assert found.optimizer.state_bytes_per_weight_byte == 2.0
    products = 2 * 8 * (100 * 200 + 200 * 10)
    first, second = found.passes
    assert flops(first.forward) == products
    # Of the weights twice as many, but the gradient of the batch itself is not asked for.
    assert flops(first.backward) == 2 * products - 2 * 8 * 100 * 200
    assert flops(second.forward) == 2 * products
    # Kept for backward: what ReLU made, and the sum.
    assert first.kept_bytes == 4 * (8 * 200 + 1)
    assert first.peak_bytes > first.kept_bytes
    assert first.batch_bytes == 4 * 8 * 100
    (table,) = found.tables
    assert [layer.id for layer in table.layers] == ["0", "1", "2"]
    assert sum(flops(layer.forward) for layer in table.layers) == products
    assert [layer.weight_bytes for layer in table.layers] == [4 * 20200, 0, 4 * 2010]
    assert sum(layer.stashed_bytes for layer in table.layers) == first.kept_bytes
    # Each half of a product's backward pass is as large as its forward pass; ReLU has no weights.
    halves = [[flops(half) for half in layer.backward_halves or ()] for layer in table.layers]
    of_first, of_last = 2.0 * 8 * 100 * 200, 2.0 * 8 * 200 * 10
    assert halves == [[of_first, of_first], [0.0, 0.0], [of_last, of_last]]
    relu = table.layers[1].backward_halves
    assert relu == (table.layers[1].backward, ())


@pytest.mark.parametrize("precision", [None, "float16"])
def test_recomputed_layers_run_again_as_on_gpus(file: Path, precision: Precision | None) -> None:
    target = targets.parse(f"{file}:dropping")
    counts = count_model(target, (2,), (), "sgd", precision=precision, activations=("recomputed",))
    (plain,), (again,) = counts.passes, counts.others["recomputed"]
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "native_layer_norm"):
        forward, repeated = (
            sorted((one.dtype, one.num_bytes, one.count) for one in operators if one.name == name)
            for operators in (plain.forward, again.backward)
        )
        assert forward == repeated
        assert sum(count for *_, count in forward) == 3


def test_recomputed_layers_keep_their_inputs_and_run_again(file: Path) -> None:
    target = targets.parse(f"{file}:repeated")
    found = count_model(target, (8,), (), "sgd", activations=("recomputed",))
    (plain,), (again,) = found.passes, found.others["recomputed"]
    assert again.forward == plain.forward
    # A layer's last product makes nothing that is kept, so only the first of two runs again.
    assert flops(again.backward) == flops(plain.backward) + flops(plain.forward) / 2
    within = 4 * 8 * (400 + 400)  # before and behind GELU
    assert plain.kept_bytes - again.kept_bytes == 4 * within
    # While one layer goes back it has its own.
    assert plain.peak_bytes - again.peak_bytes >= 3 * within
    assert not count_model(target, (8,), (), "sgd").others
    # The first bucket holds 1 MiB at least: of eight layers the last seven, so one is left.
    early, last = plain.sums
    assert (early.num_bytes + last.num_bytes, early.num_sums) == (found.weight_bytes, 1)
    assert early.num_bytes == found.weight_bytes - 4 * (100 * 400 + 400)
    assert flops(early.after) == 2 * 8 * 100 * 400  # the input itself needs no gradient
    assert last.after == ()


def test_offloaded_layers_are_gone_but_for_the_last(file: Path) -> None:
    """What goes to the host comes back; weights, and what is small, stay."""
    target = targets.parse(f"{file}:repeated")
    found = count_model(target, (400,), (), "sgd", activations=("offloaded",))
    (plain,), (offloaded,) = found.passes, found.others["offloaded"]
    assert (offloaded.forward, offloaded.backward) == (plain.forward, plain.backward)
    layer = 4 * 400 * (100 + 400 + 400)  # its input, and before and behind GELU
    batch = 4 * 400 * 100  # of which nobody takes a gradient
    assert offloaded.offloaded_bytes == 4 * layer - batch
    assert plain.offloaded_bytes == 0
    assert plain.pinned_bytes is None
    tensors = [4 * 400 * 100] * 3 + [4 * 400 * 400] * 8  # torch pins powers of two
    assert offloaded.pinned_bytes == sum(1 << (size - 1).bit_length() for size in tensors)
    assert plain.kept_bytes - offloaded.kept_bytes == 3 * layer - batch
    assert plain.peak_bytes > offloaded.peak_bytes


def test_an_autocast_of_a_gpu_counts(file: Path) -> None:
    """Products run and are kept in 16 bits, softmax in 32, whoever asks for the autocast."""
    plain = counted(file, "attending", 256).passes[0]
    own = counted(file, "under_autocast", 256).passes[0]
    asked = counted(file, "attending", 256, precision="bfloat16").passes[0]
    assert own == asked
    kinds = {(op.name, op.dtype) for op in own.forward}
    assert {("addmm", "bfloat16"), ("_softmax", "float32")} <= kinds
    assert ("mm", "bfloat16") in {(op.name, op.dtype) for op in own.backward}
    assert flops(own.forward) == flops(plain.forward)
    assert counted(file, "attending", 256, precision="tf32").passes[0] == plain
    # Of many samples, what is kept is activations: about half as large.
    many, half = (
        counted(file, "attending", 65536, precision=kind).passes[0].kept_bytes
        for kind in (None, "float16")
    )
    assert 0.5 * many < half < 0.75 * many


def test_an_update_moves_weights_gradients_and_state(file: Path) -> None:
    found = count_model(targets.parse(f"{file}:workload"), (8,), (), "sgd-momentum")
    moved = sum(operator.num_bytes * operator.count for operator in found.update)
    # Momentum: scaled (2), gradient added (3); weights: momentum added (3).
    assert moved == 8 * found.weight_bytes


def test_a_model_of_800_gigabytes_is_counted_here(file: Path) -> None:
    for name, width in (("huge", 4), ("converted_huge", 2)):
        found = count_model(targets.parse(f"{file}:{name}"), (2,), (), "sgd")
        assert found.weight_bytes == width * 20 * (10**10 + 10**5)
        assert flops(found.passes[0].forward) == 20 * 2 * 2 * 10**10


def test_a_factory_that_needs_values_is_built_with_them(file: Path) -> None:
    found = count_model(targets.parse(f"{file}:scaled"), (8,), (8,), "sgd")
    assert flops(found.passes[0].forward) == 2 * 8 * (100 * 200 + 200 * 10)
    assert len(found.tables[0].layers) == 3


@pytest.mark.parametrize(
    ("name", "plain"),
    [("augmented", "workload"), pytest.param("flipped", "huge", marks=pytest.mark.slow)],
)
def test_a_random_augmentation_runs_for_real(file: Path, name: str, plain: str) -> None:
    """It was refused, and the model blamed; the huge model still takes no memory."""
    found = count_model(targets.parse(f"{file}:{name}"), (2, 4), (2,), "adam")
    assert found == count_model(targets.parse(f"{file}:{plain}"), (2, 4), (2,), "adam")


@pytest.mark.parametrize(
    "name", ["workload", "scaled", pytest.param("huge", marks=pytest.mark.slow)]
)
def test_a_model_from_a_deferred_block_is_counted_like_any_other(file: Path, name: str) -> None:
    usual, deferred = (
        count_model(targets.parse(f"{file}:{factory}"), (2, 4), (2,), "adam")
        for factory in (name, f"deferred_{name}")
    )
    assert usual == deferred


def test_a_pass_that_depends_on_values_is_refused_in_words(file: Path) -> None:
    with pytest.raises(TargetError, match="cannot be counted without running it") as refused:
        count_model(targets.parse(f"{file}:unsteady"), (8,), (), "sgd")
    assert "with from_profile" in (refused.value.hint or "")


def test_counting_ends_where_it_is_enough(file: Path) -> None:
    found = count_model(
        targets.parse(f"{file}:workload"), (1, 2, 4, 8), (), "sgd",
        is_enough=lambda standing, passes: len(passes) == 2,
    )  # fmt: skip
    assert [one.batch_size for one in found.passes] == [1, 2]


def test_views_are_free_and_writes_in_place_are_counted() -> None:
    x = torch.zeros(10, 10)
    with tallied() as tally:
        x.t()[:5].add_(1.0)
        x.expand(3, 10, 10).sum()
    by_name = {operator.name: operator for operator in tally.operators}
    assert set(by_name) == {"add_", "sum"}
    assert by_name["add_"].num_bytes == 4 * (50 + 50)
    assert by_name["sum"].num_bytes == 4 * (100 + 1)  # the expanded values lie in memory once


DROPPING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 8)

    def forward(self, x):
        x = self.into(x).view(-1, 4, 32, 2)
        attend = nn.functional.scaled_dot_product_attention
        return attend(attend(x, x, x, None, 0.1), x, x, dropout_p=0.1)

def workload():
    return Net(), lambda n: torch.zeros(n, 32, 8), lambda model, x: model(x).sum()
"""


def test_attentions_products_are_counted_both_ways() -> None:
    """Of queries with keys and of weights with values; in the backward pass five, one again."""
    query = torch.randn(1, 4, 32, 8, requires_grad=True)
    product = 2 * 4 * 32 * 32 * 8
    with tallied() as tally:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    flops = [operator.flops for operator in tally.operators if "attention" in operator.name]
    assert flops == [2 * product, 5 * product]


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_gradients_of_grouped_convolutions_count_their_own_channels(
    kind: type[torch.nn.Conv2d], groups: int
) -> None:
    """The images' and the weight's are as many products as the convolution itself."""
    layer = kind(16, 32, 3, stride=2, groups=groups, bias=False)
    images = torch.randn(2, 16, 9, 9, requires_grad=True)
    with tallied() as tally:
        layer(images).sum().backward()
    flops = [operator.flops for operator in tally.operators if "conv" in operator.name]
    places = 81 if kind is torch.nn.ConvTranspose2d else 16
    once = 2 * 2 * places * 9 * 16 * 32 / groups
    assert flops == [once, 2 * once]


def test_attention_with_dropout_is_one_kernel_as_on_gpus(tmp_path: Path) -> None:
    file = tmp_path / "dropping.py"
    file.write_text(DROPPING)
    found = count_model(targets.parse(f"{file}:workload"), (2,), (), "sgd").passes[0]
    attentions = [op for op in found.forward if "attention" in op.name]
    assert sum(op.count for op in attentions) == 2
    assert not any("softmax" in op.name or op.name == "bmm" for op in found.forward)


def test_the_peak_follows_what_is_held() -> None:
    with tallied() as tally:
        kept = torch.zeros(1000)
        torch.zeros(500)
        assert tally.live_bytes == 4000
    assert tally.peak_bytes == 6000
    assert kept.numel() == 1000


def test_no_group_shares_a_model_without_heads(file: Path) -> None:
    plain = count_model(targets.parse(f"{file}:workload"), (2,), (2,), "adam")
    assert plain.tensor_divisor is None
    assert plain.no_tensor_reason == "the model tells of no attention heads"
    assert {row.role for row in plain.tables[0].layers} == {"replicated"}


@pytest.mark.skipif(
    not (hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")),
    reason="this torch has no products of groups",
)
def test_products_of_groups_count_as_of_even_groups(file: Path) -> None:
    grouped, even = (counted(file, name, 8).passes[0] for name in ("mixture", "even_mixture"))
    assert flops(grouped.forward) == flops(even.forward) == 2 * 8 * 100 * 200
    assert flops(grouped.backward) == flops(even.backward) > 0
    assert flops(counted(file, "mixture", 6).passes[0].forward) == flops(even.forward)  # padded
