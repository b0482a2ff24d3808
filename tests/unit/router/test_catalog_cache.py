"""The catalog's file: what is written is read back, and damage is always noticed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import catalog_cache
from router.catalog import Adapter, ApiKey, Base, Catalog, CatalogSnapshot, Version
from router.catalog_cache import CacheWriter, DamagedCache, decode, encode

hexes = st.text("0123456789abcdef", min_size=4, max_size=4)
versions = st.builds(Version, hexes, hexes, hexes, st.just("none"), st.integers(0, 256), st.integers(0, 2**40))
adapters = st.builds(
    lambda name, all_, pins: Adapter("default", name, "org/base", all_[0], tuple(all_), pins),
    st.text(min_size=1, max_size=8),
    st.lists(versions, min_size=1, max_size=3),
    st.integers(0, 2**31 - 1),
)
snapshots = st.builds(
    lambda entries, revision: CatalogSnapshot().apply(entries, store_id="s", revision=revision),
    st.lists(st.one_of(adapters, st.builds(Base, hexes, hexes), st.builds(ApiKey, hexes, hexes, hexes))),
    st.integers(0, 2**40),
)


@given(snapshots)
def test_a_catalog_survives_its_file(snapshot: CatalogSnapshot) -> None:
    assert decode(encode(snapshot)) == snapshot


@given(snapshots, st.data())
def test_any_changed_byte_is_noticed(snapshot: CatalogSnapshot, data: st.DataObject) -> None:
    content = bytearray(encode(snapshot))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedCache):
        decode(bytes(content))


@given(st.binary(max_size=200))
def test_any_other_file_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCache):
        decode(content)


async def test_a_write_that_its_router_no_longer_waits_for_never_ends_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    write = catalog_cache.write

    def slowly(path: Path, snapshot: CatalogSnapshot) -> None:
        begun.set()
        if snapshot.revision == 1:
            assert go_on.wait(30)
        write(path, snapshot)
        if snapshot.revision == 1:
            ended.set()

    monkeypatch.setattr(catalog_cache, "write", slowly)
    catalog, file = Catalog(), tmp_path / "catalog"
    writer = CacheWriter(catalog, file)
    catalog.swap(CatalogSnapshot("s", 1))
    running = asyncio.create_task(writer.run())
    assert await asyncio.to_thread(begun.wait, 30)
    running.cancel()
    await asyncio.wait([running])
    catalog.swap(CatalogSnapshot("s", 2))
    last = asyncio.create_task(writer.flush())
    await asyncio.wait([last], timeout=0.2)
    go_on.set()
    await last
    assert await asyncio.to_thread(ended.wait, 30)
    assert decode(file.read_bytes()).revision == 2
    assert list(tmp_path.iterdir()) == [file]  # noqa: ASYNC240 - a folder of one file
