"""What the registry can be told about imports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field, SecretStr, field_validator

from common.config import split_list
from common.secret_settings import Secret
from registry.service.fetching import FetchLimits
from registry.sources.places import SCHEMES, SourceRules, check_endpoint

_DEFAULT_SCHEMES: Final = "hf,https,s3,gs,az"
_HUB: Final = "https://huggingface.co"

Endpoint = Annotated[str, AfterValidator(check_endpoint)]


def _from_environment(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


class ImportSettings(BaseModel):
    """Imports: from where, how many, how long."""

    import_schemes: str = Field(
        _DEFAULT_SCHEMES, description=f"kinds of places that adapters may be imported from, of {','.join(SCHEMES)}"
    )
    import_root: Path | None = Field(
        None, description="folder on the registry's machine below which adapters may be imported by path"
    )
    import_private_hosts: str = Field(
        "", description="HOST[:PORT],... that https imports may reach although their addresses are not public"
    )
    max_concurrent_imports: Annotated[int, Field(ge=1)] = Field(16, description="imports at a time; more wait")
    import_timeout_s: Annotated[float, Field(gt=0)] = Field(1800.0, description="seconds an import may take to fetch")
    import_stall_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="seconds a source may send nothing before it is asked again, three times at most"
    )
    hf_endpoint: Endpoint = Field(
        default_factory=lambda: _from_environment("HF_ENDPOINT") or _HUB,
        validate_default=True,
        description=f"hub of hf:// sources (default: HF_ENDPOINT, else {_HUB})",
    )
    hf_token: Secret = Field(
        default_factory=lambda: SecretStr(token) if (token := _from_environment("HF_TOKEN")) else None,
        description="token that the registry shows the hub (default: HF_TOKEN)",
    )
    s3_endpoint: Endpoint | None = Field(
        default_factory=lambda: _from_environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        validate_default=True,
        description="endpoint of s3:// sources (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's)",
    )
    gs_endpoint: Endpoint | None = Field(None, description="endpoint of gs:// sources (default: Google's)")
    az_endpoint: Endpoint | None = Field(
        None, description="endpoint of az:// sources (default: the account's, AZURE_STORAGE_ACCOUNT_NAME)"
    )

    @field_validator("import_schemes")
    @classmethod
    def _are_schemes(cls, text: str) -> str:
        if unknown := [scheme for scheme in split_list(text) if scheme not in SCHEMES]:
            raise ValueError(f"{', '.join(unknown)}: not among {', '.join(SCHEMES)}")
        return text

    @field_validator("import_root")
    @classmethod
    def _is_folder(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_dir():
            raise ValueError(f"{path} is no folder")
        return path

    @property
    def source_rules(self) -> SourceRules:
        """What may be imported."""
        return SourceRules(
            schemes=frozenset(split_list(self.import_schemes)),
            import_root=self.import_root,
            private_hosts=frozenset(split_list(self.import_private_hosts)),
            hub_endpoint=self.hf_endpoint,
            hub_token=self.hf_token.get_secret_value() if self.hf_token else None,
            endpoints={"s3": self.s3_endpoint, "gs": self.gs_endpoint, "az": self.az_endpoint},
        )

    def fetch_limits(self, max_bytes: int) -> FetchLimits:
        """Return what one import of at most `max_bytes` may take."""
        return FetchLimits(max_bytes, self.import_timeout_s, self.import_stall_s)
