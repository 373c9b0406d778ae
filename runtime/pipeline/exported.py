"""Find the layers of a model that torch.fx cannot trace, by torch.export.

torch.export runs the model's own Python with the arguments of a real call, so control flow that
depends on shapes, options and missing arguments takes the branches of that call. Every size that
the code does not fix stays open, above all the batch size. What the code asks about sizes becomes
guards; a call that breaks a guard is refused. The graph consists of single operators, each of which
knows the module it came from; layers are named after those modules, as torch.fx would. Batch-norm
stays a call of the model's own module, whose statistics a pipeline keeps separate by microbatch.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...schema.errors import TargetError
from ..tensor.opaque import is_shared_call
from .answers import Rebuild, taken_apart
from .calls import TracedCall
from .layered import Layer, LayeredModel, is_leaf, numbered
from .shared import of_inputs

_ROOT = "model"
_GUARDS = "_guards_fn"
_UPDATED = ("batch_norm", "instance_norm")
_CHECKS = ("_assert_tensor_metadata",)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class _Form:
    """The form of the answer, noted while the model runs; export resets plain attributes."""

    rebuild: Rebuild


class _Called(nn.Module):
    """The model as a function from a list of its tensors to a list of tensors."""

    def __init__(self, model: nn.Module, names: list[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._names, self._constants = names, dict(constants)
        self.form = _Form()

    # One list: in torch 2.9 guards cannot name the members of ``*tensors``.
    def forward(self, tensors: list[Tensor]) -> list[Any]:
        answer = self.model(**dict(zip(self._names, tensors, strict=True)), **self._constants)
        leaves, self.form.rebuild = taken_apart(answer)
        return leaves


def exported_layers(
    model: nn.Module, inputs: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> LayeredModel:
    """Trace a model by exporting it.

    Args:
        model: The model, in training mode.
        inputs: The tensors of a call by argument name; their values do not matter.
        constants: The call's other arguments.

    Raises:
        TargetError: It cannot be exported, or it keeps statistics of its own that a pipeline would
            have to keep separate by microbatch; says why.
    """
    called = _Called(model, list(inputs), constants).train(model.training)
    try:
        program = _program(called, tuple(inputs.values()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = program.module()
    except Exception as error:
        # Any error of a model's code on symbolic shapes is reported as the reason.
        raise TargetError(f"torch.export: {_first_line(error)}") from error
    call = TracedCall(dict(inputs), dict(constants), getattr(module, _GUARDS, None))
    return _layered(model, module, call, called.form.rebuild)


def _program(called: _Called, inputs: tuple[Tensor, ...]) -> Any:
    """Export with every size open; if the model's code fails on that, with the batch size only."""
    auto = torch.export.Dim.AUTO
    # Export fixes sizes of 1 in any case, and warns.
    all_sizes = tuple(
        {place: auto for place, size in enumerate(tensor.shape) if size > 1} for tensor in inputs
    )
    batch = tuple({0: auto} if tensor.dim() else {} for tensor in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _export(called, inputs, all_sizes)
        except Exception:
            # Whatever the error: the second attempt fails with it too, or avoids it.
            return _export(called, inputs, batch)


def _export(called: _Called, inputs: tuple[Tensor, ...], sizes: tuple[Any, ...]) -> Any:
    shapes = {"tensors": list(sizes)}
    return torch.export.export(called, (list(inputs),), dynamic_shapes=shapes, strict=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _layered(
    model: nn.Module, module: fx.GraphModule, call: TracedCall, rebuild: Rebuild
) -> LayeredModel:
    graph = module.graph
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(arguments, call.inputs, strict=True):
        node.target = name
    constants: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.target == _GUARDS or _name_of(node) in _CHECKS:
            graph.erase_node(node)
        elif node.op == "get_attr":
            _name_in_model(node, module, model, constants)
    _restore_shared(model, graph)
    _restore_norms(model, graph)
    _refuse_updates(graph, dict(model.named_buffers(remove_duplicate=False)))
    output = next(node for node in graph.nodes if node.op == "output")
    found = LayeredModel(
        model=model,
        arguments=tuple(arguments),
        layers=(),
        result=list(output.args[0]),
        constants=constants,
        answer=lambda values: rebuild(iter(values)),
        check_call=call.check,
    )
    shared = of_inputs(graph, found.attribute)
    return replace(
        found,
        layers=_group(model, [node for node in graph.nodes if node not in shared]),
        shared=tuple(node for node in graph.nodes if node in shared),
    )


def _name_in_model(
    node: fx.Node, module: fx.GraphModule, model: nn.Module, constants: dict[str, Any]
) -> None:
    """Give an attribute its name in the model; what export itself made becomes a constant."""
    name = str(node.target)
    own = name.removeprefix(f"{_ROOT}.")
    if own != name and isinstance(_attribute(model, own), Tensor):
        node.target = own
        return
    node.target = f"_made_{len(constants)}"
    constants[node.target] = _attribute(module, name)


def _attribute(root: nn.Module, name: str) -> Any:
    """The object under a dotted name; None if there is none."""
    held: Any = root
    for part in name.split("."):
        held = getattr(held, part, None)
    return held


def _restore_shared(model: nn.Module, graph: fx.Graph) -> None:
    """Call the model's own module where a tensor-parallel group shares a layer."""
    for node in list(graph.nodes):
        call = _leaf_call(model, node) if is_shared_call(node.target) else None
        if call is not None:
            _call_module(graph, node, call[1])


def _call_module(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Call a module on an operator's first argument, in place of the operator."""
    with graph.inserting_before(node):
        made = graph.create_node("call_module", name, (node.args[0],))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _restore_norms(model: nn.Module, graph: fx.Graph) -> None:
    """Call the model's own module in place of operators that update its running statistics."""
    for node in list(graph.nodes):
        call = _leaf_call(model, node) if node.op == "call_function" else None
        if call is None:
            continue
        norm = model.get_submodule(call[1])
        if not isinstance(norm, _NORMS) or not norm.track_running_stats:
            continue
        if _name_of(node) in _UPDATED:
            _call_module(graph, node, call[1])
        elif not node.users:
            graph.erase_node(node)  # the module itself counts its batches


def _name_of(node: fx.Node) -> str:
    """The name of an operator, without its overload."""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _refuse_updates(graph: fx.Graph, buffers: Mapping[str, Tensor]) -> None:
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


def _group(model: nn.Module, nodes: Sequence[fx.Node]) -> tuple[Layer, ...]:
    """Group the operators of one module call into a layer; others join the layer before them."""
    groups: list[tuple[str, str, list[fx.Node]]] = []
    waiting: list[fx.Node] = []
    last = None
    for node in nodes:
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
    """The call of the outermost module with no layers inside that an operator came from."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        name = path.removeprefix(_ROOT).removeprefix(".")
        # Nodes that export adds itself have names that are no modules.
        module = _attribute(model, name) if name else None
        if isinstance(module, nn.Module) and is_leaf(module):
            return key, name
    return None
