"""Tables say everything that matters, and always when a device is emulated."""

from hetflow.reports.plots import curves_image, split_image
from hetflow.reports.tables import plan_table, profile_table, table_of
from hetflow.schema.cluster import Cluster
from hetflow.schema.plan import (
    DeviceGroup,
    EmulatedDevice,
    PassTime,
    Prediction,
    Proof,
    SplitPlan,
)
from hetflow.schema.profile import BatchPoint, Emulation, Profile

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
PLAN = SplitPlan(
    model="digits",
    global_batch_size=128,
    groups=(
        DeviceGroup(
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
    assert "optimal, gap 0 %" in text
    assert "256.0 samples/s" in text


def test_a_pool_shows_its_counts() -> None:
    text = table_of(Cluster.parse("2x(4xV100)"))
    assert "V100" in text
    assert "8" in text


def test_the_same_input_gives_the_same_picture() -> None:
    assert split_image(PLAN, "svg") == split_image(PLAN, "svg")
    assert b"emulated" in curves_image([PROFILE], "svg")
