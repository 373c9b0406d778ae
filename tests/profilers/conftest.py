"""Measuring processes of the tests here are forked, as those of ``hetflow profile`` are."""

from collections.abc import Iterator

import pytest

from hetflow.profilers.process import started_like_workers
from hetflow.tests import programs


@pytest.fixture(autouse=True)
def forked_children(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Tests that measure share the preloaded process of this pytest process."""
    if request.node.get_closest_marker("measures") is None:
        yield
        return
    libraries = programs.LIBRARIES if request.path.name == "test_script_profile.py" else ()
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded(*libraries))
    with started_like_workers():
        yield
