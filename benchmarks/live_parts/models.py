"""A script and profiles for benchmarks of the live scheduler, whose jobs train nothing."""

import json
from pathlib import Path

from hetflow.tests.scheduler.conftest import profile

TYPES = (("V100", 0.02), ("P100", 0.05))
"""Device types, and the seconds of a pass of the smallest model."""
NUM_MODELS = 4


def prepare(folder: Path) -> None:
    """Write a script, and profiles of four models; the larger a model, the slower is a V100."""
    (folder / "train.py").write_text("")
    for model in range(NUM_MODELS):
        place = folder / f"model{model}"
        place.mkdir()
        for kind, seconds in TYPES:
            growth = (1 + model) ** (0.5 if kind == "P100" else 1.0)
            document = profile(kind, seconds * growth, 1.0)
            del document["emulation"]
            (place / f"{kind}.json").write_text(json.dumps(document))
