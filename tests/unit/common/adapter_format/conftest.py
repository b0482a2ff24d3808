from __future__ import annotations

from pathlib import Path

import pytest

from common.adapter_format.base import BaseLinears, read_linears
from loraplex.manifest import read_manifest
from tests.tiny_base import write_tiny_base
from tests.variant_bases import Base, make_bases


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def base(base_folder) -> BaseLinears:
    return read_linears(read_manifest(base_folder))


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, Base]:
    """The bases that variants are made on, by kind."""
    return make_bases(tmp_path_factory.mktemp("bases"))
