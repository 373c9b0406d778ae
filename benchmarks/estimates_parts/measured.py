"""The measured runs, each with the operators that it ran."""

import csv
import json
import lzma
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetflow.planning.costs.device_table import DeviceSpec, spec_of
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.schema.layers import Operator

from .megatron import Shape, block_counts, head_counts

# Sailor's names of devices. GH-96 is a GH200 with 96 GB.
SPECS = {
    "A100-40": spec_of("A100-SXM4-40GB"),
    "GH-96": spec_of("GH200-96GB"),
    "V100-16": spec_of("V100-SXM2-16GB"),
    "Titan-RTX": spec_of("TITAN-RTX-24GB"),
}
VTRAIN = spec_of("A100-SXM4-80GB")
# OPT's published configuration has no dropout in its attention.
OPT = Shape(1024, 16, 2048, attention_dropout=0.0)
_VTRAIN_VOCABULARY = 51200
_MODELS = Path(__file__).with_name("published_models.py")
COUNTS = Path(__file__).resolve().parents[1] / "results" / "convolution_counts.json.xz"
_COUNTED_AT = (16, 32)  # other batch sizes follow
Operators = tuple[tuple[int, tuple[Operator, ...]], ...]
ADAM_BYTES = 30  # a parameter: gradient, two moments and 32-bit weight read and written, copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured time, and the operators that it is the time of.

    Args:
        source: Who measured.
        model: What was trained, with what tells its figures apart.
        config: What was varied: a size, or a part of the pass after a comma.
        spec: Of the device.
        operators: (how many times, operators), one after another.
        moved_bytes: Through the device's memory besides, by the optimizer.
        sent_bytes: Over the link, to synchronise.
        seconds: Measured.
        weight: In the whole pass: how many such parts it has.
        samples: That it was measured with, where devices were measured with unlike numbers.
    """

    source: str
    model: str
    config: str
    spec: DeviceSpec
    operators: Operators
    moved_bytes: float = 0.0
    sent_bytes: float = 0.0
    seconds: float
    weight: int = 1
    samples: int = 1


def count(model: str, is_half: bool) -> list[list[dict[str, Any]]]:
    """What a step of one of published_models.py calls: at two batch sizes, and its update."""
    counts = count_model(
        targets.parse(f"{_MODELS}:{model}"), _COUNTED_AT, (), "sgd-momentum",
        precision="float16" if is_half else None,
    )  # fmt: skip
    passes = [one.forward + one.backward for one in counts.passes]
    return [list(map(asdict, operators)) for operators in (*passes, counts.update)]


def key_of(model: str, is_half: bool) -> str:
    """Of a model's counts among the committed ones."""
    return f"{model}, {16 if is_half else 32} bits"


def write_counts(models: Iterable[tuple[str, bool]]) -> None:
    """Count models, each in 16 or in 32 bits, and write what is committed."""
    found = {key_of(*model): count(*model) for model in sorted(models)}
    COUNTS.write_bytes(lzma.compress(json.dumps(found).encode()))


@cache
def committed_counts() -> dict[str, list[list[dict[str, Any]]]]:
    """What was counted, by ``key_of``; counting all takes minutes."""
    found: dict[str, list[list[dict[str, Any]]]] = json.loads(lzma.decompress(COUNTS.read_bytes()))
    return found


@cache
def counted(model: str, is_half: bool) -> Callable[[int], Operators]:
    """What a step of a model calls, by batch size.

    Operations and bytes of each operator are linear in it, so two sizes are counted.
    """
    small, large, update = (
        [Operator(**operator) for operator in operators]
        for operators in committed_counts()[key_of(model, is_half)]
    )
    first, last = _COUNTED_AT

    def at(size: int, one: Operator, other: Operator) -> Operator:
        assert replace(one, flops=0.0, num_bytes=0) == replace(other, flops=0.0, num_bytes=0)
        share = (size - first) / (last - first)
        return replace(
            one,
            flops=one.flops + share * (other.flops - one.flops),
            num_bytes=round(one.num_bytes + share * (other.num_bytes - one.num_bytes)),
        )

    return lambda size: (
        (1, tuple(at(size, *pair) for pair in zip(small, large, strict=True))),
        (1, tuple(update)),
    )


@cache
def _counts(shape: Shape, batch: int) -> tuple[tuple[tuple[Operator, ...], ...], ...]:
    with FakeTensorMode():
        return block_counts(shape, batch), head_counts(shape, batch)


def sailor_layers(folder: Path) -> Iterator[Measured]:
    """Forward and backward passes of a block and of the head, on one device.

    Blocks were checkpointed: their backward passes fit only with the forward pass inside.
    """
    devices = json.loads((folder / "sailor" / "layer_profiles_opt350.json").read_text())
    for device, sizes in devices.items():
        for size in sorted((size for size in sizes if "1" in sizes[size]), key=int):
            layers = sizes[size]["1"]
            (forward, backward), (head, head_backward) = _counts(OPT, int(size))
            blocks = [layers[str(number)] for number in range(1, 25)]
            for part, operators, seconds, weight in (
                ("block forward", forward, statistics.median(b[0] for b in blocks), 24),
                ("block backward", forward + backward, statistics.median(b[1] for b in blocks), 24),
                ("head forward", head, layers["25"][0], 1),
                ("head backward", head_backward, layers["25"][1], 1),
            ):
                yield Measured(
                    source="Sailor",
                    model="OPT-350M",
                    config=f"microbatch {size}, {part}",
                    spec=SPECS[device],
                    operators=((1, operators),),
                    seconds=seconds,
                    weight=weight,
                )


def vtrain_steps(folder: Path) -> Iterator[Measured]:
    """Whole steps of data-parallel GPT models in 16 bits on one node of A100."""
    with (folder / "vtrain" / "measured_runs_a100_tensor1.csv").open(encoding="utf-8") as stream:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(stream))[1:]]
    for number, row in enumerate(rows):
        _, batch, micro, hidden, heads, layers, length, _, replicas, stages, milliseconds = row
        if stages != 1:
            continue
        shape = Shape(
            int(hidden), int(heads), int(length), vocabulary=_VTRAIN_VOCABULARY,
            dtype=torch.float16,
        )  # fmt: skip
        (forward, backward), (head, head_backward) = _counts(shape, int(micro))
        passes = int(batch / micro / replicas)
        weights = layers * 12 * hidden**2 + (_VTRAIN_VOCABULARY + length) * hidden
        yield Measured(
            source="vTrain",
            model=f"GPT of width {hidden:.0f} and {layers:.0f} layers",
            config=f"run {number}",
            spec=VTRAIN,
            operators=(
                (passes * int(layers), forward + backward),
                (passes, head + head_backward),
            ),
            moved_bytes=ADAM_BYTES * weights,
            sent_bytes=2 * (replicas - 1) / replicas * 2 * weights,
            seconds=milliseconds / 1e3,
        )


def link_shares(folder: Path) -> dict[str, float]:
    """Measured bandwidth of large messages in a node of four, over the sheet's, by device."""
    found = json.loads((folder / "sailor" / "intra_node_bandwidths.json").read_text())
    return {name: found[name]["4"][1] / spec.link_bytes_per_second for name, spec in SPECS.items()}
