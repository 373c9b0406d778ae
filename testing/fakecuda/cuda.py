"""The Python side of the software device: ``torch.cuda`` and NCCL's place in torch.distributed.

``load`` runs before torch does (torch remembers that there is no CUDA), ``install`` after; see
``site/sitecustomize.py``. The environment is read when CUDA is first used, as CUDA does:

    FAKECUDA                    the machine's cards; see ``cards.machine``
    FAKECUDA_HOST               the machine's name, also for ``socket.gethostname``
    FAKECUDA_PLATFORM           ``rocm`` for AMD's build of torch
    FAKECUDA_FAULTS             a folder for races and wrong collectives, a file a process
    FAKECUDA_BESIDE_TENSORS     what no tensor holds; see ``cards.beside_tensors``
    FAKECUDA_WATCHDOG_SECONDS   from a lost peer to SIGABRT; 1 by default
    FAKECUDA_TIMELINE           a folder for what the devices are asked for; see ``timeline.py``
    FAKECUDA_COMMUNICATORS      how many a process can make; the next one is NCCL's system error
"""

import ctypes
import importlib
import os
import socket
import sys
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from . import build, cards

_NCCL_VERSION = (2, 27, 5)


def load() -> None:
    """Register the device with torch's libraries; torch itself is not imported yet."""
    ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL)


def install() -> None:
    """Make ``torch.cuda`` speak of the device, and offer its NCCL."""
    import torch

    path = str(build.library())
    spec = spec_from_file_location("_fakecuda", path, loader=ExtensionFileLoader("_fakecuda", path))
    assert spec is not None
    assert spec.loader is not None
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["_fakecuda"] = native
    for name, value in _cuda(torch, native).items():
        for module in (torch.cuda, torch.cuda.random):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch._C._cuda_getDeviceCount = torch.cuda.device_count
    torch._C._cuda_getCurrentRawStream = native.get_stream
    torch._C._cuda_getDevice = native.current_device
    if os.environ.get("FAKECUDA_PLATFORM") == "rocm":
        torch.version.cuda, torch.version.hip = None, "6.4.0"
    else:
        torch.version.cuda = "12.6"
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # else it warns that there is none
    _offer_nccl(native)
    _resize_storages(torch, native)
    _mark_steps(native)
    own_name = socket.gethostname
    socket.gethostname = lambda: os.environ.get("FAKECUDA_HOST") or own_name()


def _resize_storages(torch: Any, native: Any) -> None:
    # A CPU build of torch resizes no storage of CUDA's.
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return original(storage, size)
        of = torch.empty(0, dtype=torch.uint8, device=storage.device)
        of = of.set_(storage, 0, (storage.nbytes(),), (1,))
        native.resize_storage(of, size)
        return storage

    torch.UntypedStorage.resize_ = resize


def _cuda(torch: Any, native: Any) -> dict[str, Any]:
    """What ``torch.cuda`` gets, by name."""
    seen: list[cards.Card] = []
    waiting_seeds: list[int] = []  # the last, of before the first use

    def first_use() -> None:
        # By process: a fork of one that has used CUDA must fail, as with the real driver.
        if native.initialised_in() == os.getpid():
            return
        if native.initialised_in():
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the 'spawn' start method"
            )
        seen[:] = cards.visible()
        if not seen:
            raise RuntimeError("No CUDA GPUs are available")
        native.configure([card.memory_bytes for card in seen])
        native.set_beside_tensors(*cards.beside_tensors()[:2])
        torch.cuda._initialized = True
        for index, card in enumerate(seen):
            host = os.environ.get("FAKECUDA_HOST", "host")
            native.note(f"device\t{index}\t{host}\t{card.spec}\t{card.uuid}")
        for seed in waiting_seeds:
            manual_seed_all(seed)

    def count() -> int:
        return len(seen) if native.initialised_in() == os.getpid() else len(cards.visible())

    native.ask(first_use, count)

    def index_of(device: Any) -> int:
        first_use()
        if device is None:
            return int(native.current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(native.current_device()) if found is None else int(found)

    def properties(device: Any = None) -> SimpleNamespace:
        card = seen[index_of(device)]
        major, minor = card.capability
        return SimpleNamespace(
            name=card.name,
            major=major,
            minor=minor,
            total_memory=card.memory_bytes,
            multi_processor_count=card.num_multiprocessors,
            uuid=card.uuid,
            pci_bus_id=card.pci_bus_id,
            pci_device_id=0,
            pci_domain_id=0,
            gcnArchName="gfx90a",
        )

    class _StreamKind(type):
        def __instancecheck__(cls, found: object) -> bool:
            return isinstance(found, torch.Stream)

    class Stream(metaclass=_StreamKind):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            return torch.Stream(device=torch.device("cuda", index_of(device)))

    class _EventKind(type):
        def __instancecheck__(cls, found: object) -> bool:
            return isinstance(found, torch.Event)

    class Event(metaclass=_EventKind):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            first_use()
            return torch.Event(device="cuda", enable_timing=enable_timing)

    def stream_of(device: Any, number: int) -> Any:
        index = index_of(device)
        return torch.Stream(stream_id=number, device_index=index, device_type=1)

    capturing: list[bool] = []

    class CUDAGraph:
        """Nothing is recorded, and nothing can be replayed."""

        replay = _missing("replay of CUDA graphs")

    class Graph:
        def __init__(self, _: CUDAGraph, **__: Any) -> None: ...

        def __enter__(self) -> None:
            capturing.append(True)

        def __exit__(self, *_: object) -> None:
            capturing.pop()

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            if self._stream is None:
                return
            index = self._stream.device_index
            self._device, self._before = native.current_device(), native.get_stream(index)
            native.set_device(index)
            native.set_stream(index, self._stream.stream_id)

        def __exit__(self, *_: object) -> None:
            if self._stream is not None:
                native.set_stream(self._stream.device_index, self._before)
                native.set_device(self._device)

    class DeviceContext:
        def __init__(self, device: Any) -> None:
            self._index = index_of(device)

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            native.set_device(self._before)

    def manual_seed_all(seed: int) -> None:
        waiting_seeds[:] = [seed]
        if native.initialised_in() == os.getpid():
            for index in range(len(seen)):
                native.seed(index, seed % (1 << 64))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = index_of(device)
        all_bytes = seen[index].memory_bytes
        taken = segments(native.used(index), index) + native.beside_tensors(index)
        return max(0, all_bytes - taken), all_bytes

    def segments(num_bytes: int, index: int) -> int:
        segment = cards.beside_tensors()[2]
        free = seen[index].memory_bytes - native.beside_tensors(index)
        return int(max(num_bytes, min(-(-num_bytes // segment) * segment, free)))

    def used(device: Any = None) -> int:
        return int(native.used(index_of(device)))

    def peak(device: Any = None) -> int:
        return int(native.peak(index_of(device)))

    def memory_stats(device: Any = None) -> dict[str, int]:
        now, most, index = used(device), peak(device), index_of(device)
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": most,
            "reserved_bytes.all.current": segments(now, index),
            "reserved_bytes.all.peak": segments(most, index),
        }

    for name in ("_scatter", "_gather", "_broadcast", "_broadcast_coalesced"):
        setattr(torch._C, name, _missing("torch.nn.DataParallel; use DistributedDataParallel"))
    # As without a profiler that listens to them.
    marks = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA")
    vars(torch.cuda.nvtx)["_nvtx"] = SimpleNamespace(**dict.fromkeys(marks, lambda *_: 0))

    return {
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: native.initialised_in() not in (0, os.getpid()),
        "_lazy_init": first_use,
        "init": first_use,
        "is_available": lambda: count() > 0,
        "is_initialized": lambda: native.initialised_in() == os.getpid(),
        "device_count": count,
        "get_arch_list": lambda: ["sm_60", "sm_70", "sm_75", "sm_80", "sm_90"],
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: seen[index_of(device)].capability,
        "can_device_access_peer": lambda device, peer: index_of(device) != index_of(peer),
        "current_device": lambda: index_of(None),
        "set_device": lambda device: native.set_device(index_of(device)),
        "device": DeviceContext,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": lambda device=None: stream_of(
            device, native.get_stream(index_of(device))
        ),
        "default_stream": lambda device=None: stream_of(device, 0),
        "synchronize": lambda device=None: native.synchronize(index_of(device)),
        "CUDAGraph": CUDAGraph,
        "graph": Graph,
        "is_current_stream_capturing": lambda: bool(capturing),
        "empty_cache": lambda: None,
        "mem_get_info": mem_get_info,
        "memory_allocated": used,
        "memory_reserved": lambda device=None: segments(used(device), index_of(device)),
        "max_memory_allocated": peak,
        "max_memory_reserved": lambda device=None: segments(peak(device), index_of(device)),
        "memory_stats": memory_stats,
        "memory_summary": _missing("torch.cuda.memory_summary; torch.cuda.memory_stats has sums"),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "manual_seed_all": manual_seed_all,
        "manual_seed": lambda seed: native.seed(index_of(None), seed % (1 << 64)),
        "get_rng_state": lambda device="cuda": native.get_random_state(index_of(device)),
        "set_rng_state": lambda state, device="cuda": native.set_random_state(
            index_of(device), state
        ),
    }


def _missing(what: str) -> Any:
    """What stands for a function of torch's that the device does not have."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"the software device has no {what} (docs/gpus.md says what it models)")

    return fail


def _mark_steps(native: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[Any] = []

    def mark(optimizer: Any, *_: Any) -> None:
        # One mark a step, however many optimizers there are: that of the first that stepped.
        if not first:
            first.append(optimizer)
        if optimizer is first[0] and native.initialised_in() == os.getpid():
            native.mark("step")

    register_optimizer_step_post_hook(mark)


def _offer_nccl(native: Any) -> None:
    import torch
    import torch.distributed as dist

    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

    class Options:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._timeout = c10d.default_pg_timeout
            self.is_high_priority_stream = False
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self.split_from = None

    class _NcclKind(type):
        def __instancecheck__(cls, found: object) -> bool:
            return isinstance(found, native.FakeNCCL)

    class ProcessGroupNCCL(metaclass=_NcclKind):
        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            _check_distinct(store, rank, size)
            _check_number()
            over = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            if rank == 0:
                store.set("fakecuda/name", uuid4().hex)
            name = store.get("fakecuda/name").decode()
            native.note(f"group\t{name}\t{rank}\t{size}\t{torch.cuda.current_device()}")
            return native.FakeNCCL(rank, size, over, name)

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]

    made_by: list[int] = []  # process ids: a fork begins anew

    def _check_number() -> None:
        own = os.getpid()
        made_by[:] = [*filter(own.__eq__, made_by), own]
        most = os.environ.get("FAKECUDA_COMMUNICATORS")
        if most and len(made_by) > int(most):
            raise dist.DistBackendError(
                "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
                "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
            )

    def _check_distinct(store: Any, rank: int, size: int) -> None:
        seen: list[Any] = [*map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
        facts = seen[torch.cuda.current_device()]
        # One of several may yet be changed before the first collective, where NCCL looks.
        is_chosen = len({each.pci_bus_id for each in seen}) == 1
        own = f"{socket.gethostname()}/{facts.pci_bus_id}" if is_chosen else "any"
        store.set(f"fakecuda/bus/{rank}", own)
        if not is_chosen:
            return
        for other in range(size):
            if other != rank and store.get(f"fakecuda/bus/{other}").decode() == own:
                raise dist.DistBackendError(
                    f"NCCL error: invalid usage. Duplicate GPU detected : rank {rank} and rank "
                    f"{other} both on CUDA device {facts.pci_bus_id:x}000"
                )

    register = c10d.ProcessGroup._register_backend

    def register_staged(group: Any, device: Any, kind: Any, backend: Any = None) -> None:
        if device.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            # Under its own kind torch would take the one that it has for the host.
            kind, backend = c10d.ProcessGroup.BackendType.CUSTOM, native.StagedGloo(backend)
        register(group, device, kind, backend)

    c10d.ProcessGroup._register_backend = register_staged
    modules: tuple[Any, ...] = (c10d, dist)
    for module in modules:
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.is_nccl_available = lambda: True
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: _NCCL_VERSION
