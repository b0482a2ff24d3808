"""Refused credentials in the words of a command line: by its environment's variables, not by headers of protocols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.errors import LoraplexError, Unauthenticated


@dataclass(frozen=True, slots=True)
class _Credential:
    name: str
    variables: tuple[str, ...]
    remedy: str


_CREDENTIALS: Final = {
    "api_key": _Credential("an API key", ("LORAPLEX_API_KEY",), "an operator makes one with: loraplex key add NAME"),
    "cluster_token": _Credential(
        "the cluster token",
        ("LORAPLEX_CLUSTER_TOKEN", "LORAPLEX_CLUSTER_TOKEN_FILE"),
        "it is the one that the services were started with",
    ),
}


def message_of(error: LoraplexError, environment: Mapping[str, str]) -> str:
    """Return an error's words for a command line whose credentials come from `environment`."""
    credential = _CREDENTIALS.get(error.metadata.get("credential", ""))
    if not isinstance(error, Unauthenticated) or credential is None:
        return error.message
    given = next((variable for variable in credential.variables if environment.get(variable, "").strip()), None)
    if given is None:
        return f"{credential.name} is needed: set {credential.variables[0]} to it; {credential.remedy}"
    return f"what {given} holds is not accepted as {credential.name}; {credential.remedy}"
