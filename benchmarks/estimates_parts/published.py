"""Training throughput of one GPU that NVIDIA's examples and Lambda's runs of them publish.

Whole steps with their loaders, in the containers of their year. Steps of BERT's pretraining are of
many passes, so their update is left out; those of SQuAD are of one.
"""

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetflow.planning.costs.device_table import spec_of

from .measured import ADAM_BYTES, Measured, Operators, counted
from .megatron import Shape, block_counts, head_counts

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
FIGURES, EARLIER = _DATA / "training_figures.csv", _DATA / "earlier_figures.csv"
_HALF = "AMP fp16"
_CONVOLUTIONAL = {
    "ResNet-50": "resnet50",
    "ResNeXt-101": "resnext101",
    "SE-ResNeXt-101": "se_resnext101",
    "EfficientNet-B0": "efficientnet_b0",
    "EfficientNet-B4": "efficientnet_b4",
    "SSD300": "ssd300",
}
_BERT = {"BERT-base": (768, 12), "BERT-large": (1024, 24)}  # width and layers
_NVIDIA = "NVIDIA/DeepLearningExamples"
_OF_UNKNOWN_KERNELS = (_NVIDIA, "BERT-large", True)  # apex's fused ones: no operator tells


def published_steps(figures: Path = FIGURES) -> Iterator[Measured]:
    """A step, or a pass of BERT's pretraining, for each figure of a table."""
    for row in _rows(figures):
        size, is_half = int(row["batch_per_gpu"]), _is_half(row)
        source, model = row["repository"], row["model"]
        name = model.partition(" ")[0]
        if (source, name, is_half) == _OF_UNKNOWN_KERNELS:
            continue
        is_whole = "SQuAD" in model
        yield Measured(
            source=source.partition("/")[0],
            model=name,
            config="16 bits" if is_half else "32 bits",
            spec=spec_of(row["gpu"]),
            operators=(
                counted(*_counts_of(row))(size)
                if name in _CONVOLUTIONAL
                else _bert(name, int(model.rpartition(" ")[2]), size, is_half, is_whole)
            ),
            moved_bytes=_adam_bytes(name) if is_whole else 0.0,
            seconds=size / float(row["figure"]),
            samples=size,
        )


def convolutional_models() -> set[tuple[str, bool]]:
    """The models to count, and whether in 16 bits."""
    rows = [row for figures in (FIGURES, EARLIER) for row in _rows(figures)]
    found = {_counts_of(row) for row in rows if row["model"].partition(" ")[0] in _CONVOLUTIONAL}
    return {*found, ("resnet50", False)}  # Gavel's


def _rows(figures: Path) -> Iterator[dict[str, str]]:
    with figures.open(encoding="utf-8") as stream:
        yield from csv.DictReader(stream)


def _is_half(row: Mapping[str, str]) -> bool:
    return row["precision"] == _HALF


def _counts_of(row: Mapping[str, str]) -> tuple[str, bool]:
    """In channels_last are only NVIDIA's runs in 16 bits, by its configs.yml."""
    model, is_half = _CONVOLUTIONAL[row["model"].partition(" ")[0]], _is_half(row)
    return model + "_channels_last" * (is_half and row["repository"] == _NVIDIA), is_half


@cache
def _bert(name: str, length: int, size: int, is_half: bool, is_squad: bool) -> Operators:
    dtype = torch.float16 if is_half else torch.float32
    width, layers = _BERT[name]
    shape = Shape(width, width // 64, length, vocabulary=30528, dtype=dtype)
    with FakeTensorMode():
        forward, backward = block_counts(shape, size)
        head = () if is_squad else sum(head_counts(shape, size), ())
    return (layers, forward + backward), (1, head)


def _adam_bytes(name: str) -> float:
    width, layers = _BERT[name]
    return ADAM_BYTES * (12 * layers * width**2 + 31_000 * width)
