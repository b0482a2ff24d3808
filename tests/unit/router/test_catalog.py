"""Names and how they resolve; snapshots; waiting for a revision."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import CatalogBehind, InvalidParameter, LoraplexError, ModelNotFound, RegistryUnavailable
from router.catalog import (
    Adapter,
    Base,
    Catalog,
    CatalogSnapshot,
    DeletedAdapter,
    Entry,
    Version,
    parse_min_revision,
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


BASE = Base("org/base", digest("base"))


def version(tag: str, version_digest: str = "") -> Version:
    return Version(version_digest or digest(f"v{tag}"), digest(f"a{tag}"), BASE.digest)


def adapter(name: str, *versions: Version, tenant: str = "default") -> Adapter:
    versions = versions or (version(name),)
    return Adapter(tenant, name, BASE.base_id, versions[0], versions)


def snapshot(*entries: Entry) -> CatalogSnapshot:
    return CatalogSnapshot().apply(entries, store_id="s", revision=1)


def test_the_bare_name_means_the_current_version() -> None:
    resolved = snapshot(BASE, adapter("sql", version("new"), version("old"))).resolve("default", "sql")
    assert (resolved.model, resolved.base_id, resolved.base_digest) == ("sql", "org/base", BASE.digest)
    assert resolved.version == version("new")


def test_a_base_id_wins_over_an_adapter_of_that_name() -> None:
    held = snapshot(Base("same", digest("same")), adapter("same"))
    assert held.resolve("default", "same").version is None


@pytest.mark.parametrize("length", [12, 13, 63, 64])
@pytest.mark.parametrize("of", ["version_digest", "artifact_digest"])
def test_a_prefix_of_either_digest_means_that_version(length: int, of: str) -> None:
    old = version("old")
    held = snapshot(BASE, adapter("sql", version("new"), old))
    assert held.resolve("default", f"sql@{getattr(old, of)[:length]}").version == old


TWINS = (version("1", "ab" * 6 + "0" * 52), version("2", "ab" * 6 + "1" * 52))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("", InvalidParameter),
        ("nobody", ModelNotFound),
        ("nobody@" + "0" * 12, ModelNotFound),
        ("sql@", ModelNotFound),
        ("sql@canary", ModelNotFound),
        ("sql@" + "ab" * 5 + "a", InvalidParameter),
        ("sql@" + "ab" * 6, InvalidParameter),
        ("sql@" + "AB" * 6 + "0", ModelNotFound),
        ("sql@" + "0" * 12, ModelNotFound),
        ("sql@" + "0" * 65, ModelNotFound),
        ("org/base@" + BASE.digest[:12], ModelNotFound),
        ("theirs", ModelNotFound),
        ("default/sql", ModelNotFound),
    ],
)
def test_names_that_do_not_resolve(model: str, error: type[LoraplexError]) -> None:
    held = snapshot(BASE, adapter("sql", *TWINS), adapter("theirs", tenant="other"))
    with pytest.raises(error) as caught:
        held.resolve("default", model)
    assert caught.value.field == "model"


def test_a_longer_prefix_tells_twins_apart() -> None:
    held = snapshot(BASE, adapter("sql", *TWINS))
    assert held.resolve("default", "sql@" + "ab" * 6 + "1").version == TWINS[1]


def test_a_foreign_name_answers_as_an_unknown_one() -> None:
    def told(held: CatalogSnapshot) -> str:
        with pytest.raises(ModelNotFound) as caught:
            held.resolve("default", "theirs")
        return str(caught.value)

    assert told(snapshot(adapter("theirs", tenant="other"))) == told(snapshot())


def test_models_are_bases_then_own_adapters_by_name() -> None:
    held = snapshot(adapter("b"), adapter("a"), Base("z", "1"), Base("y", "2"), adapter("c", tenant="other"))
    names = [item.base_id if isinstance(item, Base) else item.name for item in held.models("default")]
    assert names == ["y", "z", "a", "b"]


names = st.sampled_from(["a", "b", "c"])
entries = st.one_of(names.map(adapter), names.map(lambda name: DeletedAdapter("default", name)))


@given(st.lists(st.lists(entries, max_size=4), max_size=6))
def test_changes_end_where_a_plain_dictionary_ends_and_touch_no_older_snapshot(changes: list[list[Entry]]) -> None:
    held, expected = snapshot(BASE), set[str]()
    for revision, change in enumerate(changes, start=2):
        before, names_before = held, set(held.adapters)
        held = held.apply(change, revision=revision)
        for entry in change:
            if isinstance(entry, Adapter):
                expected.add(entry.name)
            elif isinstance(entry, DeletedAdapter):
                expected.discard(entry.name)
        assert set(before.adapters) == names_before
        assert {name for _, name in held.adapters} == expected
        assert (held.store_id, held.revision) == ("s", revision)


async def test_before_the_first_catalog_requests_are_unavailable() -> None:
    catalog = Catalog("registry:1")
    with pytest.raises(RegistryUnavailable, match="registry:1"):
        await catalog.at_least()
    catalog.swap(snapshot(BASE))
    assert (await catalog.at_least()).bases


async def test_waiters_wake_at_their_revision_and_not_before() -> None:
    catalog = Catalog()
    catalog.swap(snapshot(BASE))
    waiting = asyncio.create_task(catalog.at_least(3))
    catalog.swap(catalog.snapshot.apply([], revision=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    catalog.swap(catalog.snapshot.apply([], revision=3))
    assert (await waiting).revision == 3


async def test_a_revision_that_does_not_come_is_told_in_time() -> None:
    catalog = Catalog()
    catalog.swap(snapshot(BASE))
    with pytest.raises(CatalogBehind) as caught:
        await catalog.wait_for_revision(2, timeout_s=0.01)
    assert caught.value.metadata == {"revision": "1", "wanted": "2"}


def test_min_revision_is_a_plain_number() -> None:
    assert parse_min_revision(None) == 0
    assert parse_min_revision("17") == 17
    for wrong in ("", "-1", "1.5", "x", "\uff11", "1" * 20):
        with pytest.raises(InvalidParameter):
            parse_min_revision(wrong)
