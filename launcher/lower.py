"""Plan -> LaunchConfig.

The function lives with the runtime, which lowers plans by itself where another launcher
(torchrun, srun, Kubernetes) starts the workers.
"""

from ..runtime.lower import check_level, lower

__all__ = ["check_level", "lower"]
