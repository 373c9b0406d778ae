"""Time training passes of one workload on one device, and draw the samples that they take.

A pass is forward + backward into gradients that already exist, as the runtime accumulates them:
no optimizer update, no communication, no batch making. A `cpu` device is one core, so a pass on
it is timed by the process's CPU time. This leaves out the time in which other programs used the
core, and waiting (for a disk, say); wall times are in the provenance. An accelerator's pass is
timed by the wall clock between two synchronisations.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..devices import memory
from ..devices.backend import backend_of, is_out_of_memory
from ..devices.host import TORCH_DEVICE
from ..planning.costs.memory import COMPARED_BYTES
from ..runtime.emulation import PassHolder
from ..runtime.nested_tensors import tensors_in
from ..schema.errors import TargetError
from .batch_curve import SizeResult
from .layer_memory import buffer_bytes, footprint, in_blocks
from .targets import Workload, one_line
from .timing import RepeatPolicy, RepeatTiming, repeat

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader


_FIRST_WARM_UP_SECONDS = 0.5
_WARM_UP_SECONDS = 0.05


class Bench:
    """One workload on one device, ready to be timed.

    Args:
        workload: What to time. A model from ``hf.deferred()`` gets its values on the device.
        device: A torch device.
        optimizer: One of ``schema.optimizer.NAMES``, unless the workload brings its own.
        blocks: Classes or names of modules that are units of shared states; empty for the repeated
            layers.

    Raises:
        TargetError: The model is on the meta device, and nothing says what its values are; or it
            has no such block.
    """

    def __init__(
        self, workload: Workload, device: str, optimizer: str, blocks: Sequence[str] = ()
    ) -> None:
        import torch

        from ..runtime.initial_values import fill_model
        from ..runtime.repeated_layers import listed_blocks, repeated_layers

        self.workload = workload
        self.device = device
        self._is_warm = False
        self.backend = backend_of(device)
        self._torch_device = torch.device(device)
        fill_model(workload.model, self._torch_device)
        tensors = [*workload.model.parameters(), *workload.model.buffers()]
        # One that is there already, perhaps without values, is left alone.
        is_there = all(str(tensor.device) == device for tensor in tensors)
        self.model = (workload.model if is_there else workload.model.to(device)).train()
        self.blocks = tuple(repeated_layers(self.model, listed_blocks(self.model, blocks)))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.weight_bytes = sum(p.nbytes for p in parameters)
        frozen = [p.nbytes for p in self.model.parameters() if not p.requires_grad]
        self.frozen_weight_bytes = sum(frozen) or None
        self.num_parameters = sum(p.numel() for p in parameters)
        make = workload.make_optimizer
        self.optimizer = make(parameters) if make else _make_optimizer(optimizer, parameters)
        self.samples = Samples(self.host_batch, workload.dataset)

    def make_batch(self, batch_size: int) -> Any:
        """One batch, on the device."""
        return move(self._made(batch_size), self.device)

    def host_batch(self, batch_size: int) -> Any:
        """One batch, on the host."""
        return move(self._made(batch_size), TORCH_DEVICE)

    def _made(self, batch_size: int) -> Any:
        return self._of_user("make_batch", self.workload.make_batch, batch_size)

    def loss_of(self, batch: Any) -> Any:
        """What the target's loss gives for a batch."""
        return self._of_user("loss", self.workload.loss, self.model, batch)

    def run_pass(self, batch: Any) -> None:
        """Forward and backward, to the end."""
        loss = self.loss_of(batch)
        if getattr(loss, "ndim", None) != 0:
            raise TargetError(f"loss must return a scalar tensor, got {_described(loss)}")
        self.backward(loss)
        self.wait()

    def backward(self, loss: Any) -> None:
        """The backward pass of what the target's loss gave."""
        self._of_user("loss.backward", loss.backward)

    def run_step(self, batch: Any) -> None:
        """A whole training step: pass and update; optimizer state exists afterwards."""
        self.optimizer.zero_grad(set_to_none=False)
        self.run_pass(batch)
        self.optimizer.step()
        self.wait()

    def time_pass(self, batch: Any) -> tuple[float, float]:
        """Device seconds and wall seconds of one pass."""
        self.optimizer.zero_grad(set_to_none=False)
        return self.timed(lambda: self.run_pass(batch))

    def measure(self, batch_size: int, policy: RepeatPolicy) -> SizeResult:
        """Median pass time and peak memory at one batch size; warm-up steps are dropped."""
        batch = self.make_batch(batch_size)
        self._warm_up(batch)
        taken = self._taken_bytes(batch)
        self.reset_peak()
        self.run_step(batch)
        walls: list[float] = []

        def once() -> float:
            seconds, wall = self.time_pass(batch)
            walls.append(wall)
            return seconds

        timing = RepeatTiming.of(repeat(once, policy, time.perf_counter))
        return SizeResult(
            batch_size=batch_size,
            timing=timing,
            wall_seconds=sorted(walls)[len(walls) // 2],
            peak_memory_bytes=self.peak_memory_bytes() + self._more_in_training(batch, taken),
            fragmentation_bytes=self.backend.fragmentation_bytes(self._torch_device),
            beside_bytes=self.beside_bytes(),
            **taken,
        )

    def _taken_bytes(self, batch: Any) -> dict[str, Any]:
        """What each part of a step takes and gives back; empty where the peak is the process's."""
        if self.backend.is_host:
            return {}
        from ..runtime.offload import lane_of
        from .pass_moments import PassWatch

        self.optimizer.zero_grad(set_to_none=False)
        watch = PassWatch(self.model, self._taking(), self.blocks)
        lane = lane_of(self._torch_device)
        pinned = 0 if lane is None else lane.pinned_bytes
        with watch.watching():
            self.run_pass(batch)
        pinned = 0 if lane is None else lane.pinned_bytes - pinned
        update = footprint(self.optimizer.step, self.device)
        self.optimizer.zero_grad(set_to_none=True)
        first = footprint(lambda: self.run_pass(batch), self.device)
        assert update is not None
        assert first is not None
        most = watch.most_bytes
        waiting = max(most, min(first.peak_bytes, most + self.backend.bucket_bytes))
        return {
            "pass_bytes": most,
            "buffered_pass_bytes": waiting,
            "update_bytes": update.peak_bytes,
            "pinned_bytes": pinned or None,
            "moments": watch.moments(),
        }

    def _more_in_training(self, batch: Any, taken: dict[str, Any]) -> int:
        """What a step of hetflow's takes more than the target's own, where its parts are known."""
        # The runtime copies samples a pass ahead. It keeps a copy of each buffer, and one for each
        # virtual node of what passes change: batch norm's statistics. One virtual node is counted.
        if not taken:
            return 0
        own: int = max(taken["pass_bytes"], taken["update_bytes"])
        waiting: int = taken["buffered_pass_bytes"]
        copies = sum(in_blocks(tensor.nbytes) for tensor in tensors_in(batch))
        copies += sum(buffer_bytes(self.model))
        return COMPARED_BYTES + copies + max(0, waiting - own)

    def _taking(self) -> Callable[[], tuple[int, int]]:
        """Tells the most bytes since it was called last, and now, beyond those of now."""
        self.wait()
        before = self.backend.allocated_bytes(self._torch_device) or 0

        def taking() -> tuple[int, int]:
            most = self.peak_memory_bytes()
            self.backend.reset_peak(self._torch_device)
            return most - before, (self.backend.allocated_bytes(self._torch_device) or 0) - before

        return taking

    def optimizer_state(self, batch_size: int) -> dict[str, Any]:
        """Bytes that the optimizer keeps after a step, and bytes that an update needs temporarily.

        Its class, bytes of its tensors, ``update_workspace_bytes``, and the most of a temporary
        byte of weights (None on a CPU).
        """
        self.run_step(self.make_batch(batch_size))
        return {
            "name": type(self.optimizer).__name__,
            "is_own": self.workload.make_optimizer is not None,
            "state_bytes": sum(t.nbytes for t in tensors_in(list(self.optimizer.state.values()))),
            "workspace_bytes": self.update_workspace_bytes(),
            "workspace_bytes_per_weight_byte": self._workspace_ratio(),
        }

    def _workspace_ratio(self) -> float | None:
        """Temporary bytes of an update over the weights that it updates, at most; None on a CPU."""
        if self.backend.is_host:
            return None
        given = [p for p in self.model.parameters() if p.grad is not None]
        found = []
        # All weights tell it where the optimizer takes them at once (foreach), and the largest one
        # where it takes one after another.
        for part in (given, sorted(given, key=lambda p: p.nbytes)[-1:]):
            kept = {id(p) for p in part}
            for parameter in given:
                parameter.grad = parameter.grad if id(parameter) in kept else None
            taken = footprint(self.optimizer.step, self.device)
            if taken is None:
                return None
            found.append(taken.peak_bytes / sum(p.nbytes for p in part))
        return max(found)

    def update_workspace_bytes(self) -> int | None:
        """Bytes that an update allocates temporarily, after ``optimizer_state``; None on GPUs.

        Counted on a CPU only: its allocator does not fit large blocks of an update into the room
        of a pass's. A GPU's peak is that of the larger of the two.
        """
        found = footprint(self.optimizer.step, self.device) if self.backend.is_host else None
        return None if found is None else found.peak_bytes

    def held(self, batch_size: int, holder: PassHolder, repeats: int) -> list[float]:
        """Wall seconds of passes that are held to a table, as an emulated device runs them.

        The passes are one step of as many virtual nodes, so deadlines are absolute and a late
        pass is made up for by the next. The first, a warm-up, is a step of its own.
        """
        batch = self.make_batch(batch_size)
        self.run_step(batch)
        ends = []
        holder.begin_step()
        ends.append(time.perf_counter())
        for _ in range(repeats):
            with holder.hold(batch_size):
                self.run_pass(batch)
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]

    def wait(self) -> None:
        """Let the device finish."""
        self.backend.synchronize(self._torch_device)

    def reset_peak(self) -> None:
        """Return unused memory to the system, and start a new peak."""
        self.backend.release_unused()
        self.backend.reset_peak(self._torch_device)

    def held_free_bytes(self) -> int | None:
        """Return unused memory to the system: how much that was, on a host.

        None on a device, whose allocator tells it, and where the kernel does not tell.
        """
        if not self.backend.is_host:
            return None
        before = memory.resident_memory_bytes()
        self.backend.release_unused()
        after = memory.resident_memory_bytes()
        return None if before is None or after is None else max(0, before - after)

    def peak_memory_bytes(self) -> int:
        """The most there was since ``reset_peak``: of the device, or of the whole process."""
        return self.backend.peak_bytes(self._torch_device) or 0

    def beside_bytes(self) -> int | None:
        """What no allocator of tensors holds of the device now; None on a CPU."""
        return self.backend.beside_bytes(self._torch_device)

    def _warm_up(self, batch: Any) -> None:
        """Whole steps, dropped: caches, kernel choices, and optimizer state for the peak."""
        # The very first steps of a process are dearest, so it takes longer there.
        warm_up = _WARM_UP_SECONDS if self._is_warm else _FIRST_WARM_UP_SECONDS
        self._is_warm = True
        end = time.perf_counter() + warm_up
        self.run_step(batch)
        while time.perf_counter() < end:
            self.run_step(batch)

    def timed(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Device seconds and wall seconds of some work, to its end."""
        self.wait()
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        self.wait()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        # A host's device is a core, which this process may have shared with others meanwhile.
        return (cpu if self.backend.is_host else wall), wall

    def _of_user(self, role: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            file = getattr(getattr(function, "__code__", None), "co_filename", None)
            raise TargetError(one_line(error, file, role)) from error


def move(batch: Any, device: str) -> Any:
    """Tensors in nested tuples, lists and dicts, moved to a device."""
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def _make_optimizer(name: str, parameters: list[Any]) -> Any:
    from torch import optim

    if name in ("sgd", "sgd-momentum"):
        return optim.SGD(parameters, lr=1e-4, momentum=0.9 if name == "sgd-momentum" else 0.0)
    kinds = {kind.__name__.lower(): kind for kind in (
        optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
        optim.RAdam, optim.RMSprop,
    )}  # fmt: skip
    return kinds[name](parameters, lr=1e-4)


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"a tensor of shape {list(shape)}" if shape is not None else type(value).__name__


# A target's batches as a dataset, so that the loop that trains can load them.
#
# A target that gives its own dataset is loaded from that. Else a batch is taken apart along its
# first dimension, and torch's collate function puts samples together again. Where that cannot be
# done, each virtual node gets a ready batch, and loading is not measured.


_SEED = 0
_MANY = 1 << 20
_OF_LOADERS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Where a rehearsal's samples come from.

    Attributes:
        dataset: Map-style.
        options: For the DataLoader over it.
        batch_of: Makes what the target's loss takes of what the script's function gets.
        obstacle: Why loading is not measured; None where it is.
    """

    dataset: Any
    options: Mapping[str, Any]
    batch_of: Callable[[tuple[Any, ...]], Any]
    obstacle: str | None = None

    def loader(self, global_batch_size: int, num_steps: int) -> "DataLoader[Any]":
        """A loader of so many global batches, drawn at random as a shuffling loader does."""
        import torch
        from torch.utils.data import DataLoader

        drawn = torch.Generator().manual_seed(_SEED)
        shape = (global_batch_size * num_steps,)
        order: list[int] = torch.randint(len(self.dataset), shape, generator=drawn).tolist()
        return DataLoader(self.dataset, batch_size=global_batch_size, sampler=order, **self.options)


class Samples:
    """The samples of one workload, on the host; made anew only where a size needs more.

    Args:
        host_batch: Makes a batch of a size, on the host.
        dataset: The target's own dataset or DataLoader, if it gives one.
    """

    def __init__(self, host_batch: Callable[[int], Any], dataset: Any) -> None:
        self._host_batch, self._dataset = host_batch, dataset
        self._size, self._source = 0, SampleSource(None, {}, tuple)

    def source(self, batch_size: int) -> SampleSource:
        """Where virtual nodes of this size get their samples."""
        suits = self._size == batch_size or (
            self._size > batch_size and self._source.obstacle is None
        )
        if not suits:
            self._size, self._source = batch_size, self._make(batch_size)
        return self._source

    def _make(self, batch_size: int) -> SampleSource:
        from torch.utils.data import TensorDataset

        batch = self._host_batch(batch_size)
        if self._dataset is not None:
            return _of_target(self._dataset, batch)
        obstacle = _obstacle(batch, batch_size) or self._obstacle_of_one(batch_size)
        if obstacle is None:
            # As a script with plain tensors has it; the runtime draws no numbers for its samples.
            dataset = TensorDataset(*_tensors(batch))
            return SampleSource(dataset, {}, lambda parts: _like(batch, iter(parts)))
        return _ready(self._host_batch, obstacle)

    def _obstacle_of_one(self, batch_size: int) -> str | None:
        """Of another size: the first dimension may be as long as the batch by chance."""
        if batch_size == 1:
            return None
        try:
            return _obstacle(self._host_batch(1), 1)
        except TargetError:
            return None  # not every target can make a batch of one sample


def _obstacle(batch: Any, batch_size: int) -> str | None:
    lengths = {len(tensor) if tensor.dim() else None for tensor in _tensors(batch)}
    if lengths == {batch_size}:
        return None
    return (
        "a batch cannot be taken apart into samples: the first dimension of its tensors is not "
        "the number of samples; the target can give a dataset (its fifth value)"
    )


def _of_target(own: Any, batch: Any) -> SampleSource:
    """The target's dataset or DataLoader, whose batches must have the form of ``make_batch``'s."""
    from torch.utils.data import DataLoader

    dataset, options = own, {}
    if isinstance(own, DataLoader):
        dataset, options = own.dataset, {name: getattr(own, name) for name in _OF_LOADERS}
    number = len(_tensors(batch))

    def batch_of(parts: tuple[Any, ...]) -> Any:
        found = _tensors(parts)
        if len(found) != number:
            raise TargetError(
                f"the target's dataset gives {len(found)} tensors a batch, and make_batch {number}",
                hint="let both give the same, in the same order",
            )
        return _like(batch, iter(found))

    return SampleSource(dataset, options, batch_of)


def _ready(make: Callable[[int], Any], obstacle: str) -> SampleSource:
    """Give one batch to every virtual node of a size."""
    known: dict[int, Any] = {}

    def collate(numbers: list[int]) -> dict[str, Any]:
        size = len(numbers)
        if size not in known:
            known[size] = make(size)
        return {"batch": known[size]}

    # A dataset of numbers costs next to nothing to load.
    return SampleSource(
        range(_MANY), {"collate_fn": collate}, lambda parts: parts[0]["batch"], obstacle=obstacle
    )


def _tensors(value: Any) -> list["Tensor"]:
    """The tensors in nested tuples, lists and dicts (in order of their keys)."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for key in sorted(value) for found in _tensors(value[key])]
    if isinstance(value, tuple | list):
        return [found for entry in value for found in _tensors(entry)]
    return []


def _like(form: Any, tensors: Iterator["Tensor"]) -> Any:
    """Tensors in the form of a batch; what is no tensor there stays as it is there."""
    import torch

    if isinstance(form, torch.Tensor):
        return next(tensors)
    if isinstance(form, Mapping):
        made = {key: _like(form[key], tensors) for key in sorted(form)}
        return type(form)({key: made[key] for key in form})  # type: ignore[call-arg]
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*(_like(entry, tensors) for entry in form))
    if isinstance(form, tuple | list):
        return type(form)(_like(entry, tensors) for entry in form)
    return form
