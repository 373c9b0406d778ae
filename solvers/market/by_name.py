"""Rent policies by name, some of which learn from a history."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...schema.errors import ProblemError
from ...schema.options import told
from ...schema.spelling import nearest

Job = TypeVar("Job")
History = TypeVar("History")
Policy = TypeVar("Policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesByName(Generic[Job, History, Policy]):
    """The policies of one kind of job.

    Attributes:
        plain: By name, what makes a policy for a job.
        learned: By name, what makes one for a job from the statistics of a history.
        history_hint: How a user gives a history.
    """

    plain: Mapping[str, Callable[[Job], Policy]]
    learned: Mapping[str, Callable[[Job, History], Policy]]
    history_hint: str = "add {history=FILE}"

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return (*self.plain, *self.learned)

    def tried(self, *, has_history: bool) -> tuple[str, ...]:
        """The names of the policies that can be tried, with or without a history."""
        return self.names if has_history else tuple(self.plain)

    def policy_of(self, name: str, job: Job, history: History | None) -> Policy:
        """A policy, ready for a job.

        Raises:
            ProblemError: There is none of that name, or it needs a history and there is none.
        """
        if name in self.plain:
            return self.plain[name](job)
        if name not in self.learned:
            guess = nearest(name, self.names)
            raise ProblemError(
                f"no rent policy {name!r}; known are {', '.join(self.names)}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
        if history is None:
            raise ProblemError(f"{name} learns from a history", hint=told(self.history_hint))
        return self.learned[name](job, history)
