"""Measure a script in the loop that trains, from inside of it: no factory needs writing.

The script runs as a launch's worker runs it, under the adapters of its library
(``runtime.adapters``), but draws batches of the sizes under measurement. The requests of the
measuring process's parent are answered whenever the script asks for a batch, so the script waits
between two measurements. Nothing of it comes after: the parent ends the process.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..devices import memory
from ..devices.backend import backend_of, is_out_of_memory
from ..planning.costs.memory import COMPARED_BYTES
from ..runtime.emulation import PassHolder
from ..runtime.measurements import StepTimes, reference_seconds
from ..runtime.nested_tensors import tensors_in
from ..schema import files
from ..schema.errors import HetflowError, TargetError
from ..schema.launch import LaunchConfig
from ..schema.options import option
from ..schema.plan import PassTime
from .batch_curve import SizeResult
from .exchange import StartingLine
from .targets import one_line
from .timing import RepeatPolicy, RepeatTiming

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..runtime.adapters.training import Sized, Training

_FIRST_STEPS = 3  # the first ones of a process are the dearest
_MOST_EXTRA_SECONDS = 60.0
_NO_TRACE = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}  # no runs of other tools

Steps = Generator[None, None, Any]
"""Resumed whenever the script asks for a batch; what it returns is the answer."""


def run_measured(
    script: list[str],
    *,
    config: str,
    rank: int,
    device: str,
    memory_bytes: int,
    few_samples: int,
    port: int | None,
    receive: Callable[[], dict[str, Any]],
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Run a script, and answer requests from inside its loop; ends with the process.

    Args:
        script: The script and its arguments.
        config: The launch config of its workers, as JSON text.
        rank: Of this worker.
        device: A torch device.
        memory_bytes: The device's memory; enforced on a host's own.
        few_samples: Samples of its batches before its loop is known.
        port: Of the store in which several workers meet; None for one worker.
        receive: Waits for the next request.
        answer: Answers the one before.

    Raises:
        TargetError: The script failed, or ended.
    """
    import torch

    from ..runtime.adapters.training import begun, watch
    from ..runtime.group import has_joined
    from ..runtime.unplanned import install
    from ..runtime.worker import run_script

    parsed = files.from_json(config, LaunchConfig, name="config")
    backend = backend_of(device)
    backend.limit_memory(memory_bytes)
    if not backend.is_host:
        backend.set_current(torch.device(device))
    os.environ.update(_environment(config, rank, parsed.world_size, port))
    loop = _Loop(script, device, few_samples, receive, answer)
    watch(loop)
    install()
    try:
        run_script(script)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise TargetError(f"{script[0]}: the script ended: {stop.code}") from None
    except HetflowError:
        if has_joined() and begun() is None:
            raise TargetError(
                f"{script[0]} calls hf.prepare, and such a script is measured by a factory",
                hint="let a function of it give (model, make_batch, loss), and name it: "
                f"{script[0]}:workload",
            ) from None
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TargetError(one_line(error, script[0]), hint=loop.hint()) from error
    raise loop.ended()


def _environment(config: str, rank: int, world_size: int, port: int | None) -> dict[str, str]:
    """What a launcher says to a worker; the config needs no file that someone has to remove."""
    from ..runtime.protocol import environment as names

    held = os.memfd_create("hetflow-config")
    os.write(held, config.encode())
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or 0),
        names.PLAN: f"/proc/{os.getpid()}/fd/{held}",
        **_NO_TRACE,
    }
    if port is not None:
        found |= {"TORCHELASTIC_USE_AGENT_STORE": "True", names.SLOT: str(rank)}
    return found


class _Loop:
    """The parent's requests, answered from inside the script's loop; a ``Watcher``."""

    def __init__(
        self,
        script: list[str],
        device: str,
        few_samples: int,
        receive: Callable[[], dict[str, Any]],
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        self.few_samples = few_samples
        self._script, self._receive, self._answer = script, receive, answer
        self._backend = backend_of(device)
        self._own_size: int | None = None
        self._num_asked, self._num_updates = 0, 0
        self._serving: Generator[None, None, None] | None = None
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._device = torch.device(device)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.updated(optimizer))

    # What the adapters tell

    def asked(self, training: "Training", batches: "Sized") -> None:
        """Answer requests until one needs another step."""
        self._num_asked += 1
        if self._serving is None:
            self._training, self._batches = training, batches
            self._own_size = _own_size_of(batches)
            self._serving = self._serve()
        next(self._serving)

    def left(self) -> None:
        """End the process: what comes after the loop may save a model that is not trained."""
        error = self.ended()
        self._answer({"error": error.message, "hint": error.hint, "traceback": ""})
        os._exit(0)

    def updated(self, optimizer: "Optimizer") -> None:
        """Count an update; it must be of a loop that the adapters see."""
        from ..runtime.adapters.training import begun

        self._num_updates += 1
        if self._serving is None and begun() is None:
            raise TargetError(
                f"{self._script[0]} trains by itself: no loader and no model of it goes through "
                "accelerate, transformers' Trainer, Lightning or DistributedDataParallel",
                hint="see docs/howto/own_script.md; a script for torchrun must wrap its model for "
                "one worker too",
            )

    def hint(self) -> str | None:
        """What may be wrong where the script fails at another size than its own."""
        from ..runtime.adapters.training import begun

        training = begun()
        sized = training.sized if training is not None else None
        own = _own_size_of(sized) if sized is not None else None
        if sized is None or own in (None, sized.num_samples):
            return None
        named = _argument_of(self._script[1:], own)
        return (
            f"it failed at batch size {sized.num_samples}, and its own is {own}{named}: let it "
            f"take the size from the batch that it gets; or profile that size alone, with "
            f"{option('batch_sizes', own)}"
        )

    def ended(self) -> TargetError:
        """Why there is no answer: the script has ended."""
        if self._serving is None:
            return TargetError(
                f"{self._script[0]}: the script ended without training on a loader that hetflow "
                "knows",
                hint="see docs/howto/own_script.md; a factory (file.py:factory) will do too",
            )
        return TargetError(
            f"{self._script[0]}: its loop ended after {self._num_asked + 1} batches, and measuring "
            "takes more",
            hint="let it train for longer: its own arguments stand after --",
        )

    # The requests

    def _serve(self) -> Generator[None, None, None]:
        for _ in range(_FIRST_STEPS):
            yield
        while not self._training.optimizers:  # gradients may be accumulated
            yield
        self._answer({"ok": self._facts()})
        while True:
            request = self._receive()
            operation = getattr(self, f"_do_{request.pop('operation')}")
            self._answer({"ok": (yield from operation(**request))})

    def _facts(self) -> dict[str, Any]:
        import torch

        trained = {id(parameter) for parameter in self._parameters()}
        frozen = [p.nbytes for p in self._training.models.parameters() if id(p) not in trained]
        return {
            "weight_bytes": sum(p.nbytes for p in self._parameters()),
            "frozen_weight_bytes": sum(frozen) or None,
            "num_parameters": sum(p.numel() for p in self._parameters()),
            "optimizer": type(self._training.optimizers[0]).__name__,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "reference_seconds": reference_seconds(self._device),
            "peak_memory_reset": memory.reset_peak(),
            "own_batch_size": self._own_size,
            "num_samples": self._num_samples(),
        }

    def _parameters(self) -> list[Any]:
        """What the script trains, each once."""
        found = {
            id(parameter): parameter
            for optimizer in self._training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        return list(found.values())

    def _num_samples(self) -> int | None:
        """Of the script's dataset, as far as its sampler goes through it."""
        sampler = getattr(self._batches.batch_sampler, "sampler", None)
        try:
            return None if sampler is None else len(sampler)
        except TypeError:
            return None

    def _do_measure(self, batch_size: int, policy: dict[str, Any]) -> Steps:
        """A few steps of one size by themselves, and the peak of one."""
        repeats = RepeatPolicy(**policy)
        yield from self._steps([batch_size], 1)
        self._backend.release_unused()
        self._backend.reset_peak(self._device)
        if self._training.cuts_batches:
            self._make_gradients()
        yield from self._steps([batch_size], 1)
        samples: list[float] = []
        began = time.perf_counter()
        while not repeats.is_enough(samples, time.perf_counter() - began):
            samples += [step.computed for step in (yield from self._steps([batch_size], 1))]
        found = SizeResult(
            batch_size=batch_size,
            timing=RepeatTiming.of(samples),
            wall_seconds=statistics.median(samples),
            peak_memory_bytes=(self._backend.peak_bytes(self._device) or 0)
            + (0 if self._backend.is_host else COMPARED_BYTES),
            fragmentation_bytes=self._backend.fragmentation_bytes(self._device),
            beside_bytes=self._backend.beside_bytes(self._device),
        )
        return asdict(found)

    def _make_gradients(self) -> None:
        """Let the next pass find gradients, of 0, as it does behind another virtual node's."""
        import torch

        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _do_rehearse(
        self,
        config: str,
        num_steps: int,
        warm_up_steps: int = 0,
        is_empty: bool = False,
        rank: int = 0,
        group: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
        measures_peak: bool = False,
    ) -> Steps:
        """Rehearse as ``rehearsal.rehearse``, one pass in a step; the workers have met already."""
        parsed = files.from_json(config, LaunchConfig, name="config")
        sizes = [node.batch_size for slot in parsed.workers for node in slot.virtual_nodes]
        line = StartingLine(**beside) if beside is not None else None
        if measures_peak:
            self._backend.release_unused()
            self._backend.reset_peak(self._device)
        if line is not None:
            yield from self._steps(sizes, 1)
            line.wait("ready")
        steps = yield from self._steps(sizes, num_steps)
        found: dict[str, Any] = {"steps": [step.as_json() for step in steps], "no_loading": None}
        if measures_peak:
            found["peak_memory_bytes"] = self._backend.peak_bytes(self._device) or 0
            found["beside_bytes"] = self._backend.beside_bytes(self._device)
        if line is not None:
            yield from self._accompany(line, sizes)
        return found

    def _accompany(self, line: StartingLine, sizes: list[int]) -> Steps:
        """Keep training until the others are done: they are measured beside busy devices."""
        line.say("done")
        end = time.monotonic() + _MOST_EXTRA_SECONDS
        while not line.have_all("done") and time.monotonic() < end:
            yield from self._steps(sizes, 1)

    def _do_optimizer_state(self, batch_size: int) -> Steps:
        yield from self._steps([batch_size], 1)
        optimizers = self._training.optimizers
        states = [state for one in optimizers for state in one.state.values()]
        return {
            "name": type(optimizers[0]).__name__,
            "is_own": True,
            "state_bytes": sum(tensor.nbytes for tensor in tensors_in(states)),
            "workspace_bytes": None,
            "workspace_bytes_per_weight_byte": None,
        }

    def _do_base_memory(self, batch_size: int) -> Steps:
        """Unknown: the script's model cannot be taken out of its process."""
        yield from ()
        return {"bytes": None}

    def _do_hold(self, batch_size: int, passes: list[tuple[int, float]], repeats: int) -> Steps:
        """Run passes held to a table, as an emulated device runs them."""
        yield from self._steps([batch_size], 1)
        table = [PassTime(batch_size=size, step_seconds=seconds) for size, seconds in passes]
        holder = PassHolder(table)
        self._training.holder = holder
        steps = yield from self._steps([batch_size], repeats)
        self._training.holder = None
        return {"seconds": [step.computed for step in steps], "num_overruns": holder.num_overruns}

    def _steps(self, sizes: list[int], num_steps: int) -> Generator[None, None, list[StepTimes]]:
        """Let the script train so many steps of a size.

        Batches of another size, which it has drawn ahead, do not count. Where it accumulates
        gradients, an update is shared out over its batches.
        """
        training = self._training
        self._batches.num_samples = sum(sizes)
        training.resize(sizes)
        first, asked, updates = training.num_full_steps, self._num_asked, self._num_updates
        num_done, per_update = 0, 1
        while num_done < max(num_steps, per_update):
            yield
            num_done = training.num_full_steps - first
            per_update = round((self._num_asked - asked) / max(1, self._num_updates - updates))
        whole = num_done - num_done % max(1, per_update)
        steps = list(training.clock.steps)[-whole:]
        if per_update <= 1:
            return steps
        shared = statistics.fmean(step.update_seconds for step in steps)
        return [replace(step, ended=step.synchronised + shared) for step in steps]


def _own_size_of(batches: "Sized") -> int | None:
    """The script's global batch; None where it depends on the number of workers, or is unknown."""
    from torch.utils.data.distributed import DistributedSampler

    own = batches.batch_sampler
    if isinstance(getattr(own, "sampler", None), DistributedSampler):
        return None
    size: int | None = getattr(own, "batch_size", None)
    return size


def _argument_of(arguments: list[str], size: int | None) -> str:
    """The script's argument that states its batch size, to name it; empty where none does."""
    for name, value in zip(arguments, arguments[1:], strict=False):
        if name.startswith("-") and value == str(size):
            return f" ({name} {value})"
    for text in arguments:
        if text.startswith("-") and text.endswith(f"={size}"):
            return f" ({text})"
    return ""


def receiving(requests: Any) -> Callable[[], dict[str, Any]]:
    """How to wait for the next of some lines of JSON; the process ends with them."""

    def receive() -> dict[str, Any]:
        line = requests.readline()
        if not line:
            os._exit(0)
        found: dict[str, Any] = json.loads(line)
        return found

    return receive
