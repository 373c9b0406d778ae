"""Loops compiled by numba, where it is installed (the extra ``fast``).

Modules of compiled loops are imported by their callers, and only if ``can_compile()``, since numba
takes 0.15 s to import. What they compute is computed elsewhere in numpy too, to the same digits.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

OFTEN = 500
"""Calls without compiling, which takes 20 CPU s once an installation; a call takes milliseconds."""


@cache
def can_compile() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of scalars and arrays; once for all processes that share a cache."""
    # Sums are added up in the order written and products are not fused with them, so that the
    # digits are those of numpy. Numba's cache notices changes of the function's own file only. So
    # what other files define is passed as an argument, and functions do not call themselves
    # (cached, that crashes).
    from numba import njit

    try:
        kernel: Callable[..., Any] = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        kernel = njit(error_model="numpy")(function)
    return kernel


def compiled_if_often(
    plain: Callable[..., Any], load: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """A function that goes over to its compiled twin, of the same digits, when it is called often.

    So a single allocation, or a simulation of a few jobs, never waits for the compiler.
    """
    calls = 0
    twin: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal calls, twin
        if twin is None and can_compile():
            calls += 1
            if calls > OFTEN:
                twin = load()
        return (twin or plain)(*args)

    return call
