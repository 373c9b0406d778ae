"""``hetflow solve``, ``check`` and ``show`` as a user meets them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.planning.limits import SolveLimits
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile, Sync
from hetflow.tests.plan_parts import kind_of

COMMANDS = (
    "demo", "devices", "doctor", "profile", "solve", "check", "launch", "resize",
    "allocate", "simulate", "show", "import", "export",
)  # fmt: skip
Hetflow = Callable[..., Any]
Profiles = Callable[..., Profile]


def one_line_error(answer: Any, code: int, *parts: str) -> None:
    """Exactly one `hetflow: ` line, at most one hint, nothing on stdout."""
    assert answer.code == code, answer
    lines = answer.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("hetflow: ") and "warning" not in line]
    assert len(errors) == 1, answer.stderr
    assert [line for line in lines if not line.startswith(("hetflow: ", "hint: "))] == []
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    for part in parts:
        assert part in answer.stderr


def solve(hetflow: Hetflow, profiles: Path, *more: object) -> Any:
    return hetflow(
        "solve", "--profiles", profiles, "--gpus", "2xV100,2xP100", "--batch-size", 256, *more
    )


def test_a_plan_goes_to_stdout_as_json(hetflow: Hetflow, profiles: Path) -> None:
    answer = solve(hetflow, profiles)
    assert answer.code == 0
    plan = files.from_json(answer.stdout, Plan)
    assert plan.proof.termination == "optimal"
    assert sum(g.num_devices * g.device_batch_size for g in plan.groups) == 256


def test_the_chain_solve_check_show(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert solve(hetflow, profiles, "-o", target).stdout == ""
    checked = hetflow("check", target, "--profiles", profiles, "--gpus", "2xV100,2xP100", "--json")
    assert json.loads(checked.stdout)["valid"] is True
    alone = hetflow("check", target).stdout
    assert "valid (optimal if its certificate holds, which --profiles replays)" in alone
    shown = hetflow("show", target)
    assert "V100" in shown.stdout
    assert "optimal" in shown.stdout
    assert kind_of(json.loads(hetflow("show", target, "--json").stdout)) == "split"


@pytest.mark.parametrize("method", ["cbc", "highs"])
def test_the_reference_agrees(hetflow: Hetflow, profiles: Path, method: str) -> None:
    fast = json.loads(solve(hetflow, profiles).stdout)
    slow = json.loads(solve(hetflow, profiles, "--method", method).stdout)
    assert slow["proof"]["objective"] == pytest.approx(fast["proof"]["objective"], rel=1e-9)


def test_waste_gives_alternatives(hetflow: Hetflow, profiles: Path) -> None:
    answer = solve(hetflow, profiles, "--objective", "waste", "--virtual-nodes", 8, "--top", 3)
    plan = json.loads(answer.stdout)
    assert plan["objective"] == "waste"
    throughputs = [plan["est"]["throughput"]] + [
        choice["est"]["throughput"] for choice in plan["alternatives"]
    ]
    assert throughputs == sorted(throughputs, reverse=True)


def test_a_broken_plan_fails_its_check(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    document = json.loads(solve(hetflow, profiles).stdout)
    document["predicted"]["step_seconds"] *= 0.5
    target = tmp_path / "plan.json"
    target.write_text(json.dumps(document))
    answer = hetflow("check", target, "--profiles", profiles, "--gpus", "2xV100,2xP100")
    one_line_error(answer, 2, "step_seconds")


def write_profile(profile: Profile, folder: Path, **changes: Any) -> Path:
    document = files.to_plain(profile)
    document.update(changes)
    folder.mkdir()
    (folder / "p.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"update_seconds": float("nan")}, "$.update_seconds: must be finite"),
        ({"update_seconds": float("inf")}, "$.update_seconds: must be finite"),
        ({"weight_bytes": -1}, "$.weight_bytes: must be >= 0"),
        ({"batch_cruve": []}, "did you mean 'batch_curve'?"),
        ({"batch_curve": [{"batch_size": 1, "step_seconds": 0, "peak_memory_bytes": 1}]}, "> 0"),
    ],
)
def test_bad_profiles_are_named(
    hetflow: Hetflow, make_profile: Profiles, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    folder = write_profile(make_profile("V100", 1.0), tmp_path / "bad", **changes)
    one_line_error(solve(hetflow, folder, "-o", tmp_path / "plan.json"), 2, part, "p.json")
    assert not (tmp_path / "plan.json").exists()


def test_bad_pools_are_named(hetflow: Hetflow, profiles: Path) -> None:
    def asked(gpus: str) -> Any:
        return hetflow("solve", "--profiles", profiles, "--gpus", gpus, "--batch-size", 256)

    one_line_error(asked("2xV10"), 2, "V10", "V100")
    one_line_error(asked("0xV100"), 2, "at least 1")
    one_line_error(asked("2*?"), 2, "cannot read")


def test_bad_flags_are_named(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    one_line_error(hetflow("solve", "--profiles", profiles, "--batch-size", 8), 2, "no pool")
    one_line_error(hetflow("solve", "--batch-size", 8), 2, "--profiles")
    one_line_error(hetflow("sovle"), 2, "sovle")
    one_line_error(solve(hetflow, profiles, "--top", 2), 2, "--objective waste")
    one_line_error(solve(hetflow, profiles, "--virtual-nodes", 7), 2, "do not divide")
    one_line_error(solve(hetflow, tmp_path / "absent"), 2, "no such folder")
    one_line_error(solve(hetflow, profiles, "--model", "resnet5"), 2, "resnet50")


def test_infeasible_is_exit_3_with_the_nearest_batches(hetflow: Hetflow, profiles: Path) -> None:
    answer = hetflow("solve", "--profiles", profiles, "--gpus", "2xV100,2xP100", "--batch-size", 3)
    one_line_error(answer, 3, "8")


def test_outputs_are_protected(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("mine")
    one_line_error(solve(hetflow, profiles, "-o", target), 2, "exists already", "--force")
    assert target.read_text() == "mine"
    assert solve(hetflow, profiles, "-o", target, "--force").code == 0
    absent = tmp_path / "absent" / "plan.json"
    one_line_error(solve(hetflow, profiles, "-o", absent), 2, "no such folder")


def test_truncated_plans_are_named(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text(solve(hetflow, profiles).stdout[:100])
    for command in ("check", "show"):
        one_line_error(hetflow(command, target), 2, "not valid JSON at line")


def test_values_resolve_flag_environment_file_default(
    hetflow: Hetflow, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "hetflow.toml"
    config.write_text('[solve]\nbatch-size = 64\ngpus = "2xV100"\n')
    monkeypatch.setenv("HETFLOW_CONFIG", str(config))
    monkeypatch.setenv("HETFLOW_SOLVE_GPUS", "1xV100")
    shown = hetflow("solve", "--profiles", profiles, "--show-config").stdout
    assert "batch_size = 64  (file" in shown
    assert "gpus = '1xV100'  (environment HETFLOW_SOLVE_GPUS)" in shown
    assert "strategy = 'auto'  (default)" in shown
    assert "(flag)" in shown
    plan = json.loads(hetflow("solve", "--profiles", profiles).stdout)
    assert plan["global_batch_size"] == 64
    config.write_text("[solve\n")
    one_line_error(hetflow("solve", "--profiles", profiles), 2, "not valid TOML")


def test_pictures_are_drawn(hetflow: Hetflow, profiles: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    solve(hetflow, profiles, "-o", target)
    assert hetflow("show", profiles, "--plot", tmp_path / "curves.png").code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert hetflow("show", target, "--plot", tmp_path / "split.svg").code == 0
    assert "<svg" in (tmp_path / "split.svg").read_text()
    one_line_error(hetflow("show", target, "--plot", tmp_path / "x.gif"), 2, ".png or .svg")


def test_every_command_has_help_with_an_example(hetflow: Hetflow) -> None:
    for command in COMMANDS:
        answer = hetflow(command, "--help")
        assert answer.code == 0
        assert f"hetflow {command}" in answer.stdout.split("Options", 1)[0].split("\n", 2)[2]
        assert "--json" in answer.stdout, command


def test_solve_takes_a_kind_with_its_options_alone(
    hetflow: Hetflow, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``solve split`` is ``solve --strategy split``, with the same environment and table."""
    asked = ("--profiles", profiles, "--gpus", "2xV100,2xP100", "--virtual-nodes", 8)
    plain = hetflow("solve", *asked, "--batch-size", 256, "--strategy", "split")
    assert hetflow("solve", "split", *asked, "--batch-size", 256) == plain
    (tmp_path / "hetflow.toml").write_text("[solve]\nbatch-size = 256\n")
    monkeypatch.chdir(tmp_path)
    assert hetflow("solve", "split", *asked) == plain
    monkeypatch.setenv("HETFLOW_SOLVE_BATCH_SIZE", "128")
    assert json.loads(hetflow("solve", "split", *asked).stdout)["global_batch_size"] == 128
    one_line_error(hetflow("solve", "pipeline", *asked), 2, "No such option: --virtual-nodes")
    one_line_error(hetflow("solve", "split", "--schedule", "1f1b"), 2, "--schedule")
    shown = hetflow("solve", "--help").stdout
    panels = ("Options:", "Options of splits:", "Options of pipelines:")
    assert [panel for panel in panels if f"\n{panel}\n" in shown] == list(panels)


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path) -> None:
    """As in ``hetflow ... 2>&1 | head -1``: the reader may be gone before the second line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hetflow", "show", str(tmp_path / "nowhere.json")]
    try:
        assert subprocess.run(command, stdout=writer, stderr=writer).returncode == 2
    finally:
        os.close(writer)


def test_the_simpler_plan_is_taken_said_and_refused(
    hetflow: Hetflow, make_profile: Profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 x 16 are 1 % faster on paper than 4 x 32, and the passes known to 3 %."""
    curve = [
        {"batch_size": 16, "step_seconds": 0.020, "peak_memory_bytes": 1},
        {"batch_size": 32, "step_seconds": 0.0404, "peak_memory_bytes": 1},
    ]
    told = [{**point, "load_seconds": 0.001, "step_seconds_error": 0.03} for point in curve]
    folder = write_profile(
        make_profile("V100", 1.0), tmp_path / "told", batch_curve=told, fixed_seconds=0.002
    )
    target = tmp_path / "plan.json"
    asked = ("--profiles", folder, "--gpus", "2xV100", "--batch-size", 256, "--strategy", "split")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    answer = hetflow("solve", *asked, "-o", target)
    assert "2 x V100: 8 x 16, is predicted at 186 ms" in answer.stderr
    assert "--fastest takes the other" in answer.stderr
    plan = json.loads(target.read_text())
    assert [group["virtual_nodes"] for group in plan["stages"][0]["replicas"]] == [4]
    assert not SolveLimits(time_limit_seconds=1.0).is_missed(files.read(target, Plan))
    assert "simplest of the plans within 2 %" in plan["proof"]["method"]
    checked = hetflow("check", target, "--profiles", folder, "--gpus", "2xV100")
    assert "valid (optimal)" in checked.stdout
    shown = hetflow("show", target).stdout
    assert "simpler than the fastest on paper, 186 ms" in shown
    assert "the measurements allow" in shown
    plan = json.loads(hetflow("solve", *asked, "--fastest").stdout)
    assert [group["virtual_nodes"] for group in plan["stages"][0]["replicas"]] == [8]
    assert "tolerance" not in plan["proof"]


def test_a_step_is_explained_by_terms_that_add_up(
    hetflow: Hetflow, profiles: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    solve(hetflow, profiles, "-o", target)
    shown = hetflow("show", target, "--explain").stdout
    assert "passes on the slowest" in shown
    assert "synchronisation over 4 devices" in shown
    assert "fixed cost of a step was not measured" in shown
    document = json.loads(hetflow("show", target, "--explain", "--json").stdout)
    total = sum(term["seconds"] for term in document["terms"])
    assert total == pytest.approx(document["step_seconds"], rel=1e-9)
    one_line_error(hetflow("show", profiles, "--explain"), 2, "--explain is for plans")
    document = json.loads(target.read_text())
    document["predicted"]["update_seconds"] += 1
    target.write_text(json.dumps(document))
    one_line_error(hetflow("show", target, "--explain"), 2, "the terms add up to")


def test_an_unknown_synchronisation_and_a_sweep_of_one_size_are_said(
    hetflow: Hetflow, profiles: Path, tmp_path: Path, make_profile: Callable[..., Profile]
) -> None:
    """The first was planned for free; of the second, 50 x 1 was optimal and 13 times too slow."""
    measured = make_profile("V100", 1.0)
    unknown = replace(measured, sync=Sync(num_devices=2, at_most_seconds=0.003))
    files.write(profiles / "v100.json", unknown, force=True)
    target = tmp_path / "plan.json"
    solved = hetflow(
        "solve", "--profiles", profiles, "--gpus", "2xV100", "--batch-size", 128, "-o", target
    )
    sentence = "synchronisation of V100 could not be told from zero"
    assert f"{sentence}: plans count the most that it can be, 3 ms a step" in solved.stderr
    plan = files.read(target, Plan)
    assert plan.predicted.sync_seconds == 0.003
    checked = hetflow("check", target, "--profiles", profiles, "--gpus", "2xV100")
    assert checked.code == 0
    for command in (("show", target), ("show", target, "--explain")):
        assert sentence in hetflow(*command).stdout
    assert "unknown, at most 3" in hetflow("show", profiles / "v100.json").stdout
    files.write(target, replace(plan, sync_bounds=()), force=True)
    checked = hetflow("check", target, "--profiles", profiles, "--gpus", "2xV100")
    assert checked.code != 0
    assert "sync_bounds" in checked.stdout + checked.stderr
    alone = replace(
        measured,
        batch_curve=measured.batch_curve[:1],
        provenance={"curve_stopped": "the time budget is spent"},
    )
    files.write(profiles / "v100.json", alone, force=True)
    solved = hetflow("solve", "--profiles", profiles, "--gpus", "2xV100", "--batch-size", 128)
    assert (
        "the profile of V100 holds batch size 8 alone (the time budget is spent)" in solved.stderr
    )
