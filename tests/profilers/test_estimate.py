"""Estimates from the target to the profile, through the process that counts."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import hetflow
from hetflow.planning.parallel_problem import parallel_problem
from hetflow.profilers.process import Child
from hetflow.runtime.preload import Forked
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError, TargetError
from hetflow.schema.problem import Problem
from hetflow.schema.profile import Profile
from hetflow.tests import programs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    """Fork the processes that count from the one that those that measure are forked from."""
    with mock.patch.dict(os.environ, {programs.VARIABLE: programs.preloaded()}):
        yield


@pytest.fixture(scope="module")
def estimated() -> Profile:
    (profile,) = hetflow.profile(
        "zoo:gpt-small",
        ["spec:V100"],
        layers=True,
        optimizer="adam",
        max_batch_size=8,
        recompute=True,
        offload=True,
    )
    return profile


def test_the_process_that_counts_is_forked_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for preloaded in (True, False):
        with Child() as child:
            assert isinstance(child._process, Forked) is preloaded
        monkeypatch.setenv(programs.VARIABLE, "off")


def test_sizes_layers_and_optimizer_come_from_the_target(estimated: Profile) -> None:
    assert [point.batch_size for point in estimated.batch_curve] == [1, 2, 3, 4, 6, 8]
    for point, plain in zip(estimated.recomputed_curve, estimated.batch_curve, strict=True):
        assert plain.step_seconds < point.step_seconds < 1.5 * plain.step_seconds
        assert point.peak_memory_bytes <= plain.peak_memory_bytes
    for point, plain in zip(estimated.offloaded_curve, estimated.batch_curve, strict=True):
        assert point.step_seconds >= plain.step_seconds
        assert (point.pass_bytes or 0) < (plain.pass_bytes or 0)
    assert estimated.optimizer is not None
    assert estimated.optimizer.state_bytes_per_weight_byte == 2.0
    (table,) = estimated.layer_tables
    total = sum(node.forward_seconds + node.backward_seconds for node in table.nodes)
    assert total == pytest.approx(estimated.batch_curve[-1].step_seconds)
    assert sum(node.weight_bytes for node in table.nodes) == estimated.weight_bytes


def test_groups_of_devices_share_a_transformers_layers(estimated: Profile) -> None:
    assert [each.tensor_parallel_size for each in estimated.tensor_layers] == [2, 4]  # of 4 heads
    assert estimated.layers is not None
    whole = {node.id: node for node in estimated.layers.nodes}
    for each in estimated.tensor_layers:
        for node in each.layers.nodes:
            assert node.activation_bytes == whole[node.id].activation_bytes
            assert node.weight_bytes <= whole[node.id].weight_bytes
        # All but the 96 rows of embeddings, the rows' biases and the norms is split.
        split = sum(n.weight_bytes for n in each.layers.nodes)
        kept = 4 * (96 * 128 + 4 * 2 * 128 + 9 * 2 * 128)
        assert split == kept + (estimated.weight_bytes - kept) // each.tensor_parallel_size


def test_sequences_are_spread_over_the_same_groups(estimated: Profile) -> None:
    pairs = zip(estimated.tensor_layers, estimated.sequence_layers, strict=True)
    for plain, spread in pairs:
        assert plain.tensor_parallel_size == spread.tensor_parallel_size
        kept = [sum(n.stashed_bytes or 0 for n in each.layers.nodes) for each in (plain, spread)]
        assert kept[1] < kept[0]


def test_attention_cores_are_estimated(estimated: Profile) -> None:
    assert estimated.layers is not None
    tables = [estimated.layers, *(each.layers for each in estimated.tensor_layers)]
    cores = [[node.core for node in table.nodes if node.core] for table in tables]
    assert [len(found) for found in cores] == [4, 4, 4]  # a block's kernel of attention
    (whole, *_), (half, *_), _ = cores
    assert 0 < half.forward_seconds < whole.forward_seconds
    assert half.made_bytes == whole.made_bytes / 2
    problem = parallel_problem(
        Problem([estimated], Cluster.parse("4xV100"), 8, link_bytes_per_second=1e9)
    )
    assert problem.recompute == ("none", "selective", "full")


def test_a_measured_profile_is_carried_layer_by_layer(estimated: Profile, tmp_path: Path) -> None:
    """As if a V100 had been measured that takes twice its estimate."""
    assert estimated.layers is not None
    measured = replace(
        estimated,
        batch_curve=tuple(
            replace(point, step_seconds=2 * point.step_seconds) for point in estimated.batch_curve
        ),
        layers=replace(
            estimated.layers,
            nodes=tuple(
                replace(node, forward_seconds=2 * node.forward_seconds)
                for node in estimated.layers.nodes
            ),
        ),
        estimate=None,
        provenance={"device": "Tesla V100-SXM2-16GB"},
    )
    path = tmp_path / "measured.json"
    files.write(path, measured)
    (target,) = hetflow.profile(
        "zoo:gpt-small", ["spec:H100"], layers=True, optimizer="adam", batch_sizes=[8]
    )
    (carried,) = hetflow.profile("zoo:gpt-small", ["spec:H100"], from_profile=path)
    assert carried.estimate is not None
    assert carried.estimate.carried_from == "V100"
    assert len(carried.batch_curve) == len(measured.batch_curve)
    assert carried.tensor_layers == ()
    assert carried.batch_curve[-1].step_seconds == pytest.approx(
        2 * target.batch_curve[-1].step_seconds
    )
    assert carried.layers is not None
    assert target.layers is not None
    forward, direct = (
        sum(node.forward_seconds for node in profile.layers.nodes)  # type: ignore[union-attr]
        for profile in (carried, target)
    )
    assert forward == pytest.approx(2 * direct, rel=0.2)  # layers are scaled to the whole apart


def test_what_cannot_be_carried_or_counted_is_refused(estimated: Profile, tmp_path: Path) -> None:
    elsewhere = replace(estimated, estimate=None, device_type="cpu", provenance=None)
    with pytest.raises(ProblemError, match="measured on cpu, which is not in the device table"):
        hetflow.profile("zoo:gpt-small", ["spec:H100"], from_profile=elsewhere)
    script = tmp_path / "train.py"
    script.write_text("def workload():\n    raise RuntimeError('no data')\n")
    with pytest.raises(TargetError, match="no data"):
        hetflow.profile(f"{script}:workload", ["spec:H100"])
