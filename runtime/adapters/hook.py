"""Adapt a library when a script imports it."""

import sys
from functools import partial
from importlib import import_module

from ..after_import import after_import

# A library's module -> the adapter that runs once it is imported.
ADAPTED = {
    "torch": ".ddp",
    "accelerate": ".accelerate",
    "datasets.distributed": ".streams",
    "transformers.trainer": ".transformers",
    "lightning.fabric": ".lightning",
    "lightning.pytorch": ".lightning",
    "lightning_fabric": ".lightning",
    "pytorch_lightning": ".lightning",
}


def install() -> None:
    """Adapt libraries as the script imports them; call it before the script runs."""
    for name, adapter in ADAPTED.items():
        after_import(name, partial(_adapt, adapter, name))


def _adapt(adapter: str, name: str) -> None:
    import_module(adapter, __package__).adapt(sys.modules[name])
