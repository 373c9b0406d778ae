"""A small pipeline plan, made by hand, for launches."""

import pytest

from hetflow.schema.plan import Plan
from hetflow.tests import handmade


@pytest.fixture(scope="session")
def two_stages() -> Plan:
    return handmade.two_stages(("cpu:slow", "cpu:slow"))
