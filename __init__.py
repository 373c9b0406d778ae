"""Plan and run PyTorch training on the devices people really have.

What a program calls is named here, and nothing else is promised. Names are loaded when they are
first used, so planning starts without torch::

    import hetflow

    profiles = hetflow.profile("train.py:workload", devices=["V100", "P100"])
    plan = hetflow.solve(profiles, "2xV100,8xP100", batch_size=8192)
    record = hetflow.launch(plan, "train.py", ["--epochs", "90"])

and in the training script ``job = hetflow.prepare(model, optimizer)``. What a person should know
beside a result goes to the logger ``hetflow`` of ``logging``. What a plug-in is written with is in
``hetflow.plugins``; what rents machines in ``hetflow.rent``, what looks after a live cluster's jobs
in ``hetflow.cluster``.

The repository root is this package: every folder beside this file imports as
``hetflow.<folder>``. See docs/ for the file formats and the design decisions.
"""

from .schema.lazy import lazy_names

__version__ = "0.1.0"

TYPE_CHECKING = False  # as type checkers know it; typing takes longer to import than all of this
if TYPE_CHECKING:
    from . import plugins
    from .api import cluster
    from .api import renting as rent
    from .api.allocate import allocate, throughputs
    from .api.files import read, write
    from .api.formats import export
    from .api.launch import dry_run, launch, resize
    from .api.profile import profile
    from .api.show import show
    from .api.simulate import simulate, sweep
    from .api.solve import check, solve
    from .runtime import prepare
    from .schema.cluster import Cluster
    from .schema.errors import (
        BackendError,
        FileError,
        HetflowError,
        InfeasibleError,
        LaunchError,
        ProblemError,
        TargetError,
    )
    from .schema.jobs import Allocation, Job, Jobs, ModelThroughput, Throughputs
    from .schema.launch import ResizeAnswer
    from .schema.optimizer import OptimizerState
    from .schema.plan import Plan
    from .schema.profile import BatchPoint, Profile
    from .schema.run import RunRecord
    from .schema.simulation import SimulationRun

_NAMES = {
    ".api.allocate": "allocate throughputs",
    ".api.cluster:": "cluster",
    ".api.launch": "dry_run launch resize",
    ".api.formats": "export",
    ".plugins:": "plugins",
    ".runtime": "prepare",
    ".api.profile": "profile",
    ".api.files": "read write",
    ".api.renting:": "rent",
    ".api.show": "show",
    ".api.simulate": "simulate sweep",
    ".api.solve": "check solve",
    ".schema.jobs": "Allocation Job Jobs ModelThroughput Throughputs",
    ".schema.profile": "BatchPoint Profile",
    ".schema.cluster": "Cluster",
    ".schema.optimizer": "OptimizerState",
    ".schema.plan": "Plan",
    ".schema.launch": "ResizeAnswer",
    ".schema.run": "RunRecord",
    ".schema.simulation": "SimulationRun",
    ".schema.errors": "BackendError FileError HetflowError InfeasibleError LaunchError "
    "ProblemError TargetError",
}

__all__ = [
    "Allocation",
    "BackendError",
    "BatchPoint",
    "Cluster",
    "FileError",
    "HetflowError",
    "InfeasibleError",
    "Job",
    "Jobs",
    "LaunchError",
    "ModelThroughput",
    "OptimizerState",
    "Plan",
    "ProblemError",
    "Profile",
    "ResizeAnswer",
    "RunRecord",
    "SimulationRun",
    "TargetError",
    "Throughputs",
    "allocate",
    "check",
    "cluster",
    "dry_run",
    "export",
    "launch",
    "plugins",
    "prepare",
    "profile",
    "read",
    "rent",
    "resize",
    "show",
    "simulate",
    "solve",
    "sweep",
    "throughputs",
    "write",
]

__getattr__, __dir__ = lazy_names(globals(), _NAMES, "__version__")
