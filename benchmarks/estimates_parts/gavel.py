"""Training steps of ResNet-50 that Gavel measured on K80, P100 and V100.

Gavel's figures are whole training scripts alone on a device, data loading included, in 32 bits.
"""

import json
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

from hetflow.planning.costs.device_table import spec_of

from .measured import Measured, counted

SPECS = {
    "K80": spec_of("K80"), "P100": spec_of("P100-PCIE-16GB"), "V100": spec_of("V100-SXM2-16GB"),
}  # fmt: skip
_JOB = "ResNet-50"


def gavel_steps(folder: Path) -> Iterator[Measured]:
    """Whole steps, by device and batch size."""
    text = (folder / "gavel" / "throughputs" / "simulation_throughputs.json").read_text()
    found = json.loads(text)
    steps: dict[tuple[str, int], float] = {}
    for device in SPECS:
        for key, rates in found[device.lower()].items():
            job, scale_factor = literal_eval(key)
            if scale_factor == 1 and job.startswith(_JOB) and rates["null"] > 0:
                size = int(job.rpartition(" ")[2].rstrip(")"))
                steps[device, size] = 1 / rates["null"]
    operators_at = counted("resnet50", False)
    for (device, size), seconds in sorted(steps.items()):
        yield Measured(
            source="Gavel",
            model=_JOB,
            config=f"batch {size}",
            spec=SPECS[device],
            operators=operators_at(size),
            seconds=seconds,
        )
