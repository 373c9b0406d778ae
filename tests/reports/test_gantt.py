"""The Gantt chart of a simulated run: a row a device, named as far as there is room."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetflow.cli.main import app
from hetflow.clusters.simulator.cases import Case, report, run_case
from hetflow.formats.reports.plots import device_groups, simulation_image
from hetflow.schema import files
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.schema.simulation import SimulationRun

pytest.importorskip("matplotlib")


def _run(num_devices: int) -> SimulationRun:
    table = Throughputs(
        models=(ModelThroughput(model="conv", steps_per_second={"fast": 4.0, "slow": 1.0}),)
    )
    case = Case(throughputs=table, num_devices={"slow": 1, "fast": num_devices}, records_spans=True)
    jobs = [Job(id=f"job{i}", model="conv", steps=40000.0) for i in range(num_devices)]
    return report(case, run_case(case, jobs), "made up", with_jobs=True)


def test_rows_are_devices_and_bars_are_named(tmp_path: Path) -> None:
    run = _run(3)
    path, picture = tmp_path / "run.json", tmp_path / "run.svg"
    files.write(path, run)
    result = CliRunner().invoke(app, ["show", str(path), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    text = picture.read_text()
    places = [text.index(f"<!-- {name} -->") for name in ("fast:0", "fast:1", "fast:2")]
    assert places == sorted(places)
    assert all(text.count(f"<!-- {job.id} -->") >= 2 for job in run.jobs)  # a bar and the legend


def test_the_share_of_finished_jobs_rises_from_zero_for_one_job_too() -> None:
    picture = simulation_image(_run(1), "svg").decode()
    assert "<!-- 0.00 -->" in picture
    assert "<!-- 1.00 -->" in picture


def test_large_pools_are_named_by_server_then_by_type() -> None:
    few = [f"server{i}/fast:0" for i in range(80)]
    assert device_groups(few) == few
    several = [f"server{i}/fast:{n}" for i in range(40) for n in range(4)]
    assert device_groups(several) == [f"server{i}/fast" for i in range(40) for _ in range(4)]
    many = [f"server{i}/fast:0" for i in range(81)]
    assert device_groups(many) == ["fast"] * 81
    assert device_groups([f"slow:{i}" for i in range(81)]) == ["slow"] * 81
    text = simulation_image(_run(90), "svg").decode()
    assert "<!-- fast -->" in text
    assert "<!-- fast:0 -->" not in text


def test_a_run_without_names_of_devices_is_refused() -> None:
    run = _run(1)
    older = replace(run, spans=tuple(replace(span, devices=()) for span in run.spans))
    for lacking in (older, replace(run, spans=())):
        with pytest.raises(HetflowError, match="which devices its jobs held"):
            simulation_image(lacking, "svg")
    with pytest.raises(HetflowError, match="keeps no jobs"):
        simulation_image(replace(run, jobs=()), "svg")
