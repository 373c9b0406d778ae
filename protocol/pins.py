"""What a determinism level fixes before torch is imported: environment variables of a worker.

Pure, and without torch: the launcher calls it.
"""

from collections.abc import Mapping

from ..schema.launch import Determinism

# oneDNN, ATen and MKL choose code by what the CPU has; these are on every x86 server since 2013.
CPU_PINS = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # The only mode that MKL promises to be equal on Intel's and others' CPUs.
    "MKL_CBWR": "COMPATIBLE",
}


def pins(level: Determinism) -> dict[str, str]:
    """Environment variables that a worker at this level must be started with."""
    if level == "none":
        return {}
    fixed = {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # cuBLAS chooses its split of long sums by the workspace it has.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if level == "heterogeneous":
        fixed |= {**CPU_PINS, "NVIDIA_TF32_OVERRIDE": "0"}
    return fixed


def missing_pins(level: Determinism, environment: Mapping[str, str]) -> dict[str, str]:
    """The pins that an environment does not have, where another launcher made it."""
    return {name: value for name, value in pins(level).items() if environment.get(name) != value}
