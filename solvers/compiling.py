"""Loops compiled by numba, where it is installed (the extra ``fast``).

Modules of compiled loops are imported by their callers, and only if ``can_compile()``, since numba
takes 0.15 s to import. What they compute is computed elsewhere in numpy too, to the same digits.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def can_compile() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of scalars and arrays; once for all processes that share a cache.

    Sums are added up in the order written and products are not fused with them, so that the digits
    are those of numpy. Numba's cache notices changes of the function's own file only. So what other
    files define is passed as an argument, and functions do not call themselves (cached, that
    crashes).
    """
    from numba import njit

    try:
        kernel: Callable[..., Any] = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        kernel = njit(error_model="numpy")(function)
    return kernel
