"""The exchanges that a launch's workers begin, in order: they must be alike.

gloo only meets unlike ones where their kinds and sizes differ, so a run may pass by luck.

Usage, in place of a script::

    hetflow launch plan.json exchanges.py SCRIPT [ARGUMENT ...]

Each worker writes a line for each exchange into ``exchanges.RANK``, for ``unlike`` to compare.
"""

import functools
import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

# What all workers of a group begin together. In these each may bring another number of entries.
_UNLIKE_SIZES = {"alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"}
_KINDS = {
    *_UNLIKE_SIZES, "_allgather_base", "_reduce_scatter_base", "all_gather_single", "allgather",
    "allgather_coalesced", "allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce",
    "reduce_scatter", "reduce_scatter_single",
}  # fmt: skip


def note() -> None:
    """Write down this process's exchanges from now on."""
    stream = open(f"exchanges.{os.environ['RANK']}", "w", buffering=1)  # noqa: SIM115

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(group: Any, *values: Any, **options: Any) -> Any:
            if group.size() == dist.get_world_size():
                what = "" if name in _UNLIKE_SIZES else _described([*values, *options.values()])
                places = traceback.extract_stack(limit=16)[:-1]
                ours = [f"{Path(place.filename).name}:{place.lineno}" for place in places[::-1]]
                stream.write(f"{name} {what}\t{' < '.join(ours)}\n")
            return original(group, *values, **options)

        return begin

    for name in _KINDS & vars(dist.ProcessGroup).keys():
        setattr(dist.ProcessGroup, name, noting(name, getattr(dist.ProcessGroup, name)))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.numel()} {value.dtype}"
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(_described, value)))
    return f"of {value.rootRank}" if hasattr(value, "rootRank") else ""


def unlike(folder: Path) -> str | None:
    """Where the exchanges of a launch's workers first differ; None where they do not."""
    lines = [path.read_text().splitlines() for path in sorted(folder.glob("exchanges.*"))]
    assert lines
    for at, row in enumerate(itertools.zip_longest(*lines, fillvalue="nothing\t")):
        if len({line.partition("\t")[0] for line in row}) > 1:
            return f"exchange {at} of the workers: " + "; ".join(row)
    return None


if __name__ == "__main__":
    note()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
