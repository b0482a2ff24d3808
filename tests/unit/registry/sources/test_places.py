"""What clients may write as a source, and what settings allow of it."""

from __future__ import annotations

import pytest

from loraplex.errors import InvalidParameter, SourceForbidden
from registry.sources.hub import HubPlace, parse_hub
from registry.sources.places import SCHEMES, Places, SourceRules, check_endpoint


def rules(*schemes: str, import_root=None) -> SourceRules:
    return SourceRules(frozenset(schemes), import_root, frozenset(), "https://hub.example", None, {})


@pytest.fixture
def places():
    made = Places(rules(*SCHEMES), 1)
    yield made
    made.close()


BAD = [
    "hf://", "hf://acme", "hf://acme/", "hf:acme/sql", "hf://acme/../sql", "hf://acme/sql/..", "hf://acme/sql@",
    "hf://acme/sql@../x", "hf://acme/sql@a b", "hf://ac me/sql", "hf://acme/sql/.hidden", "hf://acme//sql",
    "s3://", "s3:///x", "s3://B/x", "s3://a/x", "s3://bucket/../x", "s3://bucket/a/./b", "s3://us@er/x", "gs://a..b/x",
    "az://-bad/x", "https://", "https://host", "https://host/folder", "https:///x/", "https://[::1/x/",
    "ftp://host/x/", "gopher://x/", "https://host/\n/", "hf://acme/sql\x00", "s3://bucket/" + "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_names_no_source_is_refused(places, text):
    with pytest.raises(InvalidParameter) as caught:
        places.source(text)
    assert caught.value.field == "source"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_that_the_settings_leave_out_is_refused(scheme):
    places = Places(rules(*(other for other in SCHEMES if other != scheme)), 1)
    with pytest.raises(SourceForbidden, match="import-schemes"):
        places.source(f"{scheme}://acme/sql/")
    places.close()


@pytest.mark.parametrize("path", ["/etc", "sql", "file:///etc", "file:sql", "../x"])
def test_without_an_import_root_no_path_is_a_source(places, path):
    with pytest.raises(SourceForbidden, match="import-root"):
        places.source(path)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("acme/sql", HubPlace("acme/sql", "", "")),
        ("acme/sql/", HubPlace("acme/sql", "", "")),
        ("acme/sql/a/b@main", HubPlace("acme/sql", "a/b/", "main")),
        ("acme/sql@refs/pr/1", HubPlace("acme/sql", "", "refs/pr/1")),
    ],
)
def test_a_hub_source_names_repository_folder_and_revision(text, place):
    assert parse_hub(text) == place


async def test_credentials_and_query_of_a_url_are_shown_nowhere(places):
    source = places.source("https://user:secret@host.example/sql/?sig=secret#x")
    assert await source.locate() == "https://host.example/sql/"
    with pytest.raises(InvalidParameter) as caught:
        places.source("https://user:secret@host.example/sql?sig=secret")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("url", ["host", "ftp://host", "https://", "https://user:pw@host", "https://host/?x=1"])
def test_an_endpoint_is_a_plain_url(url):
    with pytest.raises(ValueError, match="is no endpoint"):
        check_endpoint(url)
