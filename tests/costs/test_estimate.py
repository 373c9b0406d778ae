"""Profiles from operator counts and data sheets, against the roofline by hand."""

from dataclasses import replace

import pytest

from hetflow.planning.costs.device_table import SPECS, DeviceSpec, spec_of
from hetflow.planning.costs.efficiency import ESTIMATED_ERROR, RATIO_ERROR
from hetflow.planning.costs.estimate import (
    RESERVE_BYTES,
    Estimator,
    carried_profile,
    estimated_profile,
)
from hetflow.planning.costs.roofline import Efficiency, operator_seconds
from hetflow.schema import files
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.layers import (
    LayerCounts,
    LayerTable,
    LayerTrace,
    ModelCounts,
    Operator,
    PassCounts,
    SumCounts,
)
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.profile import BatchPoint, Profile

DEVICE = DeviceSpec(
    name="Toy-1GB",
    device_type="Toy",
    memory_bytes=2**31,
    float32_flops_per_second=100e9,
    tf32_flops_per_second=400e9,
    half_flops_per_second=800e9,
    has_bfloat16=False,
    memory_bytes_per_second=10e9,
    board_watts=4.0,
    link="PCIe",
    link_bytes_per_second=2e9,
    source="made up",
)
SHARES = Efficiency(
    vector=0.5,
    tf32=0.25,
    half=0.5,
    convolution_vector=0.25,
    convolution_tf32=0.125,
    convolution_half=0.25,
    memory=0.5,
    convolution_memory=0.25,
    channels_last_memory=0.4,
    link=0.5,
    launch_seconds=1e-3,
    power=0.5,
)
ESTIMATOR = Estimator(spec=DEVICE, efficiency=SHARES)


def operator(
    name: str = "mm", flops: float = 0.0, num_bytes: int = 0, dtype: str = "float32", count: int = 1
) -> Operator:
    return Operator(name=name, dtype=dtype, flops=flops, num_bytes=num_bytes, count=count)


def passes(size: int) -> PassCounts:
    return PassCounts(
        batch_size=size,
        forward=(operator(flops=5e9 * size),),
        backward=(operator(flops=10e9 * size), operator("add", num_bytes=10**9)),
        kept_bytes=10**6 * size,
        peak_bytes=10**8 * size,
        batch_bytes=1000 * size,
        sums=(
            SumCounts(num_bytes=10**6, num_sums=1, after=(operator("add", num_bytes=10**8),)),
            SumCounts(num_bytes=3 * 10**6, num_sums=2, after=()),
        ),
    )


def counts(*sizes: int) -> ModelCounts:
    return ModelCounts(
        weight_bytes=4 * 10**6,
        num_parameters=10**6,
        standing_bytes=12 * 10**6,
        optimizer=OptimizerState(name="sgd-momentum", state_bytes_per_weight_byte=1.0),
        update=(operator("_foreach_add_", num_bytes=5 * 10**8),),
        update_workspace_bytes=0,
        passes=tuple(passes(size) for size in sizes),
    )


def layer(name: str, flops: float) -> LayerCounts:
    return LayerCounts(
        id=name,
        op="Linear",
        forward=(operator(flops=flops),),
        backward=(operator(flops=2 * flops),),
        activation_bytes=10,
        weight_bytes=2 * 10**6,
        stashed_bytes=10,
        workspace_bytes=0,
    )


TABLE = LayerTable(
    whole=passes(2),
    layers=(layer("a", 2e9), layer("b", 6e9)),
    edges=(("a", "b"),),
    trace=LayerTrace(way="fx"),
)


@pytest.mark.parametrize(
    ("call", "precision", "seconds"),
    [
        (operator(flops=5e9), None, 0.101),  # 5e9 / (100e9 * 0.5)
        (operator(num_bytes=10**9), None, 0.201),  # 1e9 / (10e9 * 0.5)
        (operator(flops=5e9, num_bytes=10**9), None, 0.201),  # the longer of the two
        (operator("convolution", flops=5e9), None, 0.101),  # 5e9 / (400e9 * 0.25 * 0.5): TF32
        (operator("convolution", flops=5e9), "float32", 0.201),
        (operator(flops=5e9), "tf32", 0.051),
        (operator(flops=5e9, dtype="float16"), None, 0.0135),
        (operator(flops=5e9), "float16", 0.0135),
        (operator(flops=5e9, dtype="bfloat16"), None, 0.101),  # emulated where there is none
    ],
)
def test_an_operator_takes_its_launch_and_the_longer_of_computing_and_moving(
    call: Operator, precision: str | None, seconds: float
) -> None:
    assert operator_seconds(call, DEVICE, SHARES, precision) == pytest.approx(seconds)


def test_a_board_of_little_power_runs_its_fast_units_slower() -> None:
    """A quarter of the watts that limit nothing, to the power 0.5, at the half unit's peak."""
    weak = replace(DEVICE, board_watts=0.8)
    call = operator(flops=5e9, dtype="float16")
    assert operator_seconds(call, weak, SHARES) == pytest.approx(0.026)  # twice 0.0125
    slow = operator(flops=5e9)  # 8e-12 W for an operation of the vector units
    assert operator_seconds(slow, weak, SHARES) == operator_seconds(slow, DEVICE, SHARES)


def test_a_profile_adds_up_operators() -> None:
    profile = estimated_profile(counts(1, 2), ESTIMATOR, model="toy")
    first, second = profile.batch_curve
    assert first.step_seconds == pytest.approx(0.101 + 0.201 + 0.201)
    assert second.step_seconds == pytest.approx(0.201 + 0.401 + 0.201)
    assert profile.update_seconds == pytest.approx(0.101)
    assert second.peak_memory_bytes == 12 * 10**6 + 2000 + 2 * 10**8 + RESERVE_BYTES
    assert profile.sync is not None
    assert profile.sync.bytes_per_second == 1e9
    assert profile.sync.sync_seconds == pytest.approx(2e-5 + 4e-3)
    assert profile.device_memory_bytes == DEVICE.memory_bytes
    early, last = second.sums
    assert (early.num_bytes, last.num_bytes, last.num_sums) == (10**6, 3 * 10**6, 2)
    assert (early.seconds_left, last.seconds_left) == (pytest.approx(0.021), 0.0)


def test_an_estimate_says_so_and_survives_its_file() -> None:
    profile = estimated_profile(counts(1), ESTIMATOR, model="toy")
    assert profile.estimate is not None
    assert (profile.estimate.spec, profile.estimate.source) == ("Toy-1GB", "made up")
    assert profile.step_error == profile.estimate.step_error == ESTIMATED_ERROR.products
    assert files.from_json(files.to_json(profile), Profile) == profile


def test_a_model_of_convolutions_has_the_error_of_those() -> None:
    products = estimated_profile(counts(1), ESTIMATOR, model="toy")
    convolved = replace(passes(1), forward=(operator("convolution", flops=9e10),))
    vision = estimated_profile(replace(counts(1), passes=(convolved,)), ESTIMATOR, model="toy")
    assert products.step_error == ESTIMATED_ERROR.products
    assert vision.step_error == ESTIMATED_ERROR.convolutions


def test_sizes_end_with_the_memory() -> None:
    profile = estimated_profile(counts(1, 8, 16), ESTIMATOR, model="toy")
    assert [point.batch_size for point in profile.batch_curve] == [1, 8]
    assert profile.out_of_memory_batch_size == 16
    with pytest.raises(InfeasibleError, match="toy does not fit a Toy-1GB: a batch of 16"):
        estimated_profile(counts(16), ESTIMATOR, model="toy")


def test_a_model_that_fits_no_device_can_still_be_a_pipeline() -> None:
    layered = replace(counts(16), tables=(TABLE,))
    profile = estimated_profile(layered, ESTIMATOR, model="toy")
    assert profile.out_of_memory_batch_size == 16
    assert profile.layers is not None
    assert profile.batch_curve[0].peak_memory_bytes > profile.device_memory_bytes


def test_layers_sum_to_the_whole_pass() -> None:
    profile = estimated_profile(replace(counts(2), tables=(TABLE,)), ESTIMATOR, model="toy")
    assert profile.layers is not None
    a, b = profile.layers.nodes
    assert a.forward_seconds + b.forward_seconds == pytest.approx(0.201)
    assert a.backward_seconds + b.backward_seconds == pytest.approx(0.401 + 0.201)
    assert b.forward_seconds / a.forward_seconds == pytest.approx(0.121 / 0.041)


def measured(*points: tuple[int, float]) -> Profile:
    curve = tuple(
        BatchPoint(
            batch_size=size, step_seconds=seconds, peak_memory_bytes=10**9, load_seconds=0.01,
            virtual_node_seconds=0.02,
        )
        for size, seconds in points
    )  # fmt: skip
    profile = estimated_profile(counts(1), ESTIMATOR, model="toy")
    return replace(profile, batch_curve=curve, update_seconds=0.3, estimate=None, layers=None)


def test_a_profile_carried_to_its_own_type_is_itself() -> None:
    before = measured((1, 1.0), (2, 1.5))
    carried = carried_profile(before, counts(1, 2), ESTIMATOR, ESTIMATOR)
    assert [p.step_seconds for p in carried.batch_curve] == pytest.approx([1.0, 1.5])
    assert carried.update_seconds == pytest.approx(0.3)
    assert carried.estimate is not None
    assert carried.estimate.carried_from == "Toy"
    assert carried.step_error == RATIO_ERROR.products


def test_only_the_model_s_own_time_is_carried() -> None:
    fast = Estimator(
        spec=replace(
            DEVICE,
            device_type="Fast",
            float32_flops_per_second=200e9,
            memory_bytes_per_second=20e9,
        ),
        efficiency=replace(SHARES, launch_seconds=5e-4),
    )
    carried = carried_profile(measured((1, 1.03)), counts(1), ESTIMATOR, fast)
    assert carried.device_type == "Fast"
    assert carried.batch_curve[0].step_seconds == pytest.approx(0.5 + 0.03)


def test_what_is_no_measurement_is_not_carried() -> None:
    estimate = estimated_profile(counts(1), ESTIMATOR, model="toy")
    with pytest.raises(ProblemError, match="is itself an estimate"):
        carried_profile(estimate, counts(1), ESTIMATOR, ESTIMATOR)
    other = replace(counts(1), weight_bytes=8)
    with pytest.raises(ProblemError, match="they are two models"):
        carried_profile(measured((1, 1.0)), other, ESTIMATOR, ESTIMATOR)


def test_a_device_is_found_by_type_and_by_form() -> None:
    assert spec_of("a100").name == "A100-SXM4-40GB"  # of two, the one with less memory
    assert spec_of("A100-SXM4-80GB").memory_bytes == 80 * 2**30
    with pytest.raises(ProblemError, match="did you mean 'H100'"):
        spec_of("H1000")


def test_every_row_says_where_it_is_from() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    assert all(spec.source for spec in SPECS)
