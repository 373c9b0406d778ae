"""What a plug-in is written with: the decorators that register one, and the types that they speak.

    from hetflow import plugins

    @plugins.exporter("markdown", takes=(plugins.SplitPlan,))
    def render(record, name): ...

docs/plugins.md describes each kind. Names are loaded when they are first used: a worker that needs
a schedule loads no solver.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checks.judges import Judge, judge
    from ..devices.accelerator import AcceleratorBackend
    from ..devices.backend import LocalDevice, device_backend
    from ..devices.cpu import cpu_device
    from ..devices.host import HostBackend
    from ..exporters.registry import exporter
    from ..importers.registry import jobs_importer, layer_importer
    from ..schedules.one_f_one_b import one_rank
    from ..schedules.operations import Schedule
    from ..schedules.parallel import parallel_pipelines
    from ..schedules.registry import schedule
    from ..schedules.shape import PipelineShape
    from ..schema.profile import LayerGraph, LayerNode
    from ..solvers.allocation.goals import MaxMin
    from ..solvers.allocation.instance import Instance
    from ..solvers.allocation.policy import policy

_WHERE = {
    "AcceleratorBackend": "devices.accelerator",
    "HostBackend": "devices.host",
    "Instance": "solvers.allocation.instance",
    "Judge": "checks.judges",
    "LayerGraph": "schema.profile",
    "LayerNode": "schema.profile",
    "LocalDevice": "devices.backend",
    "MaxMin": "solvers.allocation.goals",
    "PipelineShape": "schedules.shape",
    "Schedule": "schedules.operations",
    "cpu_device": "devices.cpu",
    "device_backend": "devices.backend",
    "exporter": "exporters.registry",
    "jobs_importer": "importers.registry",
    "judge": "checks.judges",
    "layer_importer": "importers.registry",
    "one_rank": "schedules.one_f_one_b",
    "parallel_pipelines": "schedules.parallel",
    "policy": "solvers.allocation.policy",
    "schedule": "schedules.registry",
}

__all__ = [
    "AcceleratorBackend",
    "HostBackend",
    "Instance",
    "Judge",
    "LayerGraph",
    "LayerNode",
    "LocalDevice",
    "MaxMin",
    "PipelineShape",
    "Schedule",
    "cpu_device",
    "device_backend",
    "exporter",
    "jobs_importer",
    "judge",
    "layer_importer",
    "one_rank",
    "parallel_pipelines",
    "policy",
    "schedule",
]


def __getattr__(name: str) -> object:
    """Load a name when it is first used."""
    if name not in _WHERE:
        raise AttributeError(f"hetflow.plugins has no attribute {name!r}")
    value = getattr(import_module(f"..{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
