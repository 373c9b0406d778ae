"""``cuda``: GPUs of NVIDIA, and of AMD with ROCm, which torch names ``cuda`` too."""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema.cluster import GpuFacts, device_type_names
from .backend import AcceleratorBackend, LocalDevice, device_backend

if TYPE_CHECKING:
    import torch

    from ..schema.launch import Determinism

VISIBLE = "CUDA_VISIBLE_DEVICES"
VISIBLE_TO_ROCM = "HIP_VISIBLE_DEVICES"


@device_backend
class CudaBackend(AcceleratorBackend):
    """GPUs of NVIDIA and AMD."""

    kind = "cuda"
    collective = "nccl"
    early_variables = {
        "CUBLAS_": "cuBLAS's workspaces; to be on the safe side",
        "CUDA_": "the driver reads them at its first use; to be on the safe side",
        "CUDNN_": "as CUBLAS_",
        "NVIDIA_": "as CUDA_; TF32 among them",
    }
    late_variables = dict.fromkeys(
        (VISIBLE, VISIBLE_TO_ROCM), "the driver reads it at its first use, after the fork"
    )

    # Else NCCL's watchdog ends the process when it finds another gone, or late.
    abortable_with = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

    def local_devices(self) -> tuple[LocalDevice, ...]:
        """The visible GPUs by type, in torch's order."""
        gpus = local_gpus()
        by_type: dict[str, list[int]] = {}
        for index, device_type in enumerate(device_type_names(gpus)):
            by_type.setdefault(device_type, []).append(index)
        return tuple(
            self._local(device_type, indices, gpus[indices[0]])
            for device_type, indices in by_type.items()
        )

    def _local(self, device_type: str, indices: list[int], facts: GpuFacts) -> LocalDevice:
        limits = [self.module.get_device_properties(index).total_memory for index in indices]
        return LocalDevice(
            device_type=device_type,
            kind=self.kind,
            name=facts.name,
            torch_devices=tuple(f"{self.kind}:{index}" for index in indices),
            memory_bytes=min(map(int, limits)),
            compute_capability=".".join(map(str, facts.capability)),
            driver=nvidia_driver(),
            distinctions=facts.distinctions,
        )

    def visibility(self, devices: Sequence[str]) -> dict[str, str]:
        """The visible-devices variable, with the entries of this process's own where it is set.

        ROCm reads both variables, and its own wins.
        """
        names = (VISIBLE_TO_ROCM, VISIBLE) if _is_rocm() else (VISIBLE,)
        outer = next((os.environ[name] for name in names if os.environ.get(name)), "")
        entries = [entry.strip() for entry in outer.split(",")] if outer else []
        numbers = [int(device.partition(":")[2]) for device in devices]
        chosen = [entries[n] if n < len(entries) else str(n) for n in numbers]
        return dict.fromkeys(names, ",".join(chosen))

    def pins(self, level: "Determinism") -> dict[str, str]:
        """The workspace by which cuBLAS chooses its split of long sums; no TF32 on unlike types."""
        fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        return fixed | ({"NVIDIA_TF32_OVERRIDE": "0"} if level == "heterogeneous" else {})

    def toolkit(self) -> str | None:
        """CUDA's or ROCm's version."""
        import torch

        for name, version in (("ROCm", torch.version.hip), ("CUDA", torch.version.cuda)):
            if version:
                return f"{name} {version}"
        return None

    def collective_version(self) -> str | None:
        """The version of NCCL or RCCL, which works with its own version only."""
        import torch

        if not hasattr(torch._C, "_nccl_version"):  # which ``version`` asks without a check
            return None
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def identity(self, device: "torch.device") -> str | None:
        """The GPU's place on the PCI bus: NCCL refuses slices of one GPU, though UUIDs differ."""
        properties = self.module.get_device_properties(device)
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        if all(hasattr(properties, name) for name in names):
            return ":".join(f"{getattr(properties, name):02x}" for name in names)
        return str(getattr(properties, "uuid", device.index))

    def arithmetic(self, device: "torch.device") -> str:
        """The GPU's name and number of multiprocessors, by which kernels are chosen."""
        found = self.module.get_device_properties(device)
        return f"{found.name} {found.multi_processor_count}"

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""
        return self.is_initialized() and bool(self.module.is_current_stream_capturing())

    def fix_kernels(self, level: "Determinism") -> None:
        """Use cuDNN's deterministic kernels; no TF32 on unlike types."""
        import torch

        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        if level == "heterogeneous":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.9 advises newer settings
                torch.backends.cuda.matmul.allow_tf32 = False
                torch.backends.cudnn.allow_tf32 = False

    def out_of_memory_words(self) -> tuple[str, ...]:
        """Torch's, and those of the libraries that allocate by themselves.

        A cuDNN convolution that has no room for a workspace finds no algorithm, or fails inside.
        """
        return (
            *super().out_of_memory_words(),
            r"(CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
            "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
            "CUDNN_STATUS_INTERNAL_ERROR",
            "unable to find a valid cuDNN algorithm",
            "(FIND|GET) was unable to find an engine",
            "miopenStatusAllocFailed",
        )


def _is_rocm() -> bool:
    """Whether the torch that is loaded is ROCm's; where none is, nobody has listed devices."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def local_gpus() -> list[GpuFacts]:
    """The visible GPUs, by index; empty where there are none."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        GpuFacts(
            name=str(properties.name),
            capability=(int(properties.major), int(properties.minor)),
            num_multiprocessors=int(properties.multi_processor_count),
            memory_bytes=int(properties.total_memory),
        )
        for properties in found
    ]


def nvidia_driver() -> str | None:
    """The version of the loaded NVIDIA kernel module, where there is one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None
