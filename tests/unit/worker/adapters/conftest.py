from __future__ import annotations

import pytest

from tests.artifact_source import FakeSource


@pytest.fixture
async def source() -> FakeSource:
    return FakeSource()
