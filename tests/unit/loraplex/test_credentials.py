"""A client's credentials: where they come from, what they go with, and that they do not show themselves."""

from __future__ import annotations

import pytest

from loraplex.client import AsyncClient, Client, Credentials, gather
from loraplex.errors import InvalidRequest

KEY, TOKEN = "lpx_abcd_" + "a" * 64, "the-cluster-token-of-this-test"


def test_they_come_from_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert Credentials.from_environment({}) == Credentials(None, None)
    told = {"LORAPLEX_API_KEY": f" {KEY}\n", "LORAPLEX_CLUSTER_TOKEN": TOKEN, "LORAPLEX_CLUSTER_TOKEN_FILE": "none"}
    assert Credentials.from_environment(told) == Credentials(KEY, TOKEN)
    assert Credentials.from_environment({"LORAPLEX_CLUSTER_TOKEN_FILE": str(file)}) == Credentials(None, TOKEN)
    assert Credentials.from_environment({"LORAPLEX_API_KEY": "", "LORAPLEX_CLUSTER_TOKEN": ""}) == Credentials()


def test_what_cannot_be_a_secret_is_told_unseen(tmp_path):
    with pytest.raises(InvalidRequest, match="LORAPLEX_CLUSTER_TOKEN_FILE") as caught:
        Credentials.from_environment({"LORAPLEX_CLUSTER_TOKEN_FILE": str(tmp_path / "none")})
    assert "cannot be read" in caught.value.message
    with pytest.raises(InvalidRequest, match="api_key") as caught:
        Credentials(api_key="two words")
    assert "two words" not in caught.value.message


def test_they_do_not_show_themselves():
    assert KEY not in repr(Credentials(KEY, TOKEN))
    assert TOKEN not in repr(Credentials(KEY, TOKEN))


def test_requests_carry_the_key_and_operators_calls_the_token(fake_cluster):
    seen = fake_cluster.metadata
    with Client(fake_cluster.address, fake_cluster.address, credentials=Credentials(KEY, TOKEN)) as client:
        gather(client.generate("m", "x"))
        list(client.list_models())
    with Client(fake_cluster.address, fake_cluster.address, credentials=Credentials(None, TOKEN)) as client:
        list(client.list_models())
        gather(client.generate("m", "x"))  # whether that is let in is for the router to say
    with Client(fake_cluster.address, fake_cluster.address, credentials=Credentials()) as client:
        gather(client.generate("m", "x"))
    sent = [metadata.get("authorization") for metadata in seen]
    assert sent == [f"Bearer {KEY}", f"Bearer {KEY}", f"Bearer {TOKEN}", None, None]


async def test_the_environment_is_read_where_nothing_is_given(fake_cluster, monkeypatch):
    monkeypatch.setenv("LORAPLEX_API_KEY", KEY)
    async with AsyncClient(fake_cluster.address, fake_cluster.address) as client:
        assert [event async for event in client.generate("m", "x")]
    assert fake_cluster.metadata[-1]["authorization"] == f"Bearer {KEY}"
