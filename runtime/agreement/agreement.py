"""One worker's part in checking that all workers still train the same model.

There are three checks, from the cheapest to the dearest. In each step: the identities of the
script's parameters, on this worker alone, and the optimizers' settings, in the sums that the step
needs anyway. Every so many steps, after every change of workers, before a checkpoint and at the
end: one small collective of fingerprints of all parameters. Where these differ: each worker's
values, parameter by parameter.

Gloo and NCCL give all workers the same bits of a sum, and the same update on the same kind of
device gives the same bits. So bits are compared. Only between kinds of devices, where an optimizer
that sums (a norm for clipping) may round differently, half of the values' digits are compared.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...devices.backend import backend_of
from ...devices.collectives import wire_device
from ...schema.errors import TargetError
from .. import peers
from ..group import Place
from ..log import log
from .fingerprints import fingerprint, shadow_of
from .known import KnownParameters, OtherOptimizers, check_leaves
from .verdict import MOST, SettingsNumber, Statement, are_alike, find_fault, settings_of

# The schedule of comparisons between workers, and the step at which they last agreed.

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


# Columns of a worker's row; the fingerprints of the sets of tensors follow.
_ARITHMETIC, _SETTINGS, _FROZEN, _DATA, _FINGERPRINTS = 0, 1, 2, 3, 4

Answer = TypeVar("Answer")
Together = Callable[[Callable[[], Answer]], Answer]


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors that must be equal on some workers.

    Attributes:
        holders: Ranks of these workers; None for all workers.
        tensors: Tensors by name; empty on a worker that is not among the holders.
    """

    holders: tuple[int, ...] | None
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The things that an agreement compares; those that change with the workers are functions.

    Attributes:
        known: The job's parameters.
        optimizers: The job's optimizers.
        others: Watches for other optimizers.
        shared: Gives the tensors to compare: the same sets, in the same order, on every worker.
        place: Gives this worker's place among the others.
        together: Runs a function that needs all workers.
        is_launched: Whether there is a plan, so that there can be other workers.
        is_saved: Whether the job's state is saved to a disk or sent to other workers.
        compares_between_steps: Whether all workers have made the same updates between two steps.
    """

    known: KnownParameters
    optimizers: Sequence[Any]
    others: OtherOptimizers
    shared: Callable[[], list[SharedTensors]]
    place: Callable[[], Place]
    together: Callable[[Callable[[], Any]], Any]
    is_launched: bool
    is_saved: bool
    compares_between_steps: bool


class Agreement:
    """One worker's knowledge of whether the others train the same model.

    Args:
        subject: What is compared.
        watch: When it is compared.
    """

    def __init__(self, subject: Subject, watch: Watch) -> None:
        self._subject, self._watch = subject, watch
        self._settings = SettingsNumber(subject.optimizers)
        self._epoch, self._data = -1, 0
        self._looks = False
        self._leaves = WeakIdKeyDictionary()  # plain tensors that losses depended on
        self._has_warned_of_schedule = False
        self._has_schedule_kept = False

    # Each step

    @property
    def settings_number(self) -> int:
        """The number that this worker adds to the step's sums, along with its square."""
        return self._settings.number ^ self._data & MOST

    def saw(self, digest: int) -> None:
        """Note the digest of a global batch that every worker draws by itself."""
        self._data = digest

    def registered(self, thing: object) -> None:
        """Note an object that the script gave to ``job.register``."""
        self._subject.others.clear(thing)
        is_optimizer = isinstance(thing, torch.optim.Optimizer)
        if not is_optimizer and not isinstance(thing, torch.amp.GradScaler):
            self._has_schedule_kept = True

    def begin_step(self, step: int, epoch: int) -> None:
        """Begin a step. Call it on all workers, outside of other collectives.

        Args:
            step: Number of steps that are done.
            epoch: Epoch of the batch.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see, or workers have
                diverged.
        """
        subject = self._subject
        is_due = self._watch.is_due(step)
        if subject.is_launched or subject.is_saved:
            subject.known.look_closer() if is_due else subject.known.check()
        self._notice_schedule(epoch)
        if subject.compares_between_steps and is_due:
            self.compare(step)
        self._looks = subject.is_launched and (
            self._watch.is_due(step + 1) or subject.others.has_met_unknown
        )
        subject.others.has_met_unknown = False
        subject.others.begin_step()

    def withhold(self) -> None:
        """Let no optimizer of the job step until ``release``: gradients are only some workers'."""
        self._subject.others.withhold()

    def release(self) -> None:
        """Let the job's optimizers step: they have the gradients of the whole batch."""
        self._subject.others.begin_step()

    @property
    def looks(self) -> bool:
        """Whether ``look_at`` inspects losses in this step."""
        return self._looks

    def look_at(self, answer: Any, answered: set[Any] | None = None) -> None:
        """Inspect the loss of a pass before its backward pass; in some steps only.

        Args:
            answer: The result of the script's function.
            answered: Nodes of autograd's graph at which to stop; by default none.

        Raises:
            TargetError: The loss depends on a parameter that ``prepare`` did not see.
        """
        if self._looks:
            check_leaves(answer, self._subject.known.names, self._leaves, answered)

    def is_broken_by(self, sums: Sequence[Any] | Tensor) -> bool:
        """Whether a step's sums show that settings differ; ``compare`` then says how.

        Args:
            sums: [3] number of workers, sum of their settings' numbers, sum of the squares. On a
                device they are not read, because that would wait for the device.
        """
        if not self._watch.settings_are_exact or (isinstance(sums, Tensor) and not sums.is_cpu):
            return False
        return not are_alike(*(float(value) for value in sums))

    def _notice_schedule(self, epoch: int) -> None:
        """Warn of a schedule that would restart in a joining worker, or after a restart."""
        self._settings.read()
        stays, self._epoch = epoch == self._epoch, epoch
        if self._has_warned_of_schedule or self._has_schedule_kept or not stays:
            return
        scheduled = any("initial_lr" in g for o in self._subject.optimizers for g in o.param_groups)
        if scheduled and self._settings.has_changed and self._subject.is_saved:
            self._has_warned_of_schedule = True
            self._warn(
                "a learning-rate scheduler steps within the epoch and nothing is registered: a "
                "restart or a resize would begin it anew; call job.register(scheduler)"
            )

    # Comparisons

    def compare(self, step: int) -> None:
        """Compare the shared tensors and settings. Call it on all workers, outside of collectives.

        Raises:
            TargetError: Workers have diverged: names the first parameter, the workers, since which
                step, and why.
        """
        subject = self._subject
        rows: Tensor = subject.together(lambda: _rows(subject.place(), self._own_row()))
        data = rows[:, _DATA].tolist()
        if len(set(data)) > 1:
            other = next(rank for rank, number in enumerate(data) if number != data[0])
            raise TargetError(
                f"workers 0 and {other} drew unlike batches by step {step}, so samples were used "
                f"twice or never",
                hint="let every worker's stream give the same whole batches: no sharding by rank, "
                "one seed on all workers; hetflow cuts them into shares",
            )
        if not self._agree(rows):
            told: list[str] = subject.together(
                lambda: _texts(subject.place(), json.dumps(self._statement().as_json()))
            )
            fault = find_fault([Statement.of_json(json.loads(text)) for text in told], step)
            if fault is not None:
                raise TargetError(fault.message, hint=fault.hint)
            # Kinds of devices round differently, so the numbers in the steps' sums stay different.
            self._watch.settings_are_exact = False
        self._watch.agreed_step = step

    def _own_row(self) -> Tensor:
        subject = self._subject
        held = subject.shared() if subject.place().distributed else []
        numbers = [fingerprint(list(shared.tensors.values())) for shared in held]
        head = [
            _hash(arithmetic_of(subject.place().device)),
            _hash(repr(settings_of(subject.optimizers))),
            _hash(repr(self._frozen())),
            self._data,
        ]
        return torch.cat([torch.tensor(head), *(number.reshape(1).cpu() for number in numbers)])

    def _frozen(self) -> list[str]:
        return self._subject.known.frozen

    def _agree(self, rows: Tensor) -> bool:
        if len(rows) == 1:
            return True
        columns = [rows[:, _SETTINGS], rows[:, _FROZEN]]
        for number, shared in enumerate(self._subject.shared()):
            column = rows[:, _FINGERPRINTS + number]
            columns.append(column if shared.holders is None else column[list(shared.holders)])
        return all(bool((column == column[0]).all()) for column in columns)

    def _statement(self) -> Statement:
        subject, known = self._subject, self._subject.known
        tensors = {n: t for shared in subject.shared() for n, t in shared.tensors.items()}
        return Statement(
            arithmetic=arithmetic_of(subject.place().device),
            joined_step=self._watch.joined_step,
            agreed_step=self._watch.agreed_step,
            settings=settings_of(subject.optimizers),
            groups=known.first_of_groups(),
            frozen=self._frozen(),
            unheld=known.unheld(),
            numbers={name: int(fingerprint([tensor])) for name, tensor in tensors.items()},
            shadows={name: shadow_of(tensor) for name, tensor in tensors.items()},
        )

    def _warn(self, sentence: str) -> None:
        if self._subject.place().rank == 0:
            log.warning(sentence)

    def close(self) -> None:
        """End the checks with the job."""
        self._subject.others.close()


def arithmetic_of(device: torch.device) -> str:
    """All that an update's bits may depend on: kind of device, threads, version of torch."""
    return f"{torch.__version__} {backend_of(device).arithmetic(device)}"


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _rows(place: Place, own: Tensor) -> Tensor:
    """[workers, length] int64: every worker's vector, on the host."""
    if not place.distributed:
        return own[None]
    sent = own.to(wire_device(place.device))
    whole = sent.new_empty((place.world_size, len(own)))
    peers.all_gather(whole.view(-1), sent)
    return whole.cpu()


def _texts(place: Place, own: str) -> list[str]:
    """[workers] every worker's text, by rank."""
    data = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    lengths = _rows(place, torch.tensor([len(data)]))[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = _rows(place, padded)
    return [
        row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)
    ]
