"""Jobs of which a table of throughputs is known, and no profile."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.cli.main import run
from hetflow.clusters.scheduler.leases import PLAN, open_leases
from hetflow.clusters.scheduler.plans import (
    kind_of,
    may_mix,
    plan_on,
    rate_on,
    rates_of,
    throughput_of,
)
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, read_submission
from hetflow.planning.checks.batch_split import check
from hetflow.planning.even_split import even_split
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.files import from_json, read, read_plan, to_json, write
from hetflow.schema.jobs import ModelThroughput
from hetflow.schema.run import RunRecord

from .conftest import FakeEngine, write_workplace
from .resizable import ResizableEngine
from .test_live import SCRIPT, hetflow
from .test_loop import ROUND, Cluster
from .test_measured import measure, rates
from .test_replay import started
from .test_resizes import step

ROWS = {1: {"V100": 10.0, "p100": 4.0}, 2: {"V100": 18.0, "p100": 7.0}, 4: {"V100": 30.0}}
BOTH = ("V100", "P100")
Known = Callable[..., Submission]


def table(model: str = "tiny", rows: Mapping[int, Mapping[str, float]] = ROWS) -> object:
    return [{"model": model, "scale_factor": number, "steps_per_second": dict(each)}
            for number, each in rows.items()]  # fmt: skip


def written(path: Path, *models: object, **more: object) -> Path:
    document = {"schema": "hetflow.throughputs/1", "models": sum(models, []), **more}  # type: ignore[arg-type]
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def known(tmp_path: Path) -> Known:
    """Make a job with throughputs, and sane defaults."""
    script = tmp_path / "train.py"
    script.write_text("")

    def make(name: str = "a", **given: object) -> Submission:
        values: dict[str, object] = {
            "name": name, "script": str(script), "directory": str(tmp_path), "model": "tiny",
            "throughputs": tuple(ModelThroughput(**row) for row in table()),  # type: ignore[attr-defined]
            "batch_size": 32, "steps": 1000.0, "virtual_nodes": 8,
        }  # fmt: skip
        return Submission(**{**values, **given})  # type: ignore[arg-type]

    return make


def test_rates_are_the_tables_and_the_plan_is_the_even_split(known: Known) -> None:
    job = known(devices=2)
    assert throughput_of(job, {"V100": 4, "P100": 2}).steps_per_second == pytest.approx(
        {"V100": 18.0, "P100": 7.0}
    )
    plan = plan_on(job, {"P100": 2})
    assert plan.kind == "split"
    assert check(plan, None) == []
    assert plan.predicted.step_seconds == pytest.approx(1 / 7.0)
    nodes = [[node.batch_size for node in worker.virtual_nodes] for worker in lower(plan).workers]
    assert nodes == [[4, 4, 4, 4]] * 2
    assert {worker.device_type for worker in lower(plan).workers} == {"P100"}
    named = known(gpus="2xP100", devices=2)
    assert throughput_of(named, {"V100": 4, "P100": 2}).steps_per_second == pytest.approx(
        {"P100": 7.0}
    )
    assert rate_on(job, {"V100": 4}) == pytest.approx(30.0)
    assert [rate_on(job, on) for on in ({"V100": 1, "P100": 1}, {"V100": 3})] == [0.0, 0.0]


def test_a_range_holds_the_tables_numbers_that_divide_the_batch(known: Known) -> None:
    pool = {"V100": 8, "P100": 8}

    def numbers(**given: object) -> list[int]:
        job = known(devices=8, devices_at_most=8, **given)
        return [rate.scale_factor for rate in rates_of(job, pool)]

    assert numbers() == [1, 2, 4]
    assert numbers(virtual_nodes=2) == [1, 2]
    assert numbers(virtual_nodes=None, batch_size=9) == [1]
    assert numbers(devices_at_least=3) == [4]
    last = rates_of(known(devices=8, devices_at_most=8), pool)[-1]
    assert last.steps_per_second == pytest.approx({"V100": 30.0})


def test_what_a_cluster_cannot_run_is_said_for_each_type(known: Known) -> None:
    with pytest.raises(InfeasibleError) as refused:
        rates_of(known(devices=4), {"V100": 2, "P100": 4, "cpu": 4})
    said = refused.value.message
    assert "V100: 4 are asked for, the cluster has 2" in said
    assert "P100: no throughput of 'tiny' is for 4 x P100" in said
    assert "cpu: no throughput" in said
    assert not may_mix(known(determinism="none"), BOTH)
    emulated = (ModelThroughput(model="tiny", steps_per_second={"cpu:fast": 9.0}),)
    with pytest.raises(InfeasibleError, match="cpu:fast: an emulated type needs profiles"):
        rates_of(known(throughputs=emulated), {"cpu:fast": 1})


@given(
    numbers=st.sets(st.integers(1, 9), min_size=1),
    asked=st.integers(1, 9),
    node_size=st.integers(1, 5),
    nodes=st.integers(1, 24),
    given_nodes=st.booleans(),
)
def test_an_even_split_gives_each_device_the_same_or_is_refused_for_a_reason(
    numbers: set[int], asked: int, node_size: int, nodes: int, given_nodes: bool
) -> None:
    rows = [ModelThroughput(model="m", scale_factor=n, steps_per_second={"a": n}) for n in numbers]
    batch, wanted = node_size * nodes, nodes if given_nodes else None
    parts = nodes if given_nodes else batch
    try:
        plan = even_split(rows, "a", asked, batch_size=batch, virtual_nodes=wanted)
    except InfeasibleError:
        assert asked not in numbers or parts % asked
        return
    assert asked in numbers
    assert check(plan, None) == []
    workers = lower(plan).workers
    assert len(workers) == asked
    sizes = [[node.batch_size for node in worker.virtual_nodes] for worker in workers]
    own = [node_size] * (nodes // asked) if given_nodes else [batch // asked]
    assert sizes == [own] * asked
    assert plan.predicted.step_seconds == pytest.approx(1 / asked)


def test_jobs_with_other_tables_are_of_another_kind_and_those_of_profiles_keep_theirs(
    known: Known,
) -> None:
    job = known()
    assert kind_of(job) == kind_of(known("b"))
    assert len({kind_of(one) for one in (
        job, known(virtual_nodes=4), known(throughputs=job.throughputs[:1])
    )}) == 3  # fmt: skip
    profiled = replace(job, throughputs=(), model=None, profiles="/p", batch_size=16,
                       virtual_nodes=4)  # fmt: skip
    assert kind_of(profiled) == "job-aa973551953e4582"  # as in states of earlier versions
    assert "throughputs" not in to_json(profiled)
    for one in (job, profiled):
        assert from_json(to_json(one), Submission) == one


def test_a_live_cluster_runs_corrects_and_replays_them(
    tmp_path: Path, known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(number=2, kinds=BOTH)
    cluster = Cluster(tmp_path / "state", engine, "max_throughput")
    started(cluster, "2xV100,2xP100")
    cluster.submit(known(devices=2, steps=1e4), known("stuck", devices=4))
    cluster.tick()
    assert cluster.states() == ["running", "held"]
    assert "V100: 4 are asked for, the cluster has 2" in str(cluster.job(2)["reason"])
    [work] = engine.running.values()
    assert [device.device_type for device in work.devices] == ["V100"] * 2
    assert read_plan(work.folder / PLAN) == plan_on(known(), {"V100": 2})
    assert rates(cluster, 1) == pytest.approx([18.0, 7.0])
    measure(work.folder, slower=4.0)  # it turns out to be faster on the other type
    engine.end(work.folder, 1)
    cluster.tick(0.1)
    cluster.restart()
    cluster.submit(known("its twin", devices=2))  # the policy shares anew
    cluster.tick(ROUND)
    cluster.tick(0.1)
    assert rates(cluster, 1)[0] == pytest.approx(18.0 / 4)
    assert cluster.states() == ["running", "held", "running"]
    for word in ("hold", "release"):
        cluster.want(1, word)
        cluster.tick(ROUND)
        cluster.tick(ROUND)
    assert cluster.states() == ["running", "held", "running"]
    cluster.tick(0.1)  # who had to leave has, and who takes turns with it runs
    for folder in list(engine.running):
        engine.end(folder, 0)
    cluster.tick(1.0)
    assert cluster.states() == ["done", "held", "done"]
    state = ["--state", str(cluster.folder)]
    assert run(["cluster", "replay", *state, "--policy", "fifo"]) == 0
    assert "of 2 jobs that are done" in capsys.readouterr().out
    assert run(["cluster", "correct", *state, "1", "-o", str(tmp_path / "new")]) == 2
    assert "job 1 has throughputs, and no profiles to correct" in capsys.readouterr().err


@pytest.fixture
def resizable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ResizableEngine]]:
    """Engines of four devices of each type, whose launches can be resized."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made: list[ResizableEngine] = []

    def make(*kinds: str) -> ResizableEngine:
        made.append(ResizableEngine(kinds=kinds))
        return made[-1]

    yield make
    for engine in made:
        for launch in engine.launches.values():
            launch.box.close()


@pytest.mark.parametrize(
    ("policy", "kinds"), [("elastic", ("V100",)), ("easyscale", ("V100", "P100"))]
)
def test_they_grow_and_shrink_over_the_tables_numbers_of_one_type(
    tmp_path: Path, known: Known, resizable: Callable[..., ResizableEngine], policy: str,
    kinds: tuple[str, ...],
) -> None:  # fmt: skip
    engine = resizable(*kinds)
    cluster = Cluster(tmp_path / "state", engine, policy)

    def settle() -> dict[int, list[str]]:
        for _ in range(4):
            step(cluster, engine)
            cluster.restart()
        return {lease.job: sorted(name.partition(":")[0] for name in lease.devices)
                for lease in open_leases(cluster.store) if lease.holds_devices}  # fmt: skip

    cluster.submit(known(devices=8, devices_at_most=8, determinism="none"))
    assert settle() == {1: ["V100"] * 4}
    cluster.submit(known("fixed", devices=1, gpus="1xV100"))
    assert settle() == {1: ["V100"] * 2, 2: ["V100"]}  # three are left, and two have a rate
    engine.end(engine.jobs()[2], 0)
    assert settle() == {1: ["V100"] * 4}
    [row] = cluster.store.rows("SELECT leases, resizes FROM jobs WHERE number = 1")
    assert row["resizes"] == 2
    elsewhere = (ModelThroughput(model="tiny", steps_per_second={"K80": 1.0}),)
    cluster.submit(known("stuck", devices=2, devices_at_most=2, throughputs=elsewhere))
    assert settle() == {1: ["V100"] * 4}
    assert "V100: no throughput" in str(cluster.job(3)["reason"])


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder, a script and tables."""
    tmp_path = tmp_path_factory.mktemp("tables")
    store = ClusterStore.create(tmp_path / "state")
    with store.transaction():
        store.set("drainable", [])
    store.close()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "profiles").mkdir()
    written(tmp_path / "one.json", table())
    written(tmp_path / "two.json", table("resnet50"), table("resnet18"))
    mix = {"model": "tiny", "scale_factor": 2, "devices": {"a": 2}, "steps_per_second": 1.0}
    written(tmp_path / "mixes.json", [], mixes=[mix])
    (tmp_path / "rates.csv").write_text(
        "model,scale_factor,device_type,steps_per_second\ntiny,1,V100,10\n"
    )
    return tmp_path


@pytest.fixture
def workplace(tables: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run where the tables are; the state is that of the test before."""
    monkeypatch.chdir(tables)
    monkeypatch.setenv("HETFLOW_STATE", str(tables / "state"))
    return tables


def submitted(workplace: Path) -> list[dict[str, object]]:
    rows = ClusterStore.open(workplace / "state").rows(
        "SELECT submission FROM jobs ORDER BY number"
    )
    return [json.loads(row["submission"]) for row in rows]


SIZES = ["--batch-size", "32", "--steps", "10"]
ONE = ["--throughputs", "one.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "neither profiles nor throughputs are given"),
        ([*ONE, "--profiles", "profiles"], "both profiles and throughputs are given"),
        (["--throughputs", "none.json"], "none.json"),
        (["--throughputs", "train.py"], "train.py"),
        (["--throughputs", "profiles"], "profiles"),
        (["--throughputs", "two.json"], "of 2 models: resnet18, resnet50"),
        (["--throughputs", "two.json", "--model", "resnet51"], "try --model 'resnet50'"),
        (["--throughputs", "mixes.json"], "none of 'tiny' is on devices of one type"),
        ([*ONE, "--devices", "3"], "are for 1, 2, 4 devices, not for 3"),
        ([*ONE, "--devices-at-least", "5", "--devices-at-most", "8"], "are for 1, 2, 4 devices"),
        (
            [*ONE, "--devices", "4", "--virtual-nodes", "2"],
            "of the throughputs that divide it: 2",
        ),
        (
            [*ONE, "--devices", "2", "--batch-size", "5"],
            "batch_size 5 cannot be divided evenly among 2 devices",
        ),
        ([*ONE, "--gpus", "1xV100,1xP100"], "several types at once need profiles"),
        ([*ONE, "--gpus", "3xV100"], "are for 1, 2, 4 devices, not for 3"),
        ([*ONE, "--microbatch-size", "4"], "microbatch_size is for pipelines"),
        ([*ONE, "--strategy", "pipeline", "--microbatch-size", "4"], "pipeline needs profiles"),
        ([*ONE, "--strategy", "auto", "--microbatch-size", "4"], "strategy auto needs profiles"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_a_table(
    workplace: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    before = submitted(workplace)
    assert run(["submit", *SIZES, *words, "train.py"]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("hetflow: ")
    assert said in "\n".join([first, *others])
    assert all(line.startswith("hint: ") for line in others)
    assert submitted(workplace) == before


def test_the_command_takes_tables_of_other_formats_and_open_ranges(workplace: Path) -> None:
    assert run(["submit", *SIZES, "--throughputs", "rates.csv", "train.py"]) == 0
    assert run(["submit", *SIZES, *ONE, "--devices-at-most", "999999999999", "train.py"]) == 0
    first, second = submitted(workplace)[-2:]
    assert first["throughputs"] == table(rows={1: {"V100": 10.0}})
    assert second["throughputs"] == table()


def test_a_file_names_its_table_beside_it_and_an_option_replaces_it(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, sizes = workplace / "job.toml", 'script = "train.py"\nbatch_size = 32\nsteps = 10\n'
    job.write_text(sizes + 'throughputs = "two.json"\nmodel = "resnet18"\n')
    (workplace / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(workplace / "elsewhere")
    assert run(["submit", "--json", "../job.toml"]) == 0
    assert run(["submit", "--profiles", "../profiles", "../job.toml"]) == 0
    first, second = submitted(workplace)[-2:]
    assert first["throughputs"] == table("resnet18")
    assert second.keys() & {"throughputs", "profiles"} == {"profiles"}
    with job.open("a") as stream:
        stream.write('profiles = "profiles"\n')
    capsys.readouterr()
    assert run(["submit", "../job.toml"]) == 2
    assert "both profiles and throughputs are given" in capsys.readouterr().err
    job.write_text(sizes + "throughputs = 3\n")
    assert run(["submit", "../job.toml"]) == 2
    assert "throughputs must be the name of a file" in capsys.readouterr().err


def test_a_program_reads_hetflows_own_tables(workplace: Path) -> None:
    Path("own.toml").write_text('script = "train.py"\nbatch_size = 32\nsteps = 10\n')
    given = {"throughputs": "two.json", "model": "resnet50"}
    asked = read_submission(Path("own.toml"), given)
    assert asked.profiles is None
    assert [entry.scale_factor for entry in asked.throughputs] == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.processes
def test_a_plan_by_a_table_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_workplace(tmp_path, SCRIPT.replace("range(50)", "range(2)"), monkeypatch)
    rows = [ModelThroughput(model="m", scale_factor=2, steps_per_second={"cpu": 80.0})]
    write(tmp_path / "plan.json", even_split(rows, "cpu", 2, batch_size=16, virtual_nodes=4))
    hetflow("launch", "-o", "run", "--determinism", "elastic", "plan.json", "train.py",
            folder=tmp_path)  # fmt: skip
    record = read(tmp_path / "run" / "run.json", RunRecord)
    assert (record.status, record.world_size, record.num_steps) == ("done", 2, 8)
    assert record.predicted_step_seconds == pytest.approx(1 / 80)
