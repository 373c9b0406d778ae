"""The golden cases: commands whose answers, and trainings whose bits, stay as they are.

A command is run through ``hetflow.cli.main.run`` in a folder that holds ``inputs.write_inputs``'s
files; its answer is what it wrote to ``out.json`` (``@out`` among the arguments), or printed.
Of every plan the launch configuration that it lowers to is kept as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .inputs import BLOCKS, BRANCHED, FLAT, LAYERED

OUT = "out.json"
LINK = "--link-bytes-per-second 1e9"
MIXED = "2xV100,3xP100"
TREE = "2x(2xV100)"


@dataclass(frozen=True)
class Command:
    """One command line; ``lowers`` where its answer is a plan that can be launched."""

    name: str
    arguments: tuple[str, ...]
    lowers: bool = False


def commands() -> Iterator[Command]:
    """All of them."""
    yield from _splits()
    yield from _pipelines()
    yield from _allocations()
    yield from _simulations()
    yield Command(
        "import", _words(f"import small.graph.txt --device-type V100 --device-memory 16GB -o {OUT}")
    )
    yield Command("export", _words(f"export {LAYERED}/v100.json -o {OUT}"))


def _words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


def _splits() -> Iterator[Command]:
    asked = {
        "two-types": f"--gpus {MIXED} --batch-size 256",
        "three-types": "--gpus 2xV100,3xP100,4xK80 --batch-size 192",
        "large": "--gpus 8xV100,16xP100,24xK80 --batch-size 1024",
        "alone": "--gpus 1xV100 --batch-size 64",
        "fastest": f"--gpus {MIXED} --batch-size 96 --fastest",
        "servers": "--cluster cluster.json --batch-size 160",
        "interpolate": f"--gpus {MIXED} --batch-size 100 --interpolate",
        "virtual-nodes": f"--gpus {MIXED} --batch-size 256 --virtual-nodes 32",
        "cbc": f"--gpus {MIXED} --batch-size 64 --method cbc",
        "highs": f"--gpus {MIXED} --batch-size 64 --method highs",
        "waste": f"--gpus {MIXED} --batch-size 128 --objective waste --virtual-nodes 8",
        "waste-top": "--gpus 4xV100,4xP100,4xK80 --batch-size 128 --objective waste "
        "--virtual-nodes 16 --top 4",
    }
    for name, line in asked.items():
        arguments = f"solve --profiles {FLAT} --strategy split {line} -o {OUT}"
        yield Command(f"split-{name}", _words(arguments), lowers="top" not in name)


UNIFORM = ("interleaved", "zb-v")  # as many replicas everywhere


def _pipelines() -> Iterator[Command]:
    pool = f"--gpus {MIXED} --batch-size 64 {LINK}"
    uniform = f"--gpus 4xV100 --batch-size 64 {LINK}"
    asked = {
        schedule: (LAYERED, f"{uniform if schedule in UNIFORM else pool} --schedule {schedule}")
        for schedule in ("auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v",
                         "pipedream", "pipedream-vertical-sync", "2bw")
    }  # fmt: skip
    asked |= {
        "bottleneck": (LAYERED, f"{pool} --objective bottleneck"),
        "bottleneck-branched": (BRANCHED, f"{uniform} --objective bottleneck"),
        "branched": (BRANCHED, uniform),
        "branched-mixed": (BRANCHED, pool),
        "thesis": (LAYERED, f"{uniform} --schedule pipedream --stage-cost thesis"),
        "published": (LAYERED, f"{uniform} --schedule pipedream --stage-cost published"),
        "nested-published": (LAYERED, f"--gpus {TREE} --batch-size 64 {LINK} --schedule pipedream "
                             "--stage-cost published"),
        "nested": (LAYERED, f"--gpus {TREE} --batch-size 64 {LINK} --schedule pipedream"),
        "cluster": (LAYERED, "--cluster cluster.json --batch-size 64"),
        "stages": (LAYERED, f"{pool} --num-stages 3"),
        "straight": (LAYERED, f"{pool} --no-replication"),
        "chunks": (LAYERED, f"{uniform} --schedule interleaved --chunks-per-device 2"),
        "blocks": (BLOCKS, uniform),
        "repetitive": (BLOCKS, f"{uniform} --schedule 2bw --repetitive"),
        "repetitive-closed": (BLOCKS, f"{uniform} --schedule 2bw --repetitive "
                              "--cost-model closed-form"),
    }  # fmt: skip
    for name, (profiles, line) in asked.items():
        arguments = f"solve --profiles {profiles} --strategy pipeline {line} -o {OUT}"
        yield Command(f"pipeline-{name}", _words(arguments), lowers=True)
    either = f"solve --profiles {LAYERED} {uniform} -o {OUT}"
    yield Command("either", _words(either), lowers=True)


POLICIES = (
    "las", "las_weighted", "las_water_filling", "hierarchical", "makespan", "makespan_budget",
    "finish_time_fairness", "fifo", "static_priority", "sjf", "max_throughput",
    "max_normalised_throughput", "min_cost", "min_cost_slo", "min_cost_ratio",
    "min_cost_ratio_slo", "min_cost_per_job", "min_dollars_slo",
)  # fmt: skip


ALONE = ("min_cost_ratio", "min_cost_per_job")  # these weigh no pairs
FAIR = ("elastic", "static-priority")  # on one device type


def _allocations() -> Iterator[Command]:
    given = "allocate jobs.json --throughputs throughputs.json --cluster cluster.json"
    for policy in POLICIES:
        budget = " --budget 1e5" if policy == "makespan_budget" else ""
        line = f"{given} --policy {policy}{budget}"
        yield Command(f"allocate-{policy}", _words(f"{line} -o {OUT}"))
        if policy not in ALONE:
            yield Command(f"allocate-{policy}-shared", _words(f"{line} --space-sharing -o {OUT}"))
    for name, more in {
        "no-fill": "--no-fill", "agnostic": "--agnostic", "mixed": "--placement mixed",
        "unconsolidated": "--placement unconsolidated",
    }.items():  # fmt: skip
        yield Command(f"allocate-las-{name}", _words(f"{given} --policy las {more} -o {OUT}"))


def _simulations() -> Iterator[Command]:
    given = "--throughputs throughputs.json --gpus 4xV100,4xP100,4xK80"
    alike = "--throughputs throughputs.json --gpus 12xV100"
    servers = "--throughputs throughputs.json --gpus 2x(2xV100),2x(2xP100),2x(2xK80)"
    asked = {
        scheduler: ("arriving.json",
                    f"{alike if scheduler in FAIR else given} --scheduler {scheduler}")
        for scheduler in ("rounds", "published-rounds", "elastic", "static-priority", "easyscale",
                          "easyscale-taking", "easyscale-homogeneous", "yarn")
    }  # fmt: skip
    asked |= {
        f"policy-{policy}": ("arriving.json", f"{given} --policy {policy}")
        for policy in ("las_weighted", "las_water_filling", "hierarchical", "makespan", "fifo",
                       "finish_time_fairness", "fifo_greedy", "fifo_any_type", "sjf",
                       "max_throughput")
    }  # fmt: skip
    asked |= {
        "policy-min_cost": (
            "arriving.json",
            "--throughputs throughputs.json --cluster cluster.json --policy min_cost",
        ),
        "allox": ("singles.json", f"{given} --policy allox"),
        "gandiva": ("singles.json", f"{given} --policy gandiva --space-sharing"),
        "shared": ("arriving.json", f"{given} --space-sharing"),
        "agnostic": ("arriving.json", f"{given} --agnostic"),
        "centre": ("arriving.json", f"{given} --optimum centre"),
        "restarts": ("arriving.json", f"{given} --restart-seconds 30 --failure-hours 40 --seed 3"),
        "elastic-restarts": ("arriving.json", f"{alike} --scheduler elastic --restart-seconds 30"),
        "servers": ("arriving.json", f"{servers} --server-failure-hours 60"),
        "mixed": ("arriving.json", f"{servers} --placement mixed"),
        "drawn": ("continuous-multiple", f"{given} --loads 6 --num-jobs 60 --seed 2"),
        "drawn-static": ("static-single", f"{given} --num-jobs 40 --policy makespan"),
    }
    for name, (trace, line) in asked.items():
        yield Command(f"simulate-{name}", _words(f"simulate {trace} {line} -o {OUT}"))
