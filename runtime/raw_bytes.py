"""Tensors as raw bytes."""

import torch
from torch import Tensor


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat uint8 tensor; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
