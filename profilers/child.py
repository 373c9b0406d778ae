"""The measuring process: one JSON request a line in, one JSON answer a line out.

Run as ``python -m hetflow.profilers.child`` by ``process``. It may die (of memory, of the model's
own crash) without harm to the command that asked. Whatever the model prints goes to stderr.
"""

import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..devices import memory
from ..devices.backend import backend_of, is_out_of_memory
from ..devices.collectives import HOST_COLLECTIVE
from ..runtime.activations import treated
from ..runtime.emulation import PassHolder
from ..runtime.measurements import reference_seconds
from ..runtime.preload.process import dying_with
from ..runtime.setup import keep_freed_memory
from ..schema.errors import HetflowError
from ..schema.options import Activations, option
from ..schema.plan import PassTime
from . import targets
from .bench import Bench
from .estimate import answer_counts
from .exchange import exchange, exchange_messages, hold_store
from .layers import measure_layers
from .rehearsal import rehearse
from .script_loop import receiving, run_measured
from .timing import RepeatPolicy

# The memory of a worker's process without a model: Python, torch, the runtime, the group.
# A CPU's memory is that of the whole process, so this part of it is counted once for each worker.
# It is read after the model has trained and has been dropped again: by then the libraries have
# loaded their kernels and what they set up on first use.


def warm_up(bench: Bench, batch_size: int) -> None:
    """Train a step, and join a group of one: kernels, a group's threads and buffers are loaded."""
    import torch
    import torch.distributed as dist

    bench.run_step(bench.make_batch(batch_size))
    with tempfile.TemporaryDirectory(prefix="hetflow-base-") as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group(HOST_COLLECTIVE, store=store, rank=0, world_size=1)
        try:
            dist.all_reduce(torch.zeros(1))
        finally:
            dist.destroy_process_group()


def main() -> None:
    """Serve requests until the input ends."""
    die_with_parent()
    requests, answers = _private_channels()
    server = _Server()

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    receive = receiving(requests)
    while True:
        request = receive()
        if request["operation"] == "script":
            del request["operation"]
            script = partial(run_measured, receive=receive, answer=answer)
            answer(_answered(partial(script, **request)))
            os._exit(0)  # the script's own exit functions would save or report
        answer(_answered(partial(server.answer, request)))


def die_with_parent() -> None:
    """Have the kernel end this process with its parent, however the parent ends.

    Ctrl-C reaches the whole group of processes; the parent handles it and ends us.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dying_with(os.getppid())()


def _private_channels() -> tuple[TextIO, TextIO]:
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


class _Server:
    """Holds the loaded workload between requests."""

    def __init__(self) -> None:
        self.bench: Bench | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a request asks for."""
        operation = request.pop("operation")
        if operation == "load":
            self.bench, facts = _load(**request)
            return facts
        if operation == "base_memory":
            return {"bytes": self._base_memory(**request)}
        return _OPERATIONS[operation](self.bench, **request)

    def _base_memory(self, batch_size: int) -> int | None:
        """What is left without the workload; 0 on GPUs, whose peaks are the allocator's alone."""
        bench, self.bench = self.bench, None
        if bench is None or not bench.backend.is_host:
            return 0
        warm_up(bench, batch_size)
        del bench
        gc.collect()  # then all unreferenced memory is returned to the system
        ctypes.CDLL(None).malloc_trim(0)
        return memory.resident_memory_bytes()


def _answered(work: Callable[[], Any]) -> dict[str, Any]:
    """The answer to a request; faults of the workload and lack of memory are answers too."""
    try:
        return {"ok": work()}
    except HetflowError as error:
        return {"error": error.message, "hint": error.hint, "traceback": traceback.format_exc()}
    except Exception as error:
        # The workload's code or ours: whoever asked is told, with the whole traceback.
        if is_out_of_memory(error):
            return {"out_of_memory": True}
        return {
            "error": f"the measuring process failed: {first_cause(error)}",
            "hint": f"{option('debug')} shows the whole traceback",
            "traceback": traceback.format_exc(),
        }


def first_cause(error: BaseException) -> str:
    """The error at the root of a chain in one line, and where it was raised."""
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        error = before
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return targets.one_line(error) + where


def _load(
    target: str,
    device: str,
    memory_bytes: int,
    optimizer: str,
    num_threads: int = 1,
    blocks: Sequence[str] = (),
) -> tuple[Bench, dict[str, Any]]:
    import torch

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    backend = backend_of(device)
    backend.limit_memory(memory_bytes)
    if backend.is_host:
        # What a worker of a launch imports, so that measured peaks hold it.
        from ..runtime import start  # noqa: F401
        from ..runtime.pipeline import engine  # noqa: F401
    bench = Bench(targets.load(targets.parse(target)), device, optimizer, blocks)
    if backend.is_host:
        # Where `prepare` does: a model that lies among kept memory has passes 4 % slower.
        keep_freed_memory()
    facts = {
        "weight_bytes": bench.weight_bytes,
        "frozen_weight_bytes": bench.frozen_weight_bytes,
        "num_parameters": bench.num_parameters,
        "blocks": bench.blocks,
        "optimizer": type(bench.optimizer).__name__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "reference_seconds": reference_seconds(torch.device(device)),
        "peak_memory_reset": memory.reset_peak(),
    }
    return bench, facts


def _hold(
    bench: Bench, batch_size: int, passes: list[tuple[int, float]], repeats: int
) -> dict[str, Any]:
    table = [PassTime(batch_size=size, step_seconds=seconds) for size, seconds in passes]
    holder = PassHolder(table)
    return {"seconds": bench.held(batch_size, holder, repeats), "num_overruns": holder.num_overruns}


def _measured(
    bench: Bench, batch_size: int, policy: dict[str, Any], activations: Activations
) -> dict[str, Any]:
    with treated(bench.model, activations, bench.blocks):
        return dataclasses.asdict(bench.measure(batch_size, RepeatPolicy(**policy)))


_OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "measure": _measured,
    "optimizer_state": Bench.optimizer_state,
    "hold": _hold,
    "layers": measure_layers,
    "count": lambda _, **request: answer_counts(**request),
    "exchange": exchange,
    "messages": exchange_messages,
    "rehearse": rehearse,
    "store": hold_store,
}


if __name__ == "__main__":
    main()
    sys.exit(0)
