"""Fingerprints of tensors: equal bits give equal numbers.

The bytes are read as 64-bit words, multiplied by fixed odd weights and summed modulo 2^64, on the
tensor's device. Any single changed word changes the number. Several changes cancel with a
probability of about 2^-60. On the host this is one pass of a matrix-vector product, in a quarter of
the CPU time of SHA-256.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..digest import byte_view
from ..streams import generator_of

_ROW = 1 << 14  # words; a row of weights stays in the cache
_SMALL_BYTES = 1 << 16  # below this, calls cost more than bytes: such tensors are concatenated
_BLOCK_ROWS = 256  # rows that are converted to int64 at once
_NUM_PROJECTIONS = 4


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """The fingerprint of the bits of all these tensors, in this order. Waits for nothing.

    Args:
        tensors: Tensors of any dtypes and shapes, on one device.

    Returns:
        [] int64, on that device.
    """
    small, numbers = [], []
    for tensor in tensors:
        flat = byte_view(tensor)
        if len(flat) < _SMALL_BYTES:
            small += [flat, flat.new_zeros(-len(flat) % 8)] if len(flat) % 8 else [flat]
        else:
            numbers.append(_number(_words_of(flat)))
    if small:
        numbers.append(_number(_words_of(torch.cat(small))))
    if not numbers:
        return torch.zeros((), dtype=torch.int64)
    return _number(torch.stack(numbers))


def _words_of(flat: Tensor) -> Tensor:
    """The bytes as 64-bit words; the last word is padded with zeros."""
    if len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _number(words: Tensor) -> Tensor:
    """The weighted sum of words: each row repeats the same weights and has a weight of its own."""
    weights = _weights(words.device)
    whole = len(words) // _ROW
    rest = words[whole * _ROW :]
    total = (rest * weights[: len(rest)]).sum()
    if whole:
        rows = words[: whole * _ROW].view(whole, _ROW)
        of_rows = torch.arange(whole, device=words.device) * 2 + 3
        total = total + (_row_sums(rows, weights) * of_rows).sum()
    return total


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.is_cpu:
        return torch.mv(rows, weights)
    # CUDA has no matrix product of integers; blocks limit the memory of this one.
    return torch.cat([(block * weights).sum(1) for block in torch.split(rows, _BLOCK_ROWS)])


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (_ROW,), generator=generator_of("fingerprint"))
    return (drawn | 1).to(device)


@dataclass(frozen=True, slots=True)
class Shadow:
    """A few numbers that tell how far two tensors of one shape are apart.

    Attributes:
        norm: The 2-norm.
        projections: Sums of the elements with fixed signs, one for each row of signs.
        digits: Relative rounding error of the dtype; 0 where values are exact.
    """

    norm: float
    projections: tuple[float, ...]
    digits: float

    def is_near(self, other: "Shadow") -> bool:
        """Whether two tensors differ by no more than the rounding of a whole training.

        Rounding errors of updates add up, so half of the dtype's digits must agree.
        """
        if not self.digits:
            return False
        pairs = list(zip(self.projections, other.projections, strict=True))
        if any(a != a or b != b for a, b in pairs):
            return all((a != a) == (b != b) for a, b in pairs)
        squares = sum((a - b) ** 2 for a, b in pairs) / len(pairs)
        limit: float = self.digits**0.5 * max(self.norm, other.norm)
        return bool(squares**0.5 <= limit)


def shadow_of(tensor: Tensor) -> Shadow:
    """The shadow of a tensor, read in blocks as float64. Waits for the device."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return Shadow(0.0, (0.0,) * _NUM_PROJECTIONS, 0.0)
    digits = torch.finfo(flat.dtype).eps
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    signs = _signs(flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    sums = torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    whole = len(flat) // _ROW * _ROW
    for number, block in enumerate(torch.split(flat[:whole].view(-1, _ROW), _BLOCK_ROWS)):
        wide = block.double()
        square += wide.square().sum()
        # Rows have signs too, different in each block, so that equal changes do not cancel.
        of_rows = signs.roll(number + 1, dims=1)[:, : len(wide)]
        sums += ((signs @ wide.T) * of_rows).sum(1)
    rest = flat[whole:].double()
    square += rest.square().sum()
    sums += signs[:, : len(rest)] @ rest
    return Shadow(float(square.sqrt()), tuple(sums.tolist()), digits)


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    drawn = torch.randint(2, (_NUM_PROJECTIONS, _ROW), generator=generator_of("signs"))
    return (drawn * 2 - 1).double().to(device)
