"""Lightning is refused under a plan: its loaders and strategies are not adapted."""

import sys
from typing import Any

from ...schema.errors import TargetError
from .patching import around

_ENTRIES = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
)


def adapt() -> None:
    """Refuse a Trainer or Fabric when the script makes one."""
    for module, name in _ENTRIES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            around(kind, "__init__", _refuse)


def _refuse(original: Any, self: Any, *_: Any, **__: Any) -> None:
    raise TargetError(
        f"Lightning's {type(self).__name__} does not train under a plan",
        hint="train with hf.prepare, accelerate, transformers' Trainer or DistributedDataParallel",
    )
