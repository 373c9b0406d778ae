"""Sequence parallelism: between tensor-parallel regions each worker has a part of the tokens.

Norms, dropout and residuals are then computed, and kept for the backward pass, on 1/t of the
sequence. A norm's output is all-gathered before the column-parallel layers that read it, and a
row-parallel layer reduce-scatters its output: together as many bytes as one all-reduce
(Korthikanti et al., 2022; Megatron-LM's sequence parallelism, which the thesis does not have).

A value's tokens are its last dimension but one. Only models that normalise before each part can be
run so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...schema.errors import TargetError
from ...schema.options import option
from .operators import (
    SpreadInput,
    TensorGroup,
    gather_tokens_from,
    scatter_tokens_to,
    sharded_dropout,
)

SequenceRole = Literal["begin", "norm", "residual"]
"""``begin``: the first block, before which tokens are spread. ``norm``: computed on a worker's
tokens, and then gathered. ``residual``: dropout of a worker's tokens."""

_TOKENS = "_hetflow_tokens"
_DROPOUTS_INSIDE = ("attn_dropout",)  # between a column and a row layer: regions.py


def scattering(group: TensorGroup) -> Callable[[Tensor], Tensor]:
    """Make a function that spreads a value's tokens over the group; torch.fx can trace it."""

    def spread_tokens(value: Tensor) -> Tensor:
        if has_torch_function_unary(value) and not isinstance(value, Tensor):
            made: Tensor = handle_torch_function(spread_tokens, (value,), value)
            return made
        check_length(value.shape[-2], group.degree)
        return scatter_tokens_to(value, group)

    setattr(spread_tokens, _TOKENS, True)
    return spread_tokens


def spreads_tokens(target: object) -> bool:
    """Whether a function of a graph was made by ``scattering``."""
    return bool(getattr(target, _TOKENS, False))


def check_length(size: int, degree: int) -> None:
    """Refuse a sequence that does not divide among the workers of a group.

    Raises:
        TargetError: States the length.
    """
    if size % degree:
        raise TargetError(
            f"a sequence of {size} tokens does not divide among the {degree} workers of a "
            "tensor-parallel group, as sequence parallelism needs",
            hint=f"give sequences whose length is a multiple of {degree}, or plan without "
            f"{option('sequence_parallel')}",
        )


def gathered(tokens: Tensor, group: TensorGroup) -> Tensor:
    """A norm's output with all tokens; column-parallel layers find the worker's own in it."""
    whole = gather_tokens_from(tokens, group)
    if group.degree > 1:
        setattr(whole, _TOKENS, SpreadInput(tokens, group))
    return whole


def column_linear_of_tokens(whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """A column-parallel layer of a ``gathered`` value; None for any other value."""
    spread: SpreadInput | None = getattr(whole, _TOKENS, None)
    return None if spread is None else spread.linear(whole, weight, bias)


def dropped_tokens(module: nn.Dropout, group: TensorGroup, input: Tensor) -> Tensor:
    """Dropout of a worker's tokens, with the mask of all tokens."""
    if not module.training or module.p == 0:
        return input
    return sharded_dropout(input, module.p, group, dim=input.dim() - 2)


def spread_first(
    forward: Callable[..., Any], spread: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """A block's forward that takes whole activations and spreads their tokens."""

    def run(*arguments: Any, **named: Any) -> Any:
        if arguments:
            return forward(spread(arguments[0]), *arguments[1:], **named)
        first = next(iter(named))
        return forward(**{**named, first: spread(named[first])})

    return run


def check_sequence(model: nn.Module, roles: Mapping[str, SequenceRole]) -> None:
    """Refuse a model whose tokens cannot be spread between its tensor-parallel layers.

    Raises:
        TargetError: Says what is not known.
    """
    begins = [name for name, role in roles.items() if role == "begin"]
    norms = [name for name, role in roles.items() if role == "norm"]
    if len(begins) != 1 or not norms:
        raise TargetError(
            f"it is not known where the sequences of {type(model).__name__} can be spread",
            hint="say it with hetflow.runtime.tensor_parallel(model, {...}): one module 'begin', "
            "others 'norm' and 'residual'; or plan without "
            f"{option('sequence_parallel')}",
        )
    for name, role in roles.items():
        module = model.get_submodule(name)
        if role == "residual" and not isinstance(module, nn.Dropout):
            raise TargetError(
                f"{name} is a {type(module).__name__}, which cannot be 'residual'",
                hint="only torch.nn.Dropout can",
            )
    block = model.get_submodule(begins[0])
    if getattr(block, "norm_first", True) is False:
        raise TargetError(
            f"{type(model).__name__} normalises after each part: its tokens cannot be spread "
            "between tensor-parallel layers",
            hint=f"plan without {option('sequence_parallel')}",
        )
    blocks = begins[0].rpartition(".")[0]
    for name, module in model.named_modules():
        if not name.startswith(f"{blocks}." if blocks else "") or name in roles:
            continue
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if is_dropout and name.rpartition(".")[2] not in _DROPOUTS_INSIDE:
            raise TargetError(
                f"it is not known whether {name} drops a worker's own tokens",
                hint="give it the role 'residual' with hetflow.runtime.tensor_parallel if it "
                "does, set its probability to 0, or plan without "
                f"{option('sequence_parallel')}",
            )
