"""``hetflow import`` and ``hetflow export`` on PipeDream's graph.txt."""

import json

import pytest
import typer
from typer.testing import CliRunner

from hetflow.cli.asking import flag_of
from hetflow.cli.files import export, import_
from hetflow.cli.listing import with_common_flags
from hetflow.schema import files
from hetflow.schema.errors import FileError, ProblemError
from hetflow.schema.options import spelled_by
from hetflow.schema.profile import Profile

TEXT = """\
n1 -- Input0 -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
n2 -- Linear -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=[8; 4], parameter_size=16.0
n3 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.5, activation_size=8.0, parameter_size=0.0
\tn1 -- n2
\tn2 -- n3
"""  # noqa: E501


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("import")(with_common_flags(import_))
    app.command("export")(with_common_flags(export))

    def invoke(*arguments: str) -> str:
        with spelled_by(flag_of):
            result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


def test_there_and_back(run, tmp_path):
    source, target = tmp_path / "tiny.graph.txt", tmp_path / "v100.json"
    source.write_text(TEXT)
    flags = ["--device-type", "V100", "--device-memory", "16GB", "--microbatch-size", "8"]
    assert run("import", str(source), *flags, "-o", str(target)) == ""
    profile = files.read(target, Profile)
    assert (profile.model, profile.device_type) == ("tiny", "V100")
    assert profile.device_memory_bytes == 16 << 30
    assert [node.id for node in profile.layers.nodes] == ["n2", "n3"]
    assert json.loads(run("import", str(source), *flags, "--model", "x"))["model"] == "x"
    written = run("export", str(target))
    assert written.splitlines()[0].startswith("n2 -- Linear -- forward_compute_time=1.5")
    assert written.splitlines()[-1] == "\tn2 -- n3"
    document = json.loads(run("export", str(target), "--json"))
    assert document == {"model": "tiny", "layers": 2, "graph": written}
    both = run("import", str(source), *flags, "-o", str(target), "--force", "--json")
    assert files.from_json(both, Profile) == files.read(target, Profile) == profile


def test_an_existing_output_is_kept(run, tmp_path):
    source, target = tmp_path / "tiny.graph.txt", tmp_path / "v100.json"
    source.write_text(TEXT)
    target.write_text("mine")
    with pytest.raises(FileError, match="exists already"):
        run(
            "import",
            str(source),
            "--device-type",
            "V100",
            "--device-memory",
            "1GB",
            "-o",
            str(target),
        )
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("device_type", "memory", "said"),
    [
        ("V100", "16XB", "--device-memory '16XB' is no amount of memory"),
        ("V100", "16", "--device-memory '16' is no amount of memory"),
        ("2xV100", "16GB", "--device-type '2xV100' is not the name of one device type"),
        ("V 100", "16GB", "--device-type 'V 100' is not the name of one device type"),
    ],
)
def test_a_device_that_cannot_be_read_is_named_by_its_own_flag(
    run, tmp_path, device_type, memory, said
):
    source = tmp_path / "graph.txt"
    source.write_text(TEXT)
    with pytest.raises(ProblemError) as refused:
        run("import", str(source), "--device-type", device_type, "--device-memory", memory)
    assert refused.value.message == said


def test_a_cycle_is_refused_and_nothing_is_written(run, tmp_path):
    source, target = tmp_path / "round.graph.txt", tmp_path / "v100.json"
    source.write_text(TEXT + "\tn3 -- n2\n")
    with pytest.raises(ProblemError, match="the layer graph has a cycle: n2 waits for n3"):
        run("import", str(source), "--device-type", "V100", "--device-memory", "16GB",
            "-o", str(target))  # fmt: skip
    assert not target.exists()


def test_a_graph_in_parts_is_refused_and_the_unreached_layer_named(run, tmp_path):
    source, target = tmp_path / "parts.graph.txt", tmp_path / "v100.json"
    alone = TEXT.splitlines()[1].replace("n2", "n9")
    source.write_text(f"{TEXT}{alone}\n")
    with pytest.raises(ProblemError, match="falls into 2 parts: nothing joins n9 to n2"):
        run("import", str(source), "--device-type", "V100", "--device-memory", "16GB",
            "-o", str(target))  # fmt: skip
    assert not target.exists()
