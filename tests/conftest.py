"""What holds for every test: examples to draw, signals, and who shares the two cores with whom."""

import signal

import pytest

from hetflow.tests import profiles

profiles.register()

# Under nohup, or in the background of a script, SIGINT is ignored; all that the tests start would
# inherit that. A handled signal is not inherited: they start with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process of ``-n 2`` runs all that launches or measures; the other leaves it a core."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("processes") is not None:
            item.add_marker(pytest.mark.xdist_group("processes"))
