"""From nothing to a first allocation: samples that ship, CSV files, throughputs from profiles."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.formats.importers.csv_tables import read_jobs_csv, read_throughputs_csv
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import FileError
from hetflow.schema.jobs import Throughputs

JOBS = "id,model,steps\na,conv,100\nb,rnn,50\n"
RATES = "model,device_type,steps_per_second\nconv,V100,4\nconv,P100,1\nrnn,V100,2\nrnn,P100,1.5\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_samples_that_ship_give_an_allocation_and_a_simulation(hetflow: Callable) -> None:
    pool = ("--throughputs", "sample:throughputs.csv", "--gpus", "2xV100,2xP100,2xK80", "--json")
    allocated = hetflow("allocate", "sample:jobs.csv", *pool)
    assert allocated.code == 0, allocated.stderr
    assert len(json.loads(allocated.stdout)["x"]) == 6
    simulated = hetflow("simulate", "sample:jobs.csv", *pool)
    assert json.loads(simulated.stdout)["metrics"]["num_jobs"] == 6


def test_an_unknown_sample_names_those_there_are(hetflow: Callable) -> None:
    answer = hetflow("allocate", "sample:job.csv", "--throughputs", "sample:throughputs.csv",
                     "--gpus", "1xV100")  # fmt: skip
    assert answer.code == 2
    assert "jobs.csv, throughputs.csv" in answer.stderr


def test_csv_and_json_files_say_the_same(hetflow: Callable, tmp_path: Path) -> None:
    jobs, rates = write(tmp_path, "j.csv", JOBS), write(tmp_path, "t.csv", RATES)
    files.write(tmp_path / "j.json", read_jobs_csv(jobs))
    files.write(tmp_path / "t.json", read_throughputs_csv(rates))
    pool = ("--gpus", "1xV100,1xP100", "--json")
    of_csv = hetflow("allocate", jobs, "--throughputs", rates, *pool)
    of_json = hetflow("allocate", tmp_path / "j.json", "--throughputs", tmp_path / "t.json", *pool)
    assert of_csv.code == 0, of_csv.stderr
    assert of_csv.stdout == of_json.stdout


def test_every_column_is_read(tmp_path: Path) -> None:
    text = (
        "\ufeffmodel,steps,arrival_seconds,entity,slo_seconds,scale_factor,priority_weight\n"
        '"resnet, large",5e3,60,team-b,7200,2,1.5\n'
        "\n"
        "rnn,10,0,team-a,,,\n"
    )
    jobs = read_jobs_csv(write(tmp_path, "j.csv", text))
    late, early = jobs.jobs[1], jobs.jobs[0]
    assert (early.id, early.model, early.slo_seconds, early.scale_factor) == (
        "line 4",
        "rnn",
        None,
        1,
    )
    assert (late.model, late.steps, late.arrival_seconds) == ("resnet, large", 5000.0, 60.0)
    assert (late.slo_seconds, late.scale_factor, late.priority_weight) == (7200.0, 2, 1.5)
    assert [entity.name for entity in jobs.entities] == ["team-a", "team-b"]


def test_rates_alone_spread_and_shared(tmp_path: Path) -> None:
    text = (
        "model,scale_factor,device_type,steps_per_second,unconsolidated_steps_per_second,"
        "shared_with,shared_with_steps_per_second\n"
        "conv,2,V100,8,6,,\nconv,1,V100,4,,,\nrnn,1,V100,2,,,\nconv,1,V100,3,,rnn,1.5\n"
    )
    table = read_throughputs_csv(write(tmp_path, "t.csv", text))
    assert [(m.model, m.scale_factor, m.steps_per_second) for m in table.models] == [
        ("conv", 2, {"V100": 8.0}), ("conv", 1, {"V100": 4.0}), ("rnn", 1, {"V100": 2.0})
    ]  # fmt: skip
    assert table.models[0].unconsolidated_steps_per_second == {"V100": 6.0}
    assert [(p.models, p.steps_per_second) for p in table.pairs] == [
        (("conv", "rnn"), {"V100": (3.0, 1.5)})
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the first line must name the columns; model, steps missing"),
        ("model,step\n", "unknown column 'step'; did you mean 'steps'?"),
        ("model,steps,steps\n", "column 'steps' is there twice"),
        ("model,steps\na\n", "line 2: has 1 cells, the first line has 2"),
        ("model,steps\na,soon\nb,\n", "line 2: steps: must be a number, got 'soon'; line 3: steps"),
        ("model,steps\na,nan\n", "line 2: Job: $.steps: must be finite, got nan"),
        ("model,steps,scale_factor\na,1,1.5\n", "scale_factor: must be a whole number"),
        ("id,model,steps\na,m,1\na,m,1\n", "'a' appears twice"),
        ('model,steps\n"a,1\n', "line 2: not valid CSV"),
        ("model,steps\n" + "a,x\n" * 30, "and 20 more faults"),
    ],
)
def test_a_faulty_csv_is_one_line(hetflow: Callable, tmp_path: Path, text: str, words: str) -> None:
    path, rates = write(tmp_path, "j.csv", text), write(tmp_path, "t.csv", RATES)
    answer = hetflow("allocate", path, "--throughputs", rates, "--gpus", "1xV100")
    assert (answer.code, answer.stdout) == (2, "")
    assert words in answer.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RATES + "conv,V100,5\n", "line 6: conv x1 on V100 is given twice"),
        ("model,device_type,steps_per_second\n", "holds no throughputs of models alone"),
        ("model,device_type,steps_per_second,shared_with\na,V,1,b\n", "come together"),
    ],
)
def test_faulty_rates_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FileError, match=words.replace("(", r"\(")):
        read_throughputs_csv(write(tmp_path, "t.csv", text))


@pytest.mark.parametrize("command", ["allocate", "simulate"])
def test_device_names_in_any_case_and_near_misses(
    hetflow: Callable, tmp_path: Path, command: str
) -> None:
    jobs, rates = write(tmp_path, "j.csv", JOBS), write(tmp_path, "t.csv", RATES)
    found = hetflow(command, jobs, "--throughputs", rates, "--gpus", "1xv100,1xp100", "--json")
    assert found.code == 0, found.stderr
    assert "V100" in found.stdout
    assert "v100" not in found.stdout
    missed = hetflow(command, jobs, "--throughputs", rates, "--gpus", "1xV10,1xP100")
    assert missed.code == 2
    assert "no throughput is for device type 'V10'; did you mean 'V100'?" in missed.stderr


def test_solve_takes_device_names_in_any_case(hetflow: Callable, profiles: Path) -> None:
    pool = ("--batch-size", "64", "--profiles", profiles, "--gpus")
    upper, lower = (hetflow("solve", *pool, gpus) for gpus in ("1xV100,1xP100", "1xv100,1xp100"))
    assert lower.code == 0, lower.stderr
    assert json.loads(lower.stdout)["stages"] == json.loads(upper.stdout)["stages"]


def test_a_pool_that_tells_cases_apart_is_left_alone() -> None:
    pool = Cluster.parse("1xv100,2xV100")
    assert pool.spelled_as(["V100"]) == pool
    assert Cluster.parse("1xv100").spelled_as(["V100", "V100", "P100"]).num_devices == {"V100": 1}
    assert Cluster.parse("1xv100").spelled_as(["V100", "v100"]).num_devices == {"v100": 1}


def test_throughputs_from_profiles_are_what_solve_predicts(
    hetflow: Callable, profiles: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t.json"
    made = hetflow("throughputs", profiles, "--batch-size", "128", "--scale-factors", "1,2",
                   "--mixes", "-o", table)  # fmt: skip
    assert made.code == 0, made.stderr
    found = files.read(table, Throughputs)
    for entry in found.models:
        for name, rate in entry.steps_per_second.items():
            solved = hetflow("solve", "--profiles", profiles, "--batch-size", "128",
                             "--gpus", f"{entry.scale_factor}x{name}", "--json")  # fmt: skip
            assert rate == pytest.approx(1 / json.loads(solved.stdout)["predicted"]["step_seconds"])
    assert {entry.scale_factor for entry in found.models} == {1, 2}
    assert all(len(mix.devices) == 2 for mix in found.mixes)
    jobs = write(tmp_path, "j.csv", "model,steps,scale_factor\nresnet50,100,2\nresnet50,50,1\n")
    assert hetflow("allocate", jobs, "--throughputs", table, "--gpus", "2xV100,2xP100").code == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--batch-size", "x"), 2, "--batch-size: must be a whole number of at least 1, got 'x'"),
        (("--batch-size", "resnet=8"), 2, "did you mean 'resnet50'?"),
        (("--batch-size", "8", "--scale-factors", "1,1"), 2, "appears twice"),
        (("--batch-size", "7"), 3, "no 1 device(s) of one type can run a batch of 7"),
    ],
)
def test_throughputs_that_cannot_be_are_refused(
    hetflow: Callable, profiles: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    answer = hetflow("throughputs", profiles, *options)
    assert (answer.code, answer.stdout) == (code, "")
    assert words in answer.stderr
