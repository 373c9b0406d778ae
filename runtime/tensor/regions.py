"""Dropout between a column- and a row-parallel layer, the same whatever the degree.

There each worker computes its own heads, or its own part of the hidden layer. If each drew a mask
for its part, results would depend on the degree. So every worker draws the mask of the whole tensor
and takes its part of it: the masks are those of one process, and the workers' random streams stay
equal. The mask of the whole tensor needs memory until its part is taken.

Other random functions between the two layers are refused, as are kernels that draw masks inside.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from .operators import TensorGroup, recording, sharded_dropout

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

    A checkpoint of the script's may end between the two. When the backward pass recomputes it, no
    row layer ends the region, so there it ends with the recomputation: as soon as autograd records
    otherwise than when it began.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._columns: list[_Column] = []
        self._recording: Any = None

    def opened(self, name: str, made: Tensor, parts: int) -> None:
        """Note that a column-parallel layer has run."""
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
        """Whether the region is of a recomputation that has ended."""
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
            return self._dropout(args[0], *args[1:], **_named(own, train="training"))
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
        """The dimension of a tensor of which each worker has a part.

        It is that of the hidden layer in a tensor like a column-parallel layer's output, and that
        of the heads in [..., heads, tokens, any].

        Raises:
            TargetError: The tensor is neither.
        """
        for column in self._columns:
            leading, size = column.shape[:-1], column.shape[-1]
            if x.shape[:-1] == leading and x.shape[-1] in (size, size // column.parts):
                return x.dim() - 1
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
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        scores = query @ key.transpose(-1, -2)
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
        """Refuse a checkpoint that begins here: its recomputation would not draw whole masks."""
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
    """Refuse attention of transformers that drops weights inside a kernel, before training.

    Raises:
        TargetError: Names the kind of attention and the setting.
    """
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


class _Column:
    """A column-parallel layer that has run: its name, its output's shape, its fused parts."""

    __slots__ = ("name", "parts", "shape")

    def __init__(self, name: str, shape: torch.Size, parts: int) -> None:
        self.name, self.shape, self.parts = name, shape, parts


def _modes() -> list[Any]:
    """The function modes of this thread, the innermost last."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _is_on(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


def _named(given: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in given.items()}
