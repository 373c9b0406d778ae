"""Weight versions of one stage: immutable while a pass may still read them (thesis 2.4.3).

The newest version shares its memory with the parameters. If a later pass still reads that version,
an update first moves the parameters to new memory and then changes them in place. So there are as
many copies as versions in use.
"""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from ...schema.operations import PASSES, Operation


class WeightVersions:
    """The newest version of one stage's parameters, and the older ones that passes still need."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._reads: Counter[int] = Counter()
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._newest = 0
        self.most_held = 0

    def begin(self, operations: Iterable[Operation]) -> None:
        """Start a schedule at version 0, with the operations of this stage."""
        self._reads = _reads_of(operations)
        self._newest = 0
        self._leaves = {0: self._fresh()}
        self.most_held = max(self.most_held, 1)

    def shorten(self, operations: Iterable[Operation]) -> None:
        """Release versions early: only these operations are still to come."""
        self._reads = _reads_of(operations)
        for version in [v for v in self._leaves if not self._reads[v] and v != self._newest]:
            del self._leaves[version]

    def _fresh(self) -> dict[str, Tensor]:
        # `.data` has its own version counter, so later updates do not count as writes to this leaf.
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }

    def read(self, version: int) -> dict[str, Tensor]:
        """The leaf tensors of a version, by name; gradients add up in them."""
        return self._leaves[version]

    def passed(self, version: int) -> None:
        """Note that a pass that read a version is done."""
        self._reads[version] -= 1
        if not self._reads[version] and version != self._newest:
            del self._leaves[version]

    def before_update(self) -> None:
        """Make the parameters safe to change in place, before an update."""
        if self._reads[self._newest]:
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()
        else:
            del self._leaves[self._newest]

    def after_update(self) -> None:
        """Note that the parameters now hold the next version."""
        self._newest += 1
        self._leaves[self._newest] = self._fresh()
        self.most_held = max(self.most_held, len(self._leaves))


def _reads_of(operations: Iterable[Operation]) -> Counter[int]:
    return Counter(
        op.weight_version
        for op in operations
        if op.kind in PASSES and op.weight_version is not None
    )
