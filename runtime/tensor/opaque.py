"""Layers of a tensor-parallel group as single calls in a graph of torch.export.

torch.export splits modules into operators on whole parameters. A shared layer computes with a part
of them, by functions that communicate. So while the model is exported each shared layer calls one
operator, which only tells the shape of this worker's output. The graph then calls the module itself
in its place (``pipeline/trace.py``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .roles import Role, num_outputs


@torch.library.custom_op("hetflow::shared_layer", mutates_args=())
def shared_layer(input: Tensor, num_outputs: int, dtype: torch.dtype | None) -> Tensor:
    """Stand for a shared layer while a model is exported; it is never computed.

    Args:
        input: What the layer reads.
        num_outputs: The size of the last dimension of its output, on this worker.
        dtype: The output's type, of a layer that looks indices up; None for products, which keep
            the input's type and leading dimensions.
    """
    raise AssertionError("a shared layer stands in a graph as a call of its module")


@shared_layer.register_fake
def _(input: Tensor, num_outputs: int, dtype: torch.dtype | None) -> Tensor:
    leading = input.shape[:-1] if dtype is None else input.shape
    return input.new_empty((*leading, num_outputs), dtype=dtype or input.dtype)


def opaque_forward(module: nn.Module, role: Role, degree: int) -> Callable[..., Tensor]:
    """What a shared module computes while the model is exported.

    Args:
        module: The shared module.
        role: How it is shared.
        degree: Workers of the group.
    """
    if isinstance(module, nn.Embedding):
        return partial(_call, module.embedding_dim, module.weight.dtype)
    outputs = num_outputs(module)
    return partial(_call, outputs // degree if role.style == "column" else outputs, None)


def _call(num_outputs: int, dtype: torch.dtype | None, input: Tensor) -> Tensor:
    made: Tensor = shared_layer(input, num_outputs, dtype)
    return made


def is_shared_call(target: Any) -> bool:
    """Whether a graph's node stands for a shared layer."""
    return target is torch.ops.hetflow.shared_layer.default
