"""Who is let in, by the catalog as it is now."""

from __future__ import annotations

import pytest

from common.api_keys import NewKey, hash_of
from loraplex.errors import PermissionDenied, RegistryUnavailable, Unauthenticated
from router.access import Access
from router.catalog import ApiKey, Catalog, CatalogSnapshot, DeletedApiKey

TOKEN = "the-cluster-token-of-this-test"
KEY, OTHER = (NewKey(n * 12, f"lpx_{n * 12}_{(n + 'f') * 32}") for n in "12")  # fixed: they name test cases


def entry(key: NewKey, tenant: str = "default") -> ApiKey:
    return ApiKey(key.key_id, tenant, hash_of(key.text))


@pytest.fixture
def catalog() -> Catalog:
    """A catalog without keys."""
    catalog = Catalog("registry:1")
    catalog.swap(CatalogSnapshot().apply([], store_id="s", revision=1))
    return catalog


def put(catalog: Catalog, *entries: ApiKey | DeletedApiKey) -> None:
    catalog.swap(catalog.snapshot.apply(entries, revision=catalog.snapshot.revision + 1))


async def test_without_keys_a_router_on_loopback_asks_for_none(catalog):
    access = Access(catalog)
    for sent in (None, "", "Bearer not needed", f"Bearer {KEY.text}"):
        assert access.client(sent) == access.reader(sent) == "default"
        access.operator(sent)


async def test_without_keys_a_router_that_others_reach_lets_nobody_in_and_says_what_to_do(catalog):
    for sent in (None, f"Bearer {KEY.text}", f"Bearer {TOKEN}"):
        with pytest.raises(Unauthenticated, match=r"no API key exists yet.*loraplex key add NAME"):
            Access(catalog, cluster_token=TOKEN, asks_always=True).client(sent)


async def test_only_operators_change_adapters_by_way_of_the_clients_front(catalog):
    with pytest.raises(RegistryUnavailable):  # whether there are keys is not known yet
        Access(Catalog("registry:1")).administrator(None)
    Access(catalog).administrator(None)  # on loopback, where nobody is asked for anything
    guarded = Access(catalog, cluster_token=TOKEN)
    guarded.administrator(f"Bearer {TOKEN}")
    with pytest.raises(Unauthenticated, match="cluster token"):
        guarded.administrator(None)
    with pytest.raises(PermissionDenied, match="has none"):
        Access(catalog, asks_always=True).administrator(None)
    put(catalog, entry(KEY))
    for access in (guarded, Access(catalog), Access(catalog, asks_always=True)):
        with pytest.raises(PermissionDenied):
            access.administrator(f"Bearer {KEY.text}")
    with pytest.raises(PermissionDenied):
        Access(catalog).administrator(None)


@pytest.mark.parametrize("asks_always", [False, True])
async def test_the_right_key_lets_its_tenant_in(catalog, asks_always):
    put(catalog, entry(KEY), entry(OTHER, "acme"))
    access = Access(catalog, asks_always=asks_always)
    assert access.client(f"Bearer {KEY.text}") == "default"
    assert access.client(f"bearer {OTHER.text}") == "acme"
    assert access.reader(f"Bearer {OTHER.text}") == "acme"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "an API key is needed"),
        ("", "not `Bearer lpx_"),
        ("Bearer ", "not `Bearer lpx_"),
        (KEY.text, "not `Bearer lpx_"),
        (f"Basic {KEY.text}", "not `Bearer lpx_"),
        ("Bearer not needed", "not `Bearer lpx_"),
        (f"Bearer {KEY.text[:40]}", "not `Bearer lpx_"),
        (f"Bearer {TOKEN}", "not `Bearer lpx_"),
        (f"Bearer {OTHER.text}", "not valid"),  # an id that is not known
        (f"Bearer lpx_{KEY.key_id}_{OTHER.text.split('_')[2]}", "not valid"),  # a known id, another secret
        (f"Bearer lpx_{OTHER.key_id}_{KEY.text.split('_')[2]}", "not valid"),
    ],
)
async def test_any_other_credential_is_refused_and_not_repeated(catalog, sent, said):
    put(catalog, entry(KEY))
    access = Access(catalog, cluster_token="another-token-altogether")
    for ask in (access.client, access.reader):
        with pytest.raises(Unauthenticated) as caught:
            ask(sent)
        assert said in caught.value.message
        assert caught.value.metadata == {"credential": "api_key"}
        for secret in (KEY.text.split("_")[2][:20], OTHER.text.split("_")[2][:20], TOKEN):
            assert secret not in caught.value.message


async def test_a_revoked_key_is_refused_at_once(catalog):
    put(catalog, entry(KEY), entry(OTHER))
    access = Access(catalog)
    assert access.client(f"Bearer {KEY.text}") == "default"
    put(catalog, DeletedApiKey(KEY.key_id))
    with pytest.raises(Unauthenticated, match="revoked"):
        access.client(f"Bearer {KEY.text}")
    assert access.client(f"Bearer {OTHER.text}") == "default"


async def test_before_the_first_catalog_nobody_can_be_judged():
    with pytest.raises(RegistryUnavailable):
        Access(Catalog("registry:1")).client(f"Bearer {KEY.text}")


async def test_operators_need_the_cluster_token_where_one_is_configured(catalog):
    put(catalog, entry(KEY))
    access = Access(catalog, cluster_token=TOKEN)
    access.operator(f"Bearer {TOKEN}")
    for sent in (None, "Bearer x", f"Bearer {TOKEN}x", f"Bearer {OTHER.text}"):
        with pytest.raises(Unauthenticated, match="cluster token"):
            access.operator(sent)
    with pytest.raises(PermissionDenied, match="for operators"):
        access.operator(f"Bearer {KEY.text}")


async def test_operators_may_ask_for_models_without_a_key(catalog):
    put(catalog, entry(KEY))
    assert Access(catalog, cluster_token=TOKEN).reader(f"Bearer {TOKEN}") == "default"
    with pytest.raises(Unauthenticated):
        Access(catalog).reader(f"Bearer {TOKEN}")
