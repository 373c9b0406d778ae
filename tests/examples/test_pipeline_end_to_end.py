"""The example at its smallest: a solved pipeline trains as one device does, in about the time
that was predicted."""

import pytest

from hetflow.examples.pipeline_end_to_end import run as example
from hetflow.tests import programs

pytestmark = pytest.mark.measures


@pytest.mark.slow
def test_a_solved_pipeline_on_unlike_devices_equals_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    monkeypatch.setattr(example, "subprocess", programs.SUBPROCESS)
    (found,) = example.compare(("gpt",), (example.POOLS[1],), 3, quick=True)
    assert "cpu:fast" in found.stages
    assert "cpu:slow" in found.stages
    # Float32, and microbatches are summed in another order.
    assert found.loss == pytest.approx(found.one_device_loss, rel=1e-5)
    # Passes are held to their times, so nothing can be much faster than predicted; other work on
    # the machine may make it slower.
    assert -0.5 < found.error < 0.1
