from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.worker.engine.driver import Driver


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., Driver]:
    """Make a driver with some limits changed."""
    return lambda **limits: Driver(tmp_path, **limits)
