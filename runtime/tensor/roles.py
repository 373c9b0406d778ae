"""Which modules of a model a tensor-parallel group shares, and how (thesis 4.2.3).

Families known by the names of their modules are GPT-2, Llama, Qwen, GPT-NeoX, BERT and ViT of
transformers, and the zoo's transformers. Any other model declares it (``tensor_parallel``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from .regions import SequenceRole, check_sequence

# Who shares which layers: the tensor-parallel groups and each worker's part of a parameter.


# Cut a parameter over a tensor-parallel group, and join its parts again (thesis 4.2.3).


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """How a parameter is cut.

    Attributes:
        dim: The dimension in which it is cut.
        parts: How many matrices are fused along that dimension (3 for queries, keys and values).
            Each of them is cut by itself, and a worker holds its share of every one.
    """

    dim: int
    parts: int = 1

    def own(self, whole: Tensor, lane: int, degree: int) -> Tensor:
        """The part of the worker at position ``lane`` of ``degree``, as a copy."""
        share = self._share(whole, lane, degree)
        return share.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def put(self, part: Tensor, whole: Tensor, lane: int, degree: int) -> None:
        """Write the part of a worker to its place in the whole parameter, which is contiguous."""
        self._share(whole, lane, degree).copy_(self._unfused(part))

    def _share(self, whole: Tensor, lane: int, degree: int) -> Tensor:
        return self._unfused(whole).tensor_split(degree, self.dim + 1)[lane]

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """Join the parts of all workers, in order of lanes, to the whole parameter."""
        fused = [self._unfused(share) for share in shares]
        return torch.cat(fused, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _unfused(self, value: Tensor) -> Tensor:
        """The tensor with ``dim`` split into two dimensions: fused matrices, rows of each."""
        size = value.shape[self.dim] // self.parts
        shape = (*value.shape[: self.dim], self.parts, size, *value.shape[self.dim + 1 :])
        return value.reshape(shape)


Ranks = tuple[int, ...]


class Lanes:
    """The tensor-parallel groups of a launch. A worker's lane is its position in its group.

    Args:
        groups: [groups] the ranks of each group; every worker is in one group.
        cuts: How parameters are cut over a group, by name; others are whole on every worker.
        inner: Names of whole parameters for whose gradient each worker computes a share.
    """

    def __init__(
        self, groups: Sequence[Ranks], cuts: Mapping[str, ParameterCut], inner: Collection[str] = ()
    ) -> None:
        self._cuts, self._inner = cuts, inner
        self._groups = {rank: group for group in groups for rank in group}

    def group(self, rank: int) -> Ranks:
        """The ranks that share layers with a worker, its own included."""
        return self._groups[rank]

    def lane(self, rank: int) -> int:
        """A worker's position in its group, from 0."""
        return self._groups[rank].index(rank)

    def degree(self, rank: int) -> int:
        """The number of workers in a worker's group."""
        return len(self._groups[rank])

    def is_cut(self, name: str, rank: int) -> bool:
        """Whether a worker that has this parameter holds only a part of it."""
        return name in self._cuts and self.degree(rank) > 1

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A worker's part of a parameter that is cut."""
        return self._cuts[name].own(whole, self.lane(rank), self.degree(rank))

    def part_shape(self, name: str, whole: torch.Size, rank: int) -> torch.Size:
        """The shape of a worker's part of a parameter that is cut."""
        return self.part(name, torch.empty(whole, device="meta"), rank).shape

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join one group's parts of a parameter, in order of lanes."""
        return self._cuts[name].whole(parts)

    def sums(self, name: str, holders: Ranks) -> tuple[Ranks, ...]:
        """The sets of workers over which a parameter's gradients are summed, each set separately.

        If the parameter is cut, the workers with the same part in different groups form a set. If
        it is not cut, or if groups have different degrees, all holders sum whole gradients
        (``put``).
        """
        if self.adds_whole(name, holders):
            return (holders,)
        return tuple(
            tuple(rank for rank in holders if self.lane(rank) == lane)
            for lane in range(self.degree(holders[0]))
        )

    def adds_whole(self, name: str, holders: Ranks) -> bool:
        """Whether whole gradients are summed, to which each worker contributes its share.

        All workers of a group compute the gradient of a parameter that is not cut. But products
        round differently where memory is aligned differently, so only one worker contributes.
        """
        degrees = {self.degree(rank) for rank in holders}
        return len(degrees) > 1 or (degrees != {1} and name not in self._cuts)

    def is_told_by_parts(self, name: str, holders: Ranks) -> bool:
        """Whether the norm of a parameter's gradient is computed from the norms of its parts."""
        return any(self.is_cut(name, rank) for rank in holders)

    def alike(self, name: str, holders: Ranks) -> list[tuple[str, Ranks]]:
        """The sets of workers that must hold equal values of a parameter, with a name for each."""
        sets: dict[str, list[int]] = {}
        for rank in holders:
            is_cut = self.is_cut(name, rank)
            part = f" (part {self.lane(rank) + 1} of {self.degree(rank)})" if is_cut else ""
            sets.setdefault(f"{name}{part}", []).append(rank)
        return [(label, tuple(ranks)) for label, ranks in sets.items()]

    def contributes(self, name: str, rank: int) -> bool:
        """Whether a worker's gradient of a parameter counts in a sum of whole gradients."""
        return self.is_cut(name, rank) or self.lane(rank) == 0 or name in self._inner

    def put(self, name: str, part: Tensor, whole: Tensor, rank: int) -> None:
        """Write a worker's share in a sum of whole gradients to ``whole``, which is zero."""
        if self.is_cut(name, rank):
            self._cuts[name].put(part, whole, self.lane(rank), self.degree(rank))
        elif self.contributes(name, rank):
            whole.copy_(part)


Style = Literal["column", "row", "vocabulary", "output", "logits", "inner"]
_NOTE = "_hetflow_tensor_parallel"

# Ends of modules' names, for models that declare nothing. GPT-2; Llama and Qwen; GPT-NeoX; BERT
# (its vocabulary stays whole: its module of predictions reads the bias too); ViT; the zoo's.
_KNOWN = {
    "attn.c_attn": "column:3", "mlp.c_fc": "column", "c_proj": "row", "wte": "vocabulary",
    "q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row",
    "gate_proj": "column", "up_proj": "column", "down_proj": "row", "embed_tokens": "vocabulary",
    "embed_in": "vocabulary", "attention.query_key_value": "column", "attention.dense": "row",
    "dense_h_to_4h": "column", "dense_4h_to_h": "row",
    "attention.self.query": "column", "attention.self.key": "column",
    "attention.self.value": "column", "attention.output.dense": "row",
    "intermediate.dense": "column", "output.dense": "row",
    "mlp.fc1": "column", "mlp.fc2": "row",
    "attention.project_in": "column:3", "attention.project_out": "row",
    "feed_forward.0": "column", "feed_forward.2": "row", "lm_head": "output",
    "q_norm": "inner", "k_norm": "inner",
}  # fmt: skip
# With sequence parallelism (regions.py).
_KNOWN_SEQUENCE: dict[str, SequenceRole] = {
    "h.0": "begin", "ln_1": "norm", "ln_2": "norm", "ln_f": "norm",
    "attn.resid_dropout": "residual", "mlp.dropout": "residual",
    "layers.0": "begin", "input_layernorm": "norm", "post_attention_layernorm": "norm",
    "blocks.0": "begin", "norms.0": "norm", "norms.1": "norm", "norm": "norm",
}  # fmt: skip
# Sizes that a forward reads from its module; where layers are cut, they are a worker's own.
_KNOWN_SIZES = {"attn": ("split_size",)}
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_head")


@dataclass(frozen=True, slots=True)
class Role:
    """How a module is shared.

    Attributes:
        style: ``column``, a linear layer cut by outputs; ``row``, one cut by inputs; ``output``,
            one cut by outputs that are then joined; ``logits``, one cut by outputs that only the
            loss reads; ``vocabulary``, an embedding cut by vocabulary; ``inner``, a module between
            column and row layers that is whole, and that each worker uses for its share.
        parts: How many layers are fused in it (3 for queries, keys and values).
    """

    style: Style
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> "Role":
        """Read ``STYLE`` or ``STYLE:PARTS``.

        Raises:
            TargetError: There is no such style, or the number of parts is invalid.
        """
        style, _, parts = text.partition(":")
        number = int(parts) if parts.isdecimal() else 0 if parts else 1
        if style not in get_args(Style) or number < 1 or (number > 1 and style != "column"):
            raise TargetError(
                f"{text!r} is no way to share a layer",
                hint="choose from column, column:PARTS, row, output, logits, vocabulary, inner, "
                "begin, norm, residual",
            )
        return cls(cast(Style, style), number)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The shared modules and parameters of one model.

    Attributes:
        roles: Roles by module name.
        sizes: Attributes of modules to divide by the degree, by module name.
        cuts: How parameters are cut, by parameter name; the others are whole on every worker.
        inner: Names of whole parameters for whose gradient each worker computes a share.
        sequence: Roles in sequence parallelism, by module name.
    """

    roles: Mapping[str, Role]
    sizes: Mapping[str, Sequence[str]]
    cuts: Mapping[str, ParameterCut]
    inner: frozenset[str] = frozenset()
    sequence: Mapping[str, SequenceRole] = field(default_factory=dict)

    def over_sequences(self, model: nn.Module) -> "SharedParts":
        """Add sequence parallelism: more parameters whose gradient is computed in shares.

        Raises:
            TargetError: The model's sequences cannot be spread.
        """
        check_sequence(model, self.sequence)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = set(self.inner)
        for name, part in self.sequence.items():
            if part == "norm":
                found |= {names[id(p)] for p in model.get_submodule(name).parameters()}
        for name, role in self.roles.items():
            bias = getattr(model.get_submodule(name), "bias", None)
            if role.style == "row" and bias is not None:
                found.add(names[id(bias)])
        return replace(self, inner=frozenset(found))


def tensor_parallel(
    model: nn.Module,
    roles: Mapping[str, str],
    *,
    sizes: Mapping[str, Sequence[str]] | None = None,
    known: bool = False,
) -> None:
    """Declare how the workers of a tensor-parallel group share a model's layers (thesis 4.2.3).

    Call it before ``prepare``. It changes nothing by itself: a plan says how many workers share.

    Args:
        model: The model.
        roles: Roles by module name (``*`` matches any part of a name). ``column`` and ``row`` are
            two linear layers between which each worker computes its own share; ``column:3`` is a
            column layer with fused queries, keys and values; ``vocabulary`` is an embedding;
            ``output`` is a linear layer whose whole output every worker needs; the output of
            ``logits`` stays cut, and only ``torch.nn.functional.cross_entropy`` can read it;
            ``inner`` is a module with parameters between column and row layers (a norm of each
            head). For sequence parallelism ``begin`` is the first block, ``norm`` a norm that
            reads the residual stream (also the one behind the last block), ``residual`` dropout
            of it.
        sizes: By module name: attributes such as ``num_heads`` that the module's forward reads
            and that are divided by the number of workers.
        known: Whether modules that are not listed are shared as their names imply (GPT-2, Llama
            and Qwen of transformers). By default they are whole.

    Raises:
        TargetError: There is no such role, or no module has such a name.

    Example:
        >>> import torch
        >>> from hetflow.runtime import tensor_parallel
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
        ... )
        >>> tensor_parallel(model, {"0": "column", "2": "row"})
    """
    names = [name for name, _ in model.named_modules()]
    for pattern in (*roles, *(sizes or {})):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TargetError(f"{type(model).__name__} has no module {pattern!r}")
    for text in roles.values():
        if text not in get_args(SequenceRole):
            Role.parse(text)
    setattr(model, _NOTE, (dict(roles), dict(sizes or {}), known))


def sharing_of(model: nn.Module) -> SharedParts:
    """The sharing that the model declared, or that its modules' names imply.

    Raises:
        TargetError: No module can be shared, or one cannot be shared as declared.
    """
    declared, attributes, known = getattr(model, _NOTE, ({}, {}, True))
    roles: dict[str, Role] = {}
    sizes: dict[str, Sequence[str]] = {}
    sequence: dict[str, SequenceRole] = {}
    for name, module in model.named_modules():
        text = part = _by_pattern(name, declared)
        if text is None and known:
            text, part = _by_ending(name, _KNOWN), _by_ending(name, _KNOWN_SEQUENCE)
            is_linear = isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module)
            if text != "inner" and not is_linear:
                text = None
        own = _by_pattern(name, attributes) or ()
        if not own and known:
            own = [a for a in _by_ending(name, _KNOWN_SIZES) or () if hasattr(module, a)]
        if part in get_args(SequenceRole):
            sequence[name] = part
            text = None if part == text else text
        if text is not None:
            roles[name] = Role.parse(text)
        if own:
            sizes[name] = own
    if not any(role.style == "row" for role in roles.values()):
        raise TargetError(
            f"no layers of {type(model).__name__} are known that a tensor-parallel group could "
            "share",
            hint="say which with hetflow.runtime.tensor_parallel(model, {...})",
        )
    if known:
        _check_known(model, roles)
    inner = [name for name, role in roles.items() if role.style == "inner"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {names[id(p)] for name in inner for p in model.get_submodule(name).parameters()}
    return SharedParts(roles, sizes, _cuts(model, roles), frozenset(shared), sequence)


def _check_known(model: nn.Module, roles: Mapping[str, Role]) -> None:
    """Refuse a model whose modules' names imply roles that do not add up."""
    # In the modules' order, which is the layers': a row layer reads what a column layer made.
    is_split = False
    for name, role in roles.items():
        if role.style == "row" and not is_split:
            raise TargetError(
                f"{name} has the name of a layer that reads a share, and no layer before it makes "
                "shares",
                hint="say how all are shared with hetflow.runtime.tensor_parallel(model, {...})",
            )
        is_split = role.style == "column" or (is_split and role.style != "row")
    # A parameter beside a column layer may be used on a share (a norm of each head), or on whole
    # values. In the first case its gradient must be summed over the group, in the second not.
    parents = {name.rpartition(".")[0] for name, role in roles.items() if role.style == "column"}
    for name, module in model.named_modules():
        is_inside = any(name == parent or name.startswith(f"{parent}.") for parent in parents)
        if is_inside and name not in roles and any(True for _ in module.parameters(recurse=False)):
            raise TargetError(
                f"{name} stands beside layers that a tensor-parallel group cuts, and it is not "
                "known whether each worker uses it for its share",
                hint="say how all are shared with hetflow.runtime.tensor_parallel(model, {...})",
            )


def _by_pattern(name: str, table: Mapping[str, Any]) -> Any:
    return next((found for pattern, found in table.items() if fnmatchcase(name, pattern)), None)


def _by_ending(name: str, table: Mapping[str, Any]) -> Any:
    for ending, found in table.items():
        if name == ending or name.endswith(f".{ending}"):
            return found
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def num_outputs(module: nn.Module) -> int:
    """The number of outputs of a whole linear layer."""
    return int(module.nf if is_transposed(module) else module.out_features)  # type: ignore[arg-type]


def _num_inputs(module: nn.Module) -> int:
    return int(module.nx if is_transposed(module) else module.in_features)  # type: ignore[arg-type]


def _cuts(model: nn.Module, roles: Mapping[str, Role]) -> dict[str, ParameterCut]:
    """The cuts by parameter name."""
    # A tied parameter has one name here, so it is listed once.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts: dict[str, ParameterCut] = {}
    for name, role in roles.items():
        for attribute, cut in _cuts_of(name, model.get_submodule(name), role).items():
            parameter = names[id(getattr(model.get_submodule(name), attribute))]
            if cuts.setdefault(parameter, cut) != cut:
                raise TargetError(f"{parameter} is tied, and {name} would cut it otherwise")
    for name, module in model.named_modules():
        for own in module.parameters(recurse=False):
            if names[id(own)] in cuts and name not in roles:
                raise TargetError(
                    f"{names[id(own)]} is cut over the group, and {name} reads it whole",
                    hint=f"give {name} a way to share it too, or leave the other whole",
                )
    return cuts


def _cuts_of(name: str, module: nn.Module, role: Role) -> dict[str, ParameterCut]:
    if role.style == "inner":
        return {}
    if role.style == "vocabulary":
        if not isinstance(module, nn.Embedding):
            raise _no_such(name, module, role)
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise TargetError(
                f"{name} cannot be cut by vocabulary: max_norm, sparse and scale_grad_by_freq need "
                "the whole embedding"
            )
        return {"weight": ParameterCut(0)}
    if not isinstance(module, nn.Linear) and not is_transposed(module):
        raise _no_such(name, module, role)
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if role.style == "row":
        return {"weight": ParameterCut(inputs)}
    found = {"weight": ParameterCut(outputs, role.parts)}
    if module.bias is not None:
        found["bias"] = ParameterCut(0, role.parts)
    return found


def _no_such(name: str, module: nn.Module, role: Role) -> TargetError:
    return TargetError(
        f"{name} is a {type(module).__name__}, which cannot be shared by {role.style}",
        hint="column, row, output and logits take linear layers, vocabulary an embedding",
    )


def check_degree(model: nn.Module, sharing: SharedParts, degree: int) -> None:
    """Refuse a degree that does not divide the numbers that must be equal on a group's workers.

    Raises:
        TargetError: Names the module or the number of heads, and the nearest degrees that divide.
    """
    if degree == 1:
        return
    sizes: list[tuple[str, int]] = []
    for holder in (getattr(model, "config", None), *model.modules()):
        for name in _HEADS:
            number = getattr(holder, name, None)
            if isinstance(number, int) and number > 0:
                sizes.append((f"{number} ({name})", number))
    for name, role in sharing.roles.items():
        module = model.get_submodule(name)
        if role.style == "column":
            number = num_outputs(module) // role.parts
            sizes.append((f"{number} outputs of {name}", number))
            if num_outputs(module) % role.parts:
                raise TargetError(
                    f"{name} has {num_outputs(module)} outputs, which are no {role.parts} parts"
                )
        elif role.style == "row":
            sizes.append((f"{_num_inputs(module)} inputs of {name}", _num_inputs(module)))
    for said, number in sizes:
        if number % degree:
            raise TargetError(
                f"a tensor-parallel degree of {degree} does not divide the {said}",
                hint=f"degrees that do: {_nearest([n for _, n in sizes], degree)}",
            )


def check_pairs(stages: Sequence[tuple[Sequence[str], set[int]]], sharing: SharedParts) -> None:
    """Refuse a stage cut between a column- and its row-parallel layer if the degrees differ.

    The activations there are one worker's share, which has no meaning at another degree.

    ``stages`` are [stages] the names of its layers, and the degrees of its replicas.
    """
    layers = [
        (name.partition("#")[0], stage, degrees)
        for stage, (names, degrees) in enumerate(stages)
        for name in names
    ]
    column: tuple[str, int, set[int]] | None = None
    for name, stage, degrees in layers:
        style = sharing.roles[name].style if name in sharing.roles else None
        if style == "column":
            column = (name, stage, degrees)
        elif style == "row" and column is not None:
            if column[1] != stage and len(column[2] | degrees) > 1:
                raise TargetError(
                    f"{column[0]} and {name} are in two stages, whose tensor-parallel degrees are "
                    f"{', '.join(str(d) for d in sorted(column[2] | degrees))}",
                    hint="a cut between the two needs one degree on both sides",
                )
            column = None


def check_shared(stages: Sequence[Any], sharing: SharedParts, model: nn.Module) -> None:
    """Refuse stages whose graph reads a cut parameter outside the module that shares it."""
    if not sharing.cuts:
        return
    parameters = dict(model.named_parameters())
    for stage in stages:
        used = {id(parameter) for parameter in stage.module.parameters()}
        there = {id(module) for module in stage.module.modules()}
        shared = [model.get_submodule(name) for name in sharing.roles]
        owned = {
            id(parameter)
            for module in shared
            if id(module) in there
            for parameter in module.parameters(recurse=False)
        }
        for name in sharing.cuts:
            if id(parameters[name]) not in used - owned:
                continue
            raise TargetError(
                f"{name} is cut over a tensor-parallel group, and the model's layers were found by "
                "torch.export, which reads it outside of its module",
                hint="launch a plan of one stage, or one whose tensor-parallel degrees are 1",
            )


def _nearest(numbers: Sequence[int], degree: int) -> str:
    """The nearest degrees, one below and one above, that divide all numbers."""
    fit = [d for d in range(1, min(numbers) + 1) if not any(n % d for n in numbers)]
    below, above = [d for d in fit if d < degree], [d for d in fit if d > degree]
    return " and ".join(str(d) for d in (*below[-1:], *above[:1]))
