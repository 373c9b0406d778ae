"""A model as a graph of named layers, which profiles list, plans assign and stages are cut from.

torch.fx traces the model. A module whose own forward cannot be traced is taken as one layer. Each
call of a module starts a layer, named like the module; functions in between (add, flatten) belong
to the layer before them. Layers are intervals of one topological order, so any cut is valid.
Layers of a model that torch.fx cannot trace are found by torch.export.

It runs the model's own Python with the arguments of a real call. So control flow that
depends on shapes, options and missing arguments takes the branches of that call. Every size that
the code does not fix stays open, above all the batch size. What the code asks about sizes becomes
guards; a call that breaks a guard is refused. The graph consists of single operators, each of which
knows the module it came from; layers are named after those modules, as torch.fx would. Batch-norm
stays a call of the model's own module, whose statistics a pipeline keeps separate by microbatch.

``TracedCall`` says for which other calls the graph is valid.
"""

import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...schema.errors import TargetError
from ...schema.layers import LayerTrace
from ..checkpoints.checkpoint import shape_text
from ..setup import check_model
from ..tensor.sharded import is_shared_call
from .cut import Layer, LayeredModel, is_leaf, numbered, of_inputs, writes
from .evaluation import Rebuild, taken_apart

_HINT = "call the model as the profiled workload does, or profile it as the script calls it"


class TracedCall:
    """Compares calls of a model with the traced one.

    Args:
        inputs: The traced call's tensors by argument name.
        constants: Its other arguments.
        guards: Called with a call's tensors; raises AssertionError if the model's code would have
            taken another branch for their sizes. None where this torch has no guards.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        constants: Mapping[str, Any],
        guards: Callable[..., Any] | None,
    ) -> None:
        self.inputs, self._constants, self._guards = inputs, constants, guards
        self._held: set[tuple[Any, ...]] = set()

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a call for which the graph is not valid.

        Raises:
            TargetError: An argument differs from the traced call's, or the model's code would take
                another branch for its sizes; names it.
        """
        tensors = []
        for name, value in arguments.items():
            if name.startswith("*"):
                continue
            if name in self.inputs:
                tensors.append(self._tensor(name, value))
            elif name not in self._constants:
                if value is not None:
                    raise _refusal(f"with argument {name}, which the traced call did not have")
            elif isinstance(value, Tensor) or value != self._constants[name]:
                said = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise _refusal(f"with {name}={said}, and was traced with {self._constants[name]!r}")
        absent = [name for name in self.inputs if name not in arguments]
        if absent:
            raise _refusal(f"without {absent[0]}, which the traced call had")
        self._check_sizes(tensors)

    def _tensor(self, name: str, value: Any) -> Tensor:
        traced = self.inputs[name]
        if not isinstance(value, Tensor):
            raise _refusal(f"with {name}={value!r}, and was traced with a tensor")
        if value.dtype != traced.dtype or value.dim() != traced.dim():
            raise _unlike(name, value, traced)
        return value

    def _check_sizes(self, tensors: list[Tensor]) -> None:
        key = tuple(tensor.shape for tensor in tensors)
        if key in self._held:
            return
        if self._guards is not None:
            try:
                self._guards(*tensors)
            except AssertionError as error:
                raise _refusal(f"with sizes it was not traced for ({error})") from None
        else:
            for (name, traced), tensor in zip(self.inputs.items(), tensors, strict=True):
                if tensor.shape[1:] != traced.shape[1:]:
                    raise _unlike(name, tensor, traced)
        self._held.add(key)


def _unlike(name: str, tensor: Tensor, traced: Tensor) -> TargetError:
    return _refusal(
        f"with {name} as {shape_text(tensor)}, and was traced with {shape_text(traced)}"
    )


def _refusal(how: str) -> TargetError:
    return TargetError(f"the model is called {how}", hint=_HINT)


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
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f": {lines[0][:200]}" if lines else ""
        raise TargetError(f"torch.export: {type(error).__name__}{said}") from error
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
    _restore_modules(model, graph)
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
        layers=_into_layers(model, [node for node in graph.nodes if node not in shared]),
        shared=tuple(node for node in graph.nodes if node in shared),
    )


def _name_in_model(
    node: fx.Node, module: fx.GraphModule, model: nn.Module, constants: dict[str, Any]
) -> None:
    """Give an attribute its name in the model; what export itself made becomes a constant."""
    name = str(node.target)
    own = name.removeprefix(f"{_ROOT}.")
    if own != name and isinstance(_value_in(model, own), Tensor):
        node.target = own
        return
    node.target = f"_made_{len(constants)}"
    constants[node.target] = _value_in(module, name)


def _value_in(root: nn.Module, name: str) -> Any:
    """The object under a dotted name; None if there is none."""
    held: Any = root
    for part in name.split("."):
        held = getattr(held, part, None)
    return held


def _restore_modules(model: nn.Module, graph: fx.Graph) -> None:
    """Call the model's own modules again where operators would not do."""
    # These are layers that a tensor-parallel group shares, and norms, whose operators would update
    # running statistics.
    for node in list(graph.nodes):
        call = _leaf_call(model, node) if node.op == "call_function" else None
        if call is None:
            continue
        norm = model.get_submodule(call[1])
        is_norm = isinstance(norm, _NORMS) and norm.track_running_stats
        if is_shared_call(node.target) or (is_norm and _name_of(node) in _UPDATED):
            with graph.inserting_before(node):
                made = graph.create_node("call_module", call[1], (node.args[0],))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
        elif is_norm and not node.users:
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


def _into_layers(model: nn.Module, nodes: Sequence[fx.Node]) -> tuple[Layer, ...]:
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
        module = _value_in(model, name) if name else None
        if isinstance(module, nn.Module) and is_leaf(module):
            return key, name
    return None


class _Tracer(fx.Tracer):
    """Traces into a module, unless an earlier attempt failed inside it."""

    # Else code of a forward that uses buffers only (counting its calls) would run during the trace.
    proxy_buffer_attributes = True

    def __init__(self, whole: set[str]) -> None:
        super().__init__()
        self.whole = whole
        self.inside: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.whole or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.inside.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return result


def layers_of(model: nn.Module, trace: LayerTrace | None = None) -> LayeredModel:
    """Trace a model into layers, in the way that a profile did.

    Raises:
        TargetError: The forward of the model itself cannot be traced; says why.
    """
    check_model(model)
    if trace is not None and trace.way == "export":
        first = next(model.parameters(), None)
        device = None if first is None else first.device
        inputs = {
            entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
            for entry in trace.inputs
        }
        return exported_layers(model, inputs, trace.constants or {})
    graph, whole = _trace(model)
    shared = of_inputs(graph, lambda name: operator.attrgetter(name)(model))
    outside = ("placeholder", "get_attr", "output")
    _unpack_at_once(model, graph, shared)
    nodes = [node for node in graph.nodes if node.op not in outside and node not in shared]
    output = next(node for node in graph.nodes if node.op == "output")
    if not nodes:
        raise TargetError(f"{type(model).__name__} computes nothing that could be cut into layers")
    for node in graph.nodes:
        if is_shared_call(node.target):
            *_, (name, _) = node.meta["nn_module_stack"].values()
            raise TargetError(
                f"{name} is cut over a tensor-parallel group, and torch.fx traces into its forward",
                hint="use torch's own layer there, or launch a plan of one stage",
            )
    layers = _group(model, nodes)
    _check_written(model, layers)
    return LayeredModel(
        model=model,
        arguments=tuple(node for node in graph.nodes if node.op == "placeholder"),
        layers=layers,
        result=output.args[0],
        shared=tuple(node for node in graph.nodes if node in shared),
        whole=tuple(sorted(whole)),
    )


def _unpack_at_once(model: nn.Module, graph: fx.Graph, shared: Collection[fx.Node]) -> None:
    """Unpack a tensor (``q, k, v = x``) by one ``unbind``, as torch does without a trace."""
    # torch.fx indexes it once for each part. The backward pass of an index fills a gradient of the
    # whole with zeros, so those of all parts were filled, written and added.
    for node in list(graph.nodes):
        following, parts = node.next, list[fx.Node]()
        while following.target is operator.getitem and following.args == (node, len(parts)):
            parts.append(following)
            following = following.next
        is_size = node.target is getattr or node in shared
        if len(parts) < 2 or set(parts) != set(node.users) or is_size:
            continue
        if any(_is_written(model, part) for part in parts):
            continue  # autograd refuses to change what unbind returns
        with graph.inserting_after(node):
            unpacked = graph.call_function(_unpacked, (node, len(parts)))
        for part in parts:
            part.args = (unpacked, part.args[1])


def _unpacked(value: Any, num_parts: int) -> Any:
    if isinstance(value, Tensor) and len(value) == num_parts:
        return value.unbind(0)
    return value


def _is_written(model: nn.Module, node: fx.Node) -> bool:
    """Whether a value, or a view of it, may be changed in place."""
    for user in node.users:
        if writes(user):
            return True
        if user.op == "call_module":
            modules = model.get_submodule(str(user.target)).modules()
            if any(getattr(module, "inplace", False) for module in modules):
                return True
        elif user.args and user.args[0] is node and _is_written(model, user):
            return True
    return False


def _trace(model: nn.Module) -> tuple[fx.Graph, set[str]]:
    whole: set[str] = set()
    while True:
        tracer = _Tracer(whole)
        try:
            with _buffers_kept(model) as assigned:
                graph = tracer.trace(model)
        except Exception as error:
            # Any error of a model's code on symbolic values: keep the innermost module whole.
            if not tracer.inside or tracer.inside[-1] in whole:
                raise TargetError(
                    f"the forward of {type(model).__name__} cannot be traced, so it cannot be cut: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                    hint="keep control flow on tensor values inside submodules; they stay whole",
                ) from error
            whole.add(tracer.inside[-1])
            continue
        if not assigned:
            return graph, whole
        if "" in assigned or whole.issuperset(assigned):
            raise TargetError(
                f"the forward of {type(model).__name__} cannot be traced, so it cannot be cut: it "
                "assigns a new tensor to a buffer",
                hint="write into the buffer in place (add_, copy_), or move it to a submodule",
            )
        # Their forward runs as it is: an assignment leaves nothing in a graph.
        whole |= assigned


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[set[str]]:
    """Put buffers back after a trace; gives the modules that assigned one, ``self.steps += 1``."""
    before = {name: dict(module._buffers) for name, module in model.named_modules()}
    assigned: set[str] = set()
    try:
        yield assigned
    finally:
        for name, module in model.named_modules():
            if any(module._buffers.get(key) is not value for key, value in before[name].items()):
                assigned.add(name)
                module._buffers.update(before[name])


def _group(model: nn.Module, nodes: list[fx.Node]) -> tuple[Layer, ...]:
    groups: list[list[fx.Node]] = []
    for node in nodes:
        if node.op == "call_module" or not groups:
            groups.append([])
        groups[-1].append(node)
    # Functions before the first module may feed none after it: they count calls, say.
    if len(groups) > 1 and all(user in groups[0] for node in groups[0] for user in node.users):
        groups[:2] = [groups[0] + groups[1]]
    heads = [next((n for n in group if n.op == "call_module"), group[0]) for group in groups]
    names = numbered([str(h.target) if h.op == "call_module" else h.name for h in heads])
    return tuple(
        Layer(
            name,
            type(model.get_submodule(str(head.target))).__name__
            if head.op == "call_module"
            else str(getattr(head.target, "__name__", head.target)),  # of its first function
            tuple(members),
        )
        for name, head, members in zip(names, heads, groups, strict=True)
    )


def _check_written(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Refuse a written buffer that several layers use: other stages would not see it change."""
    layer_of = {node: layer.id for layer in layers for node in layer.nodes}
    for node in layer_of:
        root = node.args[0] if writes(node) and node.args else None
        while isinstance(root, fx.Node) and root.op in ("call_method", "call_function"):
            root = root.args[0] if root.args else None  # the written tensor may be a view of it
        if not isinstance(root, fx.Node) or root.op != "get_attr":
            continue
        if len({layer_of[user] for user in root.users if user in layer_of}) > 1:
            raise TargetError(
                f"the forward of {type(model).__name__} writes buffer {str(root.target)!r} in one "
                "layer and reads it in another, which may be on another device"
            )
