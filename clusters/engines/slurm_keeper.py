"""``python -m hetflow.clusters.engines.slurm_keeper FOLDER``: run one lease in a Slurm job's step.

A lease runs at most once, also when messages between hetflow and Slurm are lost: it is the step
that claims it, or the engine.
"""

import signal
import sys
from pathlib import Path

from .keeper import ASK, keep
from .lease_folder import claim


def main(folder: Path) -> int:
    """Run a lease, unless it was claimed; the step's exit code."""
    # From the claim on the engine may ask; until ``keep`` listens that must wait, not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    return keep(folder, None) if claim(folder, "step") else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
