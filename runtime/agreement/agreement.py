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

import gc
import json
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from ..group import Place, gathered
from ..log import log
from ..nested_tensors import tensors_in
from ..unplanned import is_on_trial
from .verdict import Settings, Statement, Value, find_fault, fingerprint, shadow_of

# Check in each step, by identity, that the trained parameters are those given to ``prepare``.
#
# The gradients of parameters that are added later are not reduced over the workers, so each worker
# would train a version of its own.

_BEFORE = "build the whole model and its optimizer before hf.prepare"


class KnownParameters:
    """The parameters of a job, and where the script holds them."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        parameters: Mapping[str, nn.Parameter],
        *,
        keeps_groups: bool,
    ) -> None:
        self._model, self._optimizers, self._parameters = model, optimizers, parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._watch()
        self._groups = self._group_sizes() if keeps_groups else None
        self._seen: list[int] = []
        self.check()

    def check(self) -> None:
        """Compare identities with those seen before; look closer only where they have changed.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see.
        """
        now = self._identities()
        if now == self._seen:
            return
        self._check_model()
        self._check_optimizers()
        self._watch()
        self._seen = self._identities()

    def _watch(self) -> None:
        # The modules are kept alive, so that no later one can get the id of one of these. Their
        # dicts are kept too: to reach them through the modules takes twice as long in every step.
        self._modules = list(self._model.modules())
        parts = [(module._modules, module._parameters) for module in self._modules]
        self._held: list[dict[str, Any]] = [held for pair in parts for held in pair]

    def look_closer(self) -> None:
        """Like ``check``, also where modules hold their parts in other dicts than before.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see.
        """
        self._watch()
        self.check()

    def _identities(self) -> list[int]:
        found: list[int] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += map(id, group["params"])
                found.append(0)  # no object's id; a parameter that changes groups is seen so
        for held in self._held:
            if held:
                found += map(id, held.values())
        return found

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for o in self._optimizers for group in o.param_groups]

    def _check_model(self) -> None:
        new = {n: p for n, p in self._model.named_parameters() if id(p) not in self.names}
        if not new:
            return
        name = next(iter(new))
        more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        if name not in self._parameters:
            raise TargetError(
                f"parameter {name}{more} was added to the model after hf.prepare, so workers "
                f"would train it apart",
                hint=_BEFORE,
            )
        old = self._parameters[name]
        stale = any(p is old for o in self._optimizers for g in o.param_groups for p in g["params"])
        left = ", and the optimizer still holds the old one" if stale else ""
        raise TargetError(
            f"parameter {name}{more} was replaced after hf.prepare, so workers would train it "
            f"apart{left}",
            hint=_BEFORE,
        )

    def _check_optimizers(self) -> None:
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in self.names:
                        kind, shape = type(optimizer).__name__, list(parameter.shape)
                        raise TargetError(
                            f"parameter {index} of group {number} of the {kind}, of shape {shape}, "
                            f"was added after hf.prepare, so workers would train it apart",
                            hint=_BEFORE,
                        )
        if self._groups is not None and self._groups != self._group_sizes():
            raise TargetError(
                "the optimizer's groups of parameters have changed, and a pipeline has shared "
                "them out in hf.prepare",
                hint="give the optimizer all its groups before; freeze with requires_grad",
            )

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that do not require a gradient now."""
        return [name for name, p in self._parameters.items() if not p.requires_grad]

    def unheld(self) -> list[str]:
        """Names of the parameters that no optimizer of the job holds."""
        held = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        return [name for name, p in self._parameters.items() if id(p) not in held]

    def first_of_groups(self) -> list[str]:
        """[groups] name of the first parameter of each group of the optimizers, in order."""
        return [
            next((self.names[id(p)] for p in group["params"]), "no parameter")
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]


# Find optimizers and parameters that train beside the job, unknown to ``prepare``.
#
# An optimizer that ``prepare`` was not given steps the job's parameters equally on all workers, but
# checkpoints and joining workers miss its state. A parameter that the loss depends on and that is
# not the job's gets a different gradient on each worker.

_GIVE_ALL = (
    "give hf.prepare(model, [optimizer, other]) all optimizers, and compute their losses in the "
    "function of job.backward"
)


class OtherOptimizers:
    """Watches the steps of every optimizer of the process.

    Attributes:
        has_met_unknown: Whether an optimizer has stepped parameters that are not the job's.
    """

    # A script may prepare several jobs, also with one optimizer.
    _of_jobs: ClassVar["WeakSet[Any]"] = WeakSet()
    _open: ClassVar[list["OtherOptimizers"]] = []

    def __init__(
        self,
        own: tuple[Any, ...],
        names: Mapping[int, str],
        *,
        matters: bool,
        follow_steps: bool,
        is_launched: bool,
    ) -> None:
        self._own, self._names, self._matters = own, names, matters
        self._of_jobs.update(own)
        self._cleared: WeakSet[Any] = WeakSet()
        self.has_met_unknown = False
        self._follow_steps, self._is_launched = follow_steps, is_launched
        # Own optimizers that have used up the gradients of the last ``job.backward``.
        self._spent = set(map(id, own))
        self._open.append(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def begin_step(self) -> None:
        """Note a call of ``job.backward``: each optimizer of a job may step after it."""
        for others in self._open:
            others._spent.clear()

    def withhold(self) -> None:
        """Note that gradients are in the making: no own optimizer may step."""
        self._spent.update(map(id, self._own))

    def clear(self, optimizer: object) -> None:
        """Accept an optimizer that is registered with the job, because its state is saved."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._cleared.add(optimizer)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        if self in self._open:
            self._open.remove(self)

    def _stepping(self, optimizer: Any, values: Any, options: Any) -> None:
        for own in self._own:  # as a rule; to ask a WeakSet takes several times as long
            if own is optimizer:
                # A closure runs inside the step, after this hook, and is to call ``job.backward``:
                # that clears the mark, and ``_stepped`` looks whether it has.
                if _has_closure(values, options):
                    self._spent.add(id(own))
                else:
                    self._spend(own)
                return
        if is_on_trial() or optimizer in self._cleared or optimizer in self._of_jobs:
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ours = [self._names[id(p)] for p in held if id(p) in self._names]
        self.has_met_unknown = self.has_met_unknown or len(ours) < len(held)
        # A wrapper given to ``prepare`` shows its inner optimizer's state as its own.
        is_inner = any(getattr(own, "state", None) is optimizer.state for own in self._own)
        if ours and not is_inner and self._matters:
            more = f" and {len(ours) - 1} more" if len(ours) > 1 else ""
            raise TargetError(
                f"a second optimizer ({type(optimizer).__name__}) steps {ours[0]}{more}, and "
                f"hf.prepare does not know it: its state would be in no checkpoint",
                hint=_GIVE_ALL,
            )
        strange = [p for p in held if id(p) not in self._names and p.grad is not None]
        if strange and self._is_launched:
            raise TargetError(
                f"{type(optimizer).__name__} steps {_name_of(strange[0])} of shape "
                f"{list(strange[0].shape)}, which hf.prepare does not know: each worker would "
                f"train it on its own part of the batch",
                hint=_GIVE_ALL,
            )
        # One that also holds strange parameters is looked at in every step: those have no gradient
        # yet, and may get one.
        if len(ours) == len(held) or not self._is_launched:
            self._cleared.add(optimizer)

    def _stepped(self, optimizer: Any, values: Any, options: Any) -> None:
        if _has_closure(values, options) and any(own is optimizer for own in self._own):
            self._spend(optimizer)

    def _spend(self, own: Any) -> None:
        """Refuse gradients that ``job.backward`` has not made: each worker would use its own."""
        if id(own) not in self._spent:
            self._spent.add(id(own))
        elif self._follow_steps and any(
            parameter.grad is not None for g in own.param_groups for parameter in g["params"]
        ):
            raise TargetError(
                f"{type(own).__name__} steps, and there was no job.backward since hf.prepare or "
                f"its last step: each worker would train on whole batches of its own, not under "
                f"the plan",
                hint="in the loop: for batch in job.batches(loader), and job.backward(function, "
                "batch) in place of loss.backward(), once before each step",
            )


def _has_closure(values: Any, options: Any) -> bool:
    if len(values) == 1 and not options:  # the optimizer alone, as a rule
        return False
    return any(callable(value) for value in (*values[1:], options.get("closure")))


def check_leaves(
    loss: Any,
    names: Mapping[int, str],
    met: MutableMapping[Tensor, int],
    answered: set[Any] | None = None,
) -> None:
    """Refuse a loss that depends on a parameter which is not the job's.

    A plain tensor that requires a gradient (an input) is accepted, unless an optimizer holds it, or
    an earlier pass depended on it too: the script keeps it then, and may update it by hand. This
    walks autograd's whole graph, so it is too slow for every step.

    Raises:
        TargetError: Names the parameter, if any module of the process has it.
    """
    for leaf in leaves_of(loss, answered):
        if id(leaf) in names:
            continue
        if isinstance(leaf, nn.Parameter) or leaf in met or _is_optimized(leaf):
            raise TargetError(
                f"the loss depends on {_name_of(leaf)}, of shape {list(leaf.shape)}, which "
                f"hf.prepare does not know: workers would train it apart",
                hint="make it a part of the model, or give hf.prepare the list of all optimizers; "
                "a tensor that nobody trains needs no requires_grad",
            )
        met[leaf] = 1


def leaves_of(value: Any, answered: Collection[Any] | None = None) -> Iterator[Tensor]:
    """The tensors that the graph of a nested value's tensors goes back to."""
    ahead, seen = list(nodes_of(value)), set(answered or ())
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        ahead += [source for source, _ in node.next_functions if source is not None]


def nodes_of(value: Any) -> Iterator[Any]:
    """The autograd nodes that made the tensors in a nested value."""
    return (tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)


def _is_optimized(leaf: Tensor) -> bool:
    """Whether some optimizer holds a tensor; it searches all objects, and few losses need it."""
    return any(
        parameter is leaf
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)
        for group in found.__dict__.get("param_groups", ())
        for parameter in group["params"]
    )


def _name_of(leaf: Tensor) -> str:
    """The parameter's name in a module; it searches all objects, so only errors use it."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for name, parameter in found.__dict__.get("_parameters", {}).items():
                if parameter is leaf:
                    return f"the {name} of a {type(found).__name__}"
    return "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"


# The optimizers' settings of each parameter group: learning rate, momentum and the rest.
#
# They are compared in every step, by two numbers in the sums that the step needs anyway. So if
# workers' schedules have diverged, that is found before any update uses the wrong rates.

_BITS = 22  # float64 sums the squares of such numbers exactly over 500 workers
MOST = (1 << _BITS) - 1
"""The largest such number."""
_PLAIN = (bool, int, float, str, type(None))
# Entries that no update reads: the parameters, their names, and a scheduler's notes.
_LEFT_OUT = frozenset({"params", "param_names", "initial_lr"})


def settings_of(optimizers: Iterable[Any]) -> Settings:
    """All plain settings as they are now. Waits for the device if a setting is kept there."""
    return [
        {key: _plain(value) for key, value in group.items() if _counts(key, value)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _counts(key: str, value: Any) -> bool:
    if key in _LEFT_OUT:
        return False
    if isinstance(value, tuple | list):
        return all(isinstance(entry, _PLAIN) or _is_number(entry) for entry in value)
    return isinstance(value, _PLAIN) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Value:
    if isinstance(value, tuple | list):
        return tuple(_plain(entry) for entry in value)
    found: Value = value.item() if isinstance(value, Tensor) else value
    return found


class SettingsNumber:
    """A number of 22 bits that stands for the settings; it is recomputed only when they change.

    Settings that are tensors on a device are left out: to read them would wait for the device.

    Attributes:
        number: The number when the settings were last read.
        has_changed: Whether the settings had changed then since they were read before.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._seen: list[Any] = []
        self.number = 0
        self.has_changed = False

    def read(self) -> int:
        """Read the settings as they are now, and return their number."""
        now = [_cheap(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        self.has_changed = now != self._seen
        if self.has_changed:
            self._seen = now
            # Not ``hash``: Python salts that of strings, with another salt in each process.
            digest = blake2b(repr(now).encode(), digest_size=8).digest()
            self.number = int.from_bytes(digest, "little") >> (64 - _BITS)
        return self.number


def _cheap(group: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for key, value in group.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, _PLAIN):
            found.append(value)
        elif isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value):
            found.append(tuple(value))
        elif isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
            found.append(value.item())
    return found


# The schedule of comparisons between workers, and the step at which they last agreed.

_AFTER_A_CHANGE = (1, 2)  # steps after a change of workers


class CompareSchedule:
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


class WorkerComparison:
    """Compares what all workers must have alike, together with the others.

    Args:
        known: The parameters.
        optimizers: The optimizers, of which settings are compared.
        shared: Gives the tensors to compare: the same sets, in the same order, on every worker.
        place: Gives this worker's place among the others.
        watch: Knows when workers last agreed.
        together: Runs a function that needs all workers.

    Attributes:
        data: A digest of the batches that every worker draws by itself.
    """

    def __init__(
        self,
        known: KnownParameters,
        optimizers: Sequence[Any],
        *,
        shared: Callable[[], list[SharedTensors]],
        place: Callable[[], Place],
        watch: CompareSchedule,
        together: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> None:
        self._known, self._optimizers, self._watch = known, optimizers, watch
        self._shared, self.place, self._together = shared, place, together
        self.data = 0

    def compare(self, step: int) -> None:
        """Compare the shared tensors and settings. Call it on all workers, outside of collectives.

        Raises:
            TargetError: Workers have diverged: names the first parameter, the workers, since which
                step, and why.
        """
        # Numbers first, and texts only where these differ. All workers have the same rows, so all
        # come to the second collective or none does.
        rows: Tensor = self._together(lambda: gathered(self._own_row(), place=self.place()))
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
            told: list[str] = self._together(
                lambda: _texts(self.place(), json.dumps(self._statement().as_json()))
            )
            fault = find_fault([Statement.of_json(json.loads(text)) for text in told], step)
            if fault is not None:
                raise fault
            # Kinds of devices round differently, so the numbers in the steps' sums stay different.
            self._watch.settings_are_exact = False
        self._watch.agreed_step = step

    def _own_row(self) -> Tensor:
        held = self._shared() if self.place().distributed else []
        numbers = [fingerprint(list(shared.tensors.values())) for shared in held]
        head = [
            _hash(arithmetic_of(self.place().device)),
            _hash(repr(settings_of(self._optimizers))),
            _hash(repr(self._known.frozen)),
            self.data,
        ]
        return torch.cat([torch.tensor(head), *(number.reshape(1).cpu() for number in numbers)])

    def _agree(self, rows: Tensor) -> bool:
        if len(rows) == 1:
            return True
        # Not the arithmetic: kinds of devices may differ, as long as nothing else does.
        columns = [rows[:, _SETTINGS], rows[:, _FROZEN]]
        for number, shared in enumerate(self._shared()):
            column = rows[:, _FINGERPRINTS + number]
            columns.append(column if shared.holders is None else column[list(shared.holders)])
        return all(bool((column == column[0]).all()) for column in columns)

    def _statement(self) -> Statement:
        known = self._known
        tensors = {n: t for shared in self._shared() for n, t in shared.tensors.items()}
        return Statement(
            arithmetic=arithmetic_of(self.place().device),
            joined_step=self._watch.joined_step,
            agreed_step=self._watch.agreed_step,
            settings=settings_of(self._optimizers),
            groups=known.first_of_groups(),
            frozen=self._known.frozen,
            unheld=known.unheld(),
            numbers={name: int(fingerprint([tensor])) for name, tensor in tensors.items()},
            shadows={name: shadow_of(tensor) for name, tensor in tensors.items()},
        )


class Agreement:
    """One worker's knowledge of whether the others train the same model.

    Args:
        known: The job's parameters.
        optimizers: The job's optimizers.
        others: Watches for other optimizers.
        comparison: Compares with the other workers.
        watch: Says when to compare.
        is_launched: Whether there is a plan, so that there can be other workers.
        is_saved: Whether the job's state is saved to a disk or sent to other workers.
        compares_between_steps: Whether all workers have made the same updates between two steps.

    Attributes:
        settings_number: What this worker adds to the step's sums, along with its square: a number
            that stands for its optimizers' settings and its batch.
        looks: Whether ``look_at`` inspects losses in this step.
    """

    def __init__(
        self,
        known: KnownParameters,
        optimizers: Sequence[Any],
        others: OtherOptimizers,
        comparison: WorkerComparison,
        watch: CompareSchedule,
        *,
        is_launched: bool,
        is_saved: bool,
        compares_between_steps: bool,
    ) -> None:
        self._known, self._optimizers, self._others = known, optimizers, others
        self._comparison, self._watch = comparison, watch
        self._is_launched, self._is_saved = is_launched, is_saved
        self._compares_between_steps = compares_between_steps
        self._settings = SettingsNumber(optimizers)
        self.settings_number, self.looks = 0, False
        self._epoch = -1
        self._leaves = WeakIdKeyDictionary()  # plain tensors that losses depended on
        self._has_warned_of_schedule, self._has_schedule_kept = False, False

    # Each step

    def saw(self, digest: int) -> None:
        """Note the digest of a global batch that every worker draws by itself."""
        self._comparison.data = digest

    def registered(self, thing: object) -> None:
        """Note an object that the script gave to ``job.register``."""
        self._others.clear(thing)
        is_optimizer = isinstance(thing, torch.optim.Optimizer)
        if not is_optimizer and not isinstance(thing, torch.amp.GradScaler):
            self._has_schedule_kept = True

    def begin_step(self, step: int, epoch: int) -> None:
        """Begin a step. Call it on all workers, outside of other collectives.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see, or workers have
                diverged.
        """
        is_due = self._watch.is_due(step)
        if self._is_launched or self._is_saved:
            self._known.look_closer() if is_due else self._known.check()
        self._notice_schedule(epoch)
        self.settings_number = self._settings.number ^ self._comparison.data & MOST
        if self._compares_between_steps and is_due:
            self.compare(step)
        self.looks = self._is_launched and (
            self._watch.is_due(step + 1) or self._others.has_met_unknown
        )
        self._others.has_met_unknown = False
        self._others.begin_step()

    def withhold(self) -> None:
        """Let no optimizer of the job step until ``release``: gradients are only some workers'."""
        self._others.withhold()

    def release(self) -> None:
        """Let the job's optimizers step: they have the gradients of the whole batch."""
        self._others.begin_step()

    def look_at(self, answer: Any, answered: set[Any] | None = None) -> None:
        """Inspect the loss of a pass before its backward pass; in some steps only.

        Raises:
            TargetError: The loss depends on a parameter that ``prepare`` did not see.
        """
        if self.looks:
            check_leaves(answer, self._known.names, self._leaves, answered)

    def _notice_schedule(self, epoch: int) -> None:
        """Warn of a schedule that would restart in a joining worker, or after a restart."""
        # A schedule that steps once an epoch catches up by itself: a restarted script runs through
        # its epochs. One that steps within an epoch begins again.
        self._settings.read()
        stays, self._epoch = epoch == self._epoch, epoch
        if not (stays and self._is_saved and self._settings.has_changed):
            return
        if self._has_warned_of_schedule or self._has_schedule_kept:
            return
        if any("initial_lr" in g for o in self._optimizers for g in o.param_groups):
            self._has_warned_of_schedule = True
            if self._comparison.place().rank == 0:
                log.warning(
                    "a learning-rate scheduler steps within the epoch and nothing is registered: a "
                    "restart or a resize would begin it anew; call job.register(scheduler)"
                )

    def compare(self, step: int) -> None:
        """Compare tensors and settings after so many steps; as ``WorkerComparison.compare``."""
        self._comparison.compare(step)

    def close(self) -> None:
        """End the checks with the job."""
        self._others.close()


def arithmetic_of(device: torch.device) -> str:
    """All that an update's bits may depend on: kind of device, threads, version of torch."""
    return f"{torch.__version__} {backend_of(device).arithmetic(device)}"


def _hash(text: str) -> int:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _texts(place: Place, own: str) -> list[str]:
    """[workers] every worker's text, by rank."""
    data = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    # A gather takes equal lengths, which only a gather of the lengths tells.
    lengths = gathered(torch.tensor([len(data)]), place=place)[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = gathered(padded, place=place)
    return [
        row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)
    ]
