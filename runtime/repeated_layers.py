"""The blocks of a model: their modules and parameters, and when their passes end.

They are the units in which workers share states: the repeated layers (``unit_of``), or the modules
that a user lists.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..schema.errors import TargetError
from ..schema.layers import unit_of
from ..schema.spelling import did_you_mean
from .log import log
from .nested_tensors import tensors_in


def repeated_layers(model: nn.Module, blocks: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks of a model that have parameters, by name.

    ``blocks`` are their names; empty for its repeated layers.
    """
    paths = (path.rpartition(".")[0] for path, _ in model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(name for path in paths if (name := _home(path, blocks)))
    modules = modules_of(model) if blocks else {}
    return {name: modules.get(name) or model.get_submodule(name) for name in names}


def layers_of(model: nn.Module, blocks: Sequence[str] = ()) -> dict[int, str]:
    """The block of each parameter, by the parameter's id; empty for the rest and for tied ones."""
    found: dict[int, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = _home(path.rpartition(".")[0], blocks)
        found[id(parameter)] = name if found.get(id(parameter), name) == name else ""
    return found


def _home(path: str, blocks: Sequence[str]) -> str:
    if not blocks:
        return unit_of(path)
    path = path.replace(_COMPILED, "")
    return next((name for name in blocks if _is_in(path, name)), "")


_COMPILED = "_orig_mod."


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their names, which are the same where some are compiled."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(name.replace(_COMPILED, ""), module)
    return found


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def listed_blocks(model: nn.Module, listed: Any) -> tuple[str, ...]:
    """The names of the modules that a user lists as blocks, in the model's order.

    Of blocks within blocks the outer ones count, or the inner ones: those with which fewer weights
    are whole at a time. The model itself is no block.

    Listed is a module, a class of modules, the name of either, or several of these; or a wrap
    policy of ``torch.distributed.fsdp``, which may find none.

    Raises:
        TargetError: Something that is listed is not in the model.
    """
    modules = modules_of(model)
    taken = {id(module) for module in _listed(model, listed)}
    order = [
        name
        for name, module in modules.items()
        if name and id(module) in taken and any(True for _ in module.parameters())
    ]
    outer = [one for one in order if not any(_is_in(one, other) for other in order if other != one)]
    inner = [one for one in order if not any(_is_in(other, one) for other in order if other != one)]
    return tuple(min((outer, inner), key=partial(_most_whole_bytes, model)))


def _listed(model: nn.Module, listed: Any) -> Iterable[nn.Module]:
    if isinstance(listed, nn.ModuleList | nn.ModuleDict):  # which are never called themselves
        return listed.children()
    if isinstance(listed, nn.Module):
        return [listed]
    if isinstance(listed, str):
        return _called(model, listed)
    if isinstance(listed, type):
        members = [module for module in model.modules() if isinstance(module, listed)]
        if not members:
            raise TargetError(f"blocks: the model has no {listed.__name__}", hint=_LISTS)
        return members
    if hasattr(listed, "_run_policy"):  # ModuleWrapPolicy, CustomPolicy: the only way to ask them
        policed: dict[nn.Module, Any] = listed._run_policy(
            root_module=model, ignored_modules=set(), root_kwargs={}
        )
        return policed
    if callable(listed):
        wrapped: list[nn.Module] = []
        _wrap(model, listed, wrapped)
        return wrapped
    if not isinstance(listed, Iterable):
        raise TargetError(f"blocks: {listed!r} is none", hint=_LISTS)
    return [module for one in listed for module in _listed(model, one)]


_LISTS = "list modules, classes of modules or names of either, or give a wrap policy of FSDP"


def _called(model: nn.Module, name: str) -> Iterable[nn.Module]:
    """The module of a name, or those of a class of that name."""
    modules = modules_of(model)
    if name in modules:
        return _listed(model, modules[name])
    found = [each for each in modules.values() if type(each).__name__ == name]
    if not found:
        names = {type(each).__name__ for each in modules.values()} | modules.keys()
        raise TargetError(
            f"blocks: the model has no module and no class {name!r}",
            hint=did_you_mean(name, sorted(names - {""}), _LISTS),
        )
    return found


def _wrap(module: nn.Module, policy: Callable[..., bool], found: list[nn.Module]) -> int:
    """Ask a policy as FSDP does, of inner modules first; how many numbers are in what it takes."""
    held = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=held):
        return 0
    within = sum(_wrap(child, policy, found) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=held - within):
        return within
    found.append(module)
    return held


def _most_whole_bytes(model: nn.Module, blocks: Sequence[str]) -> int:
    """What is in no block, and the two largest blocks."""
    homes, sizes = layers_of(model, blocks), Counter[str]()
    for parameter in model.parameters():
        sizes[homes[id(parameter)]] += parameter.nbytes
    rest = sizes.pop("", 0)
    return rest + sum(sorted(sizes.values())[-2:])


def agreed_blocks(
    model: nn.Module,
    listed: Sequence[str],
    planned: Sequence[str],
    *,
    speaks: bool,
    is_only: bool = True,
) -> tuple[str, ...]:
    """The blocks of a run: the plan's, whose memory is of them, where it knows any.

    Repeated layers are those of the model, whatever the plan's are called: a script's model may be
    in another one.

    Args:
        model: The model.
        listed: What the script lists; empty for nothing.
        planned: What the plan counts; empty where it counts all weights as whole.
        speaks: Whether this worker says where the two differ.
        is_only: Whether the plan must be of this model, and not of another one of the script.

    Raises:
        TargetError: The model does not have the plan's blocks.
    """
    if not planned:
        return tuple(listed)
    modules = modules_of(model)
    if all(unit_of(name) == name for name in planned):
        planned = ()
    elif not is_only and modules.keys().isdisjoint(planned):
        return tuple(listed)
    for name in planned:
        if name not in modules:
            raise TargetError(
                f"the plan's memory counts {name} as a block, and the model has no such module",
                hint="profile this model, and solve again",
            )
    own = repeated_layers(model, planned)
    if speaks and listed and {*listed} != own.keys():
        log.warning(
            f"the script's blocks ({_some(listed)}) are not those that the plan's memory counts "
            f"({_some([*own])}), which are taken; to take the script's, profile with them"
        )
    return tuple(planned)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return (", ".join(names[:2]) or "none") + more


class _AfterBackward(torch.autograd.Function):
    """The identity on a layer's inputs; its backward pass comes when the layer's has ended."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.ended = ended
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.ended()
        return (None, *gradients)


def when_back(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], ended: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A layer's inputs, so that ``ended`` is called when the layer has gone back.

    Returns:
        What to give to the layer; None where it is not told, since no input has a gradient.
    """
    values = [*args, *kwargs.values()]
    places = [n for n, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    inputs = (values[n] for n in places)
    passed = _AfterBackward.apply(ended, *inputs)  # type: ignore[no-untyped-call]
    for n, tensor in zip(places, passed, strict=True):
        values[n] = tensor
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def when_going_back(output: Any, begins: Callable[[], None]) -> bool:
    """Let ``begins`` be called when the layer that gave this output goes back; whether it may."""
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not torch.is_grad_enabled() or not found:
        return False
    torch.autograd.graph.register_multi_grad_hook(found, lambda _: begins(), mode="any")
    return True


def when_loss_is_back(output: Any, begins: Callable[[], None]) -> None:
    """Let ``begins`` be called when a loss has gone back to this output of a model, and goes on.

    Not where gradients of the output itself are asked for: then it goes no further.
    """
    nodes = {tensor.grad_fn: None for tensor in tensors_in(output) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _: begins())
