"""Compare the torch builds of the workers and refuse those that cannot work together.

Hosts with different GPUs may need different builds of torch: no one build has kernels for both the
oldest and the newest GPUs. Where NCCL versions differ, NCCL fails with an error that names no host.
Kernels of different torch releases give different bits.
"""

import socket
from collections.abc import Callable, Sequence

import torch

from ..devices.backend import backend_of
from ..devices.collectives import HOST_COLLECTIVE
from ..schema.errors import TargetError
from ..schema.files import to_json
from ..schema.launch import Determinism
from ..schema.options import option
from ..schema.records import Name, adapter_of, record
from .log import log


@record
class Build:
    """The torch build of one worker.

    Attributes:
        host: Name of the worker's host.
        torch: Torch's version, with that of the build.
        toolkit: Toolkit that torch was built with for the worker's device, such as a CUDA version.
        collective_version: Version of the collectives' library; None where its versions mix.
    """

    host: Name
    torch: Name
    toolkit: Name | None = None
    collective_version: Name | None = None

    @property
    def release(self) -> str:
        """Torch's version without the build's suffix: 2.9.1 for 2.9.1+cu128."""
        return self.torch.partition("+")[0]

    def text(self) -> str:
        """The record as text, for the store."""
        return to_json(self)


def own_build(device: torch.device) -> Build:
    """The build of this process, for its device."""
    backend = backend_of(device)
    return Build(
        host=socket.gethostname() or "unknown",
        torch=torch.__version__,
        toolkit=backend.toolkit(),
        collective_version=backend.collective_version(),
    )


def parse_build(text: str) -> Build:
    """Read a build back from its text.

    Raises:
        pydantic.ValidationError: The text is not such a record.
    """
    build: Build = adapter_of(Build).validate_json(text)
    return build


def check_builds(builds: Sequence[Build], collective: str, determinism: Determinism) -> None:
    """Refuse builds that cannot work together; warn of those that may give different bits.

    Args:
        builds: [ranks] each worker's build.
        collective: The backend of the process group, such as ``nccl``.
        determinism: The level that the launch promises.

    Raises:
        TargetError: The workers have different versions of the backend; or different releases of
            torch, under a level that promises equal bits.
    """
    unlike = None
    if collective != HOST_COLLECTIVE:
        unlike = _unlike(builds, lambda build: build.collective_version or "none")
    if unlike is not None:
        raise TargetError(
            f"{collective.upper()} of unlike versions cannot work together: {unlike}",
            hint="install builds of torch with one version of it on all hosts",
        )
    unlike = _unlike(builds, lambda build: build.release)
    if unlike is None:
        return
    if determinism != "none":
        raise TargetError(
            f"{option('determinism', determinism)} needs one release of torch on all "
            f"hosts: {unlike}",
            hint="install the same torch everywhere, or launch with "
            f"{option('determinism', 'none')}",
        )
    log.warning(f"workers run unlike releases of torch, which may fail together: {unlike}")


def _unlike(builds: Sequence[Build], version_of: Callable[[Build], str]) -> str | None:
    """Name two ranks whose versions differ; None where all are equal."""
    first = builds[0]
    for rank, build in enumerate(builds):
        if version_of(build) != version_of(first):
            return f"{_said(0, first, version_of)}, {_said(rank, build, version_of)}"
    return None


def _said(rank: int, build: Build, version_of: Callable[[Build], str]) -> str:
    toolkit = f", {build.toolkit}" if build.toolkit else ""
    return f"rank {rank} on {build.host} has {version_of(build)} (torch {build.torch}{toolkit})"
