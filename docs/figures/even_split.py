"""Draw README's figure: an even split beside the solved one, on 2 V100 and 8 P100.

The profiles are those of examples/virtualflow_6_5, built from what the VirtualFlow paper states.
The even split is what data parallelism without a plan does: 8,192 / 10 samples on each device.
Run ``python docs/figures/even_split.py`` to write even_split.svg again.
"""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import svg

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "examples" / "virtualflow_6_5"
POOL = {"V100": 2, "P100": 8}
BATCH_SIZE = 8192
LARGEST_PASS = 256  # samples that fit a device's memory (table 4 of the paper)

LEFT, BAR, GAP, WIDTH = 118, 13, 4, 560
PIXELS_PER_SECOND = WIDTH / 0.95
COLOURS = {"compute": "#3367d6", "wait": "#d9d9d9", "sync": "#f0a030"}


@dataclass(frozen=True)
class Split:
    """One panel: how long each device computes, and the step's synchronisation."""

    title: str
    compute_seconds: dict[str, float]
    samples: dict[str, int]
    sync_seconds: float

    @property
    def slowest_seconds(self) -> float:
        """When the last device has finished its passes."""
        return max(self.compute_seconds.values())

    @property
    def step_seconds(self) -> float:
        """Compute of the slowest device, then synchronisation."""
        return self.slowest_seconds + self.sync_seconds


def pass_seconds(device_type: str, samples: float) -> float:
    """A pass of so many samples, on the straight line between the profiled sizes."""
    profile = json.loads((PROFILES / f"{device_type}.json").read_text(encoding="utf-8"))
    points = [(p["batch_size"], p["step_seconds"]) for p in profile["batch_curve"]]
    for (low, low_seconds), (high, high_seconds) in zip(points, points[1:], strict=False):
        if low <= samples <= high:
            share = (samples - low) / (high - low)
            return float(low_seconds + share * (high_seconds - low_seconds))
    raise ValueError(f"{samples} samples are outside the profile of {device_type}")


def solved() -> Split:
    """The split of ``hetflow solve``."""
    gpus = ",".join(f"{count}x{name}" for name, count in POOL.items())
    command = ["solve", "--profiles", str(PROFILES), "--gpus", gpus, "--quiet", "--json"]
    answer = subprocess.run(
        [sys.executable, "-m", "hetflow", *command, "--batch-size", str(BATCH_SIZE)],
        capture_output=True,
        text=True,
        check=True,
    )
    plan = json.loads(answer.stdout)
    groups = plan["stages"][0]["replicas"]
    return Split(
        title="solved by hetflow",
        compute_seconds={g["device_type"]: g["virtual_nodes"] * g["pass_seconds"] for g in groups},
        samples={g["device_type"]: g["samples"] // g["num_replicas"] for g in groups},
        sync_seconds=plan["predicted"]["sync_seconds"],
    )


def even(sync_seconds: float) -> Split:
    """As many samples on every device, in as few equal passes as fit its memory."""
    samples = math.ceil(BATCH_SIZE / sum(POOL.values()))
    passes = math.ceil(samples / LARGEST_PASS)
    return Split(
        title="even split",
        compute_seconds={name: passes * pass_seconds(name, samples / passes) for name in POOL},
        samples=dict.fromkeys(POOL, samples),
        sync_seconds=sync_seconds,
    )


def panel(split: Split, top: int) -> tuple[list[str], int]:
    """The panel's elements, and where it ends."""
    title = f"{split.title}: {split.step_seconds * 1000:.0f} ms a step"
    shapes = [svg.text(LEFT, top, title, bold=True)]
    y = top + 9
    last = split.slowest_seconds * PIXELS_PER_SECOND
    sync = split.sync_seconds * PIXELS_PER_SECOND
    for name, count in POOL.items():
        busy = split.compute_seconds[name] * PIXELS_PER_SECOND
        label = f"{name}: {split.samples[name]:,}"
        for _ in range(count):
            shapes.append(svg.text(LEFT - 8, y + 11, label, anchor="end"))
            parts = (("compute", 0.0, busy), ("wait", busy, last - busy), ("sync", last, sync))
            for kind, start, length in parts:
                if length > 0.5:
                    shapes.append(svg.rectangle(LEFT + start, y, length, BAR, COLOURS[kind]))
            y += BAR + GAP
    return shapes, y


def draw() -> str:
    """The whole figure as SVG."""
    plan = solved()
    upper, end = panel(even(plan.sync_seconds), 22)
    lower, end = panel(plan, end + 26)
    legend = []
    names = {"compute": "computing", "wait": "waiting", "sync": "synchronising"}
    for index, (kind, name) in enumerate(names.items()):
        x = LEFT + 130 * index
        legend.append(svg.rectangle(x, end + 12, 13, 13, COLOURS[kind]))
        legend.append(svg.text(x + 19, end + 23, name))
    title = "One step on 2 V100 and 8 P100: an even split and the solved one"
    return svg.picture(LEFT + WIDTH + 12, end + 38, title, [*upper, *lower, *legend])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
