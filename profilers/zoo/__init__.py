"""Models written here, so that profiling needs no download: of images, of tokens, of vectors.

Each factory returns ``(model, make_batch, loss)`` on synthetic data. ``models`` imports torch, so
it is loaded only when a model is asked for by name.
"""

from collections.abc import Callable
from typing import Any

from ...schema.errors import TargetError
from ...schema.spelling import nearest

NAMES = (
    "mlp", "digits-cnn", "resnet18", "resnet50", "vgg16", "vgg16-small", "gpt", "gpt-small", "gpt2",
    "bert", "lstm",
)  # fmt: skip


def check_name(name: str) -> None:
    """Refuse a name that is not a zoo model's.

    Raises:
        TargetError: No model has this name; names the nearest.
    """
    if name not in NAMES:
        guess = nearest(name, NAMES)
        mend = f"did you mean zoo:{guess}?" if guess else f"choose from {', '.join(NAMES)}"
        raise TargetError(f"zoo:{name}: no such model", hint=mend)


def factory_of(name: str) -> Callable[[], Any]:
    """The factory of a zoo model; call it to build the model. Imports torch."""
    check_name(name)
    from . import models

    factory: Callable[[], Any] = getattr(models, name.replace("-", "_"))
    return factory
