"""Square roots on a CPU that have the same bits on every processor.

torch computes them by MKL's vector library. That refines the processor's own estimate of
``1 / sqrt(x)``, which differs between generations and makers, and the result is not always the
nearest number: a fifth of float32 results are one bit off on an AMD EPYC of family 26. No setting
of MKL changes it. NumPy uses the instruction that IEEE 754 defines to the last bit.
"""

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@cache
def make_exact() -> Any:
    """Let ``torch.sqrt`` of CPU tensors round correctly in this process, from now on.

    Returns:
        What torch has to keep, which ``cache`` holds: the kernels go with it.
    """
    import torch

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the intention
        library.impl("sqrt", _sqrt, "CPU")
        library.impl("sqrt_", _sqrt_, "CPU")
        library.impl("sqrt.out", _sqrt_out, "CPU")
    return library


def _sqrt(values: "Tensor") -> "Tensor":
    import numpy as np
    import torch

    kind = values.dtype
    if kind in (torch.float32, torch.float64) or kind.is_complex:
        found = torch.empty_like(values)
        with np.errstate(invalid="ignore"):  # nan of a negative number is no news
            np.sqrt(values.detach().resolve_conj().resolve_neg().numpy(), out=found.numpy())
        return found
    if kind.is_floating_point:  # float16 and bfloat16: rounded from float32, as torch does
        return _sqrt(values.float()).to(kind)
    return _sqrt(values.to(torch.get_default_dtype()))


def _sqrt_(values: "Tensor") -> "Tensor":
    return values.copy_(_sqrt(values))


def _sqrt_out(values: "Tensor", *, out: "Tensor") -> "Tensor":
    found = _sqrt(values)
    return out.resize_(found.shape).copy_(found)
