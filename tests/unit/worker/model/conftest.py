from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.worker.model.tiny import make_model, save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much when other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> Any:
    return make_model("llama_untied")


@pytest.fixture(scope="session")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama, tmp_path_factory.mktemp("llama"))
