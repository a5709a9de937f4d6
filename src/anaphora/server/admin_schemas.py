"""Bodies of the administrative routes: ours alone, so unknown fields are refused."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from anaphora.server.registry import ANY, LimitTerms
from anaphora.server.schemas import Body

_MAX_LIMIT = 2**53


class _AdminBody(Body):
    model_config = ConfigDict(strict=True, extra="forbid")


class NewTenant(_AdminBody):
    """The body of ``POST /admin/tenants``."""

    name: str = Field(max_length=64)


class NewKey(_AdminBody):
    """The body of ``POST /admin/keys``."""

    tenant: str = Field("", max_length=64)
    admin: bool = False
    expires_in_seconds: float | None = None


class NewLimits(_AdminBody):
    """The body of ``PUT /admin/limits``."""

    tenant: str = Field(ANY, max_length=64)
    endpoint: str = Field(ANY, max_length=128)
    requests_per_minute: int | None = Field(None, ge=0, le=_MAX_LIMIT)
    input_tokens_per_minute: int | None = Field(None, ge=0, le=_MAX_LIMIT)
    output_tokens_per_minute: int | None = Field(None, ge=0, le=_MAX_LIMIT)
    concurrent_requests: int | None = Field(None, ge=0, le=_MAX_LIMIT)

    @property
    def terms(self) -> LimitTerms:
        """The limits alone."""
        return LimitTerms(**self.model_dump(exclude={"tenant", "endpoint"}))
