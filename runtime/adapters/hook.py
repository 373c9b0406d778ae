"""Adapt a library when a script imports it."""

from functools import partial
from importlib import import_module

from ..after_import import after_import

# A library's module -> the adapter that runs once it is imported.
ADAPTED = {
    "torch": ".ddp",
    "accelerate": ".accelerate",
    "transformers.trainer": ".transformers",
    "lightning.pytorch.trainer.trainer": ".lightning",
    "pytorch_lightning.trainer.trainer": ".lightning",
    "lightning.fabric.fabric": ".lightning",
}


def install() -> None:
    """Adapt libraries as the script imports them; call it before the script runs."""
    for name, adapter in ADAPTED.items():
        after_import(name, partial(_adapt, adapter))


def _adapt(adapter: str) -> None:
    import_module(adapter, __package__).adapt()
