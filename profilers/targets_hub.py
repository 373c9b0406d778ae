"""Targets from optional extras: transformers configurations and torchvision's models.

Never downloads and never unpickles: weights are drawn at random from the configuration.
"""

import importlib
from pathlib import Path
from typing import Any

from ..schema.errors import TargetError
from ..schema.records import nearest

_TOKENS_PER_SAMPLE = 128


def from_config(location: str, length: int | None = None) -> tuple[Any, Any, Any]:
    """A transformers model from a configuration file, a folder with one, or a model type.

    The class is the configuration's first of ``architectures``, as a training script would have
    it; without one, the bare model. Where the class makes the loss itself of labels, it gets some.
    Else the loss is the mean square of its first output: every parameter on the way to it gets a
    gradient, whatever the task. Samples are random tokens, or one random image.

    Args:
        location: The configuration.
        length: Tokens of a sample, or pixels of an image's side; None takes 128 tokens, or the
            configuration's image size.

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
    from .zoo.synthetic import classification_loss, image_batches

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
            f"{module} cannot be imported: {_short(error)}",
            hint=f"pip install 'hetflow[{extra}]'",
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
    pixels = getattr(config, "image_size", None)
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
        channels = getattr(config, "num_channels", 3)
        if length is not None:
            config.image_size = pixels = length  # the model is built for its images
        return lambda n: {"pixel_values": torch.randn(n, channels, pixels, pixels)}
    raise TargetError(
        f"hf:{location}: has neither vocab_size nor image_size, so its inputs are unknown",
        hint="write a factory: file.py:factory",
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
