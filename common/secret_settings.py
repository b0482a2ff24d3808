"""Secrets among the settings: from the environment or a file, never from a command line, never shown.

A command line is seen by every user of a machine (`ps`), the environment of a process only by its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import CliSuppress, PydanticBaseSettingsSource

from loraplex.credentials import is_visible_ascii

MIN_TOKEN_CHARACTERS: Final = 16
_SHARED: Final = ("cluster_token", "cluster_token_file")


def _none_where_empty(value: Any) -> Any:
    return None if value == "" else value


def _is_token(value: SecretStr | None) -> SecretStr | None:
    if value is not None:
        text = value.get_secret_value()
        if len(text) < MIN_TOKEN_CHARACTERS or not is_visible_ascii(text):
            raise ValueError(
                f"the cluster token must be at least {MIN_TOKEN_CHARACTERS} ASCII characters without spaces; "
                "make one with: openssl rand -hex 32"
            )
    return value


def _read(value: Any) -> Any:
    if value is None or value == "":
        return None
    try:
        return Path(str(value)).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{value} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from error


class _FromEnvironment:
    """Marks a field that may not come from the command line."""


_MARK: Final = _FromEnvironment()
Secret = CliSuppress[Annotated[SecretStr | None, BeforeValidator(_none_where_empty), _MARK]]
"""A secret from the environment; empty counts as none."""
TokenSecret = CliSuppress[Annotated[Secret, AfterValidator(_is_token)]]
TokenFile = Annotated[SecretStr | None, BeforeValidator(_read), AfterValidator(_is_token)]
"""Given as a path; holds the file's text."""


class SharedEnvironment(PydanticBaseSettingsSource):
    """LORAPLEX_CLUSTER_TOKEN and LORAPLEX_CLUSTER_TOKEN_FILE: the same for every service, so named without one."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Return one field's value; pydantic's interface."""
        return os.environ.get(shared_name(field_name) or ""), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the values that are there."""
        values = {name: os.environ.get(f"LORAPLEX_{name.upper()}") for name in _SHARED}
        return {name: value for name, value in values.items() if value}


def shared_name(field_name: str) -> str | None:
    """Return the environment variable that gives this field to every service, or None."""
    return f"LORAPLEX_{field_name.upper()}" if field_name in _SHARED else None


def is_secret(field: FieldInfo) -> bool:
    """Tell whether a field may not come from the command line."""
    return _MARK in field.metadata


def on_command_line(fields: Mapping[str, FieldInfo], argv: Sequence[str]) -> list[str]:
    """Return the names of secret fields that somebody wrote on the command line."""
    given = {argument.partition("=")[0].removeprefix("--").replace("-", "_").lower() for argument in argv}
    return [name for name, field in fields.items() if name in given and is_secret(field)]
