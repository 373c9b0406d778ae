"""A scheduler that dies at a point that a test chose."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hetflow.clusters.engines.protocol import EngineDevice, Fate, ResizingEngine

from .conftest import FakeEngine


class Died(BaseException):
    """The scheduler was killed."""


class Points:
    """Counts the points at which a scheduler can die, and lets it die at one."""

    def __init__(self, fatal: int | None = None) -> None:
        self.fatal, self.passed = fatal, 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed == self.fatal:
            raise Died


class MortalEngine:
    """Dies before the engine acts, or after it."""

    def __init__(self, inner: FakeEngine, points: Points) -> None:
        self.inner, self.points, self.name = inner, points, inner.name

    def devices(self) -> object:
        return self.inner.devices()

    def fate(self, folder: Path) -> Fate:
        return self.inner.fate(folder)

    def can_resize(self, held: Sequence[EngineDevice], wanted: Sequence[EngineDevice]) -> bool:
        return isinstance(self.inner, ResizingEngine) and self.inner.can_resize(held, wanted)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*given: object) -> None:
            self.points()
            getattr(self.inner, name)(*given)
            self.points()

        return call
