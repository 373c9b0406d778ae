"""Errors name the argument in Python, and the flag on the command line."""

from pathlib import Path

import pytest

import hetflow
from hetflow.cli.asking import flag_of
from hetflow.cli.main import run
from hetflow.schema.errors import ProblemError
from hetflow.schema.options import command, option, options, spelled_by, told


def said() -> list[str]:
    """Each way to name options."""
    return [
        option("pool"),
        option("pool", "2xV100"),
        option("runs", "DIR"),
        option("num_stages", 3),
        option("batch_sizes", repr("8,x")),
        option("method", "cbc|highs"),
        option("rates", "V100=9.6"),
        option("replication", False),
        option("state_bytes_per_weight_byte"),
        options(repetitive=True, schedule="2bw"),
        command("profile", layers=True),
        told("leave {gap} out, or add {strategy=pipeline} {num_model_chunks=2}"),
    ]


def test_an_option_is_spelled_as_the_caller_knows_it() -> None:
    assert said() == [
        "pool",
        'pool="2xV100"',
        "runs=DIR",
        "num_stages=3",
        "batch_sizes='8,x'",
        'method="cbc"|"highs"',
        'rates={"V100": 9.6}',
        "replication=False",
        "optimizer=OptimizerState(...)",
        'repetitive=True, schedule="2bw"',
        "hetflow.profile(layers=True)",
        'leave gap out, or add strategy="pipeline", num_model_chunks=2',
    ]
    with spelled_by(flag_of):
        assert said() == [
            "--gpus",
            "--gpus 2xV100",
            "--runs DIR",
            "--num-stages 3",
            "--batch-sizes '8,x'",
            "--method cbc|highs",
            "--rate V100=9.6",
            "--no-replication",
            "--state-bytes-per-weight-byte",
            "--repetitive --schedule 2bw",
            "hetflow profile --layers",
            "leave --gap out, or add --strategy pipeline --chunks-per-device 2",
        ]


def test_a_public_function_and_its_command_name_their_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProblemError) as caught:
        hetflow.resize(tmp_path)
    error = caught.value
    assert (error.message, error.hint) == (
        "give either pool or plan",
        'for example pool="2xV100"',
    )
    assert run(["resize", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "hetflow: give either --gpus or --plan\nhint: for example --gpus 2xV100\n"
    )
    with pytest.raises(ProblemError, match="continuous trace needs jobs_per_hour, in jobs"):
        hetflow.simulate("continuous-single", "sample:throughputs.csv", "4xV100")
