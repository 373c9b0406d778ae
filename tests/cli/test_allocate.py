"""``hetflow allocate``: files in, a checked allocation out."""

import json
from dataclasses import replace

import pytest
import typer

from hetflow.cli import main
from hetflow.cli.listing import with_common_flags
from hetflow.cli.simulate import allocate
from hetflow.planning.checks.allocation import check
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import FileError, HetflowError, ProblemError
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Job,
    Jobs,
    ModelThroughput,
    PairThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import all_policies

JOBS = Jobs(jobs=tuple(Job(id=f"j{i}", model="m", steps=10.0 + i) for i in range(3)))
RATES = Throughputs(
    models=(ModelThroughput(model="m", steps_per_second={"V100": 4.0, "K80": 1.0}),)
)


@pytest.fixture
def run(tmp_path, capsys):
    files.write(tmp_path / "jobs.json", JOBS)
    files.write(tmp_path / "rates.json", RATES)
    app = typer.Typer()
    app.command()(with_common_flags(allocate))

    def call(*arguments):
        flags = [str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json")]
        command = typer.main.get_command(app)
        command.main([*flags, *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_an_allocation_is_printed_and_valid(run):
    found = files.from_json(run("--gpus", "1xV100,1xK80", "--policy", "makespan"), Allocation)
    problem = AllocationProblem(jobs=JOBS, throughputs=RATES, num_devices={"V100": 1, "K80": 1})
    assert check(found, problem) == []
    assert found.certificate.objective == pytest.approx(33 / 5, rel=1e-9)


def test_an_allocation_says_what_its_check_needs(tmp_path, capsys):
    """Placement, space sharing and budget: none of them is a flag of check again."""
    rates = Throughputs(
        models=(
            ModelThroughput(
                model="m", scale_factor=2, steps_per_second={"V100": 4.0},
                unconsolidated_steps_per_second={"V100": 3.0},
            ),
        ),
        pairs=(
            PairThroughput(
                models=("m", "m"), scale_factor=2, steps_per_second={"V100": (2.5, 2.5)}
            ),
        ),
    )  # fmt: skip
    jobs = Jobs(jobs=tuple(replace(job, scale_factor=2) for job in JOBS.jobs))
    files.write(tmp_path / "jobs.json", jobs)
    files.write(tmp_path / "rates.json", rates)
    cluster = Cluster.parse("4xV100")
    priced = replace(
        cluster, device_types={"V100": replace(cluster.device_types["V100"], dollars_per_hour=1.0)}
    )
    files.write(tmp_path / "cluster.json", priced)
    given = ["--throughputs", str(tmp_path / "rates.json"), "--cluster"]
    given.append(str(tmp_path / "cluster.json"))
    asked = ["--policy", "makespan_budget", "--budget", "1", "--placement", "unconsolidated"]
    target = tmp_path / "allocation.json"
    command = ["allocate", str(tmp_path / "jobs.json"), *given, *asked, "--space-sharing"]
    assert main.run([*command, "-o", str(target)]) == 0
    judge = ["check", str(target), "--jobs", str(tmp_path / "jobs.json"), *given]
    assert main.run(judge) == 0, capsys.readouterr().err
    document = json.loads(target.read_text())
    said = {"space_sharing": True, "placement": "unconsolidated", "budget_dollars": 1.0}
    assert said.items() <= document.items()
    capsys.readouterr()
    assert main.run([*judge, "--placement", "consolidated"]) == 2
    assert "hetflow: " in capsys.readouterr().err
    for name in said:
        del document[name]
    target.write_text(json.dumps(document))
    assert main.run(judge) == 2
    flags = ["--space-sharing", "--placement", "unconsolidated", "--budget", "1"]
    assert main.run([*judge, *flags]) == 0


def test_it_is_written_and_never_overwritten(run, tmp_path):
    target = tmp_path / "allocation.json"
    assert run("--gpus", "1xV100", "-o", str(target)) == ""
    assert json.loads(target.read_text())["policy"] == "las"
    with pytest.raises(FileError, match="exists already"):
        run("--gpus", "1xV100", "-o", str(target))


def test_the_command_judges_what_was_written(run, tmp_path, capsys):
    target = tmp_path / "allocation.json"
    run("--gpus", "1xV100,1xK80", "-o", str(target))
    inputs = ["--jobs", str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json")]
    judge = ["check", str(target), *inputs, "--gpus", "1xV100,1xK80"]
    assert main.run(judge) == 0
    assert "valid (optimal)" in capsys.readouterr().out
    assert main.run(["show", str(target)]) == 0
    assert "j2" in capsys.readouterr().out
    document = json.loads(target.read_text())
    document["x"]["j0"]["V100"] = 1.0
    target.write_text(json.dumps(document))
    assert main.run(judge) == 2
    assert capsys.readouterr().err.startswith("hetflow: ")
    assert main.run(["check", str(target)]) == 2
    assert "--jobs FILE" in capsys.readouterr().err
    target.write_text(json.dumps({**document, "policy": "lass"}))
    assert main.run(judge) == 2
    assert "no policy 'lass'; did you mean 'las'?" in capsys.readouterr().err


def test_gavel_files_are_taken_as_they_are(run, tmp_path):
    line = "A\tcmd\tdir\t-n\t1\t100\t1\t1\t-1\t0\n"
    (tmp_path / "x.trace").write_text(line * 2)
    (tmp_path / "t.json").write_text(json.dumps({"v100": {"('A', 1)": {"null": 2.0}}}))
    app = typer.Typer()
    app.command()(with_common_flags(allocate))
    typer.main.get_command(app).main(
        [str(tmp_path / "x.trace"), "--throughputs", str(tmp_path / "t.json"), "--gpus", "1xv100",
         "-o", str(tmp_path / "a.json")],
        standalone_mode=False,
    )  # fmt: skip
    found = files.read(tmp_path / "a.json", Allocation)
    assert found.throughputs == pytest.approx({"0": 1.0, "1": 1.0}, rel=1e-9)


def test_bad_usage_is_one_clear_error(run):
    with pytest.raises(ProblemError, match="no policy 'foo'"):
        run("--gpus", "1xV100", "--policy", "foo")
    with pytest.raises(HetflowError, match="no throughput is for device type .T4."):
        run("--gpus", "1xT4")


def test_servers_limit_what_is_consolidated(run, tmp_path):
    """On servers of 3 and 1 two jobs of 2 cannot both be consolidated; a job of 1 fits anywhere."""
    both = ModelThroughput(
        model="m", scale_factor=2, steps_per_second={"V100": 8.0},
        unconsolidated_steps_per_second={"V100": 5.0},
    )  # fmt: skip
    one = ModelThroughput(model="m", steps_per_second={"V100": 4.0})
    files.write(tmp_path / "rates.json", Throughputs(models=(both, one)), force=True)
    wide = tuple(Job(id=f"w{i}", model="m", steps=10.0, scale_factor=2) for i in range(2))
    files.write(tmp_path / "jobs.json", Jobs(jobs=wide), force=True)
    arguments = ("--gpus", "1x(3xV100),1x(1xV100)", "--policy", "max_throughput")
    found = files.from_json(run(*arguments, "--placement", "mixed"), Allocation)
    assert sum(found.throughputs.values()) == pytest.approx(8.0 + 5.0, rel=1e-9)
    blind = files.from_json(run(*arguments), Allocation)
    assert sum(blind.throughputs.values()) == pytest.approx(16.0, rel=1e-9)
    single = tuple(Job(id=f"s{i}", model="m", steps=10.0) for i in range(4))
    files.write(tmp_path / "jobs.json", Jobs(jobs=single), force=True)
    found = files.from_json(run(*arguments, "--placement", "mixed"), Allocation)
    assert sum(found.throughputs.values()) == pytest.approx(16.0, rel=1e-9)


def test_help_names_every_policy(capsys):
    assert main.run(["allocate", "--help"]) == 0
    words = "".join(capsys.readouterr().out.split())
    assert [name for name in all_policies() if name not in words] == []


PRICED = """{"schema": "hetflow.cluster/1", "device_types": {"V100": {"dollars_per_hour": 2.0},
"K80": {"dollars_per_hour": 0.5}}, "servers": [{"count": 1, "devices": {"V100": 1, "K80": 1}}]}"""


@pytest.mark.parametrize(
    ("slos", "says", "mend"),
    [
        ((100.0, 400.0), "job 'j0' needs 10 steps/s for its SLO, but its fastest devices give 4",
         "make its SLO at least 2.5 times as long"),
        ((300.0, 400.0), "at best 85.7143 % of the throughput they need; 2 jobs bind ('j0', 'j1')",
         "make every SLO 1.16667 times as long, or grow the pool"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["min_cost_slo", "min_cost_ratio_slo", "min_dollars_slo"])
def test_slos_that_cannot_be_met_say_which_and_by_how_much(
    tmp_path, capsys, policy, slos, says, mend
):
    jobs = (
        Job(id="j0", model="m", steps=1000.0, slo_seconds=slos[0]),
        Job(id="j1", model="m", steps=1000.0, slo_seconds=slos[1]),
        Job(id="j2", model="m", steps=100.0),
    )
    files.write(tmp_path / "jobs.json", Jobs(jobs=jobs))
    files.write(tmp_path / "rates.json", RATES)
    (tmp_path / "cluster.json").write_text(PRICED)
    target = tmp_path / "allocation.json"
    call = ["allocate", str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json"),
            "--cluster", str(tmp_path / "cluster.json"), "--policy", policy]  # fmt: skip
    assert main.run([*call, "-o", str(target)]) == 3
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith("hetflow: ")
    assert says in line
    assert hint == f"hint: {mend}"
    assert not target.exists()


CROWDED = Throughputs(
    models=(
        ModelThroughput(model="new", steps_per_second={"V100": 8.0}),
        ModelThroughput(model="old", scale_factor=2, steps_per_second={"K80": 2.0}),
    )
)


def test_idle_devices_are_filled_or_named(run, tmp_path, capsys):
    """The default fills; the bare optimum and its file say what stands idle, and why."""
    jobs = [Job(id=f"new{i}", model="new", steps=100.0) for i in range(12)]
    jobs += [Job(id=f"old{i}", model="old", steps=100.0, scale_factor=2) for i in range(4)]
    files.write(tmp_path / "jobs.json", Jobs(jobs=tuple(jobs)), force=True)
    files.write(tmp_path / "rates.json", CROWDED, force=True)
    bare, target = tmp_path / "bare.json", tmp_path / "filled.json"
    run("--gpus", "2xV100,9xK80", "--no-fill", "-o", str(bare))
    run("--gpus", "2xV100,9xK80", "-o", str(target))
    inputs = ["--jobs", str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json")]
    for path in (bare, target):
        assert main.run(["check", str(path), *inputs, "--gpus", "2xV100,9xK80"]) == 0
        assert "valid (optimal)" in capsys.readouterr().out
    assert main.run(["show", str(bare)]) == 0
    assert "of these: no filling was asked for" in capsys.readouterr().out
    assert main.run(["show", str(target)]) == 0
    assert "idle: 1 K80, which no job could use" in capsys.readouterr().out
    assert files.read(target, Allocation).usable_idle_devices == {}


def test_a_job_that_fits_nowhere_is_named_and_the_others_go_on(run, tmp_path, capsys):
    large = Job(id="large", model="m", steps=10.0, scale_factor=64)
    files.write(tmp_path / "jobs.json", Jobs(jobs=(large, *JOBS.jobs)), force=True)
    target = tmp_path / "allocation.json"
    run("--gpus", "1xV100,1xK80", "-o", str(target))
    call = ["allocate", str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json"),
            "--gpus", "1xV100,1xK80"]  # fmt: skip
    assert main.run(call) == 0
    out, err = capsys.readouterr()
    assert err.startswith("hetflow: warning: job 'large' is left out: it asks for 64 devices")
    assert json.loads(out)["left_out"].keys() == {"large"}
    assert main.run(["show", str(target)]) == 0
    assert "left out: large: it asks for 64 devices" in capsys.readouterr().out
    inputs = ["--jobs", str(tmp_path / "jobs.json"), "--throughputs", str(tmp_path / "rates.json")]
    assert main.run(["check", str(target), *inputs, "--gpus", "1xV100,1xK80"]) == 0
    assert "valid (optimal)" in capsys.readouterr().out
    files.write(tmp_path / "jobs.json", Jobs(jobs=()), force=True)
    assert files.from_json(run("--gpus", "1xV100"), Allocation).x == {}
    (tmp_path / "jobs.csv").write_text("model,steps\n")
    assert main.run(["allocate", str(tmp_path / "jobs.csv"), *call[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["x"] == {}
