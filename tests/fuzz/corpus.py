"""Good files of every format, and the commands that read them. What the fuzzing starts from."""

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from hetflow.cli.main import run
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.schema import files
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, PairThroughput, Throughputs
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile, Sync
from hetflow.schema.run import (
    DeviceRun,
    Generation,
    GenerationWorker,
    MeasuredTerm,
    MeasuredTerms,
    RunEvent,
    RunRecord,
    TermComparison,
)
from hetflow.tests.importers.test_recognise import AZURE, CATALOGUE, GOOGLE

HELD = "running/control/lock"  # whoever runs a case holds it: the run is alive then
CONFIG = "hetflow.toml"  # removed where a command is not about it
STATE = "state"  # of a live cluster: what a command that ends well may change
OUTPUT = "out.json"  # the name every command writes to, where it writes
SCRIPT = "print('never run: --dry-run')\n"


@dataclass(frozen=True)
class Command:
    """One command on the corpus.

    ``reads`` names the files that a case may damage; ``options`` the values in ``arguments``
    that it may replace by something hostile. File names are relative to the case's folder.
    """

    name: str
    arguments: tuple[str, ...]
    reads: tuple[str, ...]
    options: tuple[str, ...] = ()


_POOL = ("--gpus", "2xV100,4xP100")
_PIPELINE = ("solve", "--strategy", "pipeline", "--profiles", "layered", "--gpus", "4xV100",
             "--batch-size", "32", "--link-bytes-per-second", "1e9")  # fmt: skip
_PARALLEL = ("solve", "--strategy", "parallel", "--profiles", "layered", "--gpus", "4xV100",
             "--batch-size", "32", "--link-bytes-per-second", "1e9")  # fmt: skip
_HOST = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29500", "--devices",
         "2xcpu")  # fmt: skip
_ALLOCATE = ("allocate", "jobs.json", "--throughputs", "throughputs.json", *_POOL)
_SIMULATE = ("simulate", "--throughputs", "throughputs.json", "--gpus", "2xV100,2xP100")

COMMANDS = (
    Command(
        "solve",
        ("solve", "--profiles", "profiles", *_POOL, "--batch-size", "256", "-o", OUTPUT, "--json"),
        ("profiles/v100.json", "profiles/p100.json"),
        ("--gpus", "--batch-size", "--profiles"),
    ),
    Command(
        "solve a cluster",
        ("solve", "--profiles", "profiles", "--cluster", "cluster.json", "--batch-size", "64"),
        ("cluster.json", "profiles/v100.json"),
        ("--cluster", "--batch-size"),
    ),
    Command(
        "solve waste",
        ("solve", "--profiles", "profiles", *_POOL, "--batch-size", "128", "--objective", "waste",
         "--virtual-nodes", "4", "--top", "3", "-o", OUTPUT),
        ("profiles/v100.json",),
        ("--virtual-nodes", "--top", "--objective"),
    ),
    Command(
        "solve by MILP",
        ("solve", "--profiles", "profiles", "--gpus", "1xV100,1xP100", "--batch-size", "64",
         "--method", "highs", "--time-limit", "2"),
        ("profiles/v100.json",),
        ("--method", "--time-limit"),
    ),
    Command(
        "solve pipeline",
        (*_PIPELINE, "-o", OUTPUT),
        ("layered/v100.json",),
        ("--link-bytes-per-second", "--batch-size", "--gpus", "--strategy"),
    ),
    Command(
        "solve parallel",
        (*_PARALLEL, "--top", "2", "-o", OUTPUT),
        ("layered/v100.json",),
        ("--link-bytes-per-second", "--batch-size", "--gpus", "--top"),
    ),
    Command(
        "solve parallel, sharded",
        (*_PARALLEL, "--shard-optimizer", "--optimizer", "adam", "-o", OUTPUT),
        ("layered/v100.json",),
        ("--gpus", "--batch-size", "--optimizer", "--strategy"),
    ),
    Command(
        "solve shares",
        ("solve", "split", "--profiles", "layered", "--gpus", "4xV100", "--batch-size", "32",
         "--optimizer", "adam", "--shard", "all", "-o", OUTPUT),
        ("layered/v100.json",),
        ("--gpus", "--batch-size", "--optimizer", "--shard"),
    ),
    Command("check parallel", ("check", "parallel.json", "--profiles", "layered"),
            ("parallel.json", "layered/v100.json"), ("--profiles",)),
    Command("check split", ("check", "split.json", "--profiles", "profiles", *_POOL, "--json"),
            ("split.json", "profiles/v100.json"), ("--gpus", "--profiles")),
    Command("check pipeline",
            ("check", "pipeline.json", "--profiles", "layered", "--gpus", "4xV100",
             "--link-bytes-per-second", "1e9"),
            ("pipeline.json", "layered/v100.json"), ("--link-bytes-per-second", "--gpus")),
    Command("check allocation",
            ("check", "allocation.json", "--jobs", "jobs.json", "--throughputs",
             "throughputs.json", *_POOL),
            ("allocation.json", "jobs.json", "throughputs.json"), ("--gpus",)),
    Command("allocate", (*_ALLOCATE, "-o", OUTPUT), ("jobs.json", "throughputs.json"),
            ("--gpus", "--throughputs")),
    Command("allocate makespan", (*_ALLOCATE, "--policy", "makespan", "--json"),
            ("jobs.json", "throughputs.json"), ("--policy",)),
    Command("allocate pairs", (*_ALLOCATE, "--space-sharing"), ("throughputs.json", "jobs.json")),
    Command("allocate from CSV",
            ("allocate", "jobs.csv", "--throughputs", "throughputs.csv", *_POOL),
            ("jobs.csv", "throughputs.csv"), ("--gpus", "--throughputs")),
    Command("solve with runs",
            ("solve", "--profiles", "profiles", *_POOL, "--batch-size", "256", "--runs", "runs"),
            ("runs/first/run.json", "profiles/v100.json"), ("--runs",)),
    Command("correct",
            ("profile", "--from-run", "runs/first", "--profiles", "profiles", "-o", "corrected"),
            ("runs/first/run.json", "profiles/v100.json"), ("--from-run", "--profiles")),
    Command("simulate from CSV",
            ("simulate", "jobs.csv", "--throughputs", "throughputs.csv", *_POOL),
            ("jobs.csv", "throughputs.csv")),
    Command("throughputs",
            ("throughputs", "profiles", "--batch-size", "128", "--scale-factors", "1,2", "-o",
             OUTPUT), ("profiles/v100.json",), ("--batch-size", "--scale-factors")),
    Command("allocate cost",
            ("allocate", "jobs.json", "--throughputs", "throughputs.json", "--cluster",
             "cluster.json", "--policy", "min_cost"), ("cluster.json", "jobs.json"), ("--policy",)),
    Command("allocate a trace",
            ("allocate", "jobs.trace", "--throughputs", "gavel.json", "--gpus", "2xv100,2xk80"),
            ("jobs.trace", "gavel.json"), ("--throughputs",)),
    Command("simulate jobs", (*_SIMULATE[:1], "jobs.json", *_SIMULATE[1:], "-o", OUTPUT, "--json"),
            ("jobs.json", "throughputs.json"), ("--gpus",)),
    Command("simulate a trace",
            ("simulate", "jobs.trace", "--throughputs", "gavel.json", "--gpus", "2xv100,2xk80"),
            ("jobs.trace", "gavel.json"), ("--gpus",)),
    Command("simulate drawn",
            ("simulate", "continuous-single", *_SIMULATE[1:], "--loads", "2", "--num-jobs", "5",
             "--window", "1:3", "--round-seconds", "360", "--failure-hours", "50",
             "--resize-seconds", "5", "--early-rounds"),
            ("throughputs.json",),
            ("--loads", "--window", "--num-jobs", "--round-seconds", "--failure-hours",
             "--resize-seconds")),
    Command("simulate elastic",
            ("simulate", "jobs.json", "--throughputs", "throughputs.json", "--gpus", "4xV100",
             "--scheduler", "elastic"), ("jobs.json", "throughputs.json"), ("--scheduler",)),
    Command("simulate a market",
            ("simulate", "jobs.json", "--throughputs", "throughputs.json", "--gpus",
             "2xV100,2xP100", "--market", "prices.json", "--rent-policy", "greedy"),
            ("jobs.json", "prices.json"), ("--rent-policy", "--market")),
    Command("simulate philly",
            ("simulate", "cluster_job_log", "--throughputs", "gavel.json", "--gpus", "4xv100"),
            ("cluster_job_log",), ("--gpus",)),
    *(Command(f"show {name}", ("show", name), (name,))
      for name in ("split.json", "pipeline.json", "allocation.json", "jobs.json", "run.json",
                   "throughputs.json", "simulation.json", "cluster.json", "launch.json")),
    Command("show profile", ("show", "layered/v100.json", "--json"), ("layered/v100.json",)),
    Command("show a timeline",
            ("show", "pipeline.json", "--timeline", "--html", "timeline.html", "--trace",
             "trace.json"), ("pipeline.json",), ("--html", "--trace")),
    Command("show a picture", ("show", "profiles", "--plot", "curves.svg"),
            ("profiles/v100.json",), ("--plot",)),
    Command("launch split", ("launch", "--dry-run", *_HOST, "-o", "run",
                             "on_cpu.json", "train.py"), ("on_cpu.json",),
            ("--devices", "--nnodes", "--rdzv-endpoint")),
    Command("launch pipeline", ("launch", "--dry-run", *_HOST, "stages_on_cpu.json",
                                "train.py", "--lr", "1"), ("stages_on_cpu.json",), ("--devices",)),
    Command("submit", ("submit", "--state", STATE, "--devices", "2", "train.toml"),
            ("train.toml", "cpus/cpu.json"), ("--state", "--devices")),
    Command("submit an array",
            ("submit", "--state", STATE, "--env", "SEED=3", "--time-limit", "3600", "--after",
             "1:ok", "--array", "0-2,7", "train.toml"), ("train.toml",),
            ("--env", "--time-limit", "--after", "--array")),
    Command("submit a script",
            ("submit", "--state", STATE, "--throughputs", "throughputs.json", "--model", "conv",
             "--batch-size", "64", "--steps", "100", "--json", "train.py", "3"),
            ("throughputs.json",), ("--throughputs", "--model", "--batch-size", "--steps")),
    Command("resize", ("resize", "running", "--gpus", "1xV100,1xP100", "--timeout", "0.1"),
            ("running/control/current.json", "running/plan.json"), ("--gpus",)),
    Command("resize to a plan", ("resize", "running", "--plan", "split.json", "--no-wait"),
            ("running/control/current.json", "split.json")),
    Command("import", ("import", "graph.txt", "--device-type", "V100", "--device-memory", "16GB",
                       "-o", OUTPUT), ("graph.txt",), ("--device-memory", "--device-type")),
    Command("import counts", ("import", "counts.csv", "--format", "bamboo-trace", "--time-unit",
                              "hours", "-o", OUTPUT), ("counts.csv",),
            ("--time-unit", "--format")),
    Command("import lines", ("import", "nodes.txt", "--format", "parcae-trace", "-o", OUTPUT),
            ("nodes.txt",)),
    Command("rent fleet", ("rent", "fleet", "market.json", "--machines", "2", "--work-hours", "1",
                           "--deadline-hours", "2", "--on-demand", "3", "--spot", "1", "-o",
                           OUTPUT), ("market.json",), ("--machines", "--work-hours", "--spot")),
    Command("rent zones", ("rent", "zones", "zones.json", "--work-hours", "1",
                           "--deadline-hours", "2", "--on-demand", "3", "--spot", "1",
                           "--learn-until", "2024-01-01T02:00:00Z", "-o", OUTPUT),
            ("zones.json",), ("--spot", "--learn-until", "--deadline-hours")),
    Command("rent types", ("rent", "zones.json", "--between-zones", "--work-hours", "1",
                           "--deadline-hours", "2", "--on-demand", "a=3", "--on-demand", "b=2",
                           "--spot", "1", "--machine-speed", "a=1", "--machine-speed", "b=0.5",
                           "-o", OUTPUT), ("zones.json",), ("--machine-speed", "--on-demand")),
    Command("solve at prices",
            ("solve", "split", "--profiles", "profiles", *_POOL, "--batch-size", "64", "--market",
             "prices.json", "--at", "2024-01-01T00:00:00Z"),
            ("prices.json",), ("--at", "--market", "--gpus")),
    Command("rent machines",
            ("rent", "machines", "prices.json", "--throughputs", "throughputs.json", "--steps",
             "100", "--model", "conv", "--json"),
            ("prices.json", "throughputs.json"), ("--throughputs", "--model", "--steps")),
    Command("show a market", ("show", "market.json"), ("market.json",)),
    Command("import of Piper", ("import", "piper.json", "--format", "piper", "-o", OUTPUT,
                                "--device-type", "V100", "--device-memory", "16GB"),
            ("piper.json",)),
    Command("export", ("export", "layered/v100.json", "-o", "out.txt"), ("layered/v100.json",)),
    Command("export launch",
            ("export", "split.json", "--to", "slurm", "--hosts", "1x(2xV100),2x(2xP100)",
             "--name", "V100=v", "--job", "j", "--directory", "d", "-o", "out.txt",
             "--", "train.py", "3"),
            ("split.json",), ("--hosts", "--name", "--job", "--directory")),
    Command("import log",
            ("import", "log.txt", "--format", "sacct", "--rate", "v100=2", "-o", OUTPUT),
            ("log.txt",), ("--rate",)),
    Command("replay a log",
            ("cluster", "replay", "--sacct", "log.txt", "--policy", "las", "--gpus", "2xv100",
             "--rate", "v100=2", "--resize-seconds", "1", "--json"),
            ("log.txt",), ("--policy", "--rate", "--gpus", "--resize-seconds")),
    Command("rent", ("rent", "zones.json", "--work-hours", "1", "--deadline-hours", "2",
                     "--on-demand", "3", "--spot", "1", "--policy", "greedy", "-o", OUTPUT),
            ("zones.json",), ("--spot", "--policy", "--work-hours")),
    *(Command(f"import of {name}", ("import", name, "-o", OUTPUT), (name,))
      for name in ("azure.json", "google.json", "vms.csv")),
    Command("rent odds", ("rent", "odds", "zones.json", "--checkpoint-seconds", "30", "-o",
                          OUTPUT), ("zones.json",), ("--checkpoint-seconds",)),
    Command("rent machines by profiles",
            ("rent", "machines", "prices.json", "--profiles", "profiles", "--steps", "100",
             "--batch-size", "64", "--most-devices", "2", "-o", OUTPUT),
            ("prices.json", "profiles/v100.json"), ("--most-devices", "--batch-size")),
    *(Command(f"export to {target}",
              ("export", "parallel.json", "--to", target, "--hosts", "4x(1xV100)", "--market",
               "prices.json", "--setup", "echo 1", "--checkpoint", "c", "-o", "out.txt", "--",
               "train.py", "3"),
              ("parallel.json", "prices.json"), ("--market", "--setup", "--checkpoint"))
      for target in ("hosts", "skypilot")),
    Command("export to kubernetes",
            ("export", "split.json", "--to", "kubernetes", "--image", "me/train", "--volume",
             "runs:/runs", "--job", "j", "--name", "V100=v", "--name", "P100=p", "-o", "out.txt",
             "--", "train.py"),
            ("split.json",), ("--image", "--volume", "--job")),
    Command("launch parallel", ("launch", "--dry-run", "--json", "parallel.json", "train.py"),
            ("parallel.json",)),
    Command("configured", ("solve", "--profiles", "profiles"),
            (CONFIG, "profiles/p100.json")),
)  # fmt: skip

WITH_TORCH = ("launch parallel",)  # commands that import it
LIBRARIES = (
    "pulp",
    "hetflow.formats.reports.plots",
    "matplotlib.backends.backend_svg",
    "scipy.stats",
)
"""What other commands import beside this package, and is long in coming."""


def make(folder: Path) -> None:
    """Write the corpus: every file by the package's own commands where one makes it."""
    for name in ("profiles", "layered", "cpus", "layered_cpus"):
        (folder / name).mkdir()
    files.write(folder / "profiles/v100.json", _profile("V100", 1.0))
    files.write(folder / "profiles/p100.json", _profile("P100", 4.0))
    files.write(folder / "layered/v100.json", _layered("V100"))
    files.write(folder / "cpus/cpu.json", _profile("cpu", 9.0))
    files.write(folder / "layered_cpus/cpu.json", _layered("cpu"))
    (folder / "cluster.json").write_text(json.dumps(_CLUSTER, indent=1))
    files.write(folder / "jobs.json", _jobs())
    files.write(folder / "throughputs.json", _throughputs())
    (folder / "gavel.json").write_text(json.dumps(_GAVEL))
    (folder / "jobs.csv").write_text(_JOBS_CSV)
    (folder / "throughputs.csv").write_text(_RATES_CSV)
    (folder / "jobs.trace").write_text("".join(_trace_lines()))
    (folder / "cluster_job_log").write_text(json.dumps([_philly(n) for n in range(4)], indent=1))
    (folder / "log.txt").write_text(
        "JobID|JobName|State|Submit|Start|End|AllocTRES\n"
        "1|a|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:16|2026-11-23T03:11:18|gres/gpu:v100=2\n"
        "2+0|b|COMPLETED|1795403475|1795403476|1795403478|cpu=1,gres/gpu:v100=1\n"
    )
    (folder / "graph.txt").write_text("\n".join(_graph_lines()) + "\n")
    (folder / "counts.csv").write_text("0,0\n0,2\n1,2\n1,0\n1.5,0\n1.5,2\n4,2\n")
    zones = [{"zone": zone, "start": "2024-01-01T00:00:00Z", "tick_seconds": 1200.0,
              "available": [there, 1 - there] * 8}
             for zone, there in (("a", 1), ("b", 0))]  # fmt: skip
    (folder / "zones.json").write_text(
        json.dumps({"schema": "hetflow.market/1", "availability": zones}, indent=1)
    )
    machines = [{"name": name, "device_type": name, "on_demand_dollars_per_hour": dollars}
                for name, dollars in (("V100", 3.0), ("P100", 1.5))]  # fmt: skip
    (folder / "prices.json").write_text(
        json.dumps({"schema": "hetflow.market/1", "instance_types": machines}, indent=1)
    )
    lists = {"azure.json": AZURE, "google.json": GOOGLE}
    for name, data in lists.items():
        (folder / name).write_text(json.dumps(data))
    (folder / "vms.csv").write_text(CATALOGUE)
    nodes = [[60000 * n, ("add", "no-op", "remove")[n], {"nodes": [] if n == 1 else ["a"],
              "duration": 60000}] for n in range(3)]  # fmt: skip
    (folder / "nodes.txt").write_text("\n".join(map(json.dumps, nodes)) + "\n")
    (folder / "piper.json").write_text(json.dumps(_piper_input()))
    (folder / "train.py").write_text(SCRIPT)
    (folder / CONFIG).write_text('[solve]\ngpus = "2xV100"\nbatch-size = 64\n')
    for name, arguments in _MADE.items():
        made = tuple(str(folder / a) if (folder / a).exists() else a for a in arguments)
        with redirect_stdout(StringIO()):
            code = run([*made, "-o", str(folder / name), "--quiet"])
        if code:
            raise HetflowError(f"the corpus's {name} could not be made: exit code {code}")
    files.write(folder / "run.json", _run_record(folder))
    (folder / "runs" / "first").mkdir(parents=True)
    files.write(folder / "runs/first/run.json", _run_of_split(folder))
    _make_running(folder)
    ClusterStore.create(folder / STATE).close()
    (folder / "train.toml").write_text(_SUBMISSION)
    with redirect_stdout(StringIO()):  # one that others come after
        run(["submit", "--state", str(folder / STATE), str(folder / "train.toml")])


_SUBMISSION = """script = "train.py"
arguments = ["--epochs", "3"]
profiles = "cpus"
batch_size = 64
steps = 100
virtual_nodes = 4
checkpoint_every = 10
priority_weight = 2.0
time_limit_seconds = 7200
environment = { SEED = "1" }
"""
_MADE = {
    "split.json": (
        "solve", "--profiles", "profiles", "--gpus", "2xV100,4xP100", "--batch-size", "256"),
    "pipeline.json": _PIPELINE,
    "parallel.json": _PARALLEL,
    "on_cpu.json": ("solve", "--profiles", "cpus", "--gpus", "2xcpu", "--batch-size", "64"),
    "stages_on_cpu.json": (
        "solve", "--strategy", "pipeline", "--profiles", "layered_cpus", "--gpus", "2xcpu",
        "--batch-size", "32", "--link-bytes-per-second", "1e9"),
    "allocation.json": _ALLOCATE,
    "market.json": ("import", "counts.csv", "--format", "bamboo-trace", "--time-unit", "hours"),
    "simulation.json": (
        "simulate", "jobs.json", "--throughputs", "throughputs.json", "--gpus", "2xV100,2xP100"),
}  # fmt: skip


def _make_running(folder: Path) -> None:
    """A run's folder as ``hetflow resize`` finds it, and its launch configuration."""
    from hetflow.runtime.protocol.lower import lower

    config = lower(files.read_plan(folder / "split.json"), seed=0)
    files.write(folder / "launch.json", config)
    (folder / "running/control").mkdir(parents=True)
    (folder / HELD).touch()
    (folder / "running/control/current.json").write_text((folder / "launch.json").read_text())
    (folder / "running/plan.json").write_text((folder / "split.json").read_text())


def _profile(device_type: str, slowness: float) -> Profile:
    curve = tuple(
        BatchPoint(
            batch_size=size,
            step_seconds=slowness * (0.002 + 0.001 * size),
            peak_memory_bytes=(1 << 30) + size * (50 << 20),
        )
        for size in (8, 16, 32, 64)
    )
    return Profile(
        model="resnet50", device_type=device_type, device_memory_bytes=16 << 30,
        weight_bytes=100 << 20, update_seconds=0.004, batch_curve=curve,
        sync=Sync(num_devices=2, sync_seconds=0.02), provenance={"torch": "2.13.0"},
    )  # fmt: skip


def _layered(device_type: str) -> Profile:
    names = [f"layer{n}" for n in range(6)]
    nodes = tuple(
        LayerNode(id=name, op="Linear", forward_seconds=0.001 * (1 + n), backward_seconds=0.002,
              activation_bytes=1 << 20, weight_bytes=4 << 20)
        for n, name in enumerate(names)
    )  # fmt: skip
    edges = tuple(zip(names, names[1:], strict=False))
    return Profile(
        model="mlp", device_type=device_type, device_memory_bytes=16 << 30, weight_bytes=24 << 20,
        update_seconds=0.001,
        batch_curve=(BatchPoint(batch_size=8, step_seconds=0.03, peak_memory_bytes=1 << 30),),
        layers=LayerGraph(microbatch_size=8, nodes=nodes, edges=edges),
        optimizer=OptimizerState(name="adam", state_bytes_per_weight_byte=2.0),
    )  # fmt: skip


def _jobs() -> Jobs:
    return Jobs(
        jobs=tuple(
            Job(id=f"job{n}", model=("conv", "rnn")[n % 2], steps=4000.0 * (n + 1),
                arrival_seconds=500.0 * n, scale_factor=1)
            for n in range(4)
        )
    )  # fmt: skip


def _throughputs() -> Throughputs:
    return Throughputs(
        models=(
            ModelThroughput(model="conv", steps_per_second={"V100": 4.0, "P100": 1.0}),
            ModelThroughput(model="rnn", steps_per_second={"V100": 2.0, "P100": 1.5}),
        ),
        pairs=(
            PairThroughput(models=("conv", "rnn"), steps_per_second={"V100": (3.0, 1.5)}),
        ),
    )  # fmt: skip


def _run_record(folder: Path) -> RunRecord:
    return RunRecord(
        plan=files.read_plan(folder / "split.json"), status="done", exit_code=0, world_size=6,
        wall_seconds=12.5, num_steps=40, predicted_step_seconds=0.1, measured_step_seconds=0.11,
        step_seconds_error=-0.09, final_loss=0.5, parameters_digest="ab" * 32,
        devices=(
            DeviceRun(
                rank=0, device_type="V100", host="a", num_samples=64, num_steps=40,
                predicted_compute_seconds=0.08, pass_seconds=0.04, compute_seconds=0.08,
                sync_seconds=0.01, update_seconds=0.002, step_seconds=0.11,
                step_seconds_spread=0.001, peak_memory_bytes=1 << 30,
            ),
        ),
        events=(RunEvent(kind="failure", at_seconds=2.0, detail="worker 3 was killed"),),
        generations=(
            Generation(
                number=0, kind="start", at_seconds=0.0, detail="start",
                workers=(GenerationWorker(name="w0", device_type="V100", virtual_nodes=(0,)),),
            ),
        ),
    )  # fmt: skip


def _run_of_split(folder: Path) -> RunRecord:
    """A run that can correct the profiles, with all its terms."""
    plan = files.read_plan(folder / "split.json")
    assert plan.kind == "split"
    types = [group.device_type for group in plan.groups for _ in range(group.num_devices)]
    term = MeasuredTerm(seconds=0.01, interval_seconds=0.001)
    step = MeasuredTerm(seconds=0.5, interval_seconds=0.001)
    terms = MeasuredTerms(num_steps=37, step=step, sync=term, update=term, virtual_node=term,
                      load=term, fixed=term)  # fmt: skip
    return dataclasses.replace(
        _run_record(folder), world_size=len(types), measured_step_seconds=0.5, events=(),
        generations=(),
        devices=tuple(
            DeviceRun(
                rank=rank, device_type=name, host="a", num_samples=64, num_steps=40,
                predicted_compute_seconds=0.08, pass_seconds=0.04, compute_seconds=0.08,
                sync_seconds=0.01, update_seconds=0.01, step_seconds=0.5,
                step_seconds_spread=0.001, peak_memory_bytes=1 << 30, terms=terms,
                num_host_devices=len(types),
            )
            for rank, name in enumerate(types)
        ),
        terms=(TermComparison(term="sync", predicted_seconds=0.01, measured_seconds=0.1),),
    )  # fmt: skip


_CLUSTER = {
    "schema": "hetflow.cluster/1",
    "device_types": {
        "V100": {"memory_bytes": 17179869184, "dollars_per_hour": 2.48},
        "P100": {"memory_bytes": 17179869184, "dollars_per_hour": 1.46},
    },
    "servers": [
        {"count": 2, "devices": {"V100": 2}, "intra_bytes_per_second": 1.0e10},
        {"count": 1, "devices": {"P100": 4}, "intra_bytes_per_second": 1.0e10},
    ],
    "inter_bytes_per_second": 1.25e9,
}
_CONV, _RNN = "('conv', 1)", "('rnn', 1)"
_GAVEL = {
    "v100": {_CONV: {"null": 4.0, _RNN: [3.0, 1.0]}, _RNN: {"null": 2.0, _CONV: [1.0, 3.0]}},
    "k80": {_CONV: {"null": 1.0}, _RNN: {"null": 1.0}},
}


_JOBS_CSV = "id,model,steps,scale_factor,entity\na,conv,4000,1,x\nb,rnn,8000,2,y\nc,conv,900,1,x\n"
_RATES_CSV = (
    "model,device_type,steps_per_second,scale_factor\nconv,V100,4,1\nconv,P100,1,1\n"
    "rnn,V100,2,2\nrnn,P100,1.5,2\n"
)


def _trace_lines() -> Iterator[str]:
    for n in range(4):
        model = ("conv", "rnn")[n % 2]
        yield f"{model}\tpython train.py\tdata\t-n\t1\t4000\t1\t1\t-1.000000\t{500.0 * n}\n"


def _philly(n: int) -> dict[str, object]:
    return {
        "status": "Pass", "vc": "ee9e8c", "jobid": f"application_{n}", "user": "ce2f4c",
        "submitted_time": f"2017-10-09 05:{n:02d}:00",
        "attempts": [
            {
                "start_time": "2017-10-09 23:00:00", "end_time": "2017-10-09 23:10:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            }
        ],
    }  # fmt: skip


def _piper_input() -> dict[str, object]:
    """Two layers at two degrees, the first one with recomputation too."""

    def ways(seconds: float, degree: int, names: tuple[str, ...]) -> list[dict[str, object]]:
        return [
            {
                "id": name, "timePerSample": seconds * (1 + place / 4) / degree,
                "parameterSize": 1024.0 / degree, "memoryUsageA": 512.0 / (1 + place),
                "memoryUsageB": 2048.0, "syncTimeFw": {"0": 64.0}, "syncTimeBw": {"1": 64.0},
            }
            for place, name in enumerate(names)
        ]  # fmt: skip

    names = (("vanilla", "activation recomp"), ("vanilla",))
    return {
        "mbsInBatch": 8,
        "nodes": [
            {"id": i, "name": "Linear", "TMPCs": {str(t): ways(0.01, t, own) for t in (1, 2)}}
            for i, own in enumerate(names)
        ],
        "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 256.0}],
    }


def _graph_lines() -> Iterator[str]:
    for n in range(1, 6):
        yield (
            f"node{n} -- Linear(in=8, out=8) -- forward_compute_time=1.5, "
            f"backward_compute_time=2.0, activation_size=1024.0, parameter_size=4096.0"
        )
    for n in range(1, 5):
        yield f"\tnode{n} -- node{n + 1}"


def pick(draw: random.Random) -> Command:
    """A command, each as likely."""
    return draw.choice(COMMANDS)
