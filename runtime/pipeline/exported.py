"""Layers of a model that torch.fx cannot trace, by torch.export.

torch.export runs the model's own Python with the arguments of a real call, so control flow on
shapes, options and missing arguments goes the way it went. The graph is of single operators, each
of which knows the module it came from; layers are named after those modules as torch.fx would.
Batch-norm stays a call of the model's own module, whose statistics a pipeline keeps apart by
microbatch.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...schema.errors import TargetError
from .layered import Layer, LayeredModel, is_leaf, numbered

_ROOT = "model"
_UPDATED = ("batch_norm", "instance_norm")
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class _Called(nn.Module):
    """The model as a function of its tensors alone, in order."""

    def __init__(self, model: nn.Module, names: list[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._names, self._constants = names, dict(constants)

    def forward(self, *tensors: Tensor) -> Any:
        return self.model(**dict(zip(self._names, tensors, strict=True)), **self._constants)


def exported_layers(
    model: nn.Module, inputs: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> LayeredModel:
    """Trace a model by exporting it.

    Args:
        model: In training mode.
        inputs: The tensors of a call by argument name, batch first; values do not matter.
        constants: The call's other arguments.

    Raises:
        TargetError: It cannot be exported, or keeps statistics of its own that a pipeline must
            keep apart by microbatch; says why.
    """
    called = _Called(model, list(inputs), constants).train(model.training)
    batch = {0: torch.export.Dim.AUTO}
    shapes = tuple(batch if tensor.dim() else None for tensor in inputs.values())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                called, tuple(inputs.values()), dynamic_shapes={"tensors": shapes}, strict=False
            )
            module = program.module(check_guards=False)
    except Exception as error:
        # Whatever a model's code raises on symbolic shapes is the reason that is reported.
        raise TargetError(f"torch.export: {_first_line(error)}") from error
    return _layered(model, module, list(inputs))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _layered(model: nn.Module, module: fx.GraphModule, names: list[str]) -> LayeredModel:
    root = module.get_submodule(_ROOT)
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(arguments, names, strict=True):
        node.target = name
    for node in module.graph.nodes:
        if node.op == "get_attr":
            _root_at(node, module, root)
    _restore_norms(model, module.graph, root)
    _refuse_updates(module.graph, root)
    output = next(node for node in module.graph.nodes if node.op == "output")
    spec = module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    layers = _group(model, module.graph)
    return LayeredModel(
        model=root,
        arguments=tuple(arguments),
        layers=layers,
        result=torch.utils._pytree.tree_unflatten(list(output.args[0]), spec),
    )


def _root_at(node: fx.Node, module: fx.GraphModule, root: nn.Module) -> None:
    """Let an attribute's name start at the model; constants of the export move there."""
    name = str(node.target)
    if name.startswith(f"{_ROOT}."):
        node.target = name.removeprefix(f"{_ROOT}.")
    else:
        setattr(root, name, getattr(module, name))


def _restore_norms(model: nn.Module, graph: fx.Graph, root: nn.Module) -> None:
    """Call the model's own module where operators would update its running statistics."""
    for node in list(graph.nodes):
        call = _leaf_call(model, node) if node.op == "call_function" else None
        if call is None:
            continue
        norm = model.get_submodule(call[1])
        if not isinstance(norm, _NORMS) or not norm.track_running_stats:
            continue
        if _name_of(node) in _UPDATED:
            with graph.inserting_before(node):
                made = graph.create_node("call_module", call[1], (node.args[0],))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            parent, _, name = call[1].rpartition(".")
            setattr(root.get_submodule(parent), name, norm)
            graph.erase_node(node)
        elif not node.users:
            graph.erase_node(node)  # it counts the batches, as the module does


def _name_of(node: fx.Node) -> str:
    name: str = node.target.__name__.split(".")[0]  # type: ignore[union-attr]
    return name


def _refuse_updates(graph: fx.Graph, root: nn.Module) -> None:
    buffers = dict(root.named_buffers())
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        changed = [n for n in node.all_input_nodes if n.op == "get_attr" and n.target in buffers]
        name = _name_of(node)
        if changed and (name.endswith("_") or name in _UPDATED):
            raise TargetError(
                f"torch.export: its graph would update buffer {changed[0].target!r}, which a "
                "pipeline keeps apart for each microbatch"
            )


def _group(model: nn.Module, graph: fx.Graph) -> tuple[Layer, ...]:
    """Operators of one call of a module are a layer; others belong to the layer before."""
    groups: list[tuple[str, str, list[fx.Node]]] = []
    waiting: list[fx.Node] = []
    last = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        call = _leaf_call(model, node)
        if call is not None and call != last:
            last, name = call, call[1]
            groups.append((name, type(model.get_submodule(name)).__name__, waiting))
            waiting = []
        (groups[-1][2] if groups else waiting).append(node)
    if not groups:
        raise TargetError("torch.export: no module of the model is called")
    names = numbered([name for name, _, _ in groups])
    return tuple(
        Layer(name, kind, tuple(nodes))
        for name, (_, kind, nodes) in zip(names, groups, strict=True)
    )


def _leaf_call(model: nn.Module, node: fx.Node) -> tuple[str, str] | None:
    """The call of the outermost module without layers inside that an operator came from."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        name = path.removeprefix(_ROOT).removeprefix(".")
        if name and is_leaf(model.get_submodule(name)):
            return key, name
    return None
