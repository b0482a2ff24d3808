"""Configuration: one frozen settings object per service, built once from flags and environment.

Precedence: command line, then `LORAPLEX_<SERVICE>_<FIELD>` environment variables, then defaults. Nobody else reads
the environment.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from common.telemetry import LogFormat
from loraplex.address import parse_address


def _check_address(text: str) -> str:
    parse_address(text)
    return text


def _check_endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no OTLP/gRPC endpoint; give http://HOST:4317, or https:// for TLS")
    return url


def _endpoint_of_environment() -> str | None:
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((value for name in names if (value := os.environ.get(name))), None)


Port = Annotated[int, Field(ge=0, le=65535)]
Address = Annotated[str, AfterValidator(_check_address)]
"""HOST:PORT of another service."""


class ServiceSettings(BaseSettings):
    """What every service can be told. Subclasses set `env_prefix`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    insecure: bool = Field(False, description="allow an address other than loopback although nothing is encrypted")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")
    log_format: LogFormat = Field("auto", description="lines for people, JSON, or by whether stderr is a terminal")
    otlp_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default_factory=_endpoint_of_environment,
        validate_default=True,
        description="OTLP/gRPC receiver of traces, http://HOST:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    )

    @model_validator(mode="after")
    def _loopback_or_insecure(self) -> Self:
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable by others and this service neither encrypts nor authenticates yet; "
                "use 127.0.0.1, or say --insecure where the network itself is trusted"
            )
        return self


class AdminSettings(ServiceSettings):
    """What a service with an admin port of its own can be told besides; subclasses set `admin_port`'s default."""

    admin_host: str | None = Field(None, description="address of the admin port (default: --host)")
    admin_port: Port = Field(0, description="HTTP port for probes, metrics and /debug/resources; 0 takes a free one")

    @property
    def admin_address(self) -> str:
        """The address the admin port is on."""
        return self.host if self.admin_host is None else self.admin_host

    @model_validator(mode="after")
    def _admin_loopback_or_insecure(self) -> Self:
        # An address that others can reach was judged where it is --host's too.
        if not self.insecure and is_loopback(self.host) and not is_loopback(self.admin_address):
            raise ValueError(
                f"admin-host {self.admin_address} is reachable by others and the admin port neither encrypts nor "
                "authenticates; use 127.0.0.1, or say --insecure where the network itself is trusted"
            )
        return self


S = TypeVar("S", bound=ServiceSettings)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host` (a name or an IP address)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(cls: type[S], program: str, argv: Sequence[str]) -> S:
    """Build the settings of a service. Prints every problem at once and exits with status 2 on bad ones."""
    try:
        return cls(_cli_parse_args=list(argv), _cli_prog_name=program)  # type: ignore[call-arg]
    except ValidationError as error:
        for problem in error.errors():
            where = (
                "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-") if problem["loc"] else program
            )
            print(f"{program}: {where}: {problem['msg'].removeprefix('Value error, ')}", file=sys.stderr)  # noqa: T201
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
