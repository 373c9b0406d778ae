"""The schedule of comparisons between workers, and the step at which they last agreed."""

from collections.abc import Sequence

_AFTER_A_CHANGE = (1, 2)  # steps after a change of workers


class Watch:
    """The steps before which all workers compare their models.

    Args:
        every: Steps between two comparisons; 0 for only those that a change of workers or the end
            needs.
        watches_first: Whether to compare after the first and second step, whatever ``every`` is.

    Attributes:
        agreed_step: Steps that were done when workers last agreed.
        joined_step: Steps that were done when this worker joined.
        settings_are_exact: Whether the settings' numbers in a step's sums must be equal.
    """

    def __init__(self, every: int, *, watches_first: bool = True) -> None:
        self._every, self._watches_first = every, watches_first
        self.begin(0)

    def begin(self, step: int) -> None:
        """Note that the workers begin at a step together: the first, or a checkpoint's."""
        self.agreed_step = self.joined_step = step
        after = _AFTER_A_CHANGE if self._watches_first else ()
        self._steps = {step + number for number in after}
        self.settings_are_exact = True

    @property
    def steps(self) -> list[int]:
        """Steps before which all compare, whatever ``every`` is; a joining worker needs them."""
        return sorted(self._steps)

    def is_due(self, step: int) -> bool:
        """Whether to compare before a step."""
        by_count = self._every > 0 and step % self._every == 0
        return step > 0 and (by_count or step in self._steps)

    def changed(self, step: int) -> None:
        """Note that the workers have changed, after ``step`` steps on all of them."""
        self._steps = {watched for watched in self._steps if watched >= step}
        self._steps |= {step + number for number in _AFTER_A_CHANGE}
        self.settings_are_exact = True

    def joined(self, step: int, steps: Sequence[int]) -> None:
        """Join the others after a step, and compare when they do."""
        self._steps = set(steps)
        self.agreed_step = self.joined_step = step
        self.changed(step)
