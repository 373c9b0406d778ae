"""``python -m hetflow.engines.slurm_keeper FOLDER``: a Slurm job's step, which runs one lease.

A lease runs once, whatever became of the messages between hetflow and Slurm: who makes the folder's
``claim`` has it, be it the step (to run it) or the engine (so that nobody ever does).
"""

import sys
from pathlib import Path

from .keeper import keep

CLAIM = "claim"


def claim(folder: Path, by: str) -> bool:
    """Take a lease for good; False where it was taken before."""
    try:
        with (folder / CLAIM).open("x", encoding="utf-8") as stream:
            stream.write(by)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), None) if claim(Path(sys.argv[1]), "step") else 0)
