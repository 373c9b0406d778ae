"""Targets: what loads, what each fault says, and that nothing else runs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.profilers.zoo import NAMES, factory_of
from hetflow.schema.errors import TargetError

PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "gpt2": 124_439_808,
    "bert": 109_482_240,
}

AUDIO = {
    "model_type": "wav2vec2", "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": [8], "conv_stride": [2],
    "conv_kernel": [3], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip

SOURCE = """
import torch
from torch import nn

def workload():
    return nn.Linear(3, 2), lambda n: torch.randn(n, 3), lambda model, x: model(x).sum()

def with_optimizer():
    return (*workload(), lambda parameters: torch.optim.Adagrad(parameters))

def raises():
    raise ValueError("no data\\nhere")

def leaves():
    raise SystemExit(3)

def returns_a_number():
    return 3

def returns_two():
    return nn.Linear(1, 1), len

def returns_no_module():
    return len, len, len

def returns_no_loss():
    return nn.Linear(1, 1), len, "loss"

def frozen():
    return nn.Linear(1, 1).requires_grad_(False), len, len

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def restored_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], targets.Workload]:
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return lambda factory: targets.load(targets.parse(f"{tmp_path}/mine.py:{factory}"))


def test_a_factory_gives_a_workload(load: Callable[[str], targets.Workload]) -> None:
    workload = load("workload")
    assert workload.loss(workload.model, workload.make_batch(4)).ndim == 0
    assert workload.make_optimizer is None


def test_the_optimizer_of_a_factory_is_kept(load: Callable[[str], targets.Workload]) -> None:
    make_optimizer = load("with_optimizer").make_optimizer
    assert make_optimizer is not None
    assert isinstance(make_optimizer([torch.zeros(1)]), torch.optim.Adagrad)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("raises", r"mine.py:12: raises\(\) raised ValueError: no data here"),
        ("leaves", r"mine.py:15: leaves\(\) raised SystemExit: 3"),
        ("workloat", "has no 'workloat'; did you mean 'workload'"),
        ("NUMBER", "NUMBER is not callable"),
        ("returns_a_number", "must return .*; got int"),
        ("returns_two", "got 2 values"),
        ("returns_no_module", "model must be a torch.nn.Module, got builtin"),
        ("returns_no_loss", "loss must be callable, got str"),
        ("frozen", "no parameter to train"),
    ],
)
def test_each_fault_is_one_clear_line(
    load: Callable[[str], targets.Workload], factory: str, said: str
) -> None:
    with pytest.raises(TargetError, match=said) as caught:
        load(factory)
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_python_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"broken.py:2: SyntaxError"):
        targets.load(targets.parse(f"{tmp_path}/broken.py:f"))


def test_lack_of_memory_in_a_factory_is_not_the_factorys_fault(tmp_path: Path) -> None:
    source = "import torch\ndef big():\n    return torch.zeros(1 << 50)\n"
    (tmp_path / "big.py").write_text(source, encoding="utf-8")
    with pytest.raises(RuntimeError, match="allocate"):
        targets.load(targets.parse(f"{tmp_path}/big.py:big"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no known form"),
        ("zoo:", "no known form"),
        ("mine.py", "no such file"),
        ("mine.py:not a name", "no known form"),
        ("absent.py:f", "no such file"),
        ("zoo:resnet19", "no such model"),
    ],
)
def test_a_bad_target_is_refused_before_anything_runs(text: str, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        targets.parse(text)


def test_the_nearest_zoo_model_is_named() -> None:
    with pytest.raises(TargetError) as caught:
        targets.parse("zoo:vgg61")
    assert caught.value.hint == "did you mean zoo:vgg16?"


@pytest.mark.parametrize(("text", "module"), [("hf:bert", "transformers"),
                                              ("torchvision:resnet18", "torchvision")])  # fmt: skip
def test_a_missing_extra_says_how_to_get_it(
    text: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TargetError, match=f"{module} cannot be imported") as caught:
        targets.load(targets.parse(text))
    assert caught.value.hint == f"pip install 'hetflow[{text.partition(':')[0]}]'"


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["NobodysModel"]])
@pytest.mark.slow
def test_a_configuration_makes_the_model_that_a_script_would(
    tmp_path: Path, architectures: list[str]
) -> None:
    config = {
        "model_type": "gpt2", "vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1,
        "n_head": 2, "architectures": architectures, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    workload = targets.load(targets.parse(f"hf:{tmp_path}"))
    has_head = architectures == ["GPT2LMHeadModel"]
    assert type(workload.model).__name__ == ("GPT2LMHeadModel" if has_head else "GPT2Model")
    batch = workload.make_batch(3)
    assert ("labels" in batch) == has_head
    loss = workload.loss(workload.model, batch)
    loss.backward()
    assert loss.ndim == 0
    assert all(p.grad is not None for p in workload.model.parameters())


def test_a_target_states_the_length_of_a_sample(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 32, "n_positions": 256, "n_embd": 16,
            "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    vit = {"model_type": "vit", "image_size": 32, "patch_size": 16, "hidden_size": 16,
           "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
    for name, config in (("gpt2", gpt2), ("vit", vit)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def batch(text: str) -> dict[str, torch.Tensor]:
        workload = targets.load(targets.parse(f"hf:{tmp_path}/{text}"))
        made: dict[str, torch.Tensor] = workload.make_batch(2)
        workload.loss(workload.model, made).backward()
        return made

    assert batch("gpt2")["input_ids"].shape == (2, 128)
    assert batch("gpt2@256")["input_ids"].shape == (2, 256)
    assert batch("vit@48")["pixel_values"].shape == (2, 3, 48, 48)
    assert targets.parse(f"hf:{tmp_path}/gpt2@256").model == "gpt2-256"
    with pytest.raises(TargetError, match="257 tokens are asked for, and the model takes at most"):
        batch("gpt2@257")
    (tmp_path / "config.json").write_text(json.dumps(AUDIO), encoding="utf-8")
    with pytest.raises(TargetError, match="the model reads input_values, and a sample of that"):
        targets.load(targets.parse(f"hf:{tmp_path}"))
    with pytest.raises(TargetError, match="behind @ stands the length"):
        targets.parse("hf:gpt2@long")


@pytest.mark.parametrize("kind", ["vit", "resnet"])  # truncated draws; no image size
def test_models_of_images_are_counted_without_values(tmp_path: Path, kind: str) -> None:
    config = {
        "vit": {"image_size": 32, "patch_size": 16, "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "intermediate_size": 16},
        "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config[kind]}))
    found = count_model(targets.parse(f"hf:{tmp_path}"), (1, 2), (), "sgd")
    first, second = found.passes
    assert 0 < sum(op.flops for op in first.forward) < sum(op.flops for op in second.forward)


def test_names_of_profiles_are_safe_in_files(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}", encoding="utf-8")
    assert targets.parse(f"hf:{tmp_path}/tiny/config.json").model == "tiny"
    assert targets.parse(f"hf:{tmp_path}/tiny").model == "tiny"
    assert targets.parse("hf:../some/dir with spaces").model == "dir-with-spaces"


@pytest.mark.parametrize("name", ["x.py:__import__('os').system('touch marker')", "zoo:../marker",
                                  "x.py;touch marker:f"])  # fmt: skip
def test_a_hostile_name_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError):
        targets.parse(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_zoo_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model, _, _ = factory_of(name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpt2", "bert"}))
@pytest.mark.slow
def test_zoo_losses_are_scalars_that_reach_every_parameter(name: str) -> None:
    # On the meta device: shapes are checked, nothing is computed.
    with torch.device("meta"):
        model, make_batch, loss = factory_of(name)()
        answer = loss(model, make_batch(2))
        answer.backward()
    assert answer.ndim == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
