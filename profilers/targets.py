"""What to profile: ``file.py``, ``file.py:factory``, or a model of the zoo or another library.

``file.py`` is a training script: it is run until its loop trains, and measured in that
(``script_loop``).

A factory takes no arguments and returns ``(model, make_batch, loss)``:

- ``make_batch(batch_size)`` gives a batch: a tensor, or a tuple, list or dict of them;
- ``loss(model, batch)`` gives a scalar tensor to call ``backward`` on;
- optionally fourth, ``make_optimizer(parameters)`` gives the optimizer (None for none);
- optionally fifth, the dataset that the script trains on (map-style, or the script's DataLoader):
  then the time to load samples is the script's own.

Only a ``file.py`` target runs code of the user's, as asked; nothing is downloaded or unpickled.
"""

import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..devices.backend import is_out_of_memory
from ..schema.errors import TargetError
from ..schema.spelling import did_you_mean, nearest, whole_number
from . import zoo

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


# Targets from optional extras: transformers configurations and torchvision's models.
#
# Never downloads and never unpickles: weights are drawn at random from the configuration.

_TOKENS_PER_SAMPLE = 128
_PIXELS = 224  # of an image's side, for models of images that take any size


def from_config(location: str, length: int | None = None) -> tuple[Any, Any, Any]:
    """A transformers model from a configuration file, a folder with one, or a model type.

    The class is the configuration's first of ``architectures``, as a training script would have
    it; without one, the bare model. Where the class makes the loss itself of labels, it gets some.
    Else the loss is the mean square of its first output: every parameter on the way to it gets a
    gradient, whatever the task. Samples are random tokens, or one random image.

    Args:
        location: The configuration.
        length: Tokens of a sample, or pixels of an image's side; None takes 128 tokens, or the
            configuration's image size (224 where it has none).

    Raises:
        TargetError: transformers is not installed, or the configuration is not usable.
    """
    transformers = _extra("transformers", "hf")
    config = _config(transformers, location)
    make_inputs = _hub_batches(config, location, length)
    try:
        model = _model(transformers, config)
    except (ValueError, KeyError, TypeError, ImportError) as error:
        raise TargetError(
            f"hf:{location}: no model for this configuration: {_short(error)}"
        ) from error
    if next(iter(make_inputs(1))) not in inspect.signature(model.forward).parameters:
        raise TargetError(
            f"hf:{location}: the model reads {model.main_input_name}, and a sample of that is not "
            "known",
            hint="write a factory: file.py:factory",
        )
    make_labels = _hub_labels(type(model).__name__, config)

    def make_batch(samples: int) -> dict[str, Any]:
        inputs = make_inputs(samples)
        return {**inputs, **make_labels(samples, inputs)}

    def loss(model: Any, batch: dict[str, Any]) -> Any:
        answer = model(**batch)
        return answer.loss if "labels" in batch else answer[0].float().square().mean()

    return model, make_batch, loss


def _model(transformers: Any, config: Any) -> Any:
    """Of the class that the configuration names, where transformers itself has it."""
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    found = getattr(transformers, name, None) if name else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found(config)
    return transformers.AutoModel.from_config(config, trust_remote_code=False)


def _hub_labels(architecture: str, config: Any) -> Any:
    """Labels for the heads that make a loss of them: of each token, or of each sample."""
    import torch

    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return lambda samples, inputs: {"labels": inputs["input_ids"].clone()}
    if architecture.endswith(("ForImageClassification", "ForSequenceClassification")):
        return lambda samples, inputs: {"labels": torch.randint(config.num_labels, (samples,))}
    return lambda samples, inputs: {}


def from_torchvision(name: str) -> tuple[Any, Any, Any]:
    """A torchvision classification model with random weights, on 224 x 224 images.

    Raises:
        TargetError: torchvision is not installed, or has no such model.
    """
    torchvision = _extra("torchvision", "torchvision")
    from .zoo.models import classification_loss, image_batches

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        guess = nearest(name, names)
        mend = f"did you mean torchvision:{guess}?" if guess else "see torchvision.models"
        raise TargetError(f"torchvision:{name}: no such classification model", hint=mend)
    model = torchvision.models.get_model(name, weights=None)

    def loss(model: Any, batch: Any) -> Any:
        # Inception and GoogLeNet answer with auxiliary heads in training; the main one is first.
        return classification_loss(lambda x: _first(model(x)), batch)  # type: ignore[arg-type]

    pixels = 299 if name == "inception_v3" else 224
    return model, image_batches(3, pixels, 1000), loss


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, tuple) else answer


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TargetError(
            f"{module} cannot be imported: {_short(error)}", hint=f"pip install 'hetflow[{extra}]'"
        ) from error
    except RuntimeError as error:  # torchvision's compiled half does not fit the installed torch
        raise TargetError(
            f"{module} does not work with the installed torch: {_short(error)}",
            hint="install the torchvision release that belongs to this torch",
        ) from error


def _config(transformers: Any, location: str) -> Any:
    path = Path(location)
    if not path.exists():
        return _default_config(transformers, location)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"hf:{location}: not a usable configuration: {_short(error)}") from error


def _default_config(transformers: Any, model_type: str) -> Any:
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        guess = nearest(model_type, known)
        mend = f"did you mean hf:{guess}?" if guess else "name a local config.json or model type"
        raise TargetError(f"hf:{model_type}: no such local file, folder or model type", hint=mend)
    return transformers.CONFIG_MAPPING[model_type]()


def _hub_batches(config: Any, location: str, length: int | None) -> Any:
    import torch

    vocabulary = getattr(config, "vocab_size", None)
    channels = getattr(config, "num_channels", None)
    pixels = getattr(config, "image_size", None if channels is None else _PIXELS)
    if isinstance(vocabulary, int):
        longest = getattr(config, "max_position_embeddings", None)
        if length is not None and longest is not None and length > longest:
            raise TargetError(
                f"hf:{location}: samples of {length} tokens are asked for, and the model takes at "
                f"most {longest}",
                hint=f"hf:{location}@{longest}, or raise max_position_embeddings",
            )
        tokens = length or min(_TOKENS_PER_SAMPLE, longest or _TOKENS_PER_SAMPLE)
        names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
        return lambda n: {name: torch.randint(vocabulary, (n, tokens)) for name in names}
    if isinstance(pixels, int):
        channels = 3 if channels is None else channels
        if length is not None:
            config.image_size = pixels = length  # the model is built for its images
        return lambda n: {"pixel_values": torch.randn(n, channels, pixels, pixels)}
    raise TargetError(
        f"hf:{location}: has neither vocab_size nor image_size, so its inputs are unknown",
        hint="write a factory: file.py:factory",
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


_GRAMMAR = (
    "write train.py, file.py:factory, zoo:NAME, hf:CONFIG_OR_DIR[@LENGTH] or torchvision:NAME"
)
_MODULE_NAME = "__hetflow_target__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parsed target.

    ``source`` is script, file, zoo, hf or torchvision; ``model`` names profiles; ``arguments`` are
    a script's, and ``few_samples`` those of its batches before its loop is known. ``blocks`` are
    classes or names of modules, as ``hf.prepare`` takes them; empty for the repeated layers.
    ``length`` is of one sample of an hf target: its tokens, or the pixels of an image's side. None
    takes 128 tokens, or the configuration's image size.
    """

    text: str
    source: str
    location: str
    factory: str
    model: str
    length: int | None = None
    arguments: tuple[str, ...] = ()
    few_samples: int = 2  # of one sample nobody can tell how a loss adds up
    blocks: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is measured in its own loop, of one pass a step, and not by a factory."""
        return self.source == "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a factory gives: a model and how to make one training step of it."""

    model: "nn.Module"
    make_batch: Callable[[int], Any]
    loss: Callable[["nn.Module", Any], "Tensor"]
    make_optimizer: Callable[[Any], "Optimizer"] | None = None
    dataset: Any = None


def parse(text: str, arguments: Sequence[str] = ()) -> Target:
    """Read a target without running any of it.

    Raises:
        TargetError: It has no known form, or names a file or zoo model that is not there; or it
            is no script and there are arguments.
    """
    target = _parsed(text)
    if arguments and not target.is_script:
        raise TargetError(
            f"{text} takes no arguments, got {shlex.join(arguments)}",
            hint="only a script (such as train.py) has arguments of its own",
        )
    return replace(target, arguments=tuple(arguments))


def _parsed(text: str) -> Target:
    source, colon, rest = text.partition(":")
    if colon and rest and source in ("zoo", "hf", "torchvision"):
        if source == "zoo":
            zoo.check_name(rest)
        if source == "hf":
            return _hub_target(text, rest)
        return Target(text=text, source=source, location=rest, factory="", model=_file_safe(rest))
    if not colon and text.endswith(".py"):
        if not Path(text).is_file():
            raise TargetError(f"{text}: no such file", hint=_GRAMMAR)
        model = _file_safe(Path(text).stem)
        return Target(text=text, source="script", location=text, factory="", model=model)
    path, colon, factory = text.rpartition(":")
    if not colon or not factory.isidentifier() or not path.endswith(".py"):
        raise TargetError(f"target {text!r}: has no known form", hint=_GRAMMAR)
    if not Path(path).is_file():
        raise TargetError(f"{path}: no such file", hint=_GRAMMAR)
    model = _file_safe(f"{Path(path).stem}.{factory}")
    return Target(text=text, source="file", location=path, factory=factory, model=model)


def _hub_target(text: str, rest: str) -> Target:
    """``CONFIG``, or ``CONFIG@LENGTH`` unless a file has that very name."""
    location, at, length = rest.rpartition("@")
    if not at or Path(rest).exists():
        model = _file_safe(_config_name(Path(rest)))
        return Target(text=text, source="hf", location=rest, factory="", model=model)
    number = whole_number(length)
    if not number or not location:
        raise TargetError(
            f"target {text!r}: behind @ stands the length of a sample",
            hint="write for example hf:gpt2@1024, or hf:vit@384 for pixels",
        )
    model = _file_safe(f"{_config_name(Path(location))}-{number}")
    return Target(text=text, source="hf", location=location, factory="", model=model, length=number)


def load(target: Target) -> Workload:
    """Run the target's factory.

    Raises:
        TargetError: The factory is missing, raises, or returns something else; an extra that
            the target needs is not installed.
        MemoryError: Passed through, so that the caller can tell a model that does not fit.
    """
    made: object
    if target.source == "file":
        made = _call_from_file(target)
    elif target.source == "zoo":
        made = zoo.factory_of(target.location)()
    elif target.source == "hf":
        made = from_config(target.location, target.length)
    else:
        made = from_torchvision(target.location)
    return as_workload(made, target.text)


def as_workload(answer: object, name: str) -> Workload:
    """Check what a factory returned.

    Raises:
        TargetError: It is not ``(model, make_batch, loss[, make_optimizer[, dataset]])``.
    """
    from torch import nn

    rule = f"{name}: must return (model, make_batch, loss) and optionally make_optimizer, dataset"
    if isinstance(answer, Workload):
        return answer
    if not isinstance(answer, tuple | list):
        raise TargetError(f"{rule}; got {type(answer).__name__}")
    if len(answer) not in (3, 4, 5):
        raise TargetError(f"{rule}; got {len(answer)} values")
    model, make_batch, loss, make_optimizer, dataset = [*answer, None, None][:5]
    if not isinstance(model, nn.Module):
        raise TargetError(f"{rule}; model must be a torch.nn.Module, got {type(model).__name__}")
    functions = {"make_batch": make_batch, "loss": loss}
    if len(answer) == 4 or make_optimizer is not None:
        functions["make_optimizer"] = make_optimizer
    for role, function in functions.items():
        if not callable(function):
            raise TargetError(f"{rule}; {role} must be callable, got {type(function).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TargetError(f"{name}: the model has no parameter to train")
    if dataset is not None:
        from torch.utils.data import DataLoader

        held = dataset.dataset if isinstance(dataset, DataLoader) else dataset
        if not hasattr(held, "__getitem__") or not hasattr(held, "__len__") or not len(held):
            raise TargetError(
                f"{rule}; dataset must be map-style (__len__ and __getitem__) and not empty, or a "
                f"DataLoader over such a one, got {type(held).__name__}"
            )
    return Workload(
        model=model,
        make_batch=make_batch,
        loss=loss,
        make_optimizer=make_optimizer,
        dataset=dataset,
    )


def one_line(error: BaseException, file: str | None = None, doing: str = "") -> str:
    """An error as ``file:line: doing raised Type: message``, at the deepest line of ``file``."""
    text = " ".join(str(error).split())[:400]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    said = f"{doing} raised {said}" if doing else said
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if file and Path(frame.filename).resolve() == Path(file).resolve()
    ]
    return f"{file}:{own[-1].lineno}: {said}" if own else said


def _config_name(path: Path) -> str:
    """A folder of a configuration names the model; ``config.json`` itself says nothing."""
    resolved = path.resolve() if path.exists() else path
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def _call_from_file(target: Target) -> object:
    module = _import_file(target)
    factory = getattr(module, target.factory, None)
    if factory is None:
        raise TargetError(_missing(module, target))
    if not callable(factory):
        raise TargetError(f"{target.text}: {target.factory} is not callable; name a function")
    return _guarded(factory, target, f"{target.factory}()")


def _import_file(target: Target) -> ModuleType:
    path = Path(target.location).resolve()
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{target.location}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # As a script would see it: its own folder first, and its module found by name.
    sys.path.insert(0, str(path.parent))
    sys.modules[_MODULE_NAME] = module
    loader = spec.loader
    _guarded(lambda: loader.exec_module(module), target, "")
    return module


def _guarded(function: Callable[[], object], target: Target, doing: str) -> object:
    try:
        return function()
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise TargetError(one_line(error, target.location, doing)) from error


def _missing(module: ModuleType, target: Target) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == _MODULE_NAME
    ]
    mend = did_you_mean(target.factory, own, f"it defines {', '.join(own) or 'no function'}")
    return f"{target.location}: has no {target.factory!r}; {mend}"


def _file_safe(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name) or "model"
