"""The example plug-ins, installed from outside the package and used through the command line."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hetflow.cli.main import run
from hetflow.clusters.engines.protocol import ENGINES, OUTPUT, Fate, Work
from hetflow.devices.backend import DEVICES
from hetflow.devices.cpu import cpu_device
from hetflow.devices.local import device_of_type, local_devices, parse_requests
from hetflow.formats.exporters.registry import EXPORTERS
from hetflow.formats.importers.registry import LAYER_IMPORTERS, PRICE_IMPORTERS, TRACE_IMPORTERS
from hetflow.planning.checks.judges import JUDGES
from hetflow.planning.checks.schedule import validate
from hetflow.planning.schedules.counting import peak_in_flight
from hetflow.runtime.launcher.spawn import seat_workers, views
from hetflow.runtime.protocol.lower import lower, schedule_of
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import TargetError
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.schema.market import Market
from hetflow.schema.plan import Plan
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile
from hetflow.schema.schedule import SCHEDULES
from hetflow.solvers.allocation.policy import POLICIES
from hetflow.tests.examples.plugins import PLUGINS, declare, forget, install

Hetflow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hetflow(capsys: pytest.CaptureFixture[str]) -> Hetflow:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that distributions are installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def eager(site: Path) -> Iterator[str]:
    install(PLUGINS / "eager_1f1b", site)
    yield "eager-1f1b"
    forget(SCHEDULES, "eager-1f1b", modules=("eager_1f1b",))


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    nodes = tuple(
        LayerNode(
            id=f"layer{number}", op="Linear", forward_seconds=0.01, backward_seconds=0.02,
            activation_bytes=4_000_000, weight_bytes=1 << 20,
        )
        for number in range(4)
    )  # fmt: skip
    profile = Profile(
        model="line",
        device_type="V100",
        device_memory_bytes=16 << 30,
        weight_bytes=4 << 20,
        update_seconds=0.001,
        batch_curve=(BatchPoint(batch_size=8, step_seconds=0.12, peak_memory_bytes=1 << 30),),
        layers=LayerGraph(
            microbatch_size=8,
            nodes=nodes,
            edges=tuple((f"layer{i}", f"layer{i + 1}") for i in range(3)),
        ),
    )
    files.write(folder / "v100.json", profile)
    return folder


def solve(hetflow: Hetflow, profiles: Path, schedule: str, plan: Path) -> tuple[int, str, str]:
    return hetflow(
        "solve", "--profiles", profiles, "--gpus", "4xV100", "--batch-size", 64,
        "--strategy", "pipeline", "--schedule", schedule, "--num-stages", 4,
        "--link-bytes-per-second", "4e8", "--optimizer", "sgd", "-o", plan,
    )  # fmt: skip


def test_a_schedule_from_outside_is_planned_checked_shown_and_lowered(
    hetflow: Hetflow, eager: str, profiles: Path, tmp_path: Path
) -> None:
    own, plain = tmp_path / "eager.json", tmp_path / "1f1b.json"
    assert solve(hetflow, profiles, eager, own)[0] == 0
    assert solve(hetflow, profiles, "1f1b", plain)[0] == 0
    plan, before = files.read(own, Plan), files.read(plain, Plan)
    assert plan.schedule == eager
    # What it is for: transfers of a tenth of a second hide behind passes.
    assert plan.predicted.step_seconds < before.predicted.step_seconds
    code, _, errors = hetflow("check", own, "--profiles", profiles, "--gpus", "4xV100")
    assert (code, errors.count("fault")) == (0, 0)
    code, shown, _ = hetflow("show", own)
    assert code == 0
    assert eager in shown
    work = lower(plan).pipeline
    assert work is not None
    schedule = schedule_of(work, plan.num_microbatches)
    assert validate(schedule) == []
    assert peak_in_flight(schedule) == (7, 5, 3, 1)


def test_auto_tries_installed_schedules_too(
    hetflow: Hetflow, eager: str, profiles: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert solve(hetflow, profiles, "auto", plan)[0] == 0
    found = json.loads(plan.read_text())
    tried = {found["schedule"]} | {
        other["schedule"] for other in found["provenance"]["compared_schedules"]
    }
    assert eager in tried


@pytest.fixture
def even_progress(site: Path) -> Iterator[str]:
    install(PLUGINS / "even_progress", site)
    yield "even_progress"
    forget(POLICIES, "even_progress", modules=("even_progress",))
    forget(JUDGES, "even_progress")


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[str, ...]:
    """Jobs, throughputs and a pool as options of the command line."""
    jobs, rates = tmp_path / "jobs.csv", tmp_path / "rates.csv"
    shutil.copy(PLUGINS.parent / "cluster" / "jobs.csv", jobs)
    shutil.copy(PLUGINS.parent / "cluster" / "throughputs.csv", rates)
    return str(jobs), "--throughputs", str(rates), "--gpus", "2xV100,2xP100,2xK80"


def test_a_policy_from_outside_allocates_is_judged_and_simulates(
    hetflow: Hetflow, even_progress: str, cluster: tuple[str, ...], tmp_path: Path
) -> None:
    found = tmp_path / "allocation.json"
    code, _, errors = hetflow("allocate", *cluster, "--policy", even_progress, "-o", found)
    assert (code, errors) == (0, "")
    judging = ("check", found, "--jobs", *cluster)
    code, out, _ = hetflow(*judging)
    assert (code, "valid (optimal)" in out) == (0, True)
    record = json.loads(found.read_text())
    record["certificate"]["objective"] *= 1.01
    found.write_text(json.dumps(record))
    code, _, errors = hetflow(*judging)
    assert code == 2
    assert "stated" in errors
    code, out, _ = hetflow("simulate", *cluster, "--policy", even_progress, "--json")
    assert code == 0
    assert json.loads(out)["policy"] == even_progress


def test_a_format_from_outside_is_exported(
    hetflow: Hetflow, site: Path, profiles: Path, tmp_path: Path
) -> None:
    install(PLUGINS / "markdown_plan", site)
    plan, page = tmp_path / "plan.json", tmp_path / "plan.md"
    assert solve(hetflow, profiles, "1f1b", plan)[0] == 0
    try:
        assert hetflow("export", plan, "--format", "markdown", "-o", page)[0] == 0
        code, printed, _ = hetflow("export", plan, "--format", "markdown", "--json")
        assert code == 0
        code, _, errors = hetflow("export", profiles / "v100.json", "--format", "markdown")
    finally:
        forget(EXPORTERS, "markdown", modules=("markdown_plan",))
    heading, _, *table = page.read_text().splitlines()
    assert heading.startswith("line, batch 64: ")
    assert table[0] == "| stage | devices | layers | ms a microbatch |"
    assert table[2] == "| 0 | 1xV100 | layer0 to layer0 (1) | 30 |"
    assert json.loads(printed) == {"format": "markdown", "text": page.read_text()}
    assert code == 2
    assert "must be 'hetflow.plan/2', got 'hetflow.profile/1'" in errors


def test_a_format_from_outside_is_imported(hetflow: Hetflow, site: Path, tmp_path: Path) -> None:
    install(PLUGINS / "flat_layers", site)
    table, broken, found = (tmp_path / name for name in ("net.csv", "bad.csv", "net.json"))
    table.write_text("first,1.5,3,1000,400\nsecond,2,4,10,800\n")
    broken.write_text("first,1.5,3,1000,400\nsecond,-2,4,10,800\n")
    options = ("--format", "flat-layers", "--device-type", "V100", "--device-memory", "16GB")
    try:
        code, _, errors = hetflow("import", table, *options, "-o", found)
        assert (code, errors) == (0, "")
        code, _, errors = hetflow("import", broken, *options)
    finally:
        forget(LAYER_IMPORTERS, "flat-layers", modules=("flat_layers",))
    layers = files.read(found, Profile).layers
    assert layers is not None
    assert [(node.id, node.forward_seconds) for node in layers.nodes] == [
        ("first", 0.0015), ("second", 0.002),
    ]  # fmt: skip
    assert layers.edges == (("first", "second"),)
    assert code == 2
    assert f"{broken}: line 2: " in errors


def test_prices_from_outside_are_imported(hetflow: Hetflow, site: Path, tmp_path: Path) -> None:
    install(PLUGINS / "price_log", site)
    log, broken, found = (tmp_path / name for name in ("spot.csv", "bad.csv", "market.json"))
    log.write_text(
        "eu-1,p3,2026-03-01T00:00:00Z,0.9\neu-2,p3,2026-03-01T00:00:00Z,0.8\n"
        "eu-1,p3,2026-03-01T06:00:00Z,\n"
    )
    broken.write_text("eu-1,p3,2026-03-01T00:00:00Z,cheap\n")
    try:
        code, _, errors = hetflow("import", log, "--format", "price-log", "-o", found)
        assert (code, errors.count("hetflow: error")) == (0, 0)
        code, _, errors = hetflow("import", broken, "--format", "price-log")
    finally:
        forget(PRICE_IMPORTERS, "price-log", modules=("price_log",))
    histories = files.read(found, Market).prices
    assert [(one.zone, one.dollars_per_hour) for one in histories] == [
        ("eu-1", (0.9, None)), ("eu-2", (0.8,)),
    ]  # fmt: skip
    assert code == 2
    assert f"{broken}: line 1: " in errors


def test_traces_from_outside_are_imported(hetflow: Hetflow, site: Path, tmp_path: Path) -> None:
    install(PLUGINS / "ping_log", site)
    log, broken, found = (tmp_path / name for name in ("asked.csv", "bad.csv", "market.json"))
    log.write_text(
        "eu-1,2026-03-01T00:00:00Z,yes\neu-2,2026-03-01T00:05:00Z,no\n"
        "eu-1,2026-03-01T00:11:00Z,yes\neu-1,2026-03-01T00:12:00Z,no\n"
        "eu-1,2026-03-01T00:31:00Z,yes\n"
    )
    broken.write_text("eu-1,2026-03-01T00:00:00+01:00,yes\n")
    asked = ("--format", "ping-log", "--tick-seconds", "600")
    try:
        code, _, errors = hetflow("import", log, *asked, "-o", found)
        assert (code, errors.count("hetflow: error")) == (0, 0)
        code, _, errors = hetflow("import", broken, *asked)
    finally:
        forget(TRACE_IMPORTERS, "ping-log", modules=("ping_log",))
    windows = files.read(found, Market).availability
    assert [(one.zone, one.start, one.available) for one in windows] == [
        ("eu-1", "2026-03-01T00:00:00Z", (1, 0, None, 1)), ("eu-2", "2026-03-01T00:05:00Z", (0,)),
    ]  # fmt: skip
    assert code == 2
    assert f"{broken}: line 1: " in errors
    assert "is not in UTC" in errors


@pytest.mark.processes
def test_an_engine_from_outside_runs_a_launch(site: Path, tmp_path: Path) -> None:
    install(PLUGINS / "low_priority", site)
    lease = tmp_path / "lease"
    lease.mkdir()
    try:
        engine = ENGINES.get("low-priority")(Cluster.parse("1xcpu:fast"))
        told = (sys.executable, "-c", "import os; print(os.nice(0)); raise SystemExit(7)")
        work = Work(folder=lease, command=told, directory=lease, devices=engine.devices())
        engine.start(work)
        end = time.monotonic() + 60
        while engine.fate(lease).state != "ended":
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        forget(ENGINES, "low-priority", modules=("low_priority",))
    assert engine.fate(lease) == Fate("ended", 7)
    assert (lease / OUTPUT).read_text() == "19\n"


def test_a_broken_policy_is_one_line(
    hetflow: Hetflow, site: Path, cluster: tuple[str, ...]
) -> None:
    (site / "hasty.py").write_text("import no_module_of_that_name\n")
    declare(site, "hasty-policies", "0.3", "[hetflow.policies]\nhasty = hasty")
    code, _, errors = hetflow("allocate", *cluster, "--policy", "hasty")
    assert (code, len(errors.splitlines())) == (2, 2)
    assert (
        "plug-in 'hasty' of hasty-policies 0.3 (hasty) cannot be loaded: ModuleNotFound" in errors
    )
    assert hetflow("allocate", *cluster, "--policy", "las")[0] == 0
    code, _, errors = hetflow("allocate", *cluster, "--policy", "even_progress")
    assert code == 2
    assert "no policy 'even_progress'" in errors


def test_a_plan_needs_the_plug_in_of_its_schedule(
    hetflow: Hetflow, site: Path, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    install(PLUGINS / "eager_1f1b", site)
    assert solve(hetflow, profiles, "eager-1f1b", plan)[0] == 0
    forget(SCHEDULES, "eager-1f1b", modules=("eager_1f1b",))
    monkeypatch.undo()  # the folder is no longer on the path
    code, _, errors = hetflow("check", plan, "--profiles", profiles, "--gpus", "4xV100")
    assert code == 2
    first, *hint = errors.splitlines()
    assert "unknown schedule 'eager-1f1b'; known are gpipe, 1f1b" in first
    assert len(hint) <= 1
    code, _, errors = solve(hetflow, profiles, "eager-1f1b", tmp_path / "other.json")
    assert code == 2
    assert "--schedule must be one of auto, gpipe, 1f1b" in errors


@pytest.fixture
def whole_cpu(site: Path) -> Iterator[str]:
    install(PLUGINS / "whole_cpu", site)
    yield "wholecpu"
    forget(DEVICES, "whole-cpu", modules=("whole_cpu",))


def test_a_kind_of_device_from_outside_is_listed_and_launched(
    hetflow: Hetflow, whole_cpu: str
) -> None:
    code, out, _ = hetflow("devices", "--json")
    assert code == 0
    (found,) = [entry for entry in json.loads(out)["devices"] if entry["kind"] == "whole-cpu"]
    cores = cpu_device()
    assert (found["device_type"], found["num_devices"]) == (whole_cpu, 1)
    assert found["memory_bytes"] == cores.memory_bytes * cores.num_devices
    (request,) = parse_requests([whole_cpu], local_devices())
    assert (request.torch_device, request.local.num_threads) == ("cpu", cores.num_devices)
    config = launch_of(whole_cpu, "cpu")
    first, second = views(seat_workers(config.workers, config))
    assert first.environment({})["OMP_NUM_THREADS"] == str(cores.num_devices)
    assert second.environment({})["OMP_NUM_THREADS"] == "1"
    assert device_of_type(whole_cpu, local_rank=0) == torch.device("cpu")
    with pytest.raises(TargetError, match="needs 2 x wholecpu, this machine has 1"):
        seat_workers(launch_of(whole_cpu, whole_cpu).workers, launch_of(whole_cpu, whole_cpu))


def launch_of(*types: str) -> LaunchConfig:
    slots = tuple(
        WorkerSlot(
            rank=rank,
            device_type=name,
            virtual_nodes=(VirtualNode(index=rank, batch_size=1),),
        )
        for rank, name in enumerate(types)
    )
    return LaunchConfig(model="m", global_batch_size=len(types), workers=slots)


@pytest.mark.slow
def test_a_kind_of_device_from_outside_is_profiled(
    hetflow: Hetflow, whole_cpu: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    folder = tmp_path / "measured"
    code, _, errors = hetflow(
        "profile", "zoo:mlp", "--device", whole_cpu, "--quick", "--batch-sizes", 8,
        "--sync-devices", 0, "-o", folder,
    )  # fmt: skip
    assert code == 0, errors
    (path,) = folder.glob("*.json")
    profile = files.read(path, Profile)
    assert profile.device_type == whole_cpu
    number = cpu_device().num_devices
    assert profile.provenance["clock"].endswith(f"{number} threads" if number > 1 else "thread")
