"""Pools as Slurm, drivers and nvidia-smi spell them."""

from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.planning.inputs import pool_of
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError

LISTING = """GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-4f2)
GPU 1: Tesla V100-SXM2-16GB (UUID: GPU-4f3)
GPU 2: NVIDIA H100 PCIe (UUID: GPU-4f4)
"""


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("gpu:v100:2", "2xv100"),
        ("gres/gpu:v100:2,gpu:a100:4(S:0-1)", "2xv100,4xa100"),
        ("gres/gpu:h100", "h100"),
        ("gres/gpu:v100=2,gres:gpu:a100:4", "2xv100,4xa100"),
        ("gpu:tesla_v100-sxm2-16gb:2(S:0-1)", "v100:2:16GB"),
        ("gpu:nvidia_a100_80gb_pcie:4", "a100:4:80GB"),
        ("NVIDIA-A100-SXM4-80GB=8,Tesla-V100-SXM2-16GB:2", "A100:8:80GB,V100:2:16GB"),
        ("Tesla V100-SXM2-16GB:2", "V100:2:16GB"),
        ("2xTesla V100-SXM2-16GB, 8xP100", "V100:2:16GB,8xP100"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("4x(gpu:v100:2),2x(2xNVIDIA A100-SXM4-80GB)", "4x(2xv100),2x(A100:2:80GB)"),
        (LISTING, "V100:2:16GB,1xH100PCIe"),
        ("2xV100, 8xP100", "2xV100,8xP100"),
        ("cpu:slow:2,V100:2:16GB", "2xcpu:slow,V100:2:16GB"),
    ],
)
def test_a_pool_is_read_as_its_cluster_spells_it(text: str, plain: str) -> None:
    assert pool_of(text) == Cluster.parse(text) == Cluster.parse(plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu:2", "'gpu:2' does not say of which type the GPUs are"),
        ("2xV100 8xP100", "cannot read '2xV100 8xP100'"),
        (LISTING + "  MIG 1g.10gb Device 0: (UUID: MIG-1)", "parts of one GPU"),
    ],
)
def test_what_cannot_be_a_pool_is_refused(text: str, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        pool_of(text)


def test_a_file_and_stdin_may_be_of_nvidia_smi(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpus.txt"
    path.write_text(LISTING)
    asked = ["allocate", "sample:jobs.csv", "--throughputs", "sample:throughputs.csv"]
    path.write_text(LISTING.replace("NVIDIA H100 PCIe", "Tesla P100-PCIE-16GB"))
    assert run([*asked, "--cluster", str(path)]) == 0
    told = capsys.readouterr().out
    assert run([*asked, "--gpus", "2xV100,1xP100"]) == 0
    assert capsys.readouterr().out == told
