"""What a router can be told, by flags or by LORAPLEX_ROUTER_<FIELD>."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from common.config import Address, Port, ServiceSettings
from router.adapter_policy import PolicySettings
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
    adapter_policy: bool = Field(
        True, description="fetch adapters to workers ahead of their requests by how much they are asked for"
    )
    adapter_rate_half_life_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="seconds in which what counts for an adapter's rate halves"
    )
    adapter_promote_rate: Annotated[float, Field(gt=0)] = Field(
        0.1, description="requests per second from which an adapter is kept on a device"
    )
    adapter_demote_rate: Annotated[float, Field(gt=0)] = Field(
        0.03, description="requests per second below which it is no longer, and from which it is kept on a disk"
    )
    adapter_dwell_s: Annotated[float, Field(ge=0)] = Field(
        60.0, description="least seconds between a step up and the next step down of an adapter"
    )
    max_adapter_replicas: Annotated[int, Field(ge=1)] = Field(
        4, description="devices at most that an adapter is brought to unasked; pins may be on more"
    )
    drain_delay_s: Annotated[float, Field(ge=0)] = Field(
        5.0, description="seconds between failing readiness and refusing requests in a drain"
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        60.0, description="seconds running streams get to finish in a drain"
    )

    @model_validator(mode="after")
    def _demotes_below_promotion(self) -> Self:
        if self.adapter_demote_rate >= self.adapter_promote_rate:
            raise ValueError(
                f"adapter-demote-rate {self.adapter_demote_rate:g} must be below adapter-promote-rate "
                f"{self.adapter_promote_rate:g}, or adapters would be promoted and demoted in turn"
            )
        return self

    @property
    def policy(self) -> PolicySettings | None:
        """What decides which adapters are fetched ahead; None where none are."""
        if not self.adapter_policy:
            return None
        return PolicySettings(
            promote_rate=self.adapter_promote_rate,
            demote_rate=self.adapter_demote_rate,
            dwell_s=self.adapter_dwell_s,
            max_replicas=self.max_adapter_replicas,
        )

    @field_validator("workers")
    @classmethod
    def _are_workers(cls, value: str) -> str:
        parse_workers(value)
        return value
