"""Draw the pictures of the concept pages: ``python docs/figures/concepts.py`` writes them again."""

import json
import subprocess
import sys
from pathlib import Path

import svg

FOLDER = Path(__file__).parent
POOL = "2xV100,2xP100,2xK80"
CELL, ROW = 34, 24


def virtual_nodes() -> str:
    """The same eight virtual nodes on one, two and three devices."""
    shapes = [svg.text(20, 20, "a global batch of 256 samples, cut into 8 virtual nodes of 32")]
    shapes += _nodes(20, 30, range(8))
    mappings = (
        ("1 device", {"V100": range(8)}),
        ("2 devices", {"V100": range(6), "P100": range(6, 8)}),
        ("3 devices", {"V100": range(4), "P100 (0)": range(4, 6), "P100 (1)": range(6, 8)}),
    )
    y = 84
    for title, devices in mappings:
        shapes.append(svg.text(20, y + 16, title, bold=True))
        for device, nodes in devices.items():
            shapes.append(svg.text(190, y + 16, device, anchor="end"))
            shapes += _nodes(200, y, nodes)
            y += ROW + 4
        y += 12
    shapes.append(svg.text(200, y + 8, "time in one step (passes run one after another)"))
    return svg.picture(500, y + 24, "The same virtual nodes on one, two and three devices", shapes)


def _nodes(x: float, y: float, nodes: range) -> list[str]:
    return [
        svg.rectangle(x + CELL * place, y, CELL, ROW, svg.PALETTE[node % 2], str(node))
        for place, node in enumerate(nodes)
    ]


def generations() -> str:
    """Workers over time: a resize to more devices, then a worker that dies."""
    shapes = []
    edges = (110.0, 290.0, 450.0, 640.0)
    for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        middle = (start + end) / 2
        shapes.append(svg.text(middle, 20, f"generation {number}", anchor="middle", bold=True))
    held = (  # worker, then its virtual nodes in each generation
        ("worker 0", ("0-3", "0-1", "0-1, 7")),
        ("worker 1", ("4-7", "2-3", "2-3")),
        ("worker 2", (None, "4-5", "4-6")),
        ("worker 3", (None, "6-7", None)),
    )
    y = 34
    for index, (worker, generation) in enumerate(held):
        shapes.append(svg.text(100, y + 16, worker, anchor="end"))
        for nodes, start, end in zip(generation, edges, edges[1:], strict=False):
            if nodes:
                colour = svg.PALETTE[index]
                shapes.append(svg.rectangle(start, y, end - start, ROW, colour, f"nodes {nodes}"))
        y += ROW + 6
    shapes += [svg.line(x, 26, x, y + 4) for x in edges[1:-1]]
    shapes.append(svg.text(edges[1], y + 18, "resize: two workers join", anchor="middle"))
    shapes.append(svg.text(edges[2], y + 18, "worker 3 dies", anchor="middle"))
    return svg.picture(660, y + 32, "Generations of workers in one launch", shapes)


def allocation() -> str:
    """What ``hetflow allocate`` answers for the sample jobs: fractions of time on each type."""
    found = _hetflow("allocate", "sample:jobs.csv", "--json")
    columns = ["V100", "P100", "K80"]
    scale, left = 380, 130
    shapes = [svg.text(left, 18, "share of its time that each job runs on each device type")]
    y = 30
    for job, shares in found["x"].items():
        shapes.append(svg.text(left - 8, y + 16, job, anchor="end"))
        x = float(left)
        for column in columns:
            share = shares.get(column, 0.0)
            if share > 1e-6:
                label = f"{share:.2f}" if share > 0.1 else ""
                colour = svg.PALETTE[columns.index(column)]
                shapes.append(svg.rectangle(x, y, share * scale, ROW, colour, label))
            x += share * scale
        y += ROW + 4
    return svg.picture(
        left + scale + 20, y + 30, "An allocation", [*shapes, *_legend(left, y + 6, columns)]
    )


def rounds() -> str:
    """The same jobs in the simulator: who held which device in the first two hours."""
    until, scale, left = 7200.0, 0.075, 70
    path = FOLDER / "rounds.json.tmp"
    try:
        _hetflow("simulate", "sample:jobs.csv", "-o", str(path), "--force", read=False)
        spans = json.loads(path.read_text(encoding="utf-8"))["spans"]
    finally:
        path.unlink(missing_ok=True)
    names = sorted({span["job"] for span in spans})
    devices = [f"{kind}:{number}" for kind in ("V100", "P100", "K80") for number in range(2)]
    shapes = []
    for device in devices:
        y = 14 + (ROW + 2) * devices.index(device)
        shapes.append(svg.text(left - 8, y + 16, device, anchor="end"))
        for span in spans:
            if device in span["devices"] and span["start_seconds"] < until:
                start, end = span["start_seconds"], min(span["end_seconds"], until)
                colour = svg.PALETTE[names.index(span["job"])]
                place = (left + start * scale, y, (end - start) * scale, ROW)
                shapes.append(svg.rectangle(*place, colour))
    y = 14 + (ROW + 2) * len(devices)
    shapes.append(svg.text(left, y + 14, "0 h"))
    shapes.append(svg.text(left + until * scale, y + 14, "2 h", anchor="end"))
    shapes += _legend(left, y + 26, names[:3]) + _legend(left, y + 46, names[3:], first=3)
    return svg.picture(left + until * scale + 20, y + 70, "Rounds in the simulator", shapes)


def _legend(x: float, y: float, names: list[str], first: int = 0) -> list[str]:
    shapes = []
    for index, name in enumerate(names):
        shapes.append(svg.rectangle(x + 150 * index, y, 13, 13, svg.PALETTE[first + index]))
        shapes.append(svg.text(x + 150 * index + 19, y + 11, name))
    return shapes


def pipeline(schedule: str) -> str:
    """A schedule of four stages and eight microbatches, drawn as ``hetflow show`` draws it."""
    from hetflow.formats.reports.timeline import svg_timeline
    from hetflow.planning.schedules.registry import generate
    from hetflow.planning.schedules.timing import StageTimes, time_schedule

    lists = generate(schedule, pipeline_parallel_size=4, num_microbatches=8)
    times = StageTimes.uniform(4, forward_seconds=1, backward_seconds=2)
    return svg_timeline(time_schedule(lists, times), width=800)


def _hetflow(*arguments: str, read: bool = True) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "hetflow", *arguments, "--quiet"]
        + ["--throughputs", "sample:throughputs.csv", "--gpus", POOL],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout) if read else {}


FIGURES = {
    "virtual_nodes": virtual_nodes,
    "generations": generations,
    "allocation": allocation,
    "rounds": rounds,
    "pipeline_gpipe": lambda: pipeline("gpipe"),
    "pipeline_1f1b": lambda: pipeline("1f1b"),
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
