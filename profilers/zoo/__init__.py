"""Models written here, so that profiling needs no download: of images, of tokens, of vectors.

Each factory returns ``(model, make_batch, loss)`` on synthetic data. Modules import torch, so
they are loaded only when a model is asked for by name.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ...schema.errors import TargetError
from ...schema.spelling import nearest

_FACTORIES = {
    "mlp": ("synthetic", "mlp"),
    "digits-cnn": ("images", "digits_cnn"),
    "resnet18": ("images", "resnet18"),
    "resnet50": ("images", "resnet50"),
    "vgg16": ("images", "vgg16"),
    "vgg16-small": ("images", "vgg16_small"),
    "gpt": ("tokens", "gpt"),
    "gpt-small": ("tokens", "gpt_small"),
    "gpt2": ("tokens", "gpt2"),
    "bert": ("tokens", "bert"),
    "lstm": ("tokens", "lstm"),
}
NAMES = tuple(_FACTORIES)


def check_name(name: str) -> None:
    """Refuse a name that is not a zoo model's.

    Raises:
        TargetError: No model has this name; names the nearest.
    """
    if name not in _FACTORIES:
        guess = nearest(name, NAMES)
        mend = f"did you mean zoo:{guess}?" if guess else f"choose from {', '.join(NAMES)}"
        raise TargetError(f"zoo:{name}: no such model", hint=mend)


def factory_of(name: str) -> Callable[[], Any]:
    """The factory of a zoo model; call it to build the model. Imports torch."""
    check_name(name)
    module, function = _FACTORIES[name]
    factory: Callable[[], Any] = getattr(import_module(f".{module}", __name__), function)
    return factory
