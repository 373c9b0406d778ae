"""Random draws that are equal whether a function sees its samples together or in parts.

The first call of a function, on all samples, draws as always, and the draws are kept. In a later
call on some of these samples each draw has the values that the first call drew for them: a draw's
dimension that changed with the number of samples is chosen from like the samples::

    first call, 5 samples     torch.rand(5, 3)  ->  kept
    samples 1, 2, 3           torch.rand(3, 3)  ->  rows 1, 2, 3 of what was kept

Permutations are the identity, so a sample is mixed with itself.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..buffers import NormCall
from ..determinism import seed_streams_by

_SEED = 20220601
# Their results are computed from their inputs, and they draw only where they drop something.
_COMPUTING = ("attention", "rnn", "lstm", "gru", "rrelu")
_OF_PYTHON = (
    "random", "uniform", "gauss", "normalvariate", "lognormvariate", "expovariate", "betavariate",
    "gammavariate", "triangular", "vonmisesvariate", "paretovariate", "weibullvariate", "randint",
    "randrange", "choice", "choices", "getrandbits",
)  # fmt: skip
_OF_NUMPY = (
    "rand", "randn", "random", "random_sample", "ranf", "sample", "uniform", "normal", "laplace",
    "standard_normal", "randint", "beta", "binomial", "exponential", "gamma", "poisson", "choice",
    "lognormal", "dirichlet", "multinomial", "multivariate_normal",
)  # fmt: skip


class Draws:
    """The draws of one function's calls.

    Attributes:
        coarsest: The largest ``eps`` of the dtypes in which anything was computed.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._kept: list[Any] = []
        self._is_first = True
        self._rows: Sequence[int] = range(num_samples)
        self.taken = 0  # draws so far in the call that runs
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.coarsest = 0.0

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Let draws in the body come from here; calls of the function are in it, each in ``of``."""
        made: list[tuple[Any, str, Any]] = [
            (random, "shuffle", _in_place),
            (random, "sample", lambda drawn, k, **_: list(drawn)[:k]),
            (np.random, "shuffle", _in_place),
            (np.random, "permutation", _in_order),
        ]
        made += [(random, name, _constant(getattr(random, name))) for name in _OF_PYTHON]
        made += [(np.random, name, self._numpy(getattr(np.random, name))) for name in _OF_NUMPY]
        with ExitStack() as stack:
            for replaced in made:
                stack.enter_context(mock.patch.object(*replaced))
            yield

    @contextmanager
    def of(self, rows: Sequence[int], *, keeps: bool = False) -> Iterator[None]:
        """Draw for these samples of the first call; ``keeps`` makes this the first call."""
        self._is_first, self.taken, self._rows = keeps, 0, rows
        if keeps:
            self._kept = []
        seed_streams_by(_SEED)
        try:
            with _Dispatched(self), _WithoutBatchStatistics():
                yield
        finally:
            for generator, state in self.generators.values():
                generator.set_state(state)

    def take(self, drawn: list[Any]) -> None:
        """Keep these arrays or tensors, or overwrite them with those that were kept."""
        for value in drawn:
            if self._is_first:
                self._kept.append(value.clone() if isinstance(value, Tensor) else value.copy())
            elif self.taken < len(self._kept):
                found = self._part(self._kept[self.taken], value)
                if found is not None:
                    value.copy_(found) if isinstance(value, Tensor) else np.copyto(value, found)
            self.taken += 1

    def _part(self, kept: Any, drawn: Any) -> Any:
        """What was kept, cut to the samples of this call; None where it does not fit."""
        if len(kept.shape) != len(drawn.shape) or kept.dtype != drawn.dtype:
            return None
        for axis, (whole, part) in enumerate(zip(kept.shape, drawn.shape, strict=True)):
            if whole == part:
                continue
            each = whole // self._num_samples
            if each * self._num_samples != whole or each * len(self._rows) != part:
                return None
            at = (torch.tensor(self._rows)[:, None] * each + torch.arange(each)).flatten()
            is_tensor = isinstance(kept, Tensor)
            kept = kept.index_select(axis, at.to(kept.device)) if is_tensor else kept.take(at, axis)
        return kept

    def skip(self, number: int) -> None:
        """Pass over so many draws, where what the first call made of them is known."""
        self.taken += number

    def _numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            held = found if isinstance(found, np.ndarray) else np.asarray(found).reshape(1).copy()
            self.take([held])
            return found if isinstance(found, np.ndarray) else held[0]

        return draw


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._draws.generators.setdefault(id(value), (value, value.get_state()))
        found = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                eps = torch.finfo(tensor.dtype).eps
                self._draws.coarsest = max(self._draws.coarsest, eps)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        name = func._schema.name
        if any(word in name for word in _COMPUTING):
            return found
        if "randperm" in name:
            for tensor in tensors:
                tensor.copy_(torch.arange(len(tensor), device=tensor.device))
        else:
            self._draws.take(tensors)
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts run as they do without a mode."""
        return True


class _WithoutBatchStatistics(TorchFunctionMode):
    """Batch-norm by constant statistics: a virtual node's own are defined, and are no fault."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.batch_norm:
            return func(*args, **kwargs)
        call = NormCall(*args, **kwargs)
        x, mean, variance = call.input, call.running_mean, call.running_var
        if call.training or mean is None or variance is None:
            dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
            mean = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
            variance = torch.ones_like(mean)
        return torch.batch_norm(
            x, call.weight, call.bias, mean, variance, False, call.momentum, call.eps, False
        )


def eagerly() -> Any:
    """Let compiled parts run as they were written: new shapes would be compiled at great cost.

    A frame that dynamo first meets under a mode is never compiled later.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _constant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make one draw for the same arguments: Python's draws are single numbers."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        state = random.getstate()
        random.seed(_SEED)
        try:
            return original(*args, **kwargs)
        finally:
            random.setstate(state)

    return draw


def _in_order(x: Any) -> Any:
    return np.arange(x) if isinstance(x, int | np.integer) else np.array(x)


def _in_place(x: Any) -> None:
    """Shuffle nothing: the order stays."""
