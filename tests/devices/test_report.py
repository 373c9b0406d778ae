"""What a user sends after a trial: results, and nothing of the user's own."""

import json
from pathlib import Path

import pytest

from hetflow.devices.doctor import Facts, Finding, report, scrubbed, suite_results
from hetflow.schema.errors import FileError

RESULTS = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="3" hostname="ada-laptop">
<testcase classname="hetflow.tests.gpu.test_launch" name="test_a[none]" time="3.5">
<properties><property name="measured_step_seconds" value="0.25" />
<property name="card" value="of ada's" />
<property name="ratio" value="nan" /></properties></testcase>
<testcase classname="hetflow.tests.gpu.test_launch" name="test_b" time="1.0">
<failure message="AssertionError: /users/ada/run/log has no step">Traceback: /home/ada</failure>
</testcase>
<testcase classname="hetflow.tests.gpu.test_changes" name="test_c" time="0.0">
<skipped type="pytest.skip" message="needs 2 x A100; see /users/ada/suite">x.py:3</skipped>
</testcase></testsuite></testsuites>
"""
FACTS = Facts(python="3.12.1", torch=None, driver="570.86.15", cores=8)


def test_results_of_the_suite_without_tracebacks(tmp_path: Path) -> None:
    path = tmp_path / "suite.xml"
    path.write_text(RESULTS)
    found = suite_results(path)
    assert found["num_tests"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert [test["outcome"] for test in found["tests"]] == ["passed", "failed", "skipped"]
    assert found["tests"][0]["test"] == "hetflow.tests.gpu.test_launch::test_a[none]"
    assert found["tests"][0]["measured"] == {"measured_step_seconds": 0.25}
    assert found["tests"][1]["said"] == "AssertionError"
    document = report(FACTS, (Finding(level="info", text="all well in /home/ada"),), found)
    text = json.dumps(document)
    assert "/home" not in text
    assert "laptop" not in text
    assert "needs 2 x A100; see (path)" in text
    assert document["facts"]["driver"] == "570.86.15"
    assert document["findings"] == ["all well in (path)"]


def test_names_and_paths_are_taken_out_wherever_they_stand() -> None:
    value = {
        "a": ["on ada-laptop", ("~/x/y.py", 3)],
        "b": "adaptive, by ada",
        "c": "CUDA 12/13, 570.86.15.01, tests::test_a[::2], 10.0.0.7:29400, fe80::1, 1:2",
    }
    assert scrubbed(value, ("ada-laptop", "ada")) == {
        "a": ["on (name)", ["(path)", 3]],
        "b": "adaptive, by (name)",
        "c": "CUDA 12/13, 570.86.15.01, tests::test_a[::2], (address):29400, (address), 1:2",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("not xml", "no results of pytest"),
        ("<testsuites/>", "holds no tests"),
        ('<testsuites><testcase time="soon"/></testsuites>', "no results of pytest"),
        ('<testsuites><testcase time="nan"/></testsuites>', "a test of nan seconds"),
    ],
)
def test_a_file_without_results_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.xml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileError, match=said):
        suite_results(path)
