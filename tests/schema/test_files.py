"""Files: strict in, atomic out, every fault with an address, nothing evaluated."""

import dataclasses
import inspect
import json
import os
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.schema import files, jobs, simulation
from hetflow.schema.cluster import Cluster, Level, ServerGroup
from hetflow.schema.errors import FileError, ProblemError
from hetflow.schema.profile import BatchPoint, Profile, Sync
from hetflow.tests.profiles import examples


def profile_document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": "hetflow.profile/1",
        "model": "resnet50",
        "device_type": "V100",
        "device_memory_bytes": 17179869184,
        "weight_bytes": 102228128,
        "update_seconds": 0.004,
        "batch_curve": [
            {"batch_size": 32, "step_seconds": 0.091, "peak_memory_bytes": 5100000000},
            {"batch_size": 64, "step_seconds": 0.17, "peak_memory_bytes": 9100000000},
        ],
        "layers": {
            "microbatch_size": 32,
            "nodes": [
                {
                    "id": name,
                    "op": "Conv2d",
                    "forward_seconds": 0.0011,
                    "backward_seconds": 0.0022,
                    "activation_bytes": 102760448,
                    "weight_bytes": 37632,
                }
                for name in ("conv1", "bn1")
            ],
            "edges": [["conv1", "bn1"]],
        },
        "sync": {"num_devices": 2, "sync_seconds": 0.031},
        "provenance": {"command": "...", "anything": [1, {"goes": None}]},
    }
    return {**document, **changes}


def decode(document: Any) -> Profile:
    return files.from_json(json.dumps(document), Profile, name="p.json")


def test_the_promised_profile_reads_and_writes_back() -> None:
    profile = decode(profile_document())
    assert profile.layers is not None
    assert profile.layers.edges == (("conv1", "bn1"),)
    assert json.loads(files.to_json(profile)) == profile_document()


def point(**changes: Any) -> dict[str, Any]:
    base = {"batch_size": 1, "step_seconds": 0.1, "peak_memory_bytes": 1}
    return {**base, **changes}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            profile_document(batch_curve=[point(step_seconds=-0.1)]),
            "p.json: $.batch_curve[0].step_seconds: must be > 0",
        ),
        (profile_document(batch_curve=[point(step_seconds=0)]), "must be > 0"),
        (profile_document(batch_curve=[point(batch_size=0)]), "$.batch_curve[0].batch_size"),
        (profile_document(batch_curve=[point(batch_size="8")]), "whole number, got '8'"),
        (profile_document(batch_curve=[point(batch_size=True)]), "whole number, got True"),
        (profile_document(batch_curve=[point(), point()]), "duplicate batch_size 1"),
        (profile_document(batch_curve=[]), "at least one batch size"),
        (profile_document(update_seconds=float("nan")), "$.update_seconds: must be finite"),
        (profile_document(update_seconds=float("inf")), "$.update_seconds: must be finite"),
        (profile_document(update_second=1), "unknown key; did you mean 'update_seconds'?"),
        (profile_document(colour="red"), "$.colour: unknown key"),
        (profile_document(model=""), "$.model: must not be empty"),
        (profile_document(model="a\nb"), "$.model: must be one printable line"),
        (profile_document(schema="hetflow.profil/1"), "did you mean 'hetflow.profile/1'?"),
        (profile_document(schema="hetflow.plan/1"), "must be 'hetflow.profile/1'"),
        (profile_document(sync={"num_devices": 1, "sync_seconds": 0.1}), "num_devices must be"),
        ([1, 2], "must be an object"),
    ],
)
def test_a_fault_has_an_address_and_a_mend(document: Any, expected: str) -> None:
    with pytest.raises(FileError) as caught:
        decode(document)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


def test_every_record_with_a_schema_of_its_own_is_read_by_it() -> None:
    room = Path(files.__file__).parent
    modules = [import_module(f"hetflow.schema.{path.stem}") for path in room.glob("[a-z]*.py")]
    stated = {
        schema: cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls)
        if "schema" in {field.name for field in dataclasses.fields(cls)}
        for schema in get_args(get_type_hints(cls)["schema"])
    }
    messages = {"hetflow.resize/1", "hetflow.resized/1"}  # of launches, not files
    read = {schema: files.record_class(schema) for schema in files.RECORDS}
    assert read.pop("hetflow.plan/1") is read["hetflow.plan/2"]  # converted
    assert read == {key: cls for key, cls in stated.items() if key not in messages}


def test_a_record_shows_its_fields_as_keywords() -> None:
    parameters = inspect.signature(Sync).parameters
    assert [*parameters] == [field.name for field in dataclasses.fields(Sync)]
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_all_faults_are_reported_at_once() -> None:
    document = profile_document(update_seconds=-1, weight_bytes="x", colour=1)
    del document["model"]
    with pytest.raises(FileError) as caught:
        decode(document)
    for part in ("$.update_seconds", "$.weight_bytes", "$.colour", "$.model: missing"):
        assert part in caught.value.message


def test_a_missing_schema_key_is_an_error() -> None:
    document = profile_document()
    del document["schema"]
    with pytest.raises(FileError, match=r"\$\.schema: missing"):
        decode(document)


def test_a_key_given_twice_is_an_error() -> None:
    with pytest.raises(FileError, match="appears twice"):
        files.from_json('{"schema": "a", "schema": "b"}', Profile)


@pytest.mark.parametrize("cut", [0, 1, 40, 200, -3])
def test_a_truncated_file_says_where(cut: int) -> None:
    text = files.to_json(decode(profile_document()))
    with pytest.raises(FileError, match="not valid JSON at line"):
        files.from_json(text[:cut], Profile)


def test_a_deeply_nested_file_is_refused() -> None:
    with pytest.raises(FileError):
        files.from_json("[" * 200_000, Profile)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(FileError, match="a: holds a whole number of thousands of digits"):
        files.from_json(f'{{"a": {"9" * 5000}}}', Profile, name="a")


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(marker),))

    path = tmp_path / "profile.json"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FileError):
        files.read(path, Profile)
    assert not marker.exists()


def test_missing_folder_and_binary_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        files.read(tmp_path / "absent.json", Profile)
    with pytest.raises(FileError, match="is a folder"):
        files.read(tmp_path, Profile)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not a text file"):
        files.read(tmp_path / "binary.json", Profile)
    with pytest.raises(FileError, match="no such folder"):
        files.read_profiles(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="holds no profiles"):
        files.read_profiles(tmp_path / "empty")


def test_writing_never_overwrites_without_force(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = decode(profile_document())
    files.write(path, profile)
    before = path.read_text()
    with pytest.raises(FileError, match="exists already"):
        files.write(path, profile)
    assert path.read_text() == before
    files.write(path, profile, force=True)
    assert files.read(path, Profile) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """`-o /dev/null --force` put a file in the device's place, where the user may write there."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FileError, match="pipe: is no regular file"):
        files.write_text(path, "new", force=True)
    assert path.is_fifo()


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FileError, match="No space left"):
        files.write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_an_output_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such folder"):
        files.check_writable(tmp_path / "absent" / "p.json", force=False)


def test_records_built_in_code_are_checked_alike() -> None:
    with pytest.raises(ProblemError, match="batch_size: must be >= 1"):
        BatchPoint(batch_size=0, step_seconds=1.0, peak_memory_bytes=0)
    with pytest.raises(ProblemError, match="come together"):
        Sync(num_devices=2, sync_seconds=0.1, latency_seconds=0.1)


sizes = st.lists(st.integers(1, 1 << 16), min_size=1, max_size=8, unique=True).map(sorted)
positive = st.floats(min_value=1e-9, max_value=1e6)


@settings(max_examples=examples(60))
@given(sizes=sizes, seconds=positive, update=st.floats(0, 1e3), memory=st.integers(0, 1 << 50))
def test_a_profile_round_trips_to_the_last_bit(
    sizes: list[int], seconds: float, update: float, memory: int
) -> None:
    profile = Profile(
        model="m",
        device_type="cpu:slow",
        device_memory_bytes=1 << 30,
        weight_bytes=memory,
        update_seconds=update,
        batch_curve=tuple(
            BatchPoint(batch_size=b, step_seconds=seconds * b, peak_memory_bytes=memory)
            for b in sizes
        ),
    )
    assert files.from_json(files.to_json(profile), Profile) == profile


def test_a_cluster_file_reads(tmp_path: Path) -> None:
    document = {
        "schema": "hetflow.cluster/1",
        "device_types": {"V100": {"memory_bytes": 17179869184, "dollars_per_hour": 2.48}},
        "servers": [{"count": 4, "devices": {"V100": 4}, "intra_bytes_per_second": 1.0e10}],
        "inter_bytes_per_second": 1.25e9,
    }
    cluster = files.from_json(json.dumps(document), Cluster)
    assert cluster.num_devices == {"V100": 16}
    assert json.loads(files.to_json(cluster)) == document


def test_a_newer_cluster_file_has_racks_zones_and_links() -> None:
    document = {
        "schema": "hetflow.cluster/2",
        "device_types": {"A": {}, "B": {}},
        "servers": [
            {"count": 2, "devices": {"A": 4}, "rack": "r1", "zone": "east"},
            {"count": 1, "devices": {"B": 2}, "rack": "r2", "zone": "east"},
            {"count": 1, "devices": {"A": 1, "B": 1}, "intra_bytes_per_second": 2e9},
        ],
        "inter_bytes_per_second": 1e8,
        "links": [
            {"bytes_per_second": 1e10, "latency_seconds": 1e-6, "level": "server"},
            {"bytes_per_second": 1e9, "latency_seconds": 1e-5, "level": "rack"},
            {"bytes_per_second": 5e8, "latency_seconds": 0.0, "level": "zone"},
            {"bytes_per_second": 4e8, "latency_seconds": 0.0, "between": ["B", "A"]},
        ],
    }
    cluster = files.from_json(json.dumps(document), Cluster)
    written = json.loads(files.to_json(cluster))
    assert files.from_json(json.dumps(written), Cluster) == cluster
    near, far, mixed = cluster.servers
    assert [cluster.level(*pair) for pair in ((near, near), (near, far), (far, mixed))] == [
        "rack", "zone", "pool",
    ]  # fmt: skip

    def rate(level: Level, types: tuple[str, str], server: ServerGroup | None = None) -> float:
        found = cluster.link(level, types, server)
        assert found is not None
        return found.bytes_per_second

    assert rate("server", ("A", "A"), near) == 1e10
    assert rate("server", ("A", "A"), mixed) == 2e9  # the server's own rate comes before
    assert rate("server", ("A", "B"), mixed) == 4e8  # the exception comes first
    assert rate("zone", ("A", "B")) == 4e8
    assert rate("zone", ("A", "A")) == 5e8
    assert rate("pool", ("A", "A")) == 1e8
    with pytest.raises(FileError, match=r"cluster/2"):
        files.from_json(json.dumps(document | {"schema": "hetflow.cluster/1"}), Cluster)
    twice = document | {"links": [document["links"][0]] * 2}
    with pytest.raises(FileError, match=r"links\[1\]: a second one"):
        files.from_json(json.dumps(twice), Cluster)


def test_every_key_of_the_cluster_files_is_in_the_page_of_formats():
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    records = (
        jobs.Job, jobs.Entity, jobs.ModelThroughput, jobs.PairThroughput, jobs.MixThroughput,
        jobs.Allocation, jobs.PairShare, jobs.Certificate, simulation.SimulationRun,
        simulation.SimulationMetrics, simulation.JobOutcome, simulation.Span,
    )  # fmt: skip
    keys = {key for record in records for key in record.__dataclass_fields__}
    assert sorted(key for key in keys if f"`{key}`" not in page and f"`{key}[" not in page) == []


def test_a_folder_made_for_work_that_fails_goes_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyboardInterrupt), files.made_folder(tmp_path / "a" / "b" / "c"):
        raise KeyboardInterrupt
    assert list((tmp_path / "a").iterdir()) == []

    def work() -> None:
        with files.made_folder(tmp_path / "a" / "b" / "c"):
            (tmp_path / "a" / "b" / "kept").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["kept"]
    with pytest.raises(FileError, match="kept: cannot be made"):
        with files.made_folder(tmp_path / "a" / "b" / "kept"):
            pass
