"""Refused credentials in the words of a command line."""

from __future__ import annotations

import pytest

from common.bearer import ClusterToken
from loraplex.cli.refusals import message_of
from loraplex.errors import PermissionDenied, Unauthenticated

KEY = Unauthenticated("send `Authorization: Bearer lpx_...`", credential="api_key")
TOKEN = ClusterToken("right").why_refused(None)


@pytest.mark.parametrize(
    ("error", "environment", "words"),
    [
        (KEY, {}, ("an API key is needed: set LORAPLEX_API_KEY", "loraplex key add NAME")),
        (KEY, {"LORAPLEX_API_KEY": " "}, ("an API key is needed",)),
        (KEY, {"LORAPLEX_API_KEY": "lpx_secret"}, ("what LORAPLEX_API_KEY holds is not accepted", "loraplex key add")),
        (TOKEN, {"LORAPLEX_API_KEY": "x"}, ("the cluster token is needed: set LORAPLEX_CLUSTER_TOKEN",)),
        (TOKEN, {"LORAPLEX_CLUSTER_TOKEN_FILE": "/run/token"}, ("what LORAPLEX_CLUSTER_TOKEN_FILE holds",)),
    ],
)
def test_variables_are_named_and_neither_headers_nor_secrets(error, environment, words):
    said = message_of(error, environment)
    assert all(word in said for word in words)
    assert not any(word in said for word in ("Authorization", "Bearer", "lpx_secret"))


def test_other_errors_keep_their_words():
    assert message_of(PermissionDenied("no", credential="api_key"), {}) == "no"
    assert message_of(Unauthenticated("from elsewhere"), {}) == "from elsewhere"
