"""Training throughput that NVIDIA's examples publish for one GPU, with what they ran.

Whole steps with their loaders, in the containers of their year. BERT's steps are of many passes,
so its update is left out.
"""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetflow.planning.costs.device_table import spec_of
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.schema.choices import Precision
from hetflow.schema.operator_counts import Operator

from .measured import Measured
from .megatron import Shape, block_counts, head_counts

FIGURES = Path(__file__).resolve().parents[2] / "tests" / "data" / "training_figures.csv"
_SPECS = {
    ("A100", "80"): spec_of("A100-SXM4-80GB"),
    ("V100", "16"): spec_of("V100-SXM2-16GB"),
    ("V100", "32"): spec_of("V100-SXM2-32GB"),
}
_PRECISIONS: dict[str, Precision] = {"TF32": "tf32", "FP32": "float32", "AMP fp16": "float16"}
_CONVOLUTIONAL = {
    "ResNet-50 v1.5 224px": "zoo:resnet50",
    "ResNeXt-101 32x4d 224px": f"{Path(__file__).with_name('published_models.py')}:resnext101",
}
_BERT_LAYERS = 24
_OF_UNKNOWN_KERNELS = ("BERT-large", "float16")  # apex's fused ones, which no operator tells
PUBLISHED = ("A100, tf32", "A100, float16", "V100, float32", "V100, float16")


def published_steps() -> Iterator[Measured]:
    """A step, or a pass of BERT, for each figure."""
    with FIGURES.open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            size, precision = int(row["batch_per_gpu"]), _PRECISIONS[row["precision"]]
            model = row["model"]
            if (model.partition(" ")[0], precision) == _OF_UNKNOWN_KERNELS:
                continue
            yield Measured(
                device=f"{row['gpu']}, {precision}",
                config=model.partition(" ")[0],
                spec=_SPECS[row["gpu"], row["memory_gb"]],
                operators=(
                    _convolutional(model, size, precision)
                    if model in _CONVOLUTIONAL
                    else _bert(int(model.rpartition(" ")[2]), size, precision)
                ),
                seconds=size / float(row["figure"]),
            )


Operators = tuple[tuple[int, tuple[Operator, ...]], ...]


@cache
def _convolutional(model: str, size: int, precision: Precision) -> Operators:
    counts = count_model(
        targets.parse(_CONVOLUTIONAL[model]), (size,), (), "sgd-momentum", precision=precision
    )
    (found,) = counts.passes
    return (1, found.forward + found.backward), (1, counts.update)


@cache
def _bert(length: int, size: int, precision: Precision) -> Operators:
    dtype = torch.float16 if precision == "float16" else torch.float32
    shape = Shape(1024, 16, length, vocabulary=30528, dtype=dtype)
    with FakeTensorMode():
        (forward, backward), (head, head_backward) = (
            block_counts(shape, size),
            head_counts(shape, size),
        )
    return (_BERT_LAYERS, forward + backward), (1, head + head_backward)
