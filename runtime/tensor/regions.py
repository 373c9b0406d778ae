"""Inside and between tensor-parallel regions: dropout of parts, and layers on parts of the tokens.

Between a column- and a row-parallel layer dropout is the same whatever the degree. There each
worker computes its own heads, or its own part of the hidden layer. If each drew a mask for its
part, results would depend on the degree. So every worker draws the mask of the whole tensor and
takes its part of it: the masks are those of one process, and the workers' random streams stay
equal. The mask of the whole tensor needs memory until its part is taken.

Other random functions between the two layers are refused, as are kernels that draw masks inside.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)

from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from ...schema.options import option
from .operators import (
    SpreadInput,
    TensorGroup,
    gather_tokens_from,
    recording,
    scatter_tokens_to,
    sharded_dropout,
)

_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_OTHER_DROPOUTS = {
    functional.alpha_dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.feature_alpha_dropout,
}
_DRAWS = {
    torch.bernoulli,
    torch.rand,
    torch.rand_like,
    torch.randn,
    torch.randn_like,
    torch.randint,
    torch.randint_like,
    Tensor.bernoulli,
    Tensor.bernoulli_,
    Tensor.normal_,
    Tensor.uniform_,
    functional.gumbel_softmax,
}
_DROPOUTS = {functional.dropout, torch.dropout, functional.scaled_dot_product_attention}
_DROPOUT_NAMES = {"train": "training"}  # of torch.dropout -> of functional.dropout
_RANDOM = _DROPOUTS | _OTHER_DROPOUTS | _DRAWS
# The same in graphs of torch.export, which call operators.
_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.dropout.default: torch.dropout,
    torch.ops.aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
}
_DRAWN_BY_OPERATORS = {
    "alpha_dropout", "bernoulli", "bernoulli_", "dropout", "dropout_", "exponential_",
    "feature_alpha_dropout", "feature_dropout", "native_dropout", "normal_", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "uniform_",
}  # fmt: skip


class ParallelRegion(TorchFunctionMode):
    """What is computed between a column-parallel layer and the row-parallel layer after it.

    It begins when the first column-parallel layer has run and ends when a row-parallel one begins.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._columns: list[_Column] = []
        self._recording: Any = None

    def opened(self, name: str, made: Tensor, parts: int) -> None:
        """Note that a column-parallel layer has run."""
        # Queries, keys and values are three layers of one region; only the first one opens it.
        if not self._columns or self._is_left_open():
            self._columns.clear()
            self._recording = recording()
            if self not in _modes():
                self.__enter__()  # type: ignore[no-untyped-call]
        self._columns.append(_Column(name, made.shape, parts))

    def close(self) -> None:
        """Note that a row-parallel layer begins, or that a pass has ended."""
        self._columns.clear()
        # Autograd restores the stack after each of its nodes, so it may have left the mode itself.
        modes = _modes()
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)

    def _is_left_open(self) -> bool:
        # A checkpoint of the script's may end between column and row layer. When the backward pass
        # recomputes it, no row layer ends the region. So there it ends with the recomputation: as
        # soon as autograd records otherwise than when it began. The id is -1 outside of backward.
        return torch._C._current_graph_task_id() != -1 and recording() != self._recording

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Run a forward or a backward pass inside; however it ends, no region stays open."""
        try:
            yield
        finally:
            self.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Draw whole masks for dropout, refuse other draws, and leave everything else alone."""
        own = kwargs or {}
        if not self._columns or not _is_random(func) or self._is_left_open():
            return func(*args, **own)
        func = _OPERATORS.get(func, func)
        if func is functional.dropout:
            return self._dropout(*args, **own)
        if func is torch.dropout:
            return self._dropout(*args, **{_DROPOUT_NAMES.get(n, n): v for n, v in own.items()})
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **own)
        if func in _OTHER_DROPOUTS and not _is_on(*args, **own):
            return func(*args, **own)
        raise self._refusal(f"{func.__name__} draws")

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return functional.dropout(input, p, training, inplace)
        self._check_recording()
        dropped = sharded_dropout(input, p, self._group, dim=self._cut_dim(input))
        return input.copy_(dropped) if inplace else dropped

    def _cut_dim(self, x: Tensor) -> int:
        """The dimension of a tensor of which each worker has a part, told by its shape."""
        for column in self._columns:
            leading, size = column.shape[:-1], column.shape[-1]
            # [..., tokens, hidden]: a layer's output, or one of its fused parts.
            if x.shape[:-1] == leading and x.shape[-1] in (size, size // column.parts):
                return x.dim() - 1
        # [..., heads, tokens, any]: heads are what a group cuts in attention.
        *batch, tokens = self._columns[0].shape[:-1]
        if x.dim() > 2 and list(x.shape[:-3]) == batch and x.shape[-2] == tokens:
            return x.dim() - 3
        raise self._refusal(
            f"dropout of a tensor of shape {list(x.shape)}, of which it is not known how the "
            "group cuts it, draws"
        )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention with the weights' dropout, as torch computes it on a CPU."""
        if dropout_p == 0:
            gqa = {"enable_gqa": True} if enable_gqa else {}
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, **gqa
            )
        if query.device.type != HOST:
            raise TargetError(
                f"scaled_dot_product_attention behind {self._columns[-1].name} drops weights "
                "inside its kernel, where the mask depends on the tensor-parallel degree",
                hint="compute attention from its weights (transformers: "
                "attn_implementation='eager'), or set the attention's dropout to 0",
            )
        self._check_recording()
        # In steps, because the fused kernel draws its mask inside, for this worker's heads alone.
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        scores = query @ key.transpose(-1, -2)  # [..., heads, tokens, tokens]
        scores = scores * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = sharded_dropout(scores.softmax(-1), dropout_p, self._group, dim=scores.dim() - 3)
        return weights @ value

    def _check_recording(self) -> None:
        # A checkpoint that begins inside a region is recomputed without it: the column layer is
        # outside, and does not run again. So its masks would be of the parts.
        if recording() != self._recording:
            raise self._refusal(
                "a checkpoint recomputes dropout, which draws",
                hint="checkpoint whole blocks, from before the first of these layers, or set this "
                "dropout to 0",
            )

    def _refusal(self, said: str, *, hint: str | None = None) -> TargetError:
        return TargetError(
            f"behind {self._columns[-1].name}, which a tensor-parallel group cuts, {said} random "
            "numbers that would depend on the degree",
            hint=hint or "set it to 0, move it behind the row layer, or plan with degree 1",
        )


def _is_random(func: Callable[..., Any]) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return func in _OPERATORS or func._opname in _DRAWN_BY_OPERATORS
    return func in _RANDOM


def check_attention(model: nn.Module, device: torch.device) -> None:
    """Refuse attention of transformers that drops weights inside a kernel, before training."""
    config = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    if kind in (None, "eager") or (kind == "sdpa" and device.type == HOST):
        return
    for name in _ATTENTION_DROPOUTS:
        if getattr(config, name, None):
            raise TargetError(
                f"{type(model).__name__} drops weights ({name}) inside its kernel of attention "
                f"({kind}), where the mask depends on the tensor-parallel degree",
                hint=f"build the model with attn_implementation='eager', or set {name} to 0",
            )


class _Column(NamedTuple):
    """A column-parallel layer that has run: its name, its output's shape, its fused parts."""

    name: str
    shape: torch.Size
    parts: int


def _modes() -> list[Any]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _is_on(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


# Sequence parallelism: between tensor-parallel regions each worker has a part of the tokens.
#
# Norms, dropout and residuals are then computed, and kept for the backward pass, on 1/t of the
# sequence. A norm's output is all-gathered before the column-parallel layers that read it, and a
# row-parallel layer reduce-scatters its output: together as many bytes as one all-reduce
# (Korthikanti et al., 2022; Megatron-LM's sequence parallelism, which the thesis does not have).
#
# A value's tokens are its last dimension but one. Only models that normalise before each part can
# be run so.


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
        return scatter_tokens_to(value, group)

    setattr(spread_tokens, _TOKENS, True)
    return spread_tokens


def spreads_tokens(target: object) -> bool:
    """Whether a function of a graph was made by ``scattering``."""
    return bool(getattr(target, _TOKENS, False))


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
    """Refuse a model whose tokens cannot be spread between its tensor-parallel layers."""
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
