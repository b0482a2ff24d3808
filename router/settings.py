"""What a router can be told, by flags or by LORAPLEX_ROUTER_<FIELD>."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from common.config import Address, Port, ServiceSettings
from router.discovery import parse_workers


class RouterSettings(ServiceSettings):
    """Settings of `python -m router`."""

    model_config = SettingsConfigDict(env_prefix="LORAPLEX_ROUTER_")

    port: Port = Field(50050, description="gRPC port; 0 takes a free one")
    http_port: Port = Field(8080, description="HTTP port; 0 takes a free one")
    registry: Address = Field("127.0.0.1:50051", description="HOST:PORT of the registry")
    workers: str = Field("127.0.0.1:50052", description="HOST:PORT[,HOST:PORT...] or dns:NAME:PORT")
    catalog_cache: Path | None = Field(None, description="file with the last catalog, to start without the registry")
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="deadline of requests without their own, in seconds"
    )
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 * 2**20)] = Field(
        8 * 2**20, description="largest HTTP request body, in bytes"
    )
    max_requests: Annotated[int, Field(ge=1)] = Field(1024, description="requests in flight at most")
    max_tenant_requests: Annotated[int, Field(ge=1)] = Field(
        1024, description="requests in flight of one tenant at most"
    )
    drain_delay_s: Annotated[float, Field(ge=0)] = Field(
        5.0, description="seconds between failing readiness and refusing requests in a drain"
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        60.0, description="seconds running streams get to finish in a drain"
    )

    @field_validator("workers")
    @classmethod
    def _are_workers(cls, value: str) -> str:
        parse_workers(value)
        return value
