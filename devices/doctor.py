"""What is missing on this machine: facts about it, then findings from the facts alone.

``collect_facts`` looks; ``findings`` judges, and is a pure function, so that it can be tested for
machines that are not at hand.
"""

import getpass
import importlib.util
import math
import os
import platform
import re
import shutil
import socket
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from ..schema.errors import FileError
from ..schema.files import read_text
from ..schema.spelling import whole_number
from .cuda import nvidia_driver
from .memory import free_memory_bytes, machine_memory_bytes
from .torch_support import (
    OLDEST,
    TF32_OVERRIDE,
    emulated_bfloat16,
    is_too_old,
    mixed_tf32,
)

EXTRAS = {
    "matplotlib": ("plots", "plots in `hetflow show`"),
    "sklearn": ("examples", "the digits data of `hetflow demo`"),
    "transformers": ("hf", "hf: targets of `hetflow profile`"),
    "torchvision": ("torchvision", "torchvision: targets of `hetflow profile`"),
    "pynvml": ("gpu", "GPU facts where nvidia-smi is missing"),
}
_QUERY = "name,compute_cap,memory.total,driver_version"
_LOW_DISK_BYTES = 1 << 30
_CU126 = "install torch's CUDA 12.6 build (cu126), https://pytorch.org/get-started/locally;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its driver reports it, whether or not torch can use it."""

    name: str
    compute_capability: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is installed and present. Unknown is None or empty."""

    python: str
    torch: str | None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    torch_archs: tuple[str, ...] = ()
    torch_devices: tuple[str, ...] = ()
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    backends: tuple[str, ...] = ()
    missing_extras: tuple[str, ...] = ()
    cores: int = 1
    omp_num_threads: str | None = None
    tf32_override: str | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    disk_free_bytes: int | None = None

    @property
    def _build(self) -> tuple[str, str]:
        """What torch was built for."""
        if self.torch_hip is not None:
            return "ROCm build", self.torch_hip
        return "CUDA build", self.torch_cuda or "none (CPU build)"

    def rows(self) -> list[tuple[str, str]]:
        """The facts for people: a label and a value each."""
        gib = 1 << 30
        return [
            ("python", self.python),
            ("torch", self.torch or "not installed"),
            self._build,
            ("CUDA archs", " ".join(self.torch_archs) or "none"),
            ("driver", self.driver or "none"),
            ("GPUs by driver", ", ".join(gpu.name for gpu in self.gpus) or "none"),
            ("GPUs by torch", ", ".join(self.torch_devices) or "none"),
            ("backends", " ".join(self.backends) or "none"),
            ("cores", f"{self.cores} (OMP_NUM_THREADS {self.omp_num_threads or 'unset'})"),
            ("memory", f"{self.memory_bytes / gib:.1f} GiB" if self.memory_bytes else "unknown"),
            (
                "memory free",
                f"{self.memory_free_bytes / gib:.1f} GiB; its GPUs share what they offload"
                if self.memory_free_bytes
                else "unknown",
            ),
            (
                "disk free",
                f"{self.disk_free_bytes / gib:.1f} GiB" if self.disk_free_bytes else "unknown",
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding and how to fix it. Errors make hetflow unusable; warnings cost a part."""

    level: Literal["error", "warning", "info", "ok"]
    text: str
    mend: str | None = None


def is_usable(found: tuple[Finding, ...]) -> bool:
    """Whether the main job can run on this machine at all."""
    return all(finding.level != "error" for finding in found)


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Judge the facts: what does not work, and what to do about it. Worst first."""
    found = [
        *_torch_findings(facts),
        *_gpu_findings(facts),
        *_precision_findings(facts),
        *_machine_findings(facts),
    ]
    found += [
        Finding(
            level="info",
            text=f"{module} is not installed; it is needed for {EXTRAS[module][1]}",
            mend=f"pip install 'hetflow[{EXTRAS[module][0]}]'",
        )
        for module in facts.missing_extras
    ]
    if all(finding.level == "info" for finding in found):
        found.insert(0, Finding(level="ok", text="everything the main job needs is here"))
    order = ("error", "warning", "ok", "info")
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


def _torch_findings(facts: Facts) -> list[Finding]:
    if facts.torch is None:
        return [Finding(level="error", text="torch is not installed", mend="pip install torch")]
    found = []
    if is_too_old(facts.torch):
        oldest = ".".join(map(str, OLDEST))
        found.append(
            Finding(
                level="error",
                text=f"torch {facts.torch} is too old: training needs {oldest} or newer",
                mend=f"pip install 'torch>={oldest}'",
            )
        )
    if "gloo" not in facts.backends:
        found.append(
            Finding(
                level="error",
                text="this torch has no gloo backend, so workers cannot talk to each other",
                mend="install torch from pytorch.org's or the package index's wheels",
            )
        )
    if facts.torch_devices and "nccl" not in facts.backends:
        found.append(
            Finding(
                level="warning",
                text="this torch has no NCCL backend; CUDA devices synchronise slowly, by gloo",
            )
        )
    return found


def _gpu_findings(facts: Facts) -> list[Finding]:
    if facts.torch is None or not facts.gpus:
        return []
    if facts.torch_cuda is None:
        return [
            Finding(
                level="warning",
                text=f"{_names(facts.gpus)} cannot be used: torch {facts.torch} is a "
                f"{'CPU' if facts.torch_hip is None else 'ROCm'} build",
                mend="install a CUDA build: https://pytorch.org/get-started/locally",
            )
        ]
    found = [finding for gpu in facts.gpus for finding in _generation_findings(gpu, facts)]
    unseen = len(facts.gpus) - len(facts.torch_devices)
    if unseen > 0 and not found:
        found.append(
            Finding(
                level="warning",
                text=f"the driver reports {len(facts.gpus)} GPUs, torch sees "
                f"{len(facts.torch_devices)}",
                mend="look at CUDA_VISIBLE_DEVICES, and whether the driver "
                f"({facts.driver or 'unknown'}) is new enough for CUDA {facts.torch_cuda}",
            )
        )
    return list(dict.fromkeys(found))


def _precision_findings(facts: Facts) -> list[Finding]:
    if facts.torch_cuda is None:
        return []
    capabilities = {gpu.name: gpu.compute_capability for gpu in facts.gpus}
    override = {} if facts.tf32_override is None else {TF32_OVERRIDE: facts.tf32_override}
    emulated, mixed = emulated_bfloat16(capabilities), mixed_tf32(capabilities, override)
    found = []
    if mixed is not None:
        found.append(Finding(level="warning", text=mixed))
    if emulated is not None:
        found.append(Finding(level="info", text=emulated))
    return found


def _generation_findings(gpu: Gpu, facts: Facts) -> list[Finding]:
    """Whether the installed torch was built for this GPU's generation."""
    if gpu.compute_capability is None:
        return []
    capability = _version(gpu.compute_capability)
    oldest = _oldest_capability(facts)
    if oldest is None or _has_code_for(capability, facts):
        return []
    said = f"{gpu.name} has compute capability {gpu.compute_capability}"
    if capability >= oldest:
        return [
            Finding(
                level="warning",
                text=f"{said}; torch {facts.torch} (CUDA {facts.torch_cuda}) is too old for it",
                mend="install a newer torch: https://pytorch.org/get-started/locally",
            )
        ]
    return [
        Finding(
            level="warning",
            text=f"{said}; torch {facts.torch} (CUDA {facts.torch_cuda}) starts at "
            f"{oldest[0]}.{oldest[1]} and cannot use it",
            mend=f"{_CU126} such builds are planned to end with torch 2.15"
            if capability >= (5, 0)
            else "no current torch supports this generation",
        )
    ]


def _oldest_capability(facts: Facts) -> tuple[int, int] | None:
    """The oldest generation that the installed torch has code for."""
    archs = [_arch(name) for name in facts.torch_archs]
    known = [capability for _, capability in filter(None, archs)]
    if known:
        return min(known)
    # Without the list: wheels from torch 2.11 with CUDA 12.8 or later start at Turing.
    if _version(facts.torch or "0") >= (2, 11) and _version(facts.torch_cuda or "0") >= (12, 8):
        return 7, 5
    return None


def _has_code_for(capability: tuple[int, int], facts: Facts) -> bool:
    archs = list(filter(None, (_arch(name) for name in facts.torch_archs)))
    if not archs:
        return capability >= (_oldest_capability(facts) or (0, 0))
    # Machine code (sm) runs on later minor versions of its generation; PTX (compute) on all later.
    return any(
        found <= capability and (kind == "compute" or found[0] == capability[0])
        for kind, found in archs
    )


def _arch(name: str) -> tuple[str, tuple[int, int]] | None:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
    return (match[1], (int(match[2]), int(match[3]))) if match else None


def _machine_findings(facts: Facts) -> list[Finding]:
    found = []
    threads = facts.omp_num_threads
    if (whole_number(threads or "") or 0) > facts.cores:
        found.append(
            Finding(
                level="warning",
                text=f"OMP_NUM_THREADS={threads} is more than the {facts.cores} cores here; "
                "workers would slow each other down",
                mend="unset OMP_NUM_THREADS; hetflow gives each CPU worker one thread",
            )
        )
    if facts.disk_free_bytes is not None and facts.disk_free_bytes < _LOW_DISK_BYTES:
        found.append(
            Finding(
                level="warning",
                text=f"{facts.disk_free_bytes >> 20} MiB of disk left; checkpoints may not fit",
            )
        )
    return found


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus))


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def collect_facts() -> Facts:
    """Look at this machine. Imports torch; starts nothing but nvidia-smi, where there is one."""
    return Facts(
        python=platform.python_version(),
        driver=nvidia_driver(),
        gpus=_gpus_of_nvidia_smi() or _gpus_of_nvml(),
        missing_extras=tuple(name for name in EXTRAS if importlib.util.find_spec(name) is None),
        cores=len(os.sched_getaffinity(0)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        tf32_override=os.environ.get(TF32_OVERRIDE),
        memory_bytes=machine_memory_bytes(),
        memory_free_bytes=free_memory_bytes(),
        disk_free_bytes=shutil.disk_usage(".").free,
        **_torch_facts(),
    )


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {"torch": None}
    cuda = torch.cuda.is_available()
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    available = dist.is_available()
    return {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_archs": tuple(torch.cuda.get_arch_list()) if cuda else (),
        "torch_devices": tuple(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
        if cuda
        else (),
        "backends": tuple(name for name, check in checks.items() if available and check()),
    }


def _gpus_of_nvidia_smi() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read ``nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version`` (MiB)."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            name, capability, mebibytes, _ = fields
            gpus.append(
                Gpu(
                    name=name,
                    compute_capability=capability
                    if re.fullmatch(r"\d+\.\d+", capability)
                    else None,
                    memory_bytes=int(mebibytes) << 20 if mebibytes.isdigit() else None,
                )
            )
    return tuple(gpus)


def _gpus_of_nvml() -> tuple[Gpu, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=str(pynvml.nvmlDeviceGetName(handle)),
                compute_capability="{}.{}".format(
                    *pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                ),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


# What a user sends after a trial on GPUs of their own: versions, topology, results of the suite.
#
# The document has no names of hosts or users, no paths or addresses, and no serial numbers.

SCHEMA = "hetflow.report/1"
_PATH = re.compile(r"(?<![\w/])~?/[^\s'\",:;()\[\]]+")
# Of IPv4, IPv6 and Ethernet. Versions of four numbers, as drivers have, have larger or fewer ones.
_ADDRESS = re.compile(
    r"(?<![\w.])((25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}"
    r"|([0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:)+:[0-9a-f:]*)(?![\w.])",
    re.IGNORECASE,
)
_LONGEST_TEXT = 300
_LEAST_NAME = 3  # characters; shorter names would be found inside words


def report(
    facts: Facts, findings: tuple[Finding, ...], suite: dict[str, Any] | None
) -> dict[str, Any]:
    """The document."""
    document = {
        "schema": SCHEMA,
        "hetflow": version("hetflow"),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "facts": asdict(facts),
        "findings": [finding.text for finding in findings],
        "collective_versions": _collective_versions(),
        "topology": topology(),
        "suite": suite,
    }
    cleaned: dict[str, Any] = scrubbed(document, _own_names())
    return cleaned


def topology() -> dict[str, Any]:
    """The GPUs that torch sees, and which of them reach which others' memory directly."""
    try:
        import torch
    except ImportError:
        return {"gpus": [], "peers": []}
    if not torch.cuda.is_available():
        return {"gpus": [], "peers": []}
    number = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(index) for index in range(number)]
    # Slices of one GPU have one place on the bus; the places themselves are nobody's business.
    places = [
        (getattr(p, "pci_domain_id", 0), getattr(p, "pci_bus_id", n)) for n, p in enumerate(found)
    ]
    return {
        "gpus": [
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": int(properties.total_memory),
                "num_multiprocessors": int(properties.multi_processor_count),
                "card": sorted(set(places)).index(place),
            }
            for properties, place in zip(found, places, strict=True)
        ],
        "peers": [
            [n for n in range(number) if n != own and torch.cuda.can_device_access_peer(own, n)]
            for own in range(number)
        ],
    }


def _collective_versions() -> dict[str, str]:
    from .backend import DEVICES

    try:
        import torch  # noqa: F401
    except ImportError:
        return {}
    found = {b.collective: b.collective_version() for b in DEVICES.registered}
    return {name: text for name, text in found.items() if text is not None}


def suite_results(path: Path) -> dict[str, Any]:
    """What ``pytest --junitxml`` has written: how many tests ended how, and each test's end.

    Of a failure the type of the error is kept, of a skipped test its reason; no tracebacks. What a
    test has measured (``record_property``) is in ``measured``, as far as it is a number.

    Raises:
        FileError: It cannot be read, or is no such file.
    """
    try:
        root = ElementTree.fromstring(read_text(path))
        tests = [_result_of(case) for case in root.iter("testcase")]
    except (ElementTree.ParseError, ValueError) as error:
        raise FileError(
            f"{path}: no results of pytest ({error})", hint="write them by `--junitxml FILE`"
        ) from None
    if not tests:
        raise FileError(f"{path}: holds no tests", hint="write them by `--junitxml FILE`")
    counted = Counter(test["outcome"] for test in tests)
    return {"num_tests": dict(sorted(counted.items())), "tests": tests}


def _result_of(case: ElementTree.Element) -> dict[str, Any]:
    seconds = float(case.get("time", 0))
    if not math.isfinite(seconds):
        raise ValueError(f"a test of {seconds} seconds")
    test: dict[str, Any] = {
        "test": f"{case.get('classname', '')}::{case.get('name', '')}",
        "outcome": "passed",
        "seconds": seconds,
    }
    measured = {one.get("name", ""): _number(one.get("value", "")) for one in case.iter("property")}
    if numbers := {name: value for name, value in measured.items() if value is not None}:
        test["measured"] = numbers
    for outcome in ("skipped", "failure", "error"):
        found = case.find(outcome)
        if found is not None:
            said = found.get("message", "")
            test["outcome"] = {"failure": "failed"}.get(outcome, outcome)
            test["said"] = said if outcome == "skipped" else re.split(r"[:\s]", said, maxsplit=1)[0]
    return test


def _number(text: str) -> float | None:
    with suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None


def scrubbed(value: Any, names: tuple[str, ...]) -> Any:
    """Any JSON value without paths, addresses and these names, texts cut to a few lines."""
    if isinstance(value, dict):
        return {key: scrubbed(entry, names) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(entry, names) for entry in value]
    if not isinstance(value, str):
        return value
    text = value if value == SCHEMA else _ADDRESS.sub("(address)", _PATH.sub("(path)", value))
    for name in names:
        text = re.sub(rf"\b{re.escape(name)}\b", "(name)", text)
    return text[:_LONGEST_TEXT]


def _own_names() -> tuple[str, ...]:
    """This host's and this user's, the longest first."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0], Path.home().name}
    try:
        found.add(getpass.getuser())
    except (KeyError, OSError, ImportError):
        pass  # no user of that number, as in some containers
    return tuple(sorted((n for n in found if len(n) >= _LEAST_NAME), key=len, reverse=True))
