"""Methods that a paper states and no user would choose for work, found by name.

The papers' room registers them, so that no solver imports that room.
"""

from collections.abc import Callable

from ..schema.plan import Plan
from ..schema.plugins import Registry

METHODS: Registry[Callable[..., Plan]] = Registry(
    "method",
    group="hetflow.methods",
    own=(
        "hetflow.papers.pipedream.nested",
        "hetflow.papers.pipedream_2bw",
        "hetflow.papers.easyscale.waste",
    ),
)
