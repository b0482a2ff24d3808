from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_base import write_tiny_base
from worker.text.model import TextModel


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tiny_text(tiny_base: Path) -> TextModel:
    return TextModel.load(tiny_base)
