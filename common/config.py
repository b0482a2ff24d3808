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
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from common.http_connection import HttpLimits
from common.rpc_limits import RpcLimits
from common.secret_settings import SharedEnvironment, TokenFile, TokenSecret, is_secret, on_command_line, shared_name
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
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # it may be a secret
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    insecure: bool = Field(
        False, description="allow an address other than loopback without cluster token and API key; the log warns"
    )
    cluster_token: TokenSecret = Field(
        None, description="token that every call between services must carry; needed where host is not loopback"
    )
    cluster_token_file: TokenFile = Field(None, description="file with the cluster token")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")
    log_format: LogFormat = Field("auto", description="lines for people, JSON, or by whether stderr is a terminal")
    otlp_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default_factory=_endpoint_of_environment,
        validate_default=True,
        description="OTLP/gRPC receiver of traces, http://HOST:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    )
    http_read_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="seconds an HTTP client gets to send the head of a request, and again its body"
    )
    max_http_connections: Annotated[int, Field(ge=1)] = Field(
        4096, description="open HTTP connections at most; beyond, those that wait for their client are closed"
    )

    max_grpc_connections: Annotated[int, Field(ge=1)] = Field(
        RpcLimits().max_connections, description="open gRPC connections at most; more are closed at once"
    )
    max_grpc_calls: Annotated[int, Field(ge=1)] = Field(
        RpcLimits().max_calls, description="gRPC calls open at a time, watches included; more are refused"
    )

    @model_validator(mode="after")
    def _loopback_or_guarded(self) -> Self:
        if self.cluster_token and self.cluster_token_file:
            raise ValueError("give the cluster token itself or a file with it, not both")
        if not (self.insecure or is_loopback(self.host) or self.cluster_secret):
            raise ValueError(
                f"host {self.host} is reachable by others; set LORAPLEX_CLUSTER_TOKEN (the same for every service; "
                "make one with: openssl rand -hex 32) or --cluster-token-file, or use 127.0.0.1, or say --insecure "
                "where everybody who can reach it may do everything"
            )
        return self

    @property
    def http_limits(self) -> HttpLimits:
        """What clients of the HTTP port may take."""
        return HttpLimits(self.http_read_timeout_s, self.max_http_connections)

    @property
    def rpc_limits(self) -> RpcLimits:
        """What callers of the gRPC port may take."""
        return RpcLimits(self.max_grpc_connections, self.max_grpc_calls)

    @property
    def cluster_secret(self) -> str | None:
        """The cluster token, however it was given."""
        given = self.cluster_token or self.cluster_token_file
        return given.get_secret_value() if given else None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - there is none
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - there is none
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read what is the same for every service last."""
        return init_settings, env_settings, SharedEnvironment(settings_cls)


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


def split_list(text: str) -> list[str]:
    """Return the entries of a setting that lists them with commas between; those without a word are none."""
    return [entry for entry in (part.strip() for part in text.split(",")) if entry]


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host` (a name or an IP address)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def variable_of(cls: type[ServiceSettings], name: str) -> str:
    """Return the environment variable of a field."""
    return shared_name(name) or f"{cls.model_config.get('env_prefix', '')}{name.upper()}"


def load_settings(cls: type[S], program: str, argv: Sequence[str]) -> S:
    """Build the settings of a service. Prints every problem at once and exits with status 2 on bad ones."""
    if exposed := on_command_line(cls.model_fields, argv):
        for name in exposed:
            flag, remedy = f"--{name.replace('_', '-')}", f"set {variable_of(cls, name)} instead"
            print(  # noqa: T201
                f"{program}: {flag}: everybody on this machine can read a command line; {remedy}", file=sys.stderr
            )
        raise SystemExit(2)
    try:
        return cls(_cli_parse_args=list(argv), _cli_prog_name=program)  # type: ignore[call-arg]
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            if where in cls.model_fields and is_secret(cls.model_fields[where]):
                where = variable_of(cls, where)
            else:
                where = f"--{where.replace('_', '-')}" if where else ""
            what = problem["msg"].removeprefix("Value error, ")
            print(f"{program}: {where}: {what}" if where else f"{program}: {what}", file=sys.stderr)  # noqa: T201
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
