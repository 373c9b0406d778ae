"""Compile the software device against the torch at hand, once for each source and torch.

The library is kept in the user's cache folder. It takes 15 s of a core, and no CUDA.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("device")
COMPILERS = ("c++", "g++", "clang++")


# A CPU build of torch has none of these. In another the place of CUDA's kernels is taken.
OF_GPU_BUILDS = ("libtorch_cuda.so", "libtorch_hip.so")


class CannotBuild(Exception):
    """There is no compiler, it has refused, or torch is no CPU build; ``str`` says why."""


def library() -> Path:
    """The built library; compiles it where that has not been done.

    Two processes that ask at once compile once: the second waits for the first.

    Raises:
        CannotBuild: Says what is missing.
    """
    check_build(_torch())
    path = _place()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _compile(path)
    return path


def _place() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for fact in (version("torch"), sys.version, sysconfig.get_platform(), str(_torch())):
        digest.update(fact.encode())
    return cache / "hetflow" / f"fakecuda-{digest.hexdigest()[:16]}" / "_fakecuda.so"


def _torch() -> Path:
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    return Path(found.origin).parent


def check_build(torch: Path) -> None:
    """Refuse a torch that has kernels for GPUs of its own.

    Args:
        torch: The package's folder.

    Raises:
        CannotBuild: It has.
    """
    for name in OF_GPU_BUILDS:
        if (torch / "lib" / name).exists():
            raise CannotBuild(
                f"the software CUDA device needs a CPU build of torch, and this one has {name}"
            )


def _compile(path: Path) -> None:
    if not sys.platform.startswith("linux"):
        raise CannotBuild("the software CUDA device is for Linux")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(f"no C++ compiler ({', '.join(COMPILERS)})")
    torch, made = _torch(), path.with_suffix(f".{os.getpid()}")
    includes = [torch / "include", torch / "include/torch/csrc/api/include"]
    includes += [Path(sysconfig.get_paths()["include"])]
    libraries = ["torch_cpu", "torch", "c10", "torch_python"]
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-w"]
    command += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=_fakecuda"]
    command += [f"-I{folder}" for folder in includes]
    command += [str(SOURCES / "module.cpp"), "-o", str(made)]
    command += [f"-L{torch}/lib", *(f"-l{name}" for name in libraries), f"-Wl,-rpath,{torch}/lib"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise CannotBuild(f"{compiler} refused the software CUDA device: {first.strip()}")
    made.rename(path)
