"""Write V100.json and P100.json: ResNet-50 profiles from VirtualFlow's stated facts.

README.md in this folder derives every number. Run ``python build.py`` to write them again.
"""

import argparse
from pathlib import Path

from hetflow.schema.files import write
from hetflow.schema.profile import BatchPoint, Profile, Sync

SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # powers of two and midpoints (5.1.1)
LARGEST = 256  # table 4: 2,048 samples in 8 virtual nodes on either type
SLOWDOWN = {"V100": 1, "P100": 4}  # 5.1.2: "V100 GPUs are 4x as fast as P100 GPUs"
SYNC_PASSES = {"V100": 0.95, "P100": 4.0}  # from 42.3 %, 44 % and H1's choice; see README.md
FIXED_SHARE = 0.05  # of a full pass, for a batch of any size: chosen, see README.md
LINK_BYTES_PER_SECOND = 16e9 / 8  # 6.1: a 16 Gbps connection
WEIGHT_BYTES = 102_228_128  # 25,557,032 parameters of 4 bytes
MEMORY_BYTES = 16 << 30  # 5.1.2: 16 GB on both types
SAMPLE_BYTES = 54_000_000  # chosen so that at most 192 samples fit 11 GB (figure 18)

# The unit of time: of a full V100 pass, 0.95 is the ring all-reduce of two devices.
PASS_SECONDS = WEIGHT_BYTES / LINK_BYTES_PER_SECOND / SYNC_PASSES["V100"]


def profile(device_type: str) -> Profile:
    """The profile of ResNet-50 on one of the paper's device types."""
    return Profile(
        model="resnet50",
        device_type=device_type,
        device_memory_bytes=MEMORY_BYTES,
        weight_bytes=WEIGHT_BYTES,
        update_seconds=0.0,
        batch_curve=tuple(_point(device_type, size) for size in SIZES),
        sync=Sync(num_devices=2, sync_seconds=round(SYNC_PASSES[device_type] * PASS_SECONDS, 9)),
        provenance={
            "source": "VirtualFlow (MLSys 2022), sections 5.1, 6.1, 6.5 and 6.6",
            "derivation": "README.md beside this file; nothing here was measured by hetflow",
            "pass_seconds": PASS_SECONDS,
        },
    )


def _point(device_type: str, size: int) -> BatchPoint:
    passes = FIXED_SHARE + (1 - FIXED_SHARE) * size / LARGEST
    return BatchPoint(
        batch_size=size,
        step_seconds=round(SLOWDOWN[device_type] * passes * PASS_SECONDS, 9),
        peak_memory_bytes=4 * WEIGHT_BYTES + SAMPLE_BYTES * size,
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in SLOWDOWN:
        write(Path(__file__).parent / f"{name}.json", profile(name), force=True)
