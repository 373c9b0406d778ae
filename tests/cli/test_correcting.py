"""``hetflow profile --from-run`` and ``hetflow solve --runs``: files in, corrected profiles out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import DeviceRun, MeasuredTerm, MeasuredTerms, RunRecord

Hetflow = Callable[..., Any]
NODE_SECONDS = 0.25


def device_run(rank: int, device_type: str, nodes: int, emulated: bool = False) -> DeviceRun:
    step = nodes * NODE_SECONDS + 0.1
    return DeviceRun(
        rank=rank,
        device_type=device_type,
        host="h",
        emulated=emulated,
        num_samples=1,
        num_steps=40,
        predicted_compute_seconds=None,
        pass_seconds=NODE_SECONDS,
        compute_seconds=nodes * NODE_SECONDS,
        sync_seconds=0.0,
        update_seconds=0.004,
        step_seconds=step,
        step_seconds_spread=None,
        peak_memory_bytes=None,
        terms=MeasuredTerms(
            num_steps=37,
            step=MeasuredTerm(seconds=step),
            sync=MeasuredTerm(seconds=0.0),
            update=MeasuredTerm(seconds=0.004),
            virtual_node=MeasuredTerm(seconds=NODE_SECONDS),
            fixed=MeasuredTerm(seconds=0.096),
        ),
    )


@pytest.fixture
def runs(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> Path:
    """A folder with one run of one V100: 4 virtual nodes of 64."""
    solved = ("solve", "--profiles", profiles, "--gpus", "1xV100", "--batch-size", 256)
    assert hetflow(*solved, "--virtual-nodes", 4, "-o", tmp_path / "plan.json").code == 0
    plan = files.read(tmp_path / "plan.json", Plan)
    record = RunRecord(
        plan=plan,
        status="done",
        exit_code=0,
        world_size=1,
        wall_seconds=50.0,
        num_steps=40,
        predicted_step_seconds=plan.predicted.step_seconds,
        measured_step_seconds=4 * NODE_SECONDS + 0.1,
        step_seconds_error=None,
        final_loss=None,
        parameters_digest=None,
        devices=(device_run(0, "V100", 4),),
    )
    folder = tmp_path / "runs"
    (folder / "first").mkdir(parents=True)
    files.write(folder / "first" / "run.json", record)
    return folder


def correct(hetflow: Hetflow, runs: Path, profiles: Path, output: Path, *more: object) -> Any:
    from_run = ("profile", "--from-run", runs / "first", "--profiles", profiles)
    return hetflow(*from_run, "-o", output, *more)


def test_jobs_that_a_live_cluster_has_done_correct_their_profiles(
    hetflow: Hetflow, profiles: Path, runs: Path, tmp_path: Path
) -> None:
    """Once more: the same as from the run by hand."""
    assert correct(hetflow, runs, profiles, tmp_path / "by hand").code == 0
    (tmp_path / "train.py").write_text("")
    (store := ClusterStore.create(tmp_path / "state")).set("drainable", [])
    submit = ("submit", "--state", store.folder, "--profiles", profiles, "--batch-size", 256)
    submit = (*submit, "--steps", 40, "--model", "resnet50")
    for _ in range(4):
        assert hetflow(*submit, "--name", "a", tmp_path / "train.py").code == 0
    corrects = ("cluster", "correct", "--state", store.folder)
    answer = hetflow(*corrects, 2, "-o", tmp_path / "new")
    assert (answer.code, "has trained to its end yet" in answer.stderr) == (2, True)
    rows = [(1, 1, 143, None), (1, 2, 0, None), (2, 1, 0, 1), (3, 1, 0, None)]
    for job, lease, code, launch in rows:  # done, done after a resize, done without a record
        store.run("INSERT INTO leases (job, number, devices, state, planned, exit_code, launch) "
                  "VALUES (?, ?, '[]', 'over', 0, ?, ?)", job, lease, code, launch)  # fmt: skip
        store.run("UPDATE jobs SET state = 'done' WHERE number = ?", job)
    folder = store.lease_folder(1, 2) / "run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes((runs / "first" / "run.json").read_bytes())
    answer = hetflow(*corrects, 4, "-o", tmp_path / "new", "--json")
    assert answer.code == 0, answer.stderr
    found = {p.device_type: p for p in files.read_profiles(tmp_path / "new")}
    for expected in files.read_profiles(tmp_path / "by hand"):
        own = found[expected.device_type]
        assert replace(own, provenance=None) == replace(expected, provenance=None)
    assert found["V100"].batch_curve[-1].step_seconds == NODE_SECONDS


def test_a_run_makes_a_new_folder_of_profiles(
    hetflow: Hetflow, profiles: Path, runs: Path, tmp_path: Path
) -> None:
    before = {p.device_type: p for p in files.read_profiles(profiles) if p.model == "resnet50"}
    answer = correct(hetflow, runs, profiles, tmp_path / "new", "--json")
    assert answer.code == 0, answer.stderr
    after = {p.device_type: p for p in files.read_profiles(tmp_path / "new")}
    assert json.loads(answer.stdout) == [files.to_plain(after[name]) for name in sorted(after)]
    assert after["P100"] == before["P100"]
    assert after["V100"].batch_curve[-1].step_seconds == NODE_SECONDS
    assert after["V100"].fixed_seconds == pytest.approx(0.096)
    assert after["V100"].provenance is not None
    (entry,) = after["V100"].provenance["corrections"]
    assert entry["runs"][0]["run"] == str(runs / "first")
    terms = {change["term"]: change for change in entry["changes"]}
    assert terms["batch_curve[64].step_seconds"]["after"] == NODE_SECONDS
    shown = correct(hetflow, runs, profiles, tmp_path / "other")
    assert "batch_curve[64].step_seconds" in shown.stdout
    assert "P100: unchanged" in shown.stdout


def test_existing_profiles_are_kept_without_force(
    hetflow: Hetflow, profiles: Path, runs: Path
) -> None:
    path = next(path for path in profiles.iterdir() if "V100" in path.name or "v100" in path.name)
    texts = {path: path.read_text() for path in profiles.iterdir()}
    output = profiles.parent / "taken"
    output.mkdir()
    (output / "resnet50.V100.json").write_text(path.read_text())
    answer = correct(hetflow, runs, profiles, output)
    assert answer.code == 2
    assert "--force" in answer.stderr
    assert [p.name for p in output.iterdir()] == ["resnet50.V100.json"]
    assert {path: path.read_text() for path in profiles.iterdir()} == texts


def test_solve_folds_the_runs_of_its_model_in_memory(
    hetflow: Hetflow, profiles: Path, runs: Path
) -> None:
    record = files.read(runs / "first" / "run.json", RunRecord)
    (runs / "broken").mkdir()
    files.write(runs / "broken" / "run.json", replace(record, status="failed"))
    (runs / "other").mkdir()
    other = replace(record, plan=replace(record.plan, model="other"))
    files.write(runs / "other" / "run.json", other)
    solved = ("solve", "--profiles", profiles, "--gpus", "1xV100", "--batch-size", 256)
    plain, folded = (
        files.from_json(answer.stdout, Plan)
        for answer in (hetflow(*solved), hetflow(*solved, "--runs", runs))
    )
    assert plain.predicted.step_seconds < folded.predicted.step_seconds
    (group,) = folded.groups
    curve = {p.batch_size: p.step_seconds for p in files.read_profiles(profiles)[1].batch_curve}
    ratio = NODE_SECONDS / curve[64]
    assert group.pass_seconds == pytest.approx(ratio * curve[group.virtual_node_batch_size])
    assert folded.provenance is not None
    assert folded.provenance["corrected_by"] == [str(runs / "first")]
    assert "left out, it is failed" in hetflow(*solved, "--runs", runs, "--json").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from-run", "RUNS/first"), "--profiles DIR go together"),
        (("--profiles", "PROFILES"), "--profiles DIR go together"),
        (("zoo:mlp", "--from-run", "RUNS/first", "--profiles", "PROFILES"), "takes no target"),
        (("--from-run", "RUNS", "--profiles", "PROFILES"), "run.json"),
        ((), "nothing to profile"),
    ],
)
def test_flags_that_do_not_go_together(
    hetflow: Hetflow, profiles: Path, runs: Path, arguments: tuple[str, ...], said: str
) -> None:
    places = {"RUNS": str(runs), "PROFILES": str(profiles)}
    given = [
        next((a.replace(k, v) for k, v in places.items() if a.startswith(k)), a) for a in arguments
    ]
    answer = hetflow("profile", *given, "-o", profiles.parent / "new")
    assert answer.code == 2
    assert said in answer.stderr
    assert len([x for x in answer.stderr.splitlines() if x.startswith("hetflow: ")]) == 1
    assert not (profiles.parent / "new").exists()


def test_runs_that_correct_nothing_end_in_one_line(
    hetflow: Hetflow, profiles: Path, runs: Path
) -> None:
    path = runs / "first" / "run.json"
    files.write(path, replace(files.read(path, RunRecord), status="failed"), force=True)
    answer = correct(hetflow, runs, profiles, profiles.parent / "new")
    assert answer.code == 2
    assert "it is failed" in answer.stderr
    assert not (profiles.parent / "new").exists()


def test_profiles_read_alike_after_a_correction(
    hetflow: Hetflow, profiles: Path, runs: Path, tmp_path: Path
) -> None:
    assert correct(hetflow, runs, profiles, tmp_path / "new").code == 0
    for path in (tmp_path / "new").iterdir():
        assert files.to_json(files.read(path, Profile)) == path.read_text()
