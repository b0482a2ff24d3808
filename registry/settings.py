"""What the registry can be told, by flags or LORAPLEX_REGISTRY_<FIELD>."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import sqlalchemy as sa
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from common.api_keys import EXAMPLE, id_of
from common.config import AdminSettings, Port, split_list
from common.secret_settings import Secret
from registry.database import parse_url
from registry.import_settings import ImportSettings
from registry.limits import AdapterLimits, parse_target_modules
from registry.packing import DEFAULT_QUANTIZATION
from registry.pins import parse_pinned


class RegistrySettings(ImportSettings, AdminSettings):
    """Settings of the registry process."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_REGISTRY_")

    port: Port = Field(50051, description="port of the gRPC server; 0 takes a free one")
    admin_port: Port = Field(9051, description="HTTP port for probes, metrics and /debug/resources; 0 takes a free one")
    state_dir: Path = Field(..., description="folder for the database, artifacts and uploads; one process at a time")
    database_url: str | None = Field(
        None, description="sqlite:///PATH or postgresql://USER@HOST/NAME; by default SQLite in the state folder"
    )
    database_wait_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="seconds a database server that is away at start is waited for"
    )
    max_upload_bytes: Annotated[int, Field(ge=2**10)] = Field(2**30, description="largest upload accepted, in bytes")
    max_concurrent_uploads: Annotated[int, Field(ge=1)] = Field(8, description="uploads received at a time; more wait")
    upload_idle_timeout_s: Annotated[float, Field(gt=0)] = Field(60.0, description="seconds an upload may be silent")
    partial_upload_bytes: Annotated[int, Field(ge=0)] = Field(
        2 * 2**30, description="most bytes kept of uploads that broke off, all together"
    )
    partial_upload_s: Annotated[float, Field(ge=0)] = Field(
        900.0, description="seconds that what came of an upload that broke off is kept, so that it can go on"
    )
    default_quantization: Literal["none", "int8", "int4"] = Field(
        DEFAULT_QUANTIZATION, description="format of adapters for which no other is asked"
    )
    base_dirs: str = Field(
        "",
        description="FOLDER[,FOLDER...] with weights of base models, for adapters that cannot be packed without: DoRA",
    )
    pinned_adapters: str = Field(
        "",
        description="NAME[=WORKERS],... that workers keep whatever the demand, one worker or so many or `all`; "
        "applied at start and at registration to what is not pinned yet, and not to be unpinned while listed",
    )
    max_rank: Annotated[int, Field(ge=1)] = Field(256, description="largest rank of a module of a new adapter")
    allowed_target_modules: str = Field(
        "", description="kinds of modules that new adapters may change, q_proj,v_proj,...; empty: all"
    )
    max_adapters: Annotated[int, Field(ge=1)] = Field(10_000, description="adapters a tenant may have registered")
    artifact_grace_s: Annotated[float, Field(ge=0)] = Field(
        600.0, description="seconds an artifact stays after another has replaced it, for requests on their way to it"
    )
    keep_changes: Annotated[int, Field(ge=1)] = Field(10_000, description="transactions kept for watchers that resume")
    heartbeat_s: Annotated[float, Field(gt=0)] = Field(5.0, description="seconds between a watcher's heartbeats")
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(10.0, description="seconds running calls get in a drain")

    bootstrap_key: Secret = Field(
        None, description="API key that exists from the start, named bootstrap: lpx_bootstrap_$(openssl rand -hex 32)"
    )

    @field_validator("bootstrap_key")
    @classmethod
    def _is_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and id_of(key.get_secret_value()) is None:
            raise ValueError(
                f"it is not formed like a key, {EXAMPLE}; make one with: echo lpx_bootstrap_$(openssl rand -hex 32)"
            )
        return key

    @field_validator("pinned_adapters")
    @classmethod
    def _are_pins(cls, text: str) -> str:
        parse_pinned(text)
        return text

    @field_validator("allowed_target_modules")
    @classmethod
    def _are_modules(cls, text: str) -> str:
        parse_target_modules(text)
        return text

    @field_validator("database_url")
    @classmethod
    def _supported(cls, url: str | None) -> str | None:
        if url is not None:
            parse_url(url)
        return url

    @property
    def base_folders(self) -> list[Path]:
        """The folders of `base_dirs`."""
        return [Path(name).expanduser() for name in split_list(self.base_dirs)]

    @property
    def pins(self) -> Mapping[str, int]:
        """On how many workers the listed adapters are pinned, by name."""
        return parse_pinned(self.pinned_adapters)

    @property
    def adapter_limits(self) -> AdapterLimits:
        """What adapters may be registered."""
        return AdapterLimits(self.max_rank, parse_target_modules(self.allowed_target_modules), self.max_adapters)

    @property
    def url(self) -> sa.URL:
        """The database: as told, else SQLite in the state folder."""
        if self.database_url is not None:
            return parse_url(self.database_url)
        return sa.URL.create("sqlite+aiosqlite", database=str(self.state_dir / "registry.sqlite3"))
