"""A small pipeline plan, made by hand, for launches."""

import pytest

from hetflow.schema.pipeline import PipelinePlan
from hetflow.tests import handmade


@pytest.fixture(scope="session")
def two_stages() -> PipelinePlan:
    return handmade.two_stages(("cpu:slow", "cpu:slow"))
