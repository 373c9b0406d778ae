"""Tables say everything that matters, and always when a device is emulated."""

import re
from dataclasses import replace

from hetflow.formats.reports.grid import fitted_to
from hetflow.formats.reports.plots import curves_image, split_image
from hetflow.formats.reports.tables import measured_table, plan_table, profile_table, table_of
from hetflow.schema.cluster import Cluster
from hetflow.schema.plan import EmulatedDevice, PassTime, Prediction, Proof
from hetflow.schema.profile import BatchPoint, BusyHost, Emulation, Profile
from hetflow.schema.run import RunEvent, RunRecord
from hetflow.tests.plan_parts import split_plan, whole_group

PROFILE = Profile(
    model="digits",
    device_type="cpu:slow",
    device_memory_bytes=1 << 30,
    weight_bytes=1 << 20,
    update_seconds=0.001,
    batch_curve=(
        BatchPoint(batch_size=32, step_seconds=0.25, peak_memory_bytes=64 << 20),
        BatchPoint(batch_size=64, step_seconds=0.5, peak_memory_bytes=96 << 20),
    ),
    emulation=Emulation(speed=0.25),
    out_of_memory_batch_size=96,
)
PLAN = split_plan(
    model="digits",
    global_batch_size=128,
    groups=(
        whole_group(
            device_type="cpu:slow",
            num_devices=2,
            device_batch_size=64,
            virtual_nodes=2,
            virtual_node_batch_size=32,
            pass_seconds=0.25,
        ),
    ),
    predicted=Prediction(
        step_seconds=0.5, samples_per_second=256.0, compute_seconds=0.5, sync_seconds=0.0
    ),
    proof=Proof(termination="optimal", objective=0.5, lower_bound=0.5, gap=0.0, method="test"),
    emulated=(
        EmulatedDevice(
            device_type="cpu:slow",
            base_device_type="cpu",
            speed=0.25,
            passes=(PassTime(batch_size=32, step_seconds=0.25),),
        ),
    ),
)


def test_a_profile_shows_its_curve_and_that_it_is_emulated() -> None:
    text = profile_table(PROFILE)
    assert "cpu:slow (emulated)" in text
    assert "250 ms" in text
    assert "128.0" in text  # samples per second
    assert "out of memory at batch 96" in text
    assert "sync not measured" in text


def test_a_plan_shows_shares_parts_and_proof() -> None:
    text = plan_table(PLAN)
    assert "2 x cpu:slow (emulated)" in text
    assert "2 x 32" in text
    assert "unproved: 'optimal' is what the solver says" in text  # no judge was asked
    shown = replace(PLAN, proof=replace(PLAN.proof, bound="replayed"))
    assert "\noptimal, gap 0 %" in plan_table(shown)
    assert "256.0 samples/s" in text


def test_a_pool_shows_its_counts() -> None:
    text = table_of(Cluster.parse("2x(4xV100)"))
    assert "V100" in text
    assert "8" in text


def test_the_same_input_gives_the_same_picture() -> None:
    assert split_image(PLAN, "svg") == split_image(PLAN, "svg")
    assert b"emulated" in curves_image([PROFILE], "svg")


def test_a_run_says_how_it_ended_and_what_happened() -> None:
    run = RunRecord(
        plan=PLAN,
        status="failed",
        exit_code=3,
        world_size=2,
        wall_seconds=7.5,
        num_steps=4,
        predicted_step_seconds=0.5,
        measured_step_seconds=None,
        step_seconds_error=None,
        final_loss=None,
        parameters_digest=None,
        devices=(),
        events=(RunEvent(kind="failure", at_seconds=2.25, detail="worker 1 was killed"),),
    )
    first, second = table_of(run).splitlines()[:2]
    assert first == "digits: failed (exit code 3), 4 steps in 7.5 s"
    assert second == "failure after 2.2 s: worker 1 was killed"
    done = replace(run, status="done", exit_code=0, events=())
    assert table_of(done).splitlines()[0] == "digits: done, 4 steps in 7.5 s"


def test_curves_have_plain_ticks_and_bars_of_their_errors() -> None:
    exact = curves_image([PROFILE], "svg").decode()
    points = tuple(replace(point, step_seconds_error=0.1) for point in PROFILE.batch_curve)
    unsure = curves_image([replace(PROFILE, batch_curve=points)], "svg").decode()
    assert "mathdefault" not in exact  # as in 2^3
    assert unsure != exact


def test_what_was_measured_fits_a_terminal() -> None:
    parts = {"load_seconds": 0.01, "virtual_node_seconds": 0.001, "step_seconds_error": 0.123}
    points = tuple(replace(point, **parts) for point in PROFILE.batch_curve)  # type: ignore[arg-type]
    measured = replace(
        PROFILE,
        batch_curve=points,
        fixed_seconds=0.001,
        busy=BusyHost(num_devices=2, batch_curve=points, update_seconds=0.001),
        provenance={"emulation": {"worst_error": 0.01}, "curve_stopped": "all were measured"},
    )
    with fitted_to(80):
        lines = measured_table(measured).splitlines()
    end = lines.index("ended: all were measured at batch size 96")
    assert max(map(len, lines[1:end])) <= 80
    assert "\n".join(lines[1:end]).count("+-12.3%") == 2 * len(points)
    assert lines[0].startswith("digits on cpu:slow (emulated: 0.25 of cpu); update 1.00 ms")


def ticks(picture: str) -> list[str]:
    return re.findall(r"<!-- ([\d.,]+) -->", picture)


def test_ticks_stay_apart_for_one_size_and_for_many() -> None:
    point = PROFILE.batch_curve[0]
    one = replace(PROFILE, batch_curve=(replace(point, batch_size=1),))
    assert ticks(curves_image([one], "svg").decode())[:3] == ["0.5", "1", "2"]
    sizes = [2**power for power in range(17)]
    many = replace(
        PROFILE,
        batch_curve=tuple(replace(point, batch_size=n, step_seconds=0.1 * n) for n in sizes),
    )
    found = ticks(curves_image([many], "svg").decode())
    assert found[:6] == ["1", "10", "100", "1,000", "10,000", "100,000"]


def test_a_split_is_drawn_up_to_the_end_of_its_step() -> None:
    parts = replace(PLAN.predicted, sync_seconds=0.1, update_seconds=0.05, step_seconds=0.9)
    picture = split_image(replace(PLAN, predicted=replace(parts, compute_seconds=0.5)), "svg")
    for name in ("passes of virtual nodes", "loading and fixed costs", "synchronise", "update"):
        assert f"<!-- {name} -->".encode() in picture
    assert b"<!-- milliseconds since the start of a step (predicted) -->" in picture
